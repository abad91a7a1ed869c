"""Languages of multilingual models, such as mBART and NLLB: their tokenizers mark the language of a
text with a token, and decoders start with the token of the target's language."""

from contextlib import suppress

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.pipelines import mark_ids


def set_languages(
    tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None
) -> None:
    """Tell a multilingual tokenizer the languages of its texts. Other tokenizers are not changed.

    Args:
        tokenizer: Multilingual if it has `src_lang` and `tgt_lang`.
        source: The code of the source language, such as en_XX.
        target: The same for the target.

    Raises:
        ValueError: A language is missing, or the tokenizer does not know it.
    """
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return
    for option, attribute, code, side in (
        ("source_lang", "src_lang", source, "text"),
        ("target_lang", "tgt_lang", target, "text_target"),
    ):
        marks: set[int | None] = {None}
        with suppress(KeyError):  # some tokenizers raise it, others return the unknown token
            if code is not None:
                setattr(tokenizer, attribute, code)
                marks = set(tokenizer(**{side: ""}).input_ids)
        if not marks <= mark_ids(tokenizer):
            raise ValueError(
                f"{option}={code!r}: expected a language code of {type(tokenizer).__name__}"
            )


def start_in_target_language(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a decoder start with the language of the tokenizer's targets, if they have one.

    If targets begin with their language (mBART-50, NLLB, M2M-100), it is the first generated token;
    if they end with it (mBART), it is the token that a decoder starts with.
    """
    if getattr(tokenizer, "tgt_lang", None) is None:
        return
    start = language_to_start_with(tokenizer)
    if start is None:
        model.generation_config.forced_bos_token_id = tokenizer(text_target="").input_ids[0]
    else:
        model.config.decoder_start_token_id = start
        model.generation_config.decoder_start_token_id = start


def language_to_start_with(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that a decoder starts with because the tokenizer's targets end with it, or None."""
    if getattr(tokenizer, "tgt_lang", None) is None:
        return None
    ids: list[int] = tokenizer(text_target="").input_ids
    return ids[-1] if ids[0] == tokenizer.eos_token_id else None
