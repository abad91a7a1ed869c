"""Measure the effect of different sinusoids and a different epsilon on Marian's models.

python -m scripts.checks.marian_sinusoids --checkpoints ../shared/checkpoints/marian

Each folder under --checkpoints has a model and, in reference.safetensors, the log-probability that
Marian itself gives each word of some translations. The model is converted as it was trained, and as
transformers would run it. Writes marian_sinusoids.json and marian_sinusoids.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.hf_argparser import HfArg

from scripts.reports import markdown, read_options, write
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion import ConversionOptions, marian

WAYS = {"as trained": None, "like transformers": "transformers"}


@dataclass
class SinusoidArguments:
    checkpoints: str = HfArg(help="A folder with a folder for each model.")
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")


def main() -> None:
    arguments = read_options(SinusoidArguments, __doc__)
    folders = sorted(
        file.parent for file in Path(arguments.checkpoints).glob("*/reference.safetensors")
    )
    if not folders:
        raise SystemExit(f"--checkpoints {arguments.checkpoints}: expected */reference.safetensors")
    results = [
        {"model": folder.name, "way": way, **differences(folder, like)}
        for folder in folders
        for way, like in WAYS.items()
    ]
    write(arguments.output_dir, "marian_sinusoids", results, to_markdown(results))


@torch.no_grad()
def differences(folder: Path, like: str | None) -> dict[str, float]:
    """Differences of our log-probabilities of the reference's words, in float64, from Marian's."""
    conversion = marian.read(folder, ConversionOptions(like=like))
    model = VanillaTransformerForConditionalGeneration(conversion.config)
    model.load_state_dict(conversion.weights, strict=False)
    model.tie_weights()
    reference = load_file(folder / "reference.safetensors")
    labels, gold = reference["target_ids"], reference["gold_log_probs"]
    logits = (
        model.double()
        .eval()(
            input_ids=reference["source_ids"],
            attention_mask=is_token(reference["source_ids"], reference["source_lengths"]).long(),
            labels=labels,
        )
        .logits
    )
    found = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    difference = (found - gold)[is_token(labels, reference["target_lengths"])]
    return {"largest": difference.abs().max().item(), "mean": difference.mean().item()}


def is_token(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]) < lengths[:, None]


def to_markdown(results: list[dict[str, Any]]) -> str:
    header = ["model", "run", "largest difference", "mean change"]
    rows = [
        [row["model"], row["way"], f"{row['largest']:.2g}", f"{row['mean']:+.2g}"]
        for row in results
    ]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
