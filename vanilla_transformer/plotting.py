"""Pictures of training and of a model's internals: learning curves, the learning rate, positional
encodings, attention, heads, embeddings and scores by length.

Each `plot_` function takes numbers and returns a figure. `analysis` computes those of a model.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from transformers import get_scheduler

# Okabe and Ito's colours for the colour-blind, without yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
DASHES = ("solid", "dashed", "dashdot", "dotted")

# With dates, the same picture would be a different file each time.
METADATA: dict[str, dict[str, Any]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
LONGEST_SIDE = 8000  # of a picture, in pixels

# ---------------------------------------------------------------- Files


def picture_paths(path: str | Path) -> list[Path]:
    """The files that `save` writes: `path` itself, or, if it has no suffix, a PNG and an SVG.

    Raises:
        ValueError: The suffix is not of a known format, or there is no name.
    """
    path = Path(path)
    if path.suffix in METADATA:
        return [path]
    if path.suffix or not path.name:
        raise ValueError(
            f"{path}: expected a name that ends in {', '.join(METADATA)}, or one without a suffix "
            "for .png and .svg"
        )
    return [path.with_suffix(suffix) for suffix in (".png", ".svg")]


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure to `picture_paths(path)`, and create their folders. The same figure gives the
    same bytes each time. This fixes its layout.

    Returns:
        The files.

    Raises:
        ValueError: As `picture_paths`.
    """
    paths = picture_paths(path)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # or each drawing would shift the panels a little
    dpi = min(200.0, LONGEST_SIDE / max(figure.get_size_inches()))
    with matplotlib.rc_context({"svg.hashsalt": "vanilla_transformer"}):
        for file in paths:
            file.parent.mkdir(parents=True, exist_ok=True)
            metadata = METADATA[file.suffix]
            figure.savefig(file, dpi=dpi, metadata=metadata, bbox_inches="tight")
    return paths


# ---------------------------------------------------------------- Learning curves

Log = Sequence[Mapping[str, float]]
LOSSES = {"loss": "training", "eval_loss": "validation"}
SCORES = {  # each has its own panel if a run has it
    "eval_bleu": "BLEU",
    "eval_ter": "TER",
    "eval_ser": "sentence error rate, %",
    "eval_wer": "word error rate, %",
    "eval_per": "phone error rate, %",
    "eval_cer": "character error rate, %",
}


def has_curves(log: Log) -> bool:
    """Whether `plot_curves` finds anything to draw: a training shorter than `logging_steps` logs
    neither loss nor score."""
    return any(name in entry for entry in log for name in LOSSES | SCORES)


def plot_curves(runs: Mapping[str, Log]) -> Figure:
    """Learning curves of several runs in the same axes: losses, and scores next to them.

    Lines of the loss are labelled "name, training" and "name, validation", those of a score with
    only the run's name.

    Args:
        runs: `TrainerState.log_history` by the name of a run. A run may lack any of the metrics.

    Raises:
        ValueError: There is no run.
    """
    if not runs:
        raise ValueError("there is no run: expected one at least")
    scores = [
        name for name in SCORES if any(name in entry for log in runs.values() for entry in log)
    ]
    panels = 1 + len(scores)
    figure = Figure(figsize=(1.6 + 4.8 * panels, 4.4), layout="constrained")
    loss, *others = figure.subplots(1, panels, sharex=True, squeeze=False)[0]
    for index, (run, log) in enumerate(runs.items()):
        style = _style(index)
        _plot_metric(loss, log, "loss", f"{run}, training", **style, linewidth=0.8, alpha=0.45)
        _plot_metric(loss, log, "eval_loss", f"{run}, validation", **style)
        for axes, name in zip(others, scores, strict=True):
            _plot_metric(axes, log, name, run, **style)
    _finish(loss, "Loss", xlabel="step", ylabel="loss (nats per token)")
    for axes, name in zip(others, scores, strict=True):
        _finish(axes, f"{SCORES[name]} on the validation set", xlabel="step", ylabel=SCORES[name])
    loss.set_xlim(left=0)
    loss.xaxis.set_major_locator(MaxNLocator(integer=True))
    _add_legend_of_runs(figure, list(runs))
    return figure


def _plot_metric(axes: Axes, log: Log, name: str, label: str, **style: Any) -> None:
    points = [(entry["step"], entry[name]) for entry in log if name in entry]
    if points:
        steps, values = zip(*points, strict=True)
        # A single point has no line, and a few are easier to see with markers.
        few = len(points) == 1 or (name != "loss" and len(points) <= 40)
        axes.plot(steps, values, label=label, marker="o" if few else None, markersize=3, **style)


def _add_legend_of_runs(figure: Figure, runs: list[str]) -> None:
    """The legend under the panels: a colour for each run, then the style of training losses."""
    handles = [Line2D([], [], **_style(index)) for index in range(len(runs))]
    handles.append(Line2D([], [], color=GREY, linewidth=0.8, alpha=0.45))
    handles.append(Line2D([], [], color=GREY, marker="o", markersize=3))
    labels = [*runs, *LOSSES.values()]
    letters = int(11 * figure.get_figwidth())
    columns = max(1, min(len(labels), letters // (max(map(len, labels)) + 6)))
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


# ---------------------------------------------------------------- Learning rate


def learning_rates(d_model: int, warmup_steps: int, steps: int) -> list[float]:
    """Section 5.3's learning rate after 0, 1, ..., `steps` steps, as in training: transformers'
    "inverse_sqrt" scheduler with a peak of (d_model * warmup_steps)^-0.5.

    The scheduler counts completed steps, the paper the current one: the first step uses the rate
    after 0 steps, which is 0.

    Raises:
        ValueError: One of the numbers is not positive.
    """
    numbers = {"d_model": d_model, "warmup_steps": warmup_steps, "steps": steps}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected a positive number")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=(d_model * warmup_steps) ** -0.5)
    scheduler = get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=warmup_steps)
    rates = scheduler.get_last_lr()
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


def plot_schedule(settings: Iterable[tuple[int, int]], steps: int = 20_000) -> Figure:
    """The learning rate of section 5.3 over steps, a line for each setting, with a dot at its peak.

    Args:
        settings: d_model and the steps of warmup.
        steps: The last step.

    Raises:
        ValueError: One of the numbers is not positive, or there is no setting.
    """
    rates = {setting: learning_rates(*setting, steps) for setting in settings}
    if not rates:
        raise ValueError("there is no setting: expected a d_model and warmup steps at least")
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, ((d_model, warmup_steps), values) in enumerate(rates.items()):
        label = f"$d_\\mathrm{{model}}$ = {d_model:,}, warmup = {warmup_steps:,} steps"
        peak = [warmup_steps] if warmup_steps <= steps else []
        # Lines of the same d_model coincide after their warmups: dashes keep both visible.
        style = {**_style(index), "linestyle": DASHES[index % len(DASHES)]}
        axes.plot(values, label=label, marker="o", markersize=5, markevery=peak, **style)
    formula = (
        r"$d_\mathrm{model}^{-0.5} \cdot \min(\mathrm{step}^{-0.5},\ "
        r"\mathrm{step} \cdot \mathrm{warmup}^{-1.5})$"
    )
    _finish(axes, f"Learning rate: {formula}", xlabel="step", ylabel="learning rate")
    axes.set(xlim=(0, steps), ylim=(0, None))
    axes.legend(frameon=False)
    return figure


# ---------------------------------------------------------------- Positions


def plot_positions(
    encodings: torch.Tensor,
    *,
    dimensions: Collection[int] | None = None,
    kind: Literal["sinusoidal", "learned"] = "sinusoidal",
) -> Figure:
    """Positional encodings (section 3.5): all of them as a heat map, dimension over position, and
    below it some dimensions as lines, the even ones (sines) apart from the odd ones (cosines).

    Args:
        encodings: (length, d_model).
        dimensions: Those drawn as lines; by default, the sine and cosine of four frequencies.
        kind: The kind of encodings: only sinusoids have sines and cosines.

    Raises:
        ValueError: A dimension does not exist.
    """
    d_model = encodings.shape[1]
    if dimensions is None:
        pairs = sorted({2 * (d_model * eighth // 16) for eighth in range(1, 5)})
        dimensions = [dimension for even in pairs for dimension in (even, even + 1)]
    for dimension in dimensions:
        if not 0 <= dimension < d_model:
            raise ValueError(f"dimension {dimension}: expected 0 to {d_model - 1}")
    height = min(max(4.2, d_model / 64), 9)  # inches; 512 rows can be distinguished
    figure = Figure(figsize=(8, height + 3.8), layout="constrained")
    heat_map, *panels = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.4, 1.4])
    extreme = 1.0 if kind == "sinusoidal" else encodings.abs().max().item()
    image = heat_map.imshow(
        encodings.T.numpy(), cmap="RdBu_r", vmin=-extreme, vmax=extreme, aspect="auto"
    )
    heat_map.set(title=f"{kind.capitalize()} positional encoding", ylabel="dimension")
    figure.colorbar(image, cax=heat_map.inset_axes((1.02, 0, 0.03, 1)), label="value")
    functions = ("sine", "cosine") if kind == "sinusoidal" else (None, None)
    for axes, parity, function, family in zip(
        panels, ("Even", "Odd"), functions, ("Blues_r", "Oranges_r"), strict=True
    ):
        drawn = [dimension for dimension in dimensions if dimension % 2 == (parity == "Odd")]
        shades = matplotlib.colormaps[family]
        for index, dimension in enumerate(drawn):
            colour = shades(0.05 + 0.55 * index / max(1, len(drawn) - 1))
            axes.plot(encodings[:, dimension].numpy(), color=colour, label=f"{dimension}")
        title = f"{parity} dimensions" + (f": {function}" if function else "")
        _finish(axes, title, ylabel="value")
        if drawn:
            axes.legend(
                title="dimension", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
            )
    panels[-1].set_xlabel("position")
    return figure


# ---------------------------------------------------------------- Attention

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The title, the meaning of a row and that of a column.
DESCRIPTIONS: dict[Kind, tuple[str, str, str]] = {
    "encoder": ("Self-attention of the encoder", "source token", "source token"),
    "decoder": ("Self-attention of the decoder", "target token read", "target token read"),
    "cross": ("Attention from decoder to encoder", "target token predicted", "source token"),
}
LONGEST_PANEL = 6.8  # inches: with more than 40 tokens, cells and letters shrink


class AttentionMaps(NamedTuple):
    """Attention weights (layers, heads, query_length, key_length) of one pair of sentences, and the
    tokens of queries and keys."""

    weights: torch.Tensor
    queries: list[str]
    keys: list[str]
    kind: Kind


def expect_numbers(name: str, wanted: Iterable[int], count: int) -> None:
    """Raise a ValueError unless all wanted numbers are among 1, 2, ..., `count`."""
    for number in wanted:
        if not 1 <= number <= count:
            raise ValueError(f"{name}={number}: expected 1 to {count}")


def plot_attention(
    maps: AttentionMaps,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Figure:
    """Attention as heat maps, with a row for each query and a column for each key: one map for each
    head, and for several layers a row of maps for each layer.

    Args:
        maps: Weights (layers, heads, query_length, key_length) and their tokens.
        layers: Those to draw, counted from 1; by default all.
        heads: Likewise.

    Raises:
        ValueError: A layer or a head does not exist.
    """
    layers = layers or range(1, maps.weights.shape[0] + 1)
    heads = heads or range(1, maps.weights.shape[1] + 1)
    expect_numbers("layer", layers, maps.weights.shape[0])
    expect_numbers("head", heads, maps.weights.shape[1])
    # Heads of one layer form a square, or a slightly wider rectangle.
    square = math.isqrt(len(heads) - 1) + 1
    even = next(width for width in range(square, len(heads) + 1) if len(heads) % width == 0)
    columns = len(heads) if len(layers) > 1 else even
    places = [(layer, head) for layer in layers for head in heads]
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # the same in all pictures, with visible small weights
    figure, panels = _panels(maps, len(places) // columns, columns)
    for axes, (layer, head) in zip(panels.flat, places, strict=True):
        weights = maps.weights[layer - 1, head - 1].numpy()
        image = axes.imshow(weights, cmap="Blues", norm=scale)
        title = f"head {head}" if len(layers) == 1 else f"layer {layer}, head {head}"
        axes.set_title(title, fontsize=9)
    title, query, key = DESCRIPTIONS[maps.kind]
    if len(layers) == 1:
        title += f", layer {layers[0]}"
    figure.suptitle(title)
    figure.supylabel(query)
    figure.supxlabel(key)
    figure.colorbar(image, ax=panels, label="attention weight", aspect=40, shrink=0.6, pad=0.02)
    return figure


def _panels(maps: AttentionMaps, rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure with rows x columns panels, and legible tokens next to the first of a row and under
    the last of a column."""
    cell = min(0.17, LONGEST_PANEL / max(len(maps.keys), len(maps.queries)))  # inches
    fontsize = 44 * cell  # points
    letter = 0.6 * fontsize / 72  # inches

    def extent(panels: int, tokens: list[str], labels: list[str]) -> float:
        return panels * (cell * len(tokens) + 0.2) + letter * max(map(len, labels)) + 1.2

    width = max(extent(columns, maps.keys, maps.queries), 4.0)
    height = max(extent(rows, maps.queries, maps.keys), 3.0)
    figure = Figure(figsize=(width, height), layout="compressed")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
        axes.tick_params(length=0, labelsize=fontsize)
        axes.tick_params(axis="x", rotation=90)
    for axes in panels[-1]:
        axes.set_xticks(range(len(maps.keys)), maps.keys, parse_math=False)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(maps.queries)), maps.queries, parse_math=False)
    return figure, panels


# ---------------------------------------------------------------- Inside a model


def plot_heads(values: Mapping[Kind, torch.Tensor], title: str, label: str) -> Figure:
    """A number for each head as heat maps, a row for each layer and a column for each head.

    Args:
        values: (layers, heads) for each use of attention.
        title: Of the picture.
        label: Of the numbers.
    """
    widths = [grid.shape[1] for grid in values.values()]
    layers = max(grid.shape[0] for grid in values.values())
    size = (2.2 + 0.45 * sum(widths) + 0.5 * len(widths), 1.7 + 0.4 * layers)
    figure = Figure(figsize=(max(6.0, size[0]), size[1]), layout="constrained")
    panels = figure.subplots(1, len(values), squeeze=False, width_ratios=widths)[0]
    highest = max(grid.max().item() for grid in values.values())
    for axes, (kind, grid) in zip(panels, values.items(), strict=True):
        image = axes.imshow(grid.numpy(), cmap="Blues", vmin=0, vmax=highest or 1.0, aspect="auto")
        axes.set(title=kind, xlabel="head")
        axes.set_xticks(range(grid.shape[1]), range(1, grid.shape[1] + 1))
        axes.set_yticks(range(grid.shape[0]), range(1, grid.shape[0] + 1))
    panels[0].set_ylabel("layer")
    figure.suptitle(title)
    figure.colorbar(image, ax=panels, label=label)
    return figure


def plot_similarities(similarities: torch.Tensor, kind: str) -> Figure:
    """The cosine similarity of each pair of positions, (length, length), as a heat map."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(similarities.numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set(title=f"Similarity of {kind} positions", xlabel="position", ylabel="position")
    figure.colorbar(image, ax=axes, label="cosine similarity")
    return figure


def plot_norms(norms: torch.Tensor, scales: Mapping[str, float], position_norm: float) -> Figure:
    """Histograms of the norms of embeddings, for each factor, and the norm of positions.

    Args:
        norms: Of the rows of the matrix, (vocabulary,).
        scales: Factors by their labels.
        position_norm: Drawn as a vertical line.
    """
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, (label, scale) in enumerate(scales.items()):
        scaled, colour = (scale * norms).numpy(), COLOURS[index % len(COLOURS)]
        axes.hist(scaled, bins=60, color=colour, alpha=0.6, label=f"embedding * {label}")
    axes.axvline(position_norm, color=GREY, linestyle="dashed", label="position")
    _finish(axes, "Norms of embeddings and positions", xlabel="norm", ylabel="tokens")
    axes.set_yscale("log")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(scales) + 1, frameon=False
    )
    return figure


# ---------------------------------------------------------------- Scores by length


def plot_by_length(
    ranges: Sequence[tuple[int, int, int]], scores: Mapping[str, Mapping[str, Sequence[float]]]
) -> Figure:
    """Scores over the length of the source, a panel for each metric, a line for each system.

    Args:
        ranges: The shortest length, the longest and the number of lines of each group.
        scores: For each metric, by its label, and for each system the score of each group.
    """
    figure = Figure(figsize=(1.6 + 4.8 * len(scores), 4.4), layout="constrained")
    panels = figure.subplots(1, len(scores), squeeze=False)[0]
    labels = [
        f"{first if first == last else f'{first}–{last}'}\nn={lines:,}"
        for first, last, lines in ranges
    ]
    for axes, (metric, of_systems) in zip(panels, scores.items(), strict=True):
        for index, (system, values) in enumerate(of_systems.items()):
            axes.plot(values, label=system, marker="o", markersize=4, **_style(index))
        axes.set_xticks(range(len(ranges)), labels)
        title = f"{metric.partition(',')[0]} by source length"
        _finish(axes, title, xlabel="source length", ylabel=metric)
    # By itself, it leaves out names that start with "_".
    legend = panels[0].legend(panels[0].get_lines(), list(of_systems), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


# ---------------------------------------------------------------- All pictures


def _style(index: int) -> dict[str, Any]:
    """The line of a run: a colour, and dashes when colours are used up."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}


def _finish(axes: Axes, title: str, *, ylabel: str, xlabel: str | None = None) -> None:
    """Add title and labels of the axes, and only the lines that are needed to read values."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
