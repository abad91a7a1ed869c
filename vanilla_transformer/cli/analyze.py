r"""Look inside a model.

    vanilla-transformer analyze heads --model outputs/mine --source valid.en --target valid.de \
        --output heads.png
    vanilla-transformer analyze heads --model outputs/mine --source valid.en --target valid.de \
        --prune 0.3 --prune_output outputs/pruned
    vanilla-transformer analyze attention --model outputs/mine --text "A dog runs." \
        --output attention.html
    vanilla-transformer analyze alignments --model outputs/mine --source test.en --target test.de \
        --links test.links
    vanilla-transformer analyze positions --model outputs/mine --output positions.png
    vanilla-transformer analyze embeddings --model outputs/mine --tokens dog house

heads       how important each head is; a smaller model without the least important ones
attention   a web page that shows the attention of a sentence
alignments  how well attention aligns words, compared with links made by hand
positions   how similar positions are, and how far attention looks
embeddings  norms, neighbours, and how much of a stack's input is position

All but attention print a table. For heads, positions and embeddings, --output adds a picture. See
docs/analysis.md.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..analysis.alignment_error import read_gold_alignments, score_layers
from ..analysis.attention import (
    VIEWS,
    attention_maps,
    attention_page,
    expect_bertviz,
    expect_both_stacks,
    expect_sentences,
)
from ..analysis.embeddings import analyze_embeddings, nearest_tokens, vocabulary_of
from ..analysis.heads import ByHead, analyze_heads, expect_prunable, most_important, prune_heads
from ..analysis.positions import attention_reach, position_encodings, position_similarities
from ..data.paths import expect_unused, staged
from ..data.text_files import expect_parallel, read_file
from ..inference.alignment import penultimate_layer
from ..inference.loading import LoadingArguments, read_config
from ..plotting import KINDS, picture_paths, plot_heads, plot_norms, plot_similarities, save
from .table import table

DISTANCES = (1, 2, 3, 5, 10, 20, 50, 100)  # distances of positions in a table


def main() -> None:
    arguments = make_parser().parse_args()
    arguments.check(arguments)
    arguments.analyze(arguments)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="vanilla-transformer analyze",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(required=True, metavar="part")

    def add(
        name: str, analyze: Callable[[Namespace], None], description: str, picture: bool = True
    ) -> ArgumentParser:
        part = parts.add_parser(name, help=description, description=description)
        part.set_defaults(analyze=analyze, check=check)
        part.add_argument("--model", required=True, help="Folder or Hub name.")
        part.add_argument("--device", help="cpu, cuda, ... Default: the accelerator, if any.")
        if picture:
            formats = ".png, .svg or .pdf; without a suffix, .png and .svg."
            part.add_argument("--output", help=f"Picture: {formats}")
        return part

    def add_text(part: ArgumentParser, required: bool) -> None:
        part.add_argument("--source", required=required, help="File of sentences.")
        part.add_argument("--target", required=required, help="File of their translations.")
        most = "Maximum number of tokens in a batch, on either side. Default: 2048."
        part.add_argument("--max_tokens", type=int, default=2048, help=most)

    heads = add("heads", show_heads, "How important each head is.")
    add_text(heads, required=True)
    share = "Remove this share of each layer's heads, such as 0.3."
    heads.add_argument("--prune", type=float, help=share)
    heads.add_argument("--prune_output", help="Folder for the smaller model.")

    attention = add("attention", write_page, "A page that shows attention.", picture=False)
    attention.set_defaults(check=check_page)
    attention.add_argument("--text", required=True, help="The sentence to show.")
    attention.add_argument("--translation", help="Its translation. Default: the model's own.")
    view = "One layer at a time (head), or all at once (model). Default: head."
    attention.add_argument("--view", choices=VIEWS, default="head", help=view)
    attention.add_argument("--output", required=True, help="File for the page, .html.")

    alignments = add("alignments", show_alignments, "How well attention aligns words.", False)
    alignments.set_defaults(output=None)
    add_text(alignments, required=True)
    links = "File with the links of each pair, such as 0-0 (sure) and 1p2 (possible)."
    alignments.add_argument("--links", required=True, help=links)

    positions = add("positions", show_positions, "How similar positions are.")
    add_text(positions, required=False)
    embeddings = add("embeddings", show_embeddings, "Norms and neighbours of embeddings.")
    tokens = "Tokens whose nearest neighbours to list."
    embeddings.add_argument("--tokens", nargs="+", default=[], help=tokens)
    for part in (positions, embeddings):
        stacks, stack = ("encoder", "decoder"), "The stack to measure. Default: encoder."
        part.add_argument("--stack", choices=stacks, default="encoder", help=stack)
        length = "Number of positions. Default: 100."
        part.add_argument("--length", type=int, default=100, help=length)
    return parser


# ---------------------------------------------------------------- Before work starts


def check(arguments: Namespace) -> None:
    """Raise a ValueError or FileExistsError for options that can't work."""
    if arguments.output is not None:
        picture_paths(arguments.output)
    given = vars(arguments)
    if given.get("source") is not None or given.get("target") is not None:
        if arguments.source is None or arguments.target is None:
            raise ValueError("expected both --source and --target, or neither")
        if arguments.max_tokens < 1:
            raise ValueError(f"max_tokens={arguments.max_tokens}: expected a positive number")
        expect_parallel(arguments.source, arguments.target)
    if given.get("links") is not None:
        read_gold_alignments(arguments.links, read_pairs(arguments))
    config = read_config(arguments.model)
    expect_both_stacks(config)
    if (given.get("prune") is None) != (given.get("prune_output") is None):
        raise ValueError("expected both --prune and --prune_output, or neither")
    if given.get("prune") is not None:
        expect_prunable(config, arguments.prune)
        expect_unused(arguments.prune_output, "prune_output")


def check_page(arguments: Namespace) -> None:
    """Raise a ValueError or ModuleNotFoundError if the page can't be made."""
    expect_sentences(text=arguments.text, translation=arguments.translation)
    if Path(arguments.output).suffix != ".html":
        raise ValueError(f"output={arguments.output!r}: expected a name that ends in .html")
    expect_bertviz()
    expect_both_stacks(read_config(arguments.model))


def load(arguments: Namespace) -> Any:
    """The model, with eager attention, which returns its weights, and its tokenizer."""
    loading = LoadingArguments(device=arguments.device, attn_implementation="eager")
    return loading.load_model(arguments.model)


def read_pairs(arguments: Namespace) -> list[tuple[str, str]]:
    """The parallel text."""
    return list(zip(read_file(arguments.source), read_file(arguments.target), strict=True))


def draw(figure: Figure, output: str | None, part: str = "") -> None:
    """Save a picture, if there is an `output`; `part` is added before the suffix of its name."""
    if output is None:
        return
    path = Path(output)
    for file in save(figure, path.with_name(f"{path.stem}{part}{path.suffix}")):
        print(file)


def print_heads(columns: Mapping[str, ByHead]) -> None:
    """Print a row for each head, with its number in each column."""
    first = next(iter(columns.values()))
    rows = [
        [kind, str(layer + 1), str(head + 1)]
        + [f"{column[kind][layer, head]:.4f}" for column in columns.values()]
        for kind, values in first.items()
        for layer in range(values.shape[0])
        for head in range(values.shape[1])
    ]
    print(table(["attention", "layer", "head", *columns], rows))


# ---------------------------------------------------------------- Parts


def show_heads(arguments: Namespace) -> None:
    model, tokenizer = load(arguments)
    pairs = read_pairs(arguments)
    report = analyze_heads(pairs, model, tokenizer, arguments.max_tokens)
    print_heads({"importance": report.importance, "confidence": report.confidence})
    print(f"loss: {report.loss:.4f} nats per target token")
    label = "nats per target token"
    draw(plot_heads(report.importance, "Importance of heads", label), arguments.output)
    if arguments.prune is None:
        return
    pruned = prune_heads(model, most_important(model.config, report.importance, arguments.prune))
    with staged(arguments.prune_output, "prune_output") as folder:
        pruned.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    pruned.set_attn_implementation("eager")
    loss = analyze_heads(pairs, pruned, tokenizer, arguments.max_tokens).loss
    config = pruned.config
    print(
        f"{arguments.prune_output}: {config.encoder_attention_heads} heads in each layer of the "
        f"encoder, {config.decoder_attention_heads} of the decoder; loss: {loss:.4f}"
    )


def write_page(arguments: Namespace) -> None:
    model, tokenizer = load(arguments)
    maps = [
        attention_maps(model, tokenizer, arguments.text, arguments.translation, kind)
        for kind in KINDS
    ]
    path = Path(arguments.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(attention_page(maps, arguments.view), encoding="utf-8")
    print(path)


def show_alignments(arguments: Namespace) -> None:
    model, tokenizer = load(arguments)
    pairs = read_pairs(arguments)
    gold = read_gold_alignments(arguments.links)
    scores = score_layers(pairs, gold, model, tokenizer, arguments.max_tokens)
    default = penultimate_layer(len(scores))
    rows = [
        [f"{layer}{' (default)' * (layer == default)}", *(f"{100 * value:.1f}" for value in score)]
        for layer, score in enumerate(scores)
    ]
    print(table(["--alignment_layer", "AER", "precision", "recall"], rows))


def show_positions(arguments: Namespace) -> None:
    model, tokenizer = load(arguments)
    stack = getattr(model.model, arguments.stack)
    encodings = position_encodings(deepcopy(stack.embed_positions).cpu(), arguments.length)
    similarities = position_similarities(encodings)
    rows = [
        [str(distance), f"{similarities.diagonal(distance).mean():.3f}"]
        for distance in DISTANCES
        if distance < arguments.length
    ]
    print(table(["distance", "mean cosine similarity"], rows))
    draw(plot_similarities(similarities, model.config.position_encoding), arguments.output)
    if arguments.source is None:
        return
    reach = attention_reach(read_pairs(arguments), model, tokenizer, arguments.max_tokens)
    print_heads(reach)
    figure = plot_heads(reach["distance"], "How far attention looks", "mean distance (tokens)")
    draw(figure, arguments.output, "_distance")


def show_embeddings(arguments: Namespace) -> None:
    model, tokenizer = load(arguments)
    stack = getattr(model.model, arguments.stack).cpu()
    vocabulary = vocabulary_of(tokenizer, arguments.stack)
    nearest = nearest_tokens(stack.embed_tokens.weight, vocabulary, arguments.tokens)
    report = analyze_embeddings(stack, arguments.length)
    rows = [
        [
            f"embedding * {label}" + (" (this model)" if scale == report.scale else ""),
            f"{report.norm(scale):.3f}",
            f"{report.position_share(scale):.1%}",
        ]
        for label, scale in report.scales.items()
    ]
    rows.append(["position", f"{report.position_norm:.3f}", ""])
    print(table(["", "norm", "share of position"], rows))
    for word, neighbours in nearest.items():
        print(f"{word}: {', '.join(f'{token!r} {value:.3f}' for token, value in neighbours)}")
    draw(plot_norms(report.norms, report.scales, report.position_norm), arguments.output)
