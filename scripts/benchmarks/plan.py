"""Estimate the memory per device and the duration of a training run on several devices.

python -m scripts.benchmarks.plan --devices 8
python -m scripts.benchmarks.plan --devices 1 8 --tokens_per_second 250

Memory covers float32 weights, gradients and Adam's two moments, 16 bytes per parameter, for each
sharding strategy. Activations are not included; they grow with the batch. The duration is for the
paper's 100,000 updates of 25,000 target tokens, at a speed measured on one device, for example by
`scaling.py`.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from transformers.hf_argparser import HfArg

from scripts.reports import markdown, read_options
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

WIDE = {"encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192, "d_model": 2048}
DEEP = {"encoder_layers": 8, "decoder_layers": 8}
CONFIGS = {
    "base": VanillaTransformerConfig.from_preset("base"),
    "big": VanillaTransformerConfig.from_preset("big"),
    "1B": VanillaTransformerConfig.from_preset("big", head_dim=128, **WIDE, **DEEP),
}
WEIGHTS, GRADIENTS, MOMENTS = 4, 4, 8  # bytes for each parameter
UPDATES, TOKENS = 100_000, 25_000  # section 5.1 and 5.2


@dataclass
class PlanArguments:
    devices: list[int] = HfArg(default_factory=lambda: [8], help="Numbers of devices.")
    tokens_per_second: float | None = HfArg(
        default=None, help="Target tokens per second of one device, for the table of durations."
    )
    efficiency: float = HfArg(
        default=0.9, help="Speed of each of several devices, relative to one alone."
    )

    def __post_init__(self) -> None:
        if min(self.devices) < 1:
            raise ValueError(f"--devices {self.devices}: expected positive numbers")
        if self.tokens_per_second is not None and self.tokens_per_second <= 0:
            raise ValueError(f"--tokens_per_second {self.tokens_per_second}: expected above 0")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"--efficiency {self.efficiency}: expected above 0, at most 1")


def main() -> None:
    arguments = read_options(PlanArguments, __doc__)
    for devices in arguments.devices:
        where = f"each of {devices} devices" if devices > 1 else "one device"
        print(f"GiB on {where}:\n\n{memory_table(devices)}\n")
    if arguments.tokens_per_second is not None:
        print(days_table(arguments))


def memory_table(devices: int) -> str:
    """A table with a row per model size and a column per sharding strategy."""
    rows = []
    for name, config in CONFIGS.items():
        memory = memory_of(config, devices)
        with torch.device("meta"):
            parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
        cells = [f"{value / 2**30:.2f}" for value in memory.values()]
        rows.append([name, f"{parameters / 1e6:.0f}", *cells])
    return markdown(["size", "parameters, millions", *memory], rows)


def days_table(arguments: PlanArguments) -> str:
    """A table with a row per number of devices."""
    rows = []
    for devices in arguments.devices:
        share = arguments.efficiency if devices > 1 else 1.0
        daily = arguments.tokens_per_second * devices * share * 86_400 / TOKENS
        rows.append([devices, f"{daily:,.0f}", f"{UPDATES / daily:,.1f}"])
    return markdown(["devices", "updates per day", "days for 100,000 updates"], rows)


def memory_of(config: VanillaTransformerConfig, devices: int) -> dict[str, float]:
    """Bytes per device for each sharding strategy."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    count = model.num_parameters()
    split = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if any(fnmatch(name, f"*{pattern}.weight") for pattern in model.tp_plan)
    )
    layers = (*model.get_encoder().layers, *model.get_decoder().layers)
    gathered = max(sum(part.numel() for part in layer.parameters()) for layer in layers)
    gathered += model.lm_head.weight.numel()  # the shared matrix stays gathered throughout
    total = WEIGHTS + GRADIENTS + MOMENTS
    return {
        "DDP": total * count,
        "ZeRO 1": (WEIGHTS + GRADIENTS) * count + MOMENTS * count / devices,
        "ZeRO 2": WEIGHTS * count + (GRADIENTS + MOMENTS) * count / devices,
        "ZeRO 3, FSDP2": total * count / devices + (WEIGHTS * gathered if devices > 1 else 0),
        "tensor parallel": total * (count - split + split / devices),
    }


if __name__ == "__main__":
    main()
