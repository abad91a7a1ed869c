"""Trains a tensor2tensor model on Multi30k, for `scripts.checks.toolkit_training`.

    $TENSOR2TENSOR_PYTHON scripts/checks/tensor2tensor_training.py SETTINGS

It runs in a Python that has TensorFlow, so it imports nothing from this repository. SETTINGS is
JSON: `data`, `folder`, `languages`, `vocabulary` (a size), `steps`, and `hparams` for
`transformer_base`.
"""

# ruff: noqa: E402
import json
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensor2tensor

# Otherwise all models, and the packages that they need, would be imported.
models = ModuleType("tensor2tensor.models")
models.__path__ = [str(Path(tensor2tensor.__path__[0], "models"))]
sys.modules["tensor2tensor.models"] = models

from tensor2tensor.data_generators import problem, text_problems
from tensor2tensor.models import transformer  # noqa: F401  registers the model
from tensor2tensor.utils import hparams_lib, registry, trainer_lib
from tensorflow.python.framework import indexed_slices, ops, tensor

# Where tf_slim looks for them.
ops.Tensor, ops.IndexedSlices = tensor.Tensor, indexed_slices.IndexedSlices

SETTINGS = json.loads(sys.argv[1])


@registry.register_problem("translate_multi30k")
class TranslateMulti30k(text_problems.Text2TextProblem):
    """German to English, with one vocabulary of subwords."""

    is_generate_per_split = True
    approx_vocab_size = SETTINGS["vocabulary"]
    dataset_splits = [
        {"split": problem.DatasetSplit.TRAIN, "shards": 1},
        {"split": problem.DatasetSplit.EVAL, "shards": 1},
    ]

    def generate_samples(self, data_dir, tmp_dir, dataset_split):
        """Pairs of lines."""
        stem = "train" if dataset_split == problem.DatasetSplit.TRAIN else "val"
        source, target = (
            Path(SETTINGS["data"], f"{stem}.{each}") for each in SETTINGS["languages"]
        )
        return text_problems.text2text_txt_iterator(str(source), str(target))


def main():
    """Write the data and the vocabulary to the folder, and train there."""
    folder, steps, name = SETTINGS["folder"], SETTINGS["steps"], "translate_multi30k"
    registry.problem(name).generate_data(folder, folder)
    overrides = ",".join(f"{key}={value}" for key, value in SETTINGS["hparams"].items())
    hparams = trainer_lib.create_hparams("transformer_base", overrides)
    saved = hparams_lib.copy_hparams(hparams)  # as t2t-trainer saves them
    saved.del_hparam("modality")
    values = saved.to_json(indent=0, sort_keys=True)
    Path(folder, "hparams.json").write_text(values, encoding="utf-8")
    config = trainer_lib.create_run_config(
        "transformer", model_dir=folder, num_gpus=0, save_checkpoints_steps=steps, random_seed=1,
        schedule="train",
    )  # fmt: skip
    experiment = trainer_lib.create_experiment(
        config, hparams, "transformer", name, folder, steps, eval_steps=1, schedule="train"
    )
    experiment.train()


if __name__ == "__main__":
    main()
