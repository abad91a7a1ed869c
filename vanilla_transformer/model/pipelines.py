"""Text in, text out with any encoder-decoder: the pipelines that transformers 5 removed.

This file is self-contained and uses transformers' public names. It is saved with checkpoints, and a
process without this package runs it with `trust_remote_code=True`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from transformers import AutoModelForSeq2SeqLM, Pipeline, PreTrainedModel, pipelines

LONGEST_NOTHING = 8  # tokens of an empty source: at most a prefix and special tokens
_LANGUAGE_PAIR = re.compile(r"translation_(.+?)_to_(.+)")
_INVISIBLE = ("Cc", "Cf")  # Unicode's categories of control and format characters


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: zero-width spaces and byte order marks are invisible."""
    return all(char.isspace() or unicodedata.category(char) in _INVISIBLE for char in text)


def mark_ids(tokenizer: Any) -> set[int]:
    """The ids of a tokenizer that can mark a language or an end. "en" is only a piece of words in
    the vocabulary of NLLB, whose language is eng_Latn."""
    languages = getattr(tokenizer, "lang_code_to_id", {}).values()
    known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *languages}
    return known - {tokenizer.unk_token_id}


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Computes without dropout in this context. A loop that trains the model continues with it:
    each module then has the mode that it had before."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    training = [module for module in modules if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Text2TextGenerationPipeline(Pipeline):
    """Sends text through an encoder-decoder: `pipeline("text2text-generation", model=...)`.

    The value of a parameter of `generate()` comes from the first of these that sets it: the call,
    the constructor, `config.task_specific_params[task]`, the model's generation config,
    `generation_defaults`. A model trained with this package has its number of beams in its
    generation config; the default of 4 is for models that have none there. With a
    `generation_config` given by the user, the third and the last are ignored.

    Args:
        model: An encoder-decoder that reads token ids.
        args, kwargs: As for every pipeline; the parameters of a call may be given here as well.

    Raises:
        ValueError: The model is not an encoder-decoder that reads token ids.
    """

    # `_pipeline_calls_generate` stays off: its effect changed in transformers 5.20, and parameters
    # given here reach `generate()` without it.
    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    return_name = "generated"
    generation_defaults = {"max_new_tokens": 256, "num_beams": 4}

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        reads_text = getattr(model, "main_input_name", None) == "input_ids"
        if not (model.config.is_encoder_decoder and model.can_generate() and reads_text):
            raise ValueError(
                f"{type(self).__name__} expects an encoder-decoder that turns text into text, "
                f"such as AutoModelForSeq2SeqLM loads, but got {type(model).__name__}"
            )
        super().__init__(model, *args, **kwargs)
        by_task = getattr(model.config, "task_specific_params", None) or {}
        self._task_params = dict(by_task.get(self.task) or {})
        prefix = self._task_params.pop("prefix", getattr(model.config, "prefix", None))
        self.prefix = prefix or ""

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Generates the text for each source.

        Args:
            inputs: A string; a sequence of strings (a list, a column of `datasets`); or a generator
                or torch dataset of strings, such as `KeyDataset`, which is read lazily.
            kwargs: `batch_size` and `num_workers`; `truncation`, passed to the tokenizer;
                `return_tensors` for token ids in place of text, with `return_text=True` for both;
                `clean_up_tokenization_spaces`; `stop_sequence`; and everything that
                `generate()` takes.

        Returns:
            A list of `{"<return_name>_text": str}`, with `"<return_name>_token_ids"`, a tensor
            (target length,), where asked for. For one string, an entry per returned sequence. For a
            sequence of strings, an entry per string, or a list of them if `num_return_sequences`
            is more than 1. For a generator or dataset, an iterator over one list per string.
            A blank source gives an empty text.

        Raises:
            TypeError: A source is not a string. A sequence is checked before any work starts.
            ValueError: A source contains half a surrogate pair, checked likewise.
        """
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
            return super().__call__(inputs, **kwargs)
        inputs = list(inputs)
        for position, text in enumerate(inputs):
            self._check_source(text, f" at position {position}")
        results = super().__call__(inputs, **kwargs) if inputs else []
        return [one for (one,) in results] if all(len(r) == 1 for r in results) else results

    def _check_source(self, text: Any, where: str = "") -> None:
        if not isinstance(text, str):
            raise TypeError(
                f"{type(self).__name__} expects a string, or a list, generator or dataset column "
                f"of strings, but got {type(text).__name__}{where}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{type(self).__name__} expects Unicode, in which surrogates are no characters, "
                f"but got {text[error.start]!r}{where}"
            ) from None

    def _sanitize_parameters(
        self,
        *,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: Any = None,
        stop_sequence: str | list[str] | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sorts the parameters of a call into those of `preprocess`, `_forward`, `postprocess`."""
        if stop_sequence is not None:
            generate_kwargs.update(stop_strings=stop_sequence, tokenizer=self.tokenizer)
        postprocess = {
            "return_tensors": return_tensors,
            "return_text": return_text,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        return (
            {} if truncation is None else {"truncation": truncation},
            generate_kwargs,
            {name: value for name, value in postprocess.items() if value is not None},
        )

    def preprocess(self, text: str, **tokenizer_kwargs: Any) -> dict[str, Any]:
        """Tokenizes one source.

        Returns:
            `input_ids` and `attention_mask` (1, source length), and other outputs of the tokenizer
            for `generate()`. The mask of a blank source is all zeros.

        Raises:
            TypeError: The source is not a string.
            ValueError: The source contains half a surrogate pair.
        """
        self._check_source(text)
        encoded = dict(self._tokenize(text, **tokenizer_kwargs))
        encoded.pop("token_type_ids", None)
        if is_blank(text) or self._is_nothing(encoded["input_ids"]):
            # A row that can be batched. `_forward` recognizes it by its mask and never computes it.
            encoded["input_ids"] = torch.full((1, 1), self.tokenizer.pad_token_id or 0)
            encoded["attention_mask"] = torch.zeros_like(encoded["input_ids"])
        encoded.setdefault("attention_mask", torch.ones_like(encoded["input_ids"]))
        return encoded

    def _is_nothing(self, ids: torch.Tensor) -> bool:
        """Whether these are the ids of an empty source: the tokenizer has removed all text."""
        if ids.shape[1] > LONGEST_NOTHING:
            return False
        return ids[0].tolist() == self.tokenizer(self.prefix)["input_ids"]

    def _tokenize(self, text: str, **tokenizer_kwargs: Any) -> Any:
        return self.tokenizer(self.prefix + text, return_tensors="pt", **tokenizer_kwargs)

    def _forward(
        self, model_inputs: dict[str, Any], **generate_kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        """Generates for a batch of `preprocess` outputs, leaving out its blank rows.

        Args:
            model_inputs: Tensors (batch, source length), and lists of one value per row.
            generate_kwargs: Arguments of `generate()`.

        Returns:
            `output_ids`: per row of the batch, (returned sequences, target length); the length is
            0 for a blank row.
        """
        weaker: dict[str, Any] = {}
        if generate_kwargs.get("generation_config") is None:
            weaker = self._weaker_params(generate_kwargs)
        has_text = model_inputs["attention_mask"].any(dim=1)
        generated: Iterator[torch.Tensor] = iter(())
        returned = self._returned_sequences(**{**weaker, **generate_kwargs})
        if has_text.any():
            inputs = {name: _select(value, has_text) for name, value in model_inputs.items()}
            with evaluation_mode(self.model):
                output = self.model.generate(**{**weaker, **inputs, **generate_kwargs})
            generated = iter(getattr(output, "sequences", output).unflatten(0, (-1, returned)))
        blank = model_inputs["input_ids"].new_empty((returned, 0))
        return {"output_ids": [next(generated) if kept else blank for kept in has_text.tolist()]}

    def _returned_sequences(
        self, num_return_sequences: int | None = None, generation_config: Any = None, **rest: Any
    ) -> int:
        """How many sequences `generate()` returns for each source."""
        configs = [each for each in (generation_config, self.model.generation_config) if each]
        given = (num_return_sequences, *(config.num_return_sequences for config in configs))
        return next((number for number in given if number is not None), 1)

    def _weaker_params(self, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The task's parameters, and defaults for those that neither it nor the model sets."""
        if hasattr(self.model, "forget_defaults_of_trainer"):  # one of ours
            self.model.forget_defaults_of_trainer()
        config, task_params = self.model.generation_config, self._task_params
        params = {"pad_token_id": self.tokenizer.pad_token_id, **self.generation_defaults}
        # With two limits at once `generate()` warns and takes `max_new_tokens`. Our own models have
        # a better default: the paper's, which grows with the source.
        limited = config.max_length is not None or "max_length" in task_params
        if limited or hasattr(self.model, "extra_output_tokens"):
            params.pop("max_new_tokens")
        params = {name: value for name, value in params.items() if getattr(config, name) is None}
        limits = {"max_length", "max_new_tokens", "max_length_factor", "extra_output_tokens"}
        settled = limits if limits & generate_kwargs.keys() else set()
        return {k: v for k, v in {**params, **task_params}.items() if k not in settled}

    def postprocess(
        self,
        model_outputs: dict[str, Any],
        return_tensors: bool = False,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Decodes the sequences generated for one source.

        Args:
            model_outputs: `output_ids`, one tensor (returned sequences, target length).
            return_tensors: Return token ids.
            return_text: Return text; by default, if token ids are not.
            clean_up_tokenization_spaces: Passed to the tokenizer.

        Returns:
            One dictionary per sequence.
        """
        records = []
        for ids in model_outputs["output_ids"][0]:
            record: dict[str, Any] = {}
            if return_tensors:
                record[f"{self.return_name}_token_ids"] = ids
            if return_text or not return_tensors:
                record[f"{self.return_name}_text"] = self.tokenizer.decode(
                    ids,
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=clean_up_tokenization_spaces,
                )
            records.append(record)
        return records


class TranslationPipeline(Text2TextGenerationPipeline):
    """Translates: `pipeline("translation", model=...)` or `pipeline("translation_en_to_de", ...)`.

    A call takes two more parameters, the languages `src_lang` and `tgt_lang`; the second form of
    the task's name sets both. Only multilingual tokenizers use them. The default is the languages
    of a tokenizer with a `tgt_lang`, as `train` saves it.
    """

    return_name = "translation"

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        languages: Any = None
        if pair := _LANGUAGE_PAIR.fullmatch(self.task):
            languages = pair.groups()
        elif getattr(self.tokenizer, "tgt_lang", None) is not None:
            languages = self.tokenizer.src_lang, self.tokenizer.tgt_lang
        if languages is not None:
            self._preprocess_params.setdefault("src_lang", languages[0])
            self._preprocess_params.setdefault("tgt_lang", languages[1])

    def preprocess(self, text: str, **tokenizer_kwargs: Any) -> dict[str, Any]:
        """Same as in `Text2TextGenerationPipeline`. The tokenizer keeps its source language, which
        others may rely on."""
        before = getattr(self.tokenizer, "src_lang", None)
        try:
            return super().preprocess(text, **tokenizer_kwargs)
        finally:
            if before is not None and self.tokenizer.src_lang != before:
                self.tokenizer.src_lang = before

    def _sanitize_parameters(
        self, *, src_lang: str | None = None, tgt_lang: str | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        preprocess |= {name: value for name, value in languages.items() if value is not None}
        return preprocess, forward, postprocess

    def _tokenize(
        self,
        text: str,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **tokenizer_kwargs: Any,
    ) -> Any:
        build = getattr(self.tokenizer, "_build_translation_inputs", None)
        if build is None:
            return super()._tokenize(text, **tokenizer_kwargs)
        with suppress(KeyError):  # some tokenizers raise it, others return the unknown token
            encoded = build(
                text, return_tensors="pt", src_lang=src_lang, tgt_lang=tgt_lang, **tokenizer_kwargs
            )
            first = encoded.get("forced_bos_token_id")
            marks = {first, *self.tokenizer("")["input_ids"]} - {None}
            if marks <= mark_ids(self.tokenizer):
                if first == self.model.generation_config.decoder_start_token_id:
                    encoded.pop("forced_bos_token_id", None)  # or it is passed twice, as for mBART
                return encoded
        raise ValueError(
            f"src_lang={src_lang!r}, tgt_lang={tgt_lang!r}: expected language codes of "
            f"{type(self.tokenizer).__name__}"
        )


def _select(value: Any, rows: torch.Tensor) -> Any:
    """The given rows of a batched tensor, or the one value that a list repeats for each row."""
    if isinstance(value, torch.Tensor):
        return value[rows]
    return value[0] if isinstance(value, list) else value


class _NoDefaultModel:
    """Takes the place of a default model in the registry, which unpacks it when it needs one."""

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "The task has no default model: name one, as in pipeline('translation', model='...')"
        )


def _check_task(task: str) -> tuple[str, dict[str, Any], Any]:
    """`PipelineRegistry.check_task`, which treats `translation_XX_to_YY` as `translation`."""
    if _LANGUAGE_PAIR.fullmatch(task):
        task = "translation"
    return pipelines.PipelineRegistry.check_task(pipelines.PIPELINE_REGISTRY, task)


def register_translation_pipelines() -> None:
    """Makes `transformers.pipeline` know the tasks "translation", "translation_XX_to_YY" and
    "text2text-generation". Calling it again changes nothing.
    """
    registry = pipelines.PIPELINE_REGISTRY
    tasks = {
        "translation": TranslationPipeline,
        "text2text-generation": Text2TextGenerationPipeline,
    }
    # Patch: transformers 5.19 and later reject these names before they ask the registry.
    removed = getattr(pipelines, "REMOVED_TASKS", {})
    for task, pipeline_class in tasks.items():
        removed.pop(task, None)
        if task not in registry.supported_tasks:
            registry.register_pipeline(
                task,
                pipeline_class,
                pt_model=AutoModelForSeq2SeqLM,
                default={"model": _NoDefaultModel()},
                type="text",
            )
            # `Pipeline.save_pretrained` would write it into the config as remote code, and loading
            # the folder would require trust in code that is installed. The config of our own models
            # names the pipeline for processes that lack this package.
            del pipeline_class._registered_impl
    # Patch: the registry of transformers 5 (5.17 to 5.24) has no parametrized task names.
    registry.check_task = _check_task


__all__ = ["Text2TextGenerationPipeline", "TranslationPipeline", "register_translation_pipelines"]
