"""Runs a tensor2tensor checkpoint for `tensor2tensor.Tensor2TensorToolkit`, which starts this file
in a Python that has TensorFlow. It imports nothing from this package.

Each line of its input is JSON: a method of `Model` and the arguments. Each line of its output is
the result. The first line says that it is ready, or why tensor2tensor can't be imported.
"""

from __future__ import annotations  # may run in an old Python

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ALPHA = 0.6  # of the length penalty, as in t2t-decoder
END = 1


def import_tensor2tensor() -> None:
    """Import only the transformer, without the other models and the packages that they need."""
    sys.path.pop(0)  # the folder of this file, which has a tensor2tensor.py too
    import tensor2tensor

    models = ModuleType("tensor2tensor.models")
    models.__path__ = [str(Path(tensor2tensor.__path__[0], "models"))]
    sys.modules[models.__name__] = models
    import tensor2tensor.models.transformer


class Model:
    """A translation model. Each kind of computation has its own graph and session.

    Args:
        prefix: The checkpoint, without `.index`.
        vocabularies: Files with the subwords of the source and of the target.
        unknown: For each of them, the unknown token if it has whole tokens in place of subwords.
        target_space_id: Of the problem.
        threads: The number that TensorFlow may use within an operation, and across operations.
    """

    def __init__(
        self,
        prefix: str,
        vocabularies: list[str],
        unknown: list[str | None],
        target_space_id: int,
        threads: int,
    ):
        from tensor2tensor.data_generators.text_encoder import SubwordTextEncoder, TokenTextEncoder

        self.prefix, self.target_space_id, self.threads = prefix, target_space_id, threads
        self.encoders = [
            TokenTextEncoder(file, replace_oov=token) if token else SubwordTextEncoder(file)
            for file, token in zip(vocabularies, unknown)  # noqa: B905, for an old Python
        ]
        self.graphs: dict[str, tuple[Any, Any, Any]] = {}

    def encode(self, line: str) -> list[int]:
        """The ids of a source line."""
        return [*self.encoders[0].encode(line), END]

    def logits(self, sources: list[list[int]], targets: list[list[int]], file: str) -> None:
        """Write the logits (batch, target_length, vocabulary) to a NumPy file."""
        import numpy as np

        logits = self._run("logits", lambda model, features: model(features)[0], sources, targets)
        np.save(file, logits[:, :, 0, 0])

    def translate(self, sources: list[list[int]], num_beams: int, longest: int) -> list[list[int]]:
        """The best translations, of at most `longest` tokens, including their end tokens."""

        def search(model: Any, features: dict[str, Any]) -> Any:
            return model.infer(features, features.pop("length"), num_beams, 1, ALPHA)["outputs"]

        more = longest - max(map(len, sources))  # tokens than the longest source
        found = self._run(f"beams {num_beams}", search, sources, more=more, mode="infer")
        return [row[: row.index(END) + 1] if END in row else row for row in found.tolist()]

    def losses(
        self, sources: list[list[int]], targets: list[list[int]], steps: int, learning_rate: float
    ) -> list[float]:
        """The losses of a batch, without label smoothing and dropout, before each step of SGD on
        it. The next call starts from the checkpoint again."""
        import tensorflow.compat.v1 as tf

        def step(model: Any, features: dict[str, Any]) -> Any:
            loss = model(features)[1]["training"]
            with tf.control_dependencies([tf.identity(loss)]):
                return loss, tf.train.GradientDescentOptimizer(learning_rate).minimize(loss)

        self.graphs.pop("train", None)
        return [float(self._run("train", step, sources, targets)[0]) for _ in range(steps)]

    def _run(
        self,
        name: str,
        build: Callable[[Any, dict[str, Any]], Any],
        sources: list[list[int]],
        targets: list[list[int]] | None = None,
        more: int = 0,
        mode: str = "eval",
    ) -> Any:
        """What `build` computes from these ids, given a model and its features."""
        import tensorflow.compat.v1 as tf

        if name not in self.graphs:
            with tf.Graph().as_default():
                places = {
                    "inputs": tf.placeholder(tf.int32, (None, None, 1, 1)),
                    "length": tf.placeholder(tf.int32, ()),
                }
                if targets is not None:
                    places["targets"] = tf.placeholder(tf.int32, (None, None, 1, 1))
                features = {**places, "target_space_id": tf.constant(self.target_space_id)}
                result = build(self._model(mode), features)
                config = tf.ConfigProto(
                    intra_op_parallelism_threads=self.threads,
                    inter_op_parallelism_threads=self.threads,
                )
                session = tf.Session(config=config)
                tf.train.Saver(self._variables()).restore(session, self.prefix)
            self.graphs[name] = places, result, session
        places, result, session = self.graphs[name]
        values = {places["inputs"]: padded(sources), places["length"]: more}
        if targets is not None:
            values[places["targets"]] = padded(targets)
        return session.run(result, values)

    def _variables(self) -> dict[str, Any]:
        """The variables of the graph under their names in the checkpoint. TensorFlow 2 puts other
        scopes in front of them in each graph."""
        import tensorflow.compat.v1 as tf

        saved = {short(name): name for name, _ in tf.train.list_variables(self.prefix)}
        return {saved[short(each.op.name)]: each for each in tf.trainable_variables()}

    def _model(self, mode: str) -> Any:
        from tensor2tensor.data_generators import problem_hparams
        from tensor2tensor.models.transformer import Transformer
        from tensor2tensor.utils import hparams_lib

        path = Path(self.prefix).with_name("hparams.json")
        hparams = hparams_lib.create_hparams("transformer_base", hparams_path=str(path))
        hparams.label_smoothing = 0.0
        sizes = [encoder.vocab_size for encoder in self.encoders]
        problem = problem_hparams.test_problem_hparams(*sizes, hparams)
        return Transformer(hparams, mode, problem)


def short(name: str) -> str:
    """The name of a variable without the scopes in front; an optimizer's slots keep theirs."""
    known = "encoder/layer_|decoder/layer_|symbol_modality_|target_space_|(inputs|targets)_position"
    name = re.sub(f"^(?!training/).*/(?={known})", "", name)
    return re.sub(r"(/layer_\d+)_\d+/", r"\1/", name)


def padded(rows: list[list[int]]) -> Any:
    """Ids in an array (rows, longest, 1, 1)."""
    import numpy as np

    ids = np.zeros((len(rows), max(map(len, rows)), 1, 1), np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row), 0, 0] = row
    return ids


def main() -> None:
    """Answer requests until the input ends. TensorFlow's own messages go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        import_tensor2tensor()
    except ImportError as error:
        print(json.dumps(str(error)), file=answers, flush=True)
        return
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    model = Model(**json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for request in sys.stdin:
        method, arguments = json.loads(request)
        print(json.dumps(getattr(model, method)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
