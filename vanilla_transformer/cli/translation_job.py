"""The work of `translate`: its options, its models, and the lines that it writes."""

import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from ..data.parquet_files import is_parquet
from ..data.text_files import expect_output, expect_parallel, read_file
from ..inference.alignment import UNITS, add_alignments
from ..inference.decoding import (
    draws,
    expect_hypotheses,
    expect_valid_options,
    runs_in_torch,
    samples,
)
from ..inference.loading import LoadingArguments, expect_to_read_targets
from ..inference.parallel_translation import TARGET_COLUMN, digest, expect_files, fingerprint
from ..inference.reranking import (
    UTILITIES,
    get_utility,
    rank_by_log_probability,
    rerank_by_reverse_model,
    rerank_by_utility,
)
from ..inference.scoring import add_token_scores
from ..inference.translation import Hypothesis, encode_prefixes, translate_n_best
from .generation_options import METHOD_FILE, MOVED, encode_forced_words, expect_method, find_method
from .parser import expect_needed

SEED = 42  # of samples
SAMPLES = 32  # candidates by default


@dataclass
class TranslateArguments:
    model: list[str] = HfArg(
        help="Folder or Hub name of a sequence-to-sequence model, or an exported folder. Several "
        "models are an ensemble."
    )
    source: str | None = HfArg(
        default=None, help="Text or parquet file to translate. Default: standard input."
    )
    output: str | None = HfArg(
        default=None, help="File for the translations. Default: standard output."
    )
    source_column: str | None = HfArg(
        default=None, help="Column of a parquet source. Default: the only one with text."
    )
    target_column: str = HfArg(default=TARGET_COLUMN, help="New column of a parquet output.")
    batch_size: int = HfArg(default=32, help="Lines decoded together.")
    max_tokens: int | None = HfArg(
        default=None,
        help="Maximum number of source tokens in a batch, with padding. Replaces batch_size.",
    )
    compile: bool = HfArg(
        default=False,
        help="Compile the model, and use a static cache, which is faster for single sentences.",
    )
    seed: int = HfArg(default=SEED, help="Seed of --do_sample.")
    target_prefix_file: str | None = HfArg(
        default=None, help="File with the beginning of each translation; blank lines for none."
    )
    custom_generate: str | None = HfArg(
        default=None,
        help="Folder or Hub name of a custom generation method. Its code runs on this machine.",
    )
    force_words: list[str] | None = HfArg(
        default=None, help="Words that each translation must contain. Needs --custom_generate."
    )
    n_best: int | None = HfArg(
        default=None, help="Write this many hypotheses per line, with scores."
    )
    token_scores: bool = HfArg(default=False, help="Write the log-probability of each token.")
    alignments: str | None = HfArg(
        default=None,
        help=f"Write aligned {' or '.join(UNITS)} as pairs SOURCE-TARGET, counted from 0.",
    )
    alignment_layer: int | None = HfArg(
        default=None,
        help="Decoder layer that aligns, counted from 0, or from the end: -1 is the last. "
        "Default: the penultimate.",
    )
    replace_unknown: bool = HfArg(
        default=False, help="Replace unknown words with the aligned source words."
    )
    mbr: str | None = HfArg(
        default=None,
        help="Minimum Bayes risk: choose the hypothesis that is most similar to the others, by one "
        f"of {', '.join(UTILITIES)}.",
    )
    reverse_model: str | None = HfArg(
        default=None, help="Rerank with a model from the target to the source."
    )
    reverse_weight: float = HfArg(default=1.0, help="Weight of log p(source | translation).")
    length_weight: float = HfArg(
        default=0.0, help="Weight of the translation's length in the ranking by --reverse_model."
    )
    candidates: int | None = HfArg(
        default=None,
        help="Number of hypotheses that --mbr or --reverse_model choose from. "
        f"Default: all beams, or {SAMPLES} samples.",
    )

    def __post_init__(self) -> None:
        for name in ("n_best", "batch_size", "max_tokens", "candidates"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive integer")
        for name in ("reverse_weight", "length_weight"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name}={value}: expected a finite number")
        if self.mbr is not None and self.reverse_model is not None:
            raise ValueError(
                f"mbr={self.mbr!r} and reverse_model={self.reverse_model!r}: expected one of them"
            )
        expect_needed(self, self._needs())
        for name in ("compile", "custom_generate"):
            if (value := getattr(self, name)) and len(self.model) > 1:
                raise ValueError(
                    f"{name}={value} with {len(self.model)} models: expected one model"
                )
        expect_files(self.source, self.output, self.source_column, self.target_column)
        expect_output(self.output, target_prefix_file=self.target_prefix_file)
        for name in ("n_best", "token_scores", "alignments"):
            if (value := getattr(self, name)) and self.output and is_parquet(self.output):
                raise ValueError(
                    f"{name}={value} with output={self.output!r}: expected a text file"
                )
        if self.target_prefix_file is not None and self.source is not None:
            expect_parallel(self.source, self.target_prefix_file, self.source_column)

    def _needs(self) -> dict[str, tuple[bool, str]]:
        """The options that others need; see `expect_needed`."""
        has_reverse = self.reverse_model is not None
        aligns = self.alignments is not None or self.replace_unknown
        method = f"{MOVED['force_words_ids']} as well, or another method that has force_words_ids"
        return {
            "candidates": (self.reranks, "--mbr or --reverse_model as well"),
            "reverse_weight": (has_reverse, "--reverse_model as well"),
            "length_weight": (has_reverse, "--reverse_model as well"),
            "alignment_layer": (aligns, "--alignments or --replace_unknown as well"),
            "force_words": (self.custom_generate is not None, f"--custom_generate {method}"),
            "target_prefix_file": (self.source is not None, "--source as well"),
        }

    @property
    def reranks(self) -> bool:
        """Whether hypotheses are reranked."""
        return self.mbr is not None or self.reverse_model is not None


class TranslationJob:
    """The models and options of one call of the command.

    Attributes:
        counts: The number of translations so far, and of those that reached their length limit.
    """

    def __init__(
        self, arguments: TranslateArguments, loading: LoadingArguments, options: dict[str, Any]
    ):
        self.arguments, self.options = arguments, options
        if arguments.custom_generate is not None:
            trusted = loading.trust_remote_code
            options["custom_generate"] = find_method(arguments.custom_generate, trusted)
            options["trust_remote_code"] = trusted
        expect_method(options)
        self.model, self.tokenizer = loading.load(arguments.model)
        for name in [name for name, value in options.items() if value is None]:
            setattr(self.model.generation_config, name, options.pop(name))  # null turns it off
        if "max_new_tokens" in options:
            self.model.generation_config.max_length = None  # `generate()` warns about two limits
        elif "max_length" in options:
            self.model.generation_config.max_new_tokens = None  # and would use this one
        if (start := options.get("decoder_start_token_id")) is not None:
            self.model.generation_config.decoder_start_token_id = start  # for scores as well
        self.reverse: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
        if arguments.reverse_model is not None:
            self.reverse = loading.load(arguments.reverse_model)
            expect_to_read_targets(self.reverse[1])
        self.prefixes: list[str] | None = None
        if arguments.target_prefix_file is not None:
            self.prefixes = list(read_file(arguments.target_prefix_file))
        if arguments.force_words is not None:
            options["force_words_ids"] = encode_forced_words(arguments.force_words, self.tokenizer)
        if arguments.compile:
            if not runs_in_torch(self.model):
                engine = type(self.model).__name__
                raise ValueError(f"compile=True with a {engine}: expected a PyTorch model")
            options.setdefault("cache_implementation", "static")
            if self.model.device.type == "cpu":  # on other devices, transformers compiles
                self.model.forward = torch.compile(self.model.forward)
        self.counts = [0, 0]

    @property
    def samples(self) -> bool:
        """Whether hypotheses are drawn at random."""
        return samples(self.model, self.options)

    @property
    def number(self) -> int | None:
        """The number of hypotheses of each line, or None for the best without a score."""
        if not self.arguments.reranks:
            return self.arguments.n_best
        beams = self.options.get("num_beams") or self.model.generation_config.num_beams or 1
        return self.arguments.candidates or (SAMPLES if self.samples else beams)

    def check(self) -> None:
        """Raise an error for the first option that can't work with these models."""
        arguments, number = self.arguments, self.number
        expect_valid_options(self.model, self.options)
        if arguments.custom_generate is not None and not hasattr(
            self.model, "load_custom_generate"
        ):
            raise ValueError(
                f"custom_generate={arguments.custom_generate!r} with {type(self.model).__name__}: "
                "expected a model that searches as transformers does"
            )
        if number is not None and arguments.reranks and not max(2, arguments.n_best or 1) <= number:
            raise ValueError(
                f"candidates={number}: expected at least 2, and as many as n_best; "
                "--num_beams or --do_sample makes them"
            )
        if number is not None:
            name = "candidates" if arguments.reranks else "n_best"
            expect_hypotheses(number, self.model, self.options, name)
        if arguments.mbr is not None:
            get_utility(arguments.mbr)
        list(self.translate([]))
        if self.prefixes is not None:
            encode_prefixes(self.prefixes, self.model, self.tokenizer, self.options)

    def settings(self) -> dict[str, Any]:
        """All settings that affect the translations, besides the source; see `transform_file`."""
        ignored = ("model", "source", "output", "target_prefix_file", "reverse_model")
        settings = {**vars(self.arguments), **self.options}
        settings = {k: v for k, v in settings.items() if k not in ignored}
        settings |= fingerprint(self.model, self.tokenizer)
        if (method := settings["custom_generate"]) is not None:
            code = sorted(Path(method, METHOD_FILE).parent.glob("*.py"))
            settings["custom_generate"] = digest(*(path.read_bytes() for path in code))
        if self.reverse is not None:
            settings["reverse_model"] = fingerprint(*self.reverse)
        if self.prefixes is not None:
            settings["target_prefix_file"] = digest("\n".join(self.prefixes).encode())
        return settings

    def translate(self, lines: list[str], first: int = 0) -> Iterator[str]:
        """Yield the output for lines; `first` is the number of the first one, from 0."""
        for number, hypotheses in enumerate(self.hypotheses(lines, first), first):
            self.counts[0] += 1
            self.counts[1] += not hypotheses[0].is_complete
            for hypothesis in hypotheses:
                yield self.format(hypothesis, number)

    def hypotheses(self, lines: list[str], first: int) -> Iterator[list[Hypothesis]]:
        """Yield the hypotheses to write for each line."""
        arguments, models = self.arguments, (self.model, self.tokenizer)
        torch.manual_seed(arguments.seed + first)  # independent of earlier translations
        prefixes = None
        if self.prefixes is not None:
            prefixes = self.prefixes[first : first + len(lines)]
        found: Iterable[list[Hypothesis]] = translate_n_best(
            lines,
            *models,
            self.number,
            prefixes=prefixes,
            batch_size=arguments.batch_size,
            max_tokens=arguments.max_tokens,
            first=first,
            **self.options,
        )
        if arguments.mbr is not None:
            found = rerank_by_utility(lines, found, arguments.mbr)
        elif self.reverse is not None:
            weights = {
                name: getattr(arguments, name) for name in ("reverse_weight", "length_weight")
            }
            found = rerank_by_reverse_model(lines, found, *models, *self.reverse, **weights)
        elif self.number is not None and draws(self.model, self.options):
            found = rank_by_log_probability(add_token_scores(lines, found, *models))
        found = (hypotheses[: arguments.n_best or 1] for hypotheses in found)
        if arguments.token_scores:
            found = add_token_scores(lines, found, *models)
        if arguments.alignments is not None or arguments.replace_unknown:
            found = add_alignments(
                lines, found, *models, unit=arguments.alignments or "words",
                layer=arguments.alignment_layer, replace_unknown=arguments.replace_unknown,
            )  # fmt: skip
        yield from found

    def format(self, hypothesis: Hypothesis, number: int) -> str:
        """A line of the output."""
        fields = [one_line(hypothesis.text)]
        if self.arguments.n_best is not None:
            fields = [str(number), *fields, f"{hypothesis.score:.6f}"]
        if self.arguments.token_scores:
            fields.append(" ".join(f"{score:.4f}" for score in hypothesis.token_scores))
        if self.arguments.alignments is not None:
            fields.append(" ".join(f"{source}-{target}" for source, target in hypothesis.alignment))
        return " ||| ".join(fields)


def one_line(text: str) -> str:
    """The text without line ends, as these would shift all later lines."""
    return re.sub(r"\r\n|\r|\n", " ", text)


def report_limit(translated: int, cut: int) -> None:
    """Print to standard error how many translations reached their length limit, if any did."""
    if cut:
        print(
            f"{cut:,} of {translated:,} translations reached their length limit and are cut; "
            "max_new_tokens or extra_output_tokens raises it (or max_time, if it is set), as an "
            "option of `translate` or in the model's generation config",
            file=sys.stderr,
        )
