"""Print the paper's Table 3 with the parameter counts of our presets, as a Markdown table.

python -m scripts.benchmarks.table3
"""

import torch
from transformers import AutoModelForSeq2SeqLM

from scripts.reports import markdown
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.configuration_vanilla_transformer import PRESETS

# Parameters in millions, if the paper gives them.
PAPERS_COUNTS = {
    "base": 65,
    "B-dk16": 58,
    "B-dk32": 60,
    "C-N2": 36,
    "C-N4": 50,
    "C-N8": 80,
    "C-d256": 28,
    "C-d1024": 168,
    "C-ff1024": 53,
    "C-ff4096": 90,
    "big": 213,
}


def main() -> None:
    base = hyperparameters("base")
    header = ["preset", *base, "parameters, millions", "the paper's count"]
    rows = []
    for name in PRESETS:
        if name == "tiny":  # not in the paper
            continue
        values = hyperparameters(name)
        changed = [
            str(value) if name == "base" or value != base[field] else ""
            for field, value in values.items()
        ]
        count = f"{count_parameters(name) / 1e6:.1f}"
        rows.append([name, *changed, count, PAPERS_COUNTS.get(name)])
    print(markdown(header, rows))


def hyperparameters(name: str) -> dict[str, int | float | str]:
    """The columns of Table 3 for a preset; encoder and decoder have the same values."""
    config = VanillaTransformerConfig.from_preset(name)
    d_k = config.head_dim
    return {
        "N": config.encoder_layers,
        "d_model": config.d_model,
        "d_ff": config.encoder_ffn_dim,
        "h": config.encoder_attention_heads,
        "d_k": d_k,
        "d_v": config.value_head_dim or d_k,
        "P_drop": config.dropout,
        "eps_ls": config.label_smoothing,
        "positions": config.position_encoding,
    }


def count_parameters(name: str) -> int:
    """The number of parameters with the paper's vocabulary of 37,000, without allocating them."""
    config = VanillaTransformerConfig.from_preset(name)
    with torch.device("meta"):
        return AutoModelForSeq2SeqLM.from_config(config).num_parameters()


if __name__ == "__main__":
    main()
