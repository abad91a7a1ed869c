"""A page to try a model in the browser: translations, their scores and their attention."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import gradio as gr
import yaml
from matplotlib import rc_context
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..analysis.attention import attention_maps
from ..data.paths import staged
from ..inference.alignment import layers_and_heads
from ..inference.decoding import position_limits, runs_in_torch
from ..inference.loading import LoadingArguments, reads_targets
from ..inference.translation import translate, translate_n_best
from ..plotting import AttentionMaps, plot_attention
from .languages import languages_of_card

LONGEST_SOURCE = 1000  # characters
MEAN = "mean of all heads"
MARK = 0.6  # opacity of the strongest mark: text on it stays legible
FONTS = ["system-ui", "Segoe UI", "Roboto", "sans-serif"]  # not downloaded
CSS = """
.gradio-container { max-width: 1080px !important; margin: 0 auto !important; }
#target-tokens [role=button] { cursor: pointer; }
.score-token { filter: hue-rotate(225deg); }  /* Gradio's red becomes the page's blue */
footer .divider { display: none; }
"""


class Demo:
    """The page and its model.

    Args:
        model: A sequence-to-sequence model, or an engine's. If torch runs it, it is switched to
            eager attention, and the page shows its attention.
        tokenizer: Its tokenizer.
        name: The title of the page.
        languages: The languages of source and target for the labels, or none.
        examples: Sources to choose from.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        languages: Sequence[str] = (),
        examples: Sequence[str] = (),
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.languages, self.examples = languages, examples
        self.shows_attention = runs_in_torch(model)
        if self.shows_attention:
            model.set_attn_implementation("eager")

    def translate(
        self, source: str, num_beams: int, length_penalty: float, n_best: int
    ) -> tuple[str, list[list[str]], AttentionMaps | None]:
        """Translate one sentence.

        Returns:
            The best translation; for each hypothesis, best first, its score and its text; and the
            attention from the decoder to the encoder, if the model returns it, its tokenizer reads
            targets, and its table of positions has room for the translation with its end token.

        Raises:
            gr.Error: The sentence is too long.
        """
        source = " ".join(source.split())
        if len(source) > LONGEST_SOURCE:
            raise gr.Error(f"{len(source)} characters: expected at most {LONGEST_SOURCE}")
        if not source:
            return "", [], None
        if beyond := self._beyond_positions(text=source):
            raise gr.Error(beyond)
        if num_beams > 1:
            hypotheses = translate_n_best(
                [source],
                self.model,
                self.tokenizer,
                min(n_best, num_beams),
                num_beams=num_beams,
                length_penalty=length_penalty,
            )
            rows = [[f"{each.score:.3f}", each.text] for each in next(hypotheses)]
        else:  # without a score
            rows = [["", *translate([source], self.model, self.tokenizer, num_beams=1)]]
        best = rows[0][1]
        maps = None
        is_read = self.shows_attention and best.strip() and reads_targets(self.tokenizer)
        if is_read and not self._beyond_positions(text_target=best):
            maps = attention_maps(self.model, self.tokenizer, source, best)
        return best, rows, maps

    def _beyond_positions(self, **side: str) -> str:
        """An error message if a source or target is longer than the model's table of positions."""
        of_source, of_target = position_limits(self.model)
        limit = of_source if "text" in side else of_target
        tokens = len(self.tokenizer(**side)["input_ids"])
        return f"{tokens} tokens: expected at most {limit}" if tokens > limit else ""

    def page(self) -> gr.Blocks:
        """The page; `launch` serves it."""
        of = [f" ({language})" for language in self.languages] or ["", ""]
        with gr.Blocks(title=self.name, analytics_enabled=False) as page:
            gr.Markdown(f"# {self.name}")
            with gr.Row():
                source = gr.Textbox(
                    label=f"Source{of[0]}",
                    placeholder="Type a sentence and press Enter",
                    lines=3,
                    max_length=LONGEST_SOURCE,
                    autofocus=True,
                )
                # Without a copy button, which would hide the label from screen readers.
                target = gr.Textbox(label=f"Translation{of[-1]}", lines=3)
            button = gr.Button("Translate", variant="primary")
            if self.examples:
                gr.Examples([[one] for one in self.examples], source, label="Examples")
            with gr.Accordion("Search", open=False), gr.Row():
                search = self._sliders()
            table = gr.Dataframe(
                headers=["score", "hypothesis"],
                label="Hypotheses: log-probability over length penalty, best first",
                interactive=False,
                wrap=True,
            )
            maps = gr.State()
            translated = gr.on(
                [button.click, source.submit],
                self.translate,
                [source, *search],
                [target, table, maps],
                api_name="translate",
            )
            if self.shows_attention:
                self._add_attention(maps, translated)
        return page

    def _sliders(self) -> list[gr.Slider]:
        config = self.model.generation_config
        beams = config.num_beams or 1
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        return [
            gr.Slider(1, max(10, beams), beams if beams > 1 else 4, step=1, label="Beam size"),
            gr.Slider(min(0, penalty), max(2, penalty), penalty, step=0.1, label="Length penalty"),
            gr.Slider(1, 10, 3, step=1, label="Hypotheses", info="at most the beam size"),
        ]

    def _add_attention(self, maps: gr.State, translated: Any) -> None:
        """The lower part of the page, which is updated after each translation."""
        layers, heads = layers_and_heads(self.model.config, "decoder")
        with gr.Column(visible=False) as panel:
            gr.Markdown("## Attention\nSelect a token of the translation to see what it looked at.")
            with gr.Row():
                with gr.Column():
                    tokens = gr.HighlightedText(label="Translation", elem_id="target-tokens")
                    seen = gr.HighlightedText(label="Source", elem_id="source-tokens")
                    numbers = gr.Textbox(label="In numbers", interactive=False)
                    layer = gr.Slider(
                        1, max(2, layers), layers, step=1, label="Layer of the decoder",
                        visible=layers > 1,
                    )  # fmt: skip
                    choices = [MEAN, *map(str, range(1, heads + 1))]
                    head = gr.Dropdown(choices, value=MEAN, label="Head")
                picture = gr.Plot(label="Attention of all tokens")
        chosen = gr.State(0)

        def choose(event: gr.SelectData) -> int:
            return event.index

        inputs, views = [maps, chosen, layer, head], [tokens, seen, numbers]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        tokens.select(choose, None, chosen, **quiet).then(look, inputs, views, **quiet)
        restart = translated.then(
            lambda maps: (0, gr.Column(visible=maps is not None)), maps, [chosen, panel], **quiet
        )
        for event in (restart.then, layer.change, head.change):
            event(look, inputs, views, **quiet).then(draw, [maps, layer, head], picture, **quiet)


def look(maps: AttentionMaps | None, chosen: int, layer: int, head: str) -> tuple[Any, Any, str]:
    """The source tokens that a token of the translation attends to.

    Args:
        maps: Weights (layers, heads, target_length, source_length) and their tokens.
        chosen: The token's position.
        layer: From 1 on.
        head: From 1 on, or the mean of all.

    Returns:
        The tokens of the translation, with the chosen one marked; the tokens of the source, marked
        by their weights relative to the largest; and the largest weights as text.
    """
    if maps is None:
        return [], [], ""
    weights = _one_head(maps, layer, head).weights[0, 0, chosen].tolist()
    targets = [(token, MARK * (place == chosen)) for place, token in enumerate(maps.queries)]
    ranked = sorted(zip(weights, maps.keys, strict=True), reverse=True)[:4]
    numbers = ",  ".join(f"{token} {weight:.0%}" for weight, token in ranked)
    marks = [MARK * weight / max(weights) for weight in weights]
    sources = list(zip(maps.keys, marks, strict=True))
    return targets, sources, f"{maps.queries[chosen]}  looked at  {numbers}"


def draw(maps: AttentionMaps | None, layer: int, head: str) -> Figure | None:
    """The weights of all tokens, as a heat map."""
    if maps is None:
        return None
    with rc_context({"font.size": 8, "figure.dpi": 150}):
        figure = plot_attention(_one_head(maps, layer, head))
    figure.axes[0].set_title("")
    figure.suptitle("")  # both are on the page
    return figure


def _one_head(maps: AttentionMaps, layer: int, head: str) -> AttentionMaps:
    weights = maps.weights[layer - 1]
    weights = weights.mean(0) if head == MEAN else weights[int(head) - 1]
    return maps._replace(weights=weights[None, None])


def make_demo(
    model: str | Path,
    examples: str | Path | None = None,
    loading: LoadingArguments | None = None,
    name: str | None = None,
) -> Demo:
    """Load a model and make its demo.

    Args:
        model: A folder or a name on the Hub. The languages come from the folder's card.
        examples: A text file with one source per line.
        loading: How to load the model.
        name: The title of the page. Default: the model's.
    """
    lines = Path(examples).read_text(encoding="utf-8-sig").split("\n") if examples else []
    card = Path(model, "README.md")
    pair = languages_of_card(card) if card.is_file() else None
    loaded = (loading or LoadingArguments()).load(model)
    name = name or Path(model).resolve().name
    return Demo(*loaded, name, pair or [], [line for line in lines if line.strip()])


def launch(demo: Demo, **options: Any) -> Any:
    """Serve the page, with `gradio.Blocks.launch`'s options, until the program is stopped."""
    theme = gr.themes.Soft(primary_hue="indigo", font=FONTS, font_mono=FONTS)
    settings = {"theme": theme, "css": CSS, "footer_links": ["api"], "ssr_mode": False}
    return demo.page().queue(max_size=64).launch(**{**settings, **options})


APP = """from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.serving.demo import launch, make_demo

launch(make_demo({model!r}, {examples!r}, LoadingArguments({loading}), {name!r}))
"""


def write_space(
    folder: str | Path,
    model: str,
    demo: Demo,
    examples: str | Path | None = None,
    loading: LoadingArguments | None = None,
) -> Path:
    """Write the files of a Hugging Face Space that shows the demo.

    Args:
        folder: A new or empty folder.
        model: A folder, which is copied, or a name on the Hub, which the Space loads.
        demo: Its demo.
        examples: As for `make_demo`.
        loading: As for `make_demo`; the Space chooses the device.

    Raises:
        FileExistsError: The folder is in use.
    """
    with staged(folder, "space") as written:
        is_local = Path(model).is_dir()
        if is_local:
            _copy_model(Path(model), written / "model", demo)
        if examples is not None:
            shutil.copy(examples, written / "examples.txt")
        app = APP.format(
            model="model" if is_local else model,
            examples=examples and "examples.txt",
            loading=", ".join(_changed(loading or LoadingArguments())),
            name=demo.name,
        )
        (written / "app.py").write_text(app, encoding="utf-8")
        requirement = f"vanilla-transformer[{','.join(_extras(demo))}]=={__version__}\n"
        (written / "requirements.txt").write_text(requirement, encoding="utf-8")
        header = {
            "title": demo.name,
            "emoji": "🌍",
            "colorFrom": "indigo",
            "colorTo": "blue",
            "sdk": "gradio",
            "sdk_version": gr.__version__,
            "python_version": "3.11",
            "app_file": "app.py",
            "short_description": "Translate, and see what the model looks at",
            **({} if is_local else {"models": [model]}),
        }
        card = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
        (written / "README.md").write_text(f"---\n{card}---\n\n# {demo.name}\n", encoding="utf-8")
    return Path(folder)


def _extras(demo: Demo) -> list[str]:
    """The extras of this package that the page needs."""
    extras = ["demo"]
    if not demo.shows_attention:  # an engine's
        extras.append("export")
    if demo.tokenizer.init_kwargs.get("moses"):
        extras.append("moses")
    return extras


def _changed(loading: LoadingArguments) -> Iterator[str]:
    """The options that differ from their defaults, as keywords."""
    for option in fields(loading):
        value = getattr(loading, option.name)
        if value != option.default and option.name != "device":
            yield f"{option.name}={value!r}"


def _copy_model(model: Path, folder: Path, demo: Demo) -> None:
    """Copy the files that loading needs, without others from training."""
    if not demo.shows_attention:  # an engine's
        shutil.copytree(model, folder)
        return
    demo.model.save_pretrained(folder)
    demo.tokenizer.save_pretrained(folder)
    if (model / "README.md").is_file():
        shutil.copy(model / "README.md", folder)
