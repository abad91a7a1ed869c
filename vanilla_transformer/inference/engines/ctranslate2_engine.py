"""CTranslate2, a compiled engine for CPUs and NVIDIA GPUs, behind `generate()`."""

import json
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from ...model.configuration_vanilla_transformer import VanillaTransformerConfig
from ...model.generation_options import GenerationOptions, expect_generation_options, first_given
from ...model.output_length import new_token_limits, use_length_penalty_type
from ...model.validation import raise_if_outside

NAME = TARGET = "ctranslate2"
WEIGHTS = "model.bin"
DTYPES = {"auto": "default", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
# Options that have the same meaning here, or no effect on the result.
SUPPORTED = {
    "attention_mask", "bad_words_ids", "bos_token_id", "decoder_start_token_id", "do_sample",
    "early_stopping", "eos_token_id", "extra_output_tokens", "forced_eos_token_id",
    "length_penalty", "length_penalty_type", "max_length", "max_length_factor", "max_new_tokens",
    "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams", "num_return_sequences",
    "output_scores", "pad_token_id", "renormalize_logits", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "use_cache",
}  # fmt: skip
# Fields of a generation config that are not options.
OWN = {"transformers_version"}
# transformers' beam search removes tokens after it has normalized the probabilities, the engine
# before: the same only if they are normalized again.
MASKS = ("bad_words_ids", "min_length", "min_new_tokens", "no_repeat_ngram_size", "suppress_tokens")
# For each `early_stopping`, the factor of `num_beams` hypotheses after which a search ends.
PATIENCE = {True: 1, False: 2, "never": 4}
# The length penalty for none at all: with 0, the engine would end the search sooner.
NEARLY_NONE = 1e-3


def recognizes(folder: Path) -> bool:
    """Whether `export` wrote this folder for CTranslate2."""
    if not all((folder / name).is_file() for name in (WEIGHTS, "config.json")):
        return False
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return content.get("model_type") == VanillaTransformerConfig.model_type


def load(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: str | None = None
) -> "CTranslate2Engine":
    """Open a folder that `export` wrote for CTranslate2.

    Args:
        folder: The folder.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "float32", "float16" or "bfloat16". None or "auto": as the folder was exported, or
            the nearest that the device supports.

    Raises:
        ImportError: ctranslate2 is not installed.
        ValueError: The engine lacks the dtype or the device, or a file is damaged.
    """
    return CTranslate2Engine(Path(folder), torch.device(device), dtype or "auto")


class Hypothesis(NamedTuple):
    """A generated sequence."""

    ids: list[int]  # at least one: without the start token, with the end token
    log_probability: float

    def score(self, penalty: float) -> float:
        """The score by which it is ranked."""
        return self.log_probability / len(self.ids) ** penalty


class CTranslate2Engine:
    """A model that CTranslate2 runs, for `translate`, `translate_n_best` and `TranslationPipeline`.

    Attributes:
        config: The configuration of the exported model.
        generation_config: Its defaults for `generate()`.
        device: Where it runs.
        dtype: The type of what is not quantized.
        translator: The `ctranslate2.Translator`.
        weight_files: The files with the weights.
    """

    main_input_name = "input_ids"
    extra_output_tokens = 50  # as our models' default

    def __init__(self, folder: Path, device: torch.device, dtype: str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} with {NAME}: expected one of {', '.join(DTYPES)}")
        self.folder, self.compute_type = folder, DTYPES[dtype]
        self.config = VanillaTransformerConfig.from_pretrained(folder)
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self.weight_files = [folder / WEIGHTS]
        self.sources, self.targets = _read_vocabularies(folder)
        self.target_ids = {token: number for number, token in enumerate(self.targets)}
        self.start_id = self.target_ids[self.config.decoder_start_token]
        self.random_state: torch.Tensor | None = None
        self.to(device)

    def to(self, device: str | torch.device) -> "CTranslate2Engine":
        """Move to a device, as models do."""
        device = torch.device(device)
        if device != getattr(self, "device", None):
            self.translator, self.device = self._open(device), device
        return self

    def _open(self, device: torch.device) -> Any:
        try:
            import ctranslate2
        except ModuleNotFoundError as error:
            raise ImportError(
                f"engine={NAME!r} needs the package {error.name}: "
                "pip install 'vanilla-transformer[export]'"
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(device)!r} with {NAME}: expected cpu or cuda")
        try:
            return ctranslate2.Translator(
                str(self.folder),
                device=device.type,
                device_index=device.index or 0,
                compute_type=self._compute_type(device),
                intra_threads=torch.get_num_threads(),
            )
        except RuntimeError as error:  # such as for a file that is cut short
            raise ValueError(f"{self.folder}: {NAME} can't open the model: {error}") from error

    def _compute_type(self, device: torch.device) -> str:
        """The type to compute in. If a device lacks 16-bit integers, like most CPUs except Intel's,
        the engine would round them to 8 bits, whose sums may overflow. float32 keeps their
        precision.

        Raises a ValueError if the device does not support the requested dtype."""
        import ctranslate2

        known = ctranslate2.get_supported_compute_types(device.type, device.index or 0)
        if self.compute_type == DTYPES["auto"]:
            is_int16 = getattr(self.config, "quantization", None) == "int16"
            return "float32" if is_int16 and "int16" not in known else self.compute_type
        if self.compute_type not in known:
            raise ValueError(
                f"dtype={self.compute_type!r} with {NAME} on {device}: expected one that this "
                "device computes in, such as float32"
            )
        return self.compute_type

    def _follow_seed(self) -> None:
        """Take a seed from torch's generator if that has changed since the last call. This makes
        samples after `torch.manual_seed` reproducible, as with our models.

        The engine seeds a thread's generator once, so a new seed needs new threads, and these need
        a new translator.
        """
        import ctranslate2

        if self.random_state is None or not self.random_state.equal(torch.get_rng_state()):
            ctranslate2.set_random_seed(int(torch.randint(2**31, ())))
            self.random_state = torch.get_rng_state()
            self.translator = self._open(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is not quantized."""
        name = self.translator.compute_type.rpartition("_")[2]
        return getattr(torch, name) if name.startswith(("float", "bfloat")) else torch.float32

    @property
    def version(self) -> str:
        """The engine, its version and how it computes."""
        import ctranslate2

        return f"{NAME} {ctranslate2.__version__}, {self.translator.compute_type}"

    def eval(self) -> "CTranslate2Engine":
        """Does nothing, as an engine does not train."""
        return self

    def can_generate(self) -> bool:
        """True, as for every model with `generate()`."""
        return True

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | ModelOutput:
        """Same as our models' `generate()`, with the options that the engine has.

        Args:
            inputs: Source ids (batch, length), also as `input_ids`.
            generation_config: Options in place of the model's own.
            kwargs: `attention_mask` (batch, length), `decoder_input_ids` (batch, prompt_length),
                the beginning of each target, and options.

        Returns:
            Ids (batch * num_return_sequences, target length), including the start token, padded on
            the right. With `return_dict_in_generate`, a `ModelOutput` with `sequences` and, with
            `output_scores` in beam search, `sequences_scores`.

        Raises:
            ValueError: The engine lacks an option, or an option has an invalid value.
            IndexError: A token id is outside the vocabulary.
        """
        ids = first_given(inputs, kwargs.pop("input_ids", None))
        prompt = kwargs.pop("decoder_input_ids", None)
        options = GenerationOptions(self.generation_config, generation_config, kwargs)
        options.mask_padding(ids if isinstance(ids, torch.Tensor) else None)
        rows = self._rows(ids, options["attention_mask"])
        prefixes = self._prefixes(prompt, len(rows))
        self._expect_supported(options)
        use_length_penalty_type(options)
        limits = self._limits(ids, options, 1 + prefixes.shape[1])
        search = Search(self, options, self._ends(options), prefixes.shape[1])
        if options["do_sample"]:
            self._follow_seed()
        return self._output(search.run(rows, prefixes.tolist(), limits), prefixes, options)

    def token_scores(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """The natural log-probability of each label given its source, 0 for padding, as
        `inference.scoring.token_scores` computes it from a model's logits.

        Args:
            input_ids: Source ids (pairs, source_length).
            attention_mask: (pairs, source_length).
            labels: Target ids without the start token (pairs, target_length), padded with -100.

        Raises:
            IndexError: A token id is outside the vocabulary.
            ValueError: A source or target is longer than the table of positions.
        """
        sources = self._rows(input_ids, attention_mask)
        kept = labels != -100
        raise_if_outside(labels[kept], len(self.targets), "label")
        targets = [label[known].tolist() for label, known in zip(labels, kept, strict=True)]
        end = [self.target_ids[self.config.eos_token]]  # the engine adds one to each target
        given = [row[:-1] if row[-1:] == end else row for row in targets]
        longest, most = 1 + max(map(len, given)), self.config.max_position_embeddings
        if longest > most:
            raise ValueError(
                f"labels of {longest} tokens, the end included: expected at most {most}"
            )
        results = self.translator.score_batch(
            [[self.sources[id_] for id_ in row] for row in sources],
            [[self.targets[id_] for id_ in row] for row in given],
            max_input_length=0,
        )
        log_probs = (
            result.log_probs[: len(row)] for result, row in zip(results, targets, strict=True)
        )
        scores = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        scores[kept] = scores.new_tensor(list(chain.from_iterable(log_probs)))
        return scores

    def _rows(self, ids: Any, mask: torch.Tensor | None) -> list[list[int]]:
        """The source ids of each row, without padding."""
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise ValueError(f"input_ids={ids!r}: expected a tensor (batch, length)")
        mask = torch.ones_like(ids) if mask is None else mask
        if mask.shape != ids.shape or not mask.any(1).all():
            raise ValueError(
                f"attention_mask: expected {tuple(ids.shape)} like input_ids, with a token in each "
                "row"
            )
        raise_if_outside(ids, len(self.sources), "source id")
        longest = int(mask.count_nonzero(1).max())
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids of {longest} tokens: expected at most "
                f"{self.config.max_position_embeddings}, max_position_embeddings at the export"
            )
        return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]

    def _prefixes(self, prompt: torch.Tensor | None, rows: int) -> torch.Tensor:
        """The ids (rows, prefix_length) after the start token, which a prompt may lack."""
        if prompt is None:
            return torch.empty(rows, 0, dtype=torch.long)
        if not isinstance(prompt, torch.Tensor) or prompt.ndim != 2 or len(prompt) != rows:
            raise ValueError(f"decoder_input_ids={prompt!r}: expected a tensor ({rows}, length)")
        raise_if_outside(prompt, len(self.targets), "target id")
        starts = prompt[:, :1] == self.start_id
        if starts.any() and not starts.all():
            raise ValueError(
                f"decoder_input_ids: expected all rows, or none, to begin with {self.start_id}"
            )
        return prompt[:, int(starts.any()) :].cpu()

    def _expect_supported(self, options: GenerationOptions) -> None:
        """Raise a ValueError for an option that the engine lacks."""
        expect_generation_options(options.all(), len(self.targets))
        lacking, start = unsupported(options, self.generation_config), self.start_id
        wanted = first_given(options["decoder_start_token_id"], options["bos_token_id"], start)
        if wanted != start:
            lacking.append(f"decoder_start_token_id={wanted} where the model has {start}")
        if lacking:
            raise ValueError(f"{'; '.join(lacking)}: {NAME} can't do this")

    def _ends(self, options: GenerationOptions) -> list[str]:
        """The tokens that end a sequence."""
        return [self.targets[id_] for id_ in options.ends() if id_ >= 0]

    def _limits(
        self, ids: torch.Tensor, options: GenerationOptions, prompt_length: int
    ) -> list[int]:
        """The largest number of new tokens for each row, by the rules of our models."""
        limits = new_token_limits(self, ids, prompt_length, options)
        # The size of the table of positions is a limit too.
        room = self.config.max_position_embeddings + 1 - prompt_length
        if min(room, *limits) < 1:
            raise ValueError(
                f"decoder_input_ids of {prompt_length} tokens: expected room for another below the "
                "length limit"
            )
        return [min(limit, room) for limit in limits]

    def _output(
        self, hypotheses: list[list[Hypothesis]], prefixes: torch.Tensor, options: GenerationOptions
    ) -> torch.Tensor | ModelOutput:
        end = self.target_ids[self._ends(options)[0]]  # in place of padding, as in transformers
        pad = first_given(options["pad_token_id"], end)
        sequences = [
            torch.tensor([self.start_id, *prefix, *h.ids])
            for prefix, row in zip(prefixes.tolist(), hypotheses, strict=True)
            for h in row
        ]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad)
        ids = ids.to(self.device)
        if not options["return_dict_in_generate"]:
            return ids
        output = ModelOutput(sequences=ids)
        if options["output_scores"]:
            penalty = _penalty(options)
            scores = [h.score(penalty) for row in hypotheses for h in row]
            output["sequences_scores"] = torch.tensor(scores, device=self.device)
        return output


class Search:
    """One call of `generate()`.

    Args:
        engine: The engine.
        options: The options of the call, all of which the engine has.
        ends: The tokens that end a sequence.
        prefix_length: The number of tokens that the caller gives of each target.
    """

    def __init__(
        self,
        engine: CTranslate2Engine,
        options: GenerationOptions,
        ends: list[str],
        prefix_length: int,
    ):
        self.engine, self.options, self.ends = engine, options, ends
        self.prefix_length = prefix_length
        self.num_beams = options["num_beams"] or 1
        self.returned = options["num_return_sequences"] or 1
        self.penalty = _penalty(options)
        forced = options["forced_eos_token_id"]
        self.forced_end: int | None = min(forced) if isinstance(forced, list) else forced
        if self.returned > self.num_beams and not options["do_sample"]:
            raise ValueError(
                f"num_return_sequences={self.returned} with num_beams={self.num_beams}: expected "
                "at most as many, or do_sample=True"
            )
        self.kwargs = self._translator_options()

    def run(
        self, rows: list[list[int]], prefixes: list[list[int]], limits: list[int]
    ) -> list[list[Hypothesis]]:
        """The sequences for each source, with at most `limits` new tokens, in beam search best
        first."""
        if self.forced_end is None:
            hypotheses = self._search_within(rows, prefixes, limits)
        else:
            searched = self._search_within(rows, prefixes, [max(1, limit - 1) for limit in limits])
            hypotheses = [
                [self._end_at(h, limit) for h in row]
                for row, limit in zip(searched, limits, strict=True)
            ]
        if self.num_beams == 1:
            return hypotheses
        ranked = (sorted(row, key=lambda h: -h.score(self.penalty)) for row in hypotheses)
        return [row[: self.returned] for row in ranked]

    def _end_at(self, hypothesis: Hypothesis, limit: int) -> Hypothesis:
        """The sequence with the forced token at the limit, unless it has ended before. The token's
        log-probability is 0, as with transformers' `ForcedEOSTokenLogitsProcessor`."""
        assert self.forced_end is not None
        if limit == 1:
            return Hypothesis([self.forced_end], 0.0)
        if len(hypothesis.ids) < limit - 1 or self.engine.targets[hypothesis.ids[-1]] in self.ends:
            return hypothesis
        return hypothesis._replace(ids=[*hypothesis.ids, self.forced_end])

    def _search_within(
        self, rows: list[list[int]], prefixes: list[list[int]], limits: list[int]
    ) -> list[list[Hypothesis]]:
        """The sequences for each source, with at most `limits` new tokens.

        The engine has one limit for all, so all rows get the largest. A greedy sequence that is
        longer than its row's limit is cut. A beam search that reaches its row's limit, where all
        hypotheses end, is repeated together with other rows of the same limit.
        """
        largest = max(limits)
        hypotheses = self._search(rows, prefixes, largest)
        if self.num_beams == 1:
            pairs = zip(hypotheses, limits, strict=True)
            return [[h._replace(ids=h.ids[:limit]) for h in row] for row, limit in pairs]
        beyond: dict[int, list[int]] = {}
        for number, (results, limit) in enumerate(zip(hypotheses, limits, strict=True)):
            if max(len(h.ids) for h in results) >= limit < largest:
                beyond.setdefault(limit, []).append(number)
        for limit, numbers in beyond.items():
            chosen, begun = ([side[number] for number in numbers] for side in (rows, prefixes))
            again = self._search(chosen, begun, limit)
            for number, results in zip(numbers, again, strict=True):
                hypotheses[number] = results
        return hypotheses

    def _search(
        self, rows: list[list[int]], prefixes: list[list[int]], limit: int
    ) -> list[list[Hypothesis]]:
        # In the engine, lengths include the prefix, and scores do not. For a source with only </s>,
        # it returns nothing, not even an end token.
        engine, known = self.engine, self.prefix_length
        options, longest = self.kwargs, known + limit
        shortest = min(options["min_decoding_length"], longest)  # more is an error in the engine
        results = engine.translator.translate_batch(
            [[engine.sources[number] for number in row] for row in rows],
            target_prefix=[[engine.targets[number] for number in row] for row in prefixes],
            max_decoding_length=longest,
            **{**options, "min_decoding_length": shortest},
        )

        def hypothesis(tokens: list[str], score: float) -> Hypothesis:
            ids = [engine.target_ids[token] for token in tokens[known:] or self.ends[:1]]
            return Hypothesis(ids, score * max(1, len(tokens)) ** options["length_penalty"])

        return [list(map(hypothesis, result.hypotheses, result.scores)) for result in results]

    def _translator_options(self) -> dict[str, Any]:
        options, targets = self.options, self.engine.targets
        samples = bool(options["do_sample"])
        patience = 1 if self.num_beams == 1 else PATIENCE[options["early_stopping"] or False]
        # "min_length" counts the start token and the prefix. "min_new_tokens" counts neither, and
        # replaces it.
        shortest = max(self.prefix_length, (options["min_length"] or 1) - 1)
        if (new_tokens := options["min_new_tokens"]) is not None:
            shortest = self.prefix_length + new_tokens
        ends = [[end] for end in options.ends()]  # transformers ignores these
        unwanted = [ids for ids in options["bad_words_ids"] or [] if ids not in ends]
        unwanted += [[id_] for id_ in options["suppress_tokens"] or []]
        return {
            "beam_size": self.num_beams,
            "patience": patience,
            "num_hypotheses": self.returned if samples else self.num_beams * patience,
            "length_penalty": float(self.penalty) or NEARLY_NONE,
            "repetition_penalty": options["repetition_penalty"] or 1.0,
            "no_repeat_ngram_size": options["no_repeat_ngram_size"] or 0,
            "suppress_sequences": [[targets[id_] for id_ in ids] for ids in unwanted],
            "end_token": self.ends,
            "return_end_token": True,
            "return_scores": True,
            "max_input_length": 0,
            "min_decoding_length": shortest,
            "sampling_topk": min(first_given(options["top_k"], 50), len(targets)) if samples else 1,
            "sampling_topp": first_given(options["top_p"], 1.0) if samples else 1.0,
            "sampling_temperature": first_given(options["temperature"], 1.0) if samples else 1.0,
        }


def _penalty(options: GenerationOptions) -> float:
    """The penalty; log-probabilities are divided by `length ** penalty`."""
    return first_given(options["length_penalty"], 1.0)


def unsupported(options: GenerationOptions, default: GenerationConfig) -> list[str]:
    """Descriptions of options that the engine lacks and whose values have an effect."""
    unchanged = GenerationConfig._get_default_generation_params()
    names = sorted({*vars(default), *options.kwargs} - SUPPORTED - OWN)
    values = {name: options[name] for name in names if not name.startswith("_")}
    lacking = [
        name
        for name, value in values.items()
        if value is not None and value is not False and value != unchanged.get(name)
    ]
    if max(options.ends(), default=-1) < 0:
        lacking.append("eos_token_id=None")
    beams, stopping = options["num_beams"] or 1, options["early_stopping"]
    if beams == 1 and options["output_scores"]:
        lacking.append("output_scores without beams")
    if beams > 1 and options["do_sample"]:
        lacking.append("do_sample with beams")
    if beams > 1 and options["repetition_penalty"] not in (None, 1):
        lacking.append("repetition_penalty with beams")
    if beams > 1 and not options["renormalize_logits"]:
        masks = (name for name in MASKS if options[name])
        lacking += [f"{name} with beams but without renormalize_logits" for name in masks]
    if stopping not in (None, *PATIENCE):
        lacking.append(f"early_stopping={stopping!r}")
    return lacking


def _read_vocabularies(folder: Path) -> list[list[str]]:
    """The tokens of source and target, in the order of their ids."""
    files = [folder / f"{side}_vocabulary.json" for side in ("source", "target")]
    if (shared := folder / "shared_vocabulary.json").is_file():
        files = [shared, shared]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
