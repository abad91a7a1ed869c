"""The options of the data: where sentence pairs come from, and how long they may be."""

from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

from transformers.hf_argparser import HfArg

from .corpora import CorpusArguments
from .tables import FILE_SUFFIXES, suffix_of

SPLITS = ("train", "validation", "test")


@dataclass
class DataArguments(CorpusArguments):
    """The options that select sentence pairs, for `HfArgumentParser`.

    The data comes from a Hub dataset, the built-in `phrases`, or local files. Each split of local
    data is one corpus or several. A corpus is two text files with one sentence per line, or a table
    with two columns. A single name means one file.

    Raises:
        ValueError: An argument needs or contradicts another one, names a missing file or is out of
            range; or there is no data.
    """

    train_source: list[str] | None = HfArg(
        default=None,
        help="Source side of the training data, plain text or .gz. Several files are several "
        "corpora.",
    )
    train_target: list[str] | None = HfArg(
        default=None, help="Target side of the training data, plain text or .gz."
    )
    validation_source: list[str] | None = HfArg(
        default=None, help="Source side of the validation data."
    )
    validation_target: list[str] | None = HfArg(
        default=None, help="Target side of the validation data."
    )
    test_source: list[str] | None = HfArg(default=None, help="Source side of the test data.")
    test_target: list[str] | None = HfArg(default=None, help="Target side of the test data.")
    train_file: list[str] | None = HfArg(
        default=None,
        help="Training data as a table: csv (with quotes) or tsv (without), with a header line, "
        "json or jsonl, plain or .gz; or parquet. Several files are several corpora.",
    )
    validation_file: list[str] | None = HfArg(default=None, help="Validation data as a table.")
    test_file: list[str] | None = HfArg(default=None, help="Test data as a table.")
    dataset_name: str | None = HfArg(
        default=None,
        help="Name of a data set on the Hub, a local folder that holds one, or 'phrases' for the "
        "built-in phrases.",
    )
    dataset_config_name: str | None = HfArg(
        default=None, help="Configuration of the data set, such as de-en of wmt14."
    )
    source_lang: str | None = HfArg(default=None, help="Language to translate from, such as en.")
    target_lang: str | None = HfArg(default=None, help="Language to translate to, such as de.")
    source_column: str | None = HfArg(
        default=None,
        help="Column with the source text. Default: the source language in a 'translation' "
        "column, else the column with its name, else 'source' or 'src', else the first of two "
        "columns.",
    )
    target_column: str | None = HfArg(
        default=None,
        help="Column with the target text. Default: as for source_column, with 'target', 'tgt' or "
        "'trg'.",
    )
    phrases_train_size: int = HfArg(default=300_000, help="Number of training pairs of phrases.")
    phrases_validation_size: int = HfArg(
        default=1000, help="Number of validation pairs of phrases."
    )
    phrases_test_size: int = HfArg(default=1000, help="Number of test pairs of phrases.")
    phrases_seed: int = HfArg(default=0, help="Seed of the phrases.")
    max_source_length: int | None = HfArg(
        default=None,
        help="Truncate sources to this many tokens, including the final </s>. Default: no limit.",
    )
    max_target_length: int | None = HfArg(
        default=None,
        help="Truncate targets to this many tokens, including the final </s>. Default: no limit. "
        "Scores during training use this limit; the final scores do not.",
    )
    bpe_dropout: float = HfArg(
        default=0.0,
        help="BPE-dropout: the probability of skipping a merge, so that training texts are split "
        "differently in each epoch; 0.1 in its paper. max_tokens then counts the mean "
        "number of tokens of each text; in a stream, the actual number.",
    )
    max_train_samples: int | None = HfArg(
        default=None, help="Use only the first pairs of the training data."
    )
    max_eval_samples: int | None = HfArg(
        default=None, help="Use only the first pairs of the validation data."
    )
    max_predict_samples: int | None = HfArg(
        default=None, help="Use only the first pairs of the test data."
    )
    preprocessing_num_workers: int | None = HfArg(
        default=None, help="Number of processes that tokenize. Has no effect with streaming."
    )
    streaming: bool = HfArg(
        default=False, help="Read the training data during training instead of storing it first."
    )

    def __post_init__(self) -> None:
        for split, kind in product(SPLITS, ("source", "target", "file")):
            value = getattr(self, f"{split}_{kind}")
            if isinstance(value, str):
                setattr(self, f"{split}_{kind}", [value])
        self._check_pairs()
        self._check_origin()
        self._check_files()
        self._check_numbers()
        self.check(len(self.corpora("train")) or 1, self.streaming)

    def corpora(self, split: str) -> list[tuple[str, ...]]:
        """The local files of each corpus of a split: one with columns, or a source and a target."""
        files = getattr(self, f"{split}_file")
        if files is not None:
            return [(file,) for file in files]
        sources, targets = getattr(self, f"{split}_source"), getattr(self, f"{split}_target")
        return list(zip(sources or (), targets or (), strict=True))

    def paths(self, split: str) -> tuple[str, ...]:
        """All local files of a split."""
        return tuple(path for corpus in self.corpora(split) for path in corpus)

    def _check_pairs(self) -> None:
        pairs = [("source_column", "target_column")]
        pairs += [(f"{split}_source", f"{split}_target") for split in SPLITS]
        if self.dataset_name != "phrases":
            pairs.append(("source_lang", "target_lang"))
        for pair in pairs:
            for name, other in (pair, pair[::-1]):
                if (value := getattr(self, name)) is not None and getattr(self, other) is None:
                    raise ValueError(f"{name}={value!r}: expected {other} as well")
            numbers = [
                len(value) for name in pair if isinstance(value := getattr(self, name), list)
            ]
            if len(set(numbers)) > 1:
                raise ValueError(
                    f"{pair[0]} names {numbers[0]} files and {pair[1]} {numbers[1]}: expected a "
                    "target for each source"
                )

    def _check_origin(self) -> None:
        local = [split for split in SPLITS if self.paths(split)]
        if not local and self.dataset_name is None:
            raise ValueError(
                "dataset_name=None: expected a data set, or train_source and train_target, or "
                "train_file (or the same for validation or test)"
            )
        if local and self.dataset_name is not None:
            raise ValueError(
                f"dataset_name={self.dataset_name!r}: expected no local {local[0]} files as well"
            )
        for split in local:
            if getattr(self, f"{split}_file") and getattr(self, f"{split}_source"):
                file = getattr(self, f"{split}_file")
                raise ValueError(f"{split}_file={file}: expected no {split}_source as well")
        tables = [split for split in local if getattr(self, f"{split}_file")]
        if local and not tables and self.source_column is not None:
            raise ValueError(
                f"source_column={self.source_column!r}: expected a table, such as train_file, as "
                "text has no columns"
            )
        if self.dataset_config_name is not None and self.dataset_name is None:
            name = self.dataset_config_name
            raise ValueError(f"dataset_config_name={name!r}: expected dataset_name as well")
        if self.dataset_name == "phrases" and self.source_lang not in (None, "en"):
            raise ValueError(f"source_lang={self.source_lang!r}: expected 'en', as in phrases")
        if self.dataset_name == "phrases":
            self.source_lang, self.target_lang = "en", self.target_lang or "de"

    def _check_files(self) -> None:
        for split in SPLITS:
            for path in self.paths(split):
                if not Path(path).is_file():
                    raise ValueError(f"{split} data {path!r}: expected a file")
            for file in getattr(self, f"{split}_file") or ():
                if suffix_of(file) not in FILE_SUFFIXES:
                    raise ValueError(
                        f"{split}_file={file!r}: expected a name that ends in one of "
                        f"{', '.join(FILE_SUFFIXES)}, or the same with .gz"
                    )
                if file.lower().endswith(".parquet.gz"):
                    raise ValueError(
                        f"{split}_file={file!r}: expected parquet without .gz, as it is compressed"
                    )

    def _check_numbers(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            least = 1 if option.default is None else 0
            if value < least:
                raise ValueError(f"{option.name}={value}: expected at least {least}")
        if not 0 <= self.bpe_dropout <= 1:
            raise ValueError(f"bpe_dropout={self.bpe_dropout}: expected a probability")
