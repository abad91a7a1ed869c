"""Convert checkpoints of other toolkits and compare with the toolkits' own results.

python -m scripts.checks.conversion --checkpoints ../shared/checkpoints

Each folder TOOLKIT/VARIANT has a checkpoint and, in reference.safetensors and reference.json, the
toolkit's own token ids, log-probabilities and greedy translations. The converted model computes the
same in float64. Writes conversion.json and conversion.md.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.hf_argparser import HfArg
from transformers.utils import logging as transformers_logging

from scripts.reports import markdown, read_options, write
from tests.conversion import reference
from vanilla_transformer import conversion

# Options that are not in a bare state dict.
OPTIONS: dict[str, dict[str, Any]] = {
    "annotated_transformer": {"heads": 4},
    "torch_nn_transformer": {"heads": 4},
}
HEADER = (
    "checkpoint", "toolkit", "log-probabilities", "largest difference", "texts to the same ids",
    "equal greedy translations",
)  # fmt: skip


@dataclass
class ConversionCheckArguments:
    checkpoints: str = HfArg(
        default=str(reference.CHECKPOINTS), help="Folder with TOOLKIT/VARIANT."
    )
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")


def check(checkpoint: Path) -> dict[str, Any]:
    """Convert a checkpoint and compare."""
    tensors, notes = reference.load_reference(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        options = conversion.ConversionOptions(**OPTIONS.get(checkpoint.parent.name, {}))
        output = conversion.convert(checkpoint, Path(folder) / "converted", options=options)
        model = AutoModelForSeq2SeqLM.from_pretrained(output, dtype="float64").eval()
        tokenizer = AutoTokenizer.from_pretrained(output)
        texts = reference.greedy_texts(output, notes["source_texts"])
    expected = reference.unpadded(tensors["source_ids"], tensors["source_lengths"])
    expected += reference.unpadded(tensors["target_ids"], tensors["target_lengths"])
    ids = tokenizer(notes["source_texts"])["input_ids"]
    ids += tokenizer(text_target=notes["target_texts"])["input_ids"]
    return {
        "checkpoint": f"{checkpoint.parent.name}/{checkpoint.name}",
        "toolkit": f"{notes['toolkit']} {notes['version']}",
        "dtype": str(tensors["log_probs"].dtype).removeprefix("torch."),
        "difference": reference.log_probability_difference(model, tensors),
        "ids": _share(ids, expected),
        "greedy": _share(texts, notes["greedy"]["texts"]),
    }


def _share(found: list[Any], expected: list[Any]) -> str:
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    return f"{equal} of {len(expected)}"


def main() -> None:
    arguments = read_options(ConversionCheckArguments, __doc__)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    files = sorted(Path(arguments.checkpoints).glob("*/*/reference.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"--checkpoints {arguments.checkpoints}: expected TOOLKIT/VARIANT/reference.safetensors"
        )
    results = [check(file.parent) for file in files]
    rows = [
        (each["checkpoint"], each["toolkit"], each["dtype"], f"{each['difference']:.1e}",
         each["ids"], each["greedy"])
        for each in results
    ]  # fmt: skip
    write(arguments.output_dir, "conversion", results, markdown(HEADER, rows))


if __name__ == "__main__":
    main()
