r"""Draw learning curves, the learning rate, positions or attention, as PNG and SVG.

    vanilla-transformer plot curves outputs/a outputs/b --output pictures/curves
    vanilla-transformer plot schedule --settings 512/4000 512/8000 256/4000 \
        --output pictures/schedule
    vanilla-transformer plot positions --d_model 512 --length 100 --output pictures/positions
    vanilla-transformer plot attention --model outputs/a --source "A dog runs." --layer all \
        --output pictures/attention.svg

curves      loss and scores of finished or running training runs
schedule    the paper's learning rate
positions   the sinusoids, or the positions of --model
attention   the weights of each head, for a sentence and its --target or the model's own translation

If --output ends in .png, .svg or .pdf, only that file is written. See docs/pictures.md.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable

from matplotlib.figure import Figure
from transformers import AutoModelForSeq2SeqLM

from .. import VanillaTransformerConfig
from ..analysis.attention import attention_maps, expect_sentences
from ..analysis.positions import position_encodings
from ..inference.alignment import layers_and_heads
from ..inference.loading import LoadingArguments, expect_torch_model, read_config
from ..model.modeling_vanilla_transformer import SinusoidalPositions
from ..plotting import (
    KINDS,
    expect_numbers,
    picture_paths,
    plot_attention,
    plot_curves,
    plot_positions,
    plot_schedule,
    save,
)
from ..training.logs import read_runs


def main() -> None:
    arguments = make_parser().parse_args()
    picture_paths(arguments.output)  # raises an error about a name before work starts
    for path in save(arguments.draw(arguments), arguments.output):
        print(path)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="vanilla-transformer plot",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    pictures = parser.add_subparsers(required=True, metavar="picture")

    def add(name: str, draw: Callable[[Namespace], Figure], description: str) -> ArgumentParser:
        picture = pictures.add_parser(name, help=description, description=description)
        picture.set_defaults(draw=draw)
        formats = ".png, .svg or .pdf; without a suffix, .png and .svg."
        picture.add_argument("--output", required=True, help=formats)
        return picture

    curves = add("curves", draw_curves, "Loss and scores of training runs over steps.")
    curves.add_argument("runs", nargs="+", help="Output folders of training runs.")

    schedule = add("schedule", draw_schedule, "The paper's learning rate over steps.")
    usual = "512/4000 512/8000 256/4000"
    schedule.add_argument(
        "--settings",
        nargs="+",
        type=setting,
        default=[setting(text) for text in usual.split()],
        help=f"d_model/warmup_steps of each line. Default: {usual}.",
    )
    steps = "Number of steps. Default: 20000."
    schedule.add_argument("--steps", type=int, default=20_000, help=steps)

    positions = add("positions", draw_positions, "Positional encodings.")
    whose = positions.add_mutually_exclusive_group()
    width = "Width of the sinusoids. Default: 128."
    whose.add_argument("--d_model", type=int, default=128, help=width)
    whose.add_argument("--model", help="Draw the positions of this model, which may be learned.")
    positions.add_argument(
        "--stack",
        choices=("encoder", "decoder"),
        default="encoder",
        help="Stack of --model. Default: encoder.",
    )
    length = "Number of positions. Default: 100."
    positions.add_argument("--length", type=int, default=100, help=length)
    curves_of = "Dimensions to draw as curves, counted from 0. Default: those of four frequencies."
    positions.add_argument("--dimensions", nargs="+", type=int, help=curves_of)

    attention = add("attention", draw_attention, "Attention weights of each head.")
    attention.add_argument("--model", required=True, help="Folder or Hub name.")
    attention.add_argument("--source", required=True, help="A source sentence.")
    attention.add_argument("--target", help="Its translation. Default: the model's own.")
    attention.add_argument(
        "--kind",
        choices=KINDS,
        default="cross",
        help="Attention in a stack, or from decoder to encoder (cross). Default: cross.",
    )
    which = "A layer, counted from 1, or all. Default: the last."
    attention.add_argument("--layer", type=layer, help=which)
    which = "Heads, counted from 1. Default: all."
    attention.add_argument("--heads", nargs="+", type=int, help=which)
    return parser


def setting(text: str) -> tuple[int, int]:
    """d_model and warm-up steps, from text such as "512/4000"."""
    d_model, _, warmup_steps = text.partition("/")
    if not (d_model.isdecimal() and warmup_steps.isdecimal()):
        raise ArgumentTypeError(f"{text!r}: expected d_model/warmup steps, such as 512/4000")
    return int(d_model), int(warmup_steps)


def layer(text: str) -> int | str:
    """A number, or "all"."""
    if text != "all" and not text.isdecimal():
        raise ArgumentTypeError(f"{text!r}: expected a number from 1 on, or all")
    return text if text == "all" else int(text)


def draw_curves(arguments: Namespace) -> Figure:
    return plot_curves(read_runs(arguments.runs))


def draw_schedule(arguments: Namespace) -> Figure:
    return plot_schedule(arguments.settings, arguments.steps)


def draw_positions(arguments: Namespace) -> Figure:
    if arguments.model is None:
        config = VanillaTransformerConfig(
            d_model=arguments.d_model, encoder_attention_heads=1, decoder_attention_heads=1
        )
        positions = SinusoidalPositions(config)
    else:
        expect_torch_model(arguments.model)
        config = read_config(arguments.model)
        if config.model_type != VanillaTransformerConfig.model_type:
            raise ValueError(
                f"{arguments.model} is of type {config.model_type}: expected vanilla_transformer"
            )
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            arguments.model, output_loading_info=True
        )
        if f"model.{arguments.stack}.embed_positions.weight" in report["missing_keys"]:
            raise ValueError(  # transformers makes random ones
                f"stack={arguments.stack!r}: expected one whose learned positions are in "
                f"{arguments.model}"
            )
        positions = getattr(model.model, arguments.stack).embed_positions
    return plot_positions(
        position_encodings(positions, arguments.length),
        dimensions=arguments.dimensions,
        kind=config.position_encoding,
    )


def draw_attention(arguments: Namespace) -> Figure:
    expect_sentences(source=arguments.source, target=arguments.target)
    config = read_config(arguments.model)
    stack = "encoder" if arguments.kind == "encoder" else "decoder"
    try:
        last, heads = layers_and_heads(config, stack)
    except AttributeError as error:
        raise ValueError(
            f"{arguments.model} is of type {config.model_type}: expected an encoder and a decoder, "
            "as in vanilla_transformer, marian, bart or t5"
        ) from error
    layers = {None: [last], "all": range(1, last + 1)}.get(arguments.layer, [arguments.layer])
    expect_numbers("layer", layers, last)
    expect_numbers("heads", arguments.heads or [], heads)
    loading = LoadingArguments(device="cpu", attn_implementation="eager")
    loaded = loading.load_model(arguments.model)
    maps = attention_maps(*loaded, arguments.source, arguments.target, arguments.kind)
    return plot_attention(maps, layers=layers, heads=arguments.heads)
