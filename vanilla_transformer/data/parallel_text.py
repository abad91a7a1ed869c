"""Parallel text, from its source to token ids.

    load_parallel_dataset   Hub, local files or `phrases`  ->  columns source, target
    iter_texts              both columns, for `train_tokenizer`
    tokenize_dataset        source, target                 ->  columns input_ids, labels, length

`PairCollator` (`collation.py`) makes batches of these. No corpus is read into memory: a
data set is a memory-mapped Arrow file or a stream.
"""

import csv
import glob
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from reprlib import repr
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    NamedSplit,
    Value,
    config,
    load_dataset,
    load_dataset_builder,
)
from transformers import PreTrainedTokenizerBase

from ..model.pipelines import is_blank
from . import parquet_files
from .collation import LENGTH
from .corpora import PAIR_FEATURES
from .data_options import SPLITS, DataArguments
from .tables import ColumnChoice, flatten, read_json, read_table, suffix_of
from .text_files import expect_unicode, read_file

logger = logging.getLogger(__name__)

READERS = ("moses.py", "pipelines.py", "tokenization_vanilla_transformer.py")  # of `model`
# Names of the splits in options such as `max_eval_samples`, as in transformers' examples.
SAMPLES = {"train": "train", "validation": "eval", "test": "predict"}


def load_parallel_dataset(
    arguments: DataArguments, seed: int = 0
) -> DatasetDict | IterableDatasetDict:
    """Load the sentence pairs.

    Local files are read completely before anything else, so that errors in them are raised at once.
    Lines end in "\\n" or "\\r\\n" only, and a byte order mark is dropped; text is otherwise
    unchanged, except for spaces before a field of a csv file. A missing or blank value becomes an
    empty string. Training pairs with a blank side are dropped, and their number is logged.
    Validation and test data keep all pairs in order.

    Args:
        arguments: Which pairs to load.
        seed: The seed of the order in which corpora with weights alternate.

    Returns:
        The splits that exist among train, validation and test, with the string columns `source` and
        `target`. With `arguments.streaming`, "train" is an `IterableDataset`.

    Raises:
        ValueError: A split or column does not exist, there is no pair, a value is not text, a file
            is not valid UTF-8, JSON, CSV or gzip (the message names the file and line), or the two
            sides have different numbers of lines.
    """
    if arguments.dataset_name == "phrases":
        corpora = _load_phrases(arguments)
    elif arguments.dataset_name is not None:
        corpora = _load_from_hub(arguments.dataset_name, arguments)
    else:
        corpora = _load_files(arguments)
    splits = {split: arguments.combine(parts, split, seed) for split, parts in corpora.items()}
    for split, dataset in splits.items():
        limit = getattr(arguments, f"max_{SAMPLES[split]}_samples")
        if limit is not None:
            known = dataset.num_rows if isinstance(dataset, Dataset) else limit
            splits[split] = dataset.take(min(limit, known))
        if split != "train" and arguments.streaming:
            # Evaluations need its length, and the same order in each process.
            splits[split] = Dataset.from_list(list(splits[split]), features=PAIR_FEATURES)
    return IterableDatasetDict(splits) if arguments.streaming else DatasetDict(splits)


def iter_texts(
    dataset: Dataset | IterableDataset, sides: Sequence[str] = ("source", "target")
) -> Iterator[str]:
    """Yield all sources and targets of a split, or one of the sides, to train a tokenizer."""
    for batch in dataset.select_columns(list(sides)).iter(batch_size=1000):
        for side in sides:
            yield from batch[side]


def tokenize_dataset(
    dataset: DatasetDict | IterableDatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    arguments: DataArguments,
) -> DatasetDict | IterableDatasetDict:
    """Turn `source` and `target` into token ids.

    Returns:
        The same splits with the columns `input_ids` and `labels` (lists of ids that end in `</s>`,
        also after truncation) and `length` (the longer of the two, as
        `train_sampling_strategy="group_by_length"` expects). `PairCollator` adds the
        `attention_mask` and pads; `Seq2SeqTrainer` removes `length`.
    """
    limits = {
        "max_source_length": arguments.max_source_length,
        "max_target_length": arguments.max_target_length,
    }
    # Part of the cache key: changed code tokenizes again.
    stamp = (_code_version(), *map(version, ("tokenizers", "transformers")))
    options: dict[str, Any] = {
        "batched": True,
        "fn_kwargs": {"tokenizer": tokenizer, **limits, "stamp": stamp},
        "remove_columns": list(PAIR_FEATURES),
    }
    if isinstance(dataset, DatasetDict):
        ids = [Value("int32")]
        options["features"] = Features({"input_ids": ids, "labels": ids, LENGTH: Value("int32")})
        options["num_proc"] = arguments.preprocessing_num_workers
        options["desc"] = "Tokenizing"
    return dataset.map(_tokenize, **options)


def _tokenize(
    batch: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int | None,
    max_target_length: int | None,
    stamp: Any,
) -> dict[str, list[Any]]:
    def limit(length: int | None) -> dict[str, Any]:
        return {"truncation": length is not None, "max_length": length}

    sources = tokenizer(batch["source"], **limit(max_source_length))["input_ids"]
    targets = tokenizer(text_target=batch["target"], **limit(max_target_length))["input_ids"]
    for side in ("text", "text_target"):
        tokenizer(**{side: ""})  # a fast tokenizer keeps the last limit, and saves it
    lengths = [max(len(ids), len(labels)) for ids, labels in zip(sources, targets, strict=True)]
    return {"input_ids": sources, "labels": targets, LENGTH: lengths}


# Sources of data

Corpora = dict[str, list[Dataset | IterableDataset]]  # of each split


def _load_phrases(arguments: DataArguments) -> Corpora:
    from .phrases import load_phrases

    corpora: Corpora = {}
    language, seed = arguments.target_lang or "de", arguments.phrases_seed
    for split in SPLITS:
        if (size := getattr(arguments, f"phrases_{split}_size")) > 0:
            dataset = load_phrases(size, target_language=language, split=split, seed=seed)
            corpora[split] = [dataset.to_iterable_dataset() if arguments.streaming else dataset]
    return corpora


def _column_choice(arguments: DataArguments) -> ColumnChoice:
    columns = languages = None
    if arguments.source_column is not None and arguments.target_column is not None:
        columns = arguments.source_column, arguments.target_column
    if arguments.source_lang is not None and arguments.target_lang is not None:
        languages = arguments.source_lang, arguments.target_lang
    several = any(len(arguments.corpora(split)) > 1 for split in SPLITS)
    return ColumnChoice(columns, languages, by_order=not several)


def _load_from_hub(name: str, arguments: DataArguments) -> Corpora:
    folder = Path(name).expanduser().resolve()
    if folder.is_dir() and glob.has_magic(str(folder)):
        # `datasets` treats the path as a pattern, and would read other folders that match it.
        raise ValueError(f"dataset_name={name!r}: expected a folder without *, ? or [ in {folder}")
    names = (name, arguments.dataset_config_name)
    options: dict[str, Any] = {"streaming": arguments.streaming}
    table = load_dataset_builder(*names).config
    if hasattr(table, "na_values"):  # csv or tsv: "None" is also text
        options |= {"keep_default_na": False, "na_values": [""]}
        if table.sep == "\t" and folder.is_dir():  # as in `train_file`
            options["quoting"] = csv.QUOTE_NONE
    if folder.is_dir():  # `datasets` (4.0 to 5.2) identifies its files only by their times
        options["cache_dir"] = str(Path(config.HF_DATASETS_CACHE, _stamp_of_folder(folder)))
    tables = load_dataset(*names, **options)
    present = [split for split in SPLITS if split in tables]
    if not present:
        raise ValueError(
            f"{name} has none of the splits {', '.join(SPLITS)}, only: {', '.join(tables)}"
        )
    choose = _column_choice(arguments)
    return {split: [_table_to_pairs(tables[split], split, name, choose)] for split in present}


def _load_files(arguments: DataArguments) -> Corpora:
    files = {split: arguments.corpora(split) for split in SPLITS if arguments.corpora(split)}
    choose = _column_choice(arguments)
    columns = {
        (split, paths): _check_rows(paths, split, choose)
        for split, corpora in files.items()
        for paths in corpora
        if suffix_of(paths[0]) != ".parquet" or len(paths) == 2
    }

    def load(split: str, paths: tuple[str, ...]) -> Dataset | IterableDataset:
        if (split, paths) in columns:
            return _rows_to_pairs(paths, columns[split, paths], split, arguments.streaming)
        table = _load_parquet(paths[0], split, arguments.streaming)
        return _table_to_pairs(table, split, paths[0], choose)

    return {split: [load(split, paths) for paths in corpora] for split, corpora in files.items()}


def _load_parquet(path: str, split: str, streaming: bool) -> Dataset | IterableDataset:
    _, rows = parquet_files.inspect(path)
    if rows == 0:
        raise ValueError(f"{path}: there is no sentence pair")
    # `datasets` treats file names, and the folder that it searches, as patterns.
    file = glob.escape(str(Path(path).absolute()))
    name = "-".join(map(str, _stamp(path)))  # becomes part of the cached file's name
    return load_dataset("parquet", name, data_files={split: file}, split=split, streaming=streaming)


def _table_to_pairs(
    table: Dataset | IterableDataset, split: str, name: str, choose: ColumnChoice
) -> Dataset | IterableDataset:
    """Convert a dataset with any columns to `source` and `target`."""
    first = next(iter(table), None)
    if first is None:
        raise ValueError(f"the {split} data of {name} holds no sentence pair")
    source, target = choose(list(flatten(first)), f"the {split} data of {name}")
    # "translation.en" is a key of the column "translation", unless there is a column of that name.
    used = {column if column in first else column.split(".")[0] for column in (source, target)}
    table = table.select_columns(sorted(used))
    pairs = table.map(
        _clean_batch,
        batched=True,
        remove_columns=sorted(used),
        features=PAIR_FEATURES,
        with_indices=True,
        fn_kwargs={
            "columns": (source, target),
            "drop_blank": split == "train",
            "name": name,
            "stamp": _code_version(),
        },
    )
    if isinstance(pairs, Dataset):
        _report_blank(table.num_rows - pairs.num_rows, pairs.num_rows, split, name)
    return pairs


def _clean_batch(
    batch: dict[str, list[Any]],
    indices: list[int],
    columns: tuple[str, str],
    drop_blank: bool,
    name: str,
    stamp: str,
) -> dict[str, list[str]]:
    rows = (
        flatten(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True)
    )
    pairs = list(_clean(rows, columns, drop_blank, name, first=indices[0] + 1))
    return {side: [pair[side] for pair in pairs] for side in PAIR_FEATURES}


# Local files


def _check_rows(paths: tuple[str, ...], split: str, choose: ColumnChoice) -> tuple[str, str]:
    """Read a split of local data completely, and return its source and target columns."""
    name = " and ".join(paths)
    first = next(_read_rows(paths), None)
    if first is None:
        raise ValueError(f"{name}: there is no sentence pair")
    columns = ("source", "target") if len(paths) == 2 else choose(list(first), name)
    pairs = _read_pairs(paths, columns, drop_blank=False)
    are_dropped = Counter(split == "train" and _is_blank(pair) for pair in pairs)
    _report_blank(are_dropped[True], are_dropped[False], split, name)
    return columns


def _rows_to_pairs(
    paths: tuple[str, ...], columns: tuple[str, str], split: str, streaming: bool
) -> Dataset | IterableDataset:
    arguments = {
        # Links are not resolved: their names tell the format.
        "paths": tuple(str(Path(path).absolute()) for path in paths),
        "columns": columns,
        "drop_blank": split == "train",
        # Part of the cache key: changed files are read again, and all files by changed code.
        "stamp": (_code_version(), *map(_stamp, paths)),
    }
    make = IterableDataset.from_generator if streaming else Dataset.from_generator
    return make(_read_pairs, PAIR_FEATURES, gen_kwargs=arguments, split=NamedSplit(split))


def _stamp(path: str) -> tuple[int, ...]:
    """Numbers that differ for a changed file. Size and time of the last change are not enough, as
    tools that copy or unpack files may keep them."""
    stat = Path(path).stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _stamp_of_folder(folder: Path) -> str:
    """A digest that differs for a folder with a changed file."""
    files = filter(Path.is_file, sorted(folder.rglob("*")))
    stamps = [(str(path), _stamp(str(path))) for path in files]
    return blake2b(str(stamps).encode(), digest_size=8).hexdigest()


def _code_version() -> str:
    """A digest of the modules that read, choose and tokenize text."""
    package = Path(__file__).parents[1]
    modules = [*sorted(package.glob("data/*.py")), *(package / "model" / name for name in READERS)]
    return blake2b(b"".join(map(Path.read_bytes, modules)), digest_size=8).hexdigest()


def _read_pairs(
    paths: tuple[str, ...], columns: tuple[str, str], drop_blank: bool, stamp: Any = None
) -> Iterator[dict[str, str]]:
    return _clean(_read_rows(paths), columns, drop_blank, " and ".join(paths))


def _read_rows(paths: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if len(paths) == 2:
        return _read_parallel_text(*paths)
    suffix = suffix_of(paths[0])
    return read_json(paths[0]) if suffix.startswith(".json") else read_table(paths[0])


def _read_parallel_text(source: str, target: str) -> Iterator[dict[str, Any]]:
    lines = zip_longest(read_file(source), read_file(target))
    for count, (source_line, target_line) in enumerate(lines):
        if source_line is None or target_line is None:
            longer = target if source_line is None else source
            counts = {source: count, target: count, longer: count + 1 + sum(1 for _ in lines)}
            raise ValueError(
                f"{source} has {counts[source]} lines and {target} has {counts[target]}: expected "
                "the same number"
            )
        yield {"source": source_line, "target": target_line}


def _clean(
    rows: Iterable[dict[str, Any]],
    columns: tuple[str, str],
    drop_blank: bool,
    name: str,
    first: int = 1,
) -> Iterator[dict[str, str]]:
    for number, row in enumerate(rows, first):
        pair = {}
        for side, column in zip(PAIR_FEATURES, columns, strict=True):
            text = row.get(column)
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f"{name}, pair {number}: column {column!r} must hold text, not {repr(text)}"
                )
            pair[side] = "" if text is None or is_blank(text) else text  # as in `translate`
            expect_unicode(pair[side], f"{name}, pair {number}: column {column!r}")
        if not (drop_blank and _is_blank(pair)):
            yield pair


def _is_blank(pair: dict[str, str]) -> bool:
    return not all(pair.values())


def _report_blank(blank: int, kept: int, split: str, name: str) -> None:
    if kept == 0:
        raise ValueError(f"{name}: every sentence pair of the {split} data has a blank side")
    if blank:
        logger.warning("%s: dropped %d pairs with a blank side", name, blank)
