"""The translation pipelines: they do what those of transformers 4 did, with any encoder-decoder."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from conftest import in_new_process, small_trainer
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    NllbTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
    pipelines,
)
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from transformers.pipelines.pt_utils import KeyDataset

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model import pipelines as our_pipelines
from vanilla_transformer.model.pipelines import (
    Text2TextGenerationPipeline,
    TranslationPipeline,
    register_translation_pipelines,
)

TASKS = {
    "translation": TranslationPipeline,
    "translation_en_to_de": TranslationPipeline,
    "text2text-generation": Text2TextGenerationPipeline,
}
TEXTS = ["a small dog sleeps", "the man rides", "two children play in the snow near a red house"]
SPECIAL_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
TINY = {"vocab_size": 330, "d_model": 16, **SPECIAL_IDS}
BART_TINY = {
    **TINY,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
}


def make_tokenizer(cls=PreTrainedTokenizerFast, closing="$A </s>", **kwargs):
    """A byte-level BPE without unknown tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<pad>", "</s>", "en", "de"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single=closing, special_tokens=[("</s>", 1)]
    )
    return cls(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", **kwargs)


def make_model(kind):
    torch.manual_seed(0)
    if kind == "marian":
        config = MarianConfig(**BART_TINY, max_position_embeddings=64, init_std=1.0)
        model = MarianMTModel(config)
    elif kind == "t5":
        config = T5Config(
            **TINY, d_kv=4, d_ff=16, num_layers=1, num_heads=2, initializer_factor=9.0
        )
        config.task_specific_params = {
            "translation_en_to_de": {"prefix": "to German: ", "num_beams": 2, "max_length": 9}
        }
        model = T5ForConditionalGeneration(config)
    else:
        config = VanillaTransformerConfig(**BART_TINY, bos_token_id=0)
        model = VanillaTransformerForConditionalGeneration(config)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models of this size are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A saved checkpoint of each kind of model."""
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in ("marian", "t5", "ours"):
        make_model(kind).save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    return root


@pytest.fixture
def translator(tokenizer):
    """A pipeline with short outputs."""
    model = make_model("marian")
    return pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6)


@pytest.fixture
def generate_calls(translator, monkeypatch):
    """Records what reaches `generate()`."""
    calls = []
    generate = translator.model.generate

    def record(**kwargs):
        calls.append(kwargs)
        return generate(**kwargs)

    monkeypatch.setattr(translator.model, "generate", record)
    return calls


def spy(pipe, monkeypatch):
    """What `generate()` would be called with; it returns one token per row."""
    calls = []

    def record(input_ids, **kwargs):
        calls.append({"input_ids": input_ids, **kwargs})
        return torch.full((len(input_ids) * kwargs.get("num_return_sequences", 1), 1), 7)

    monkeypatch.setattr(pipe.model, "generate", record)
    return calls


def beams_used(pipe):
    """The number of beams: for one source the decoder gets a row for each."""
    rows = []
    decoder = pipe.model.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    pipe("a", max_new_tokens=2)
    hook.remove()
    return max(rows)


def translations(results):
    return [result["translation_text"] for result in results]


class TestTasks:
    @pytest.mark.parametrize("kind", ["marian", "t5", "ours"])
    @pytest.mark.parametrize("task", ["translation", "text2text-generation"])
    def test_returns_what_generate_returns(self, folders, tokenizer, kind, task):
        pipe = pipeline(task, model=str(folders / kind), max_new_tokens=8)
        assert type(pipe) is TASKS[task]
        model = AutoModelForSeq2SeqLM.from_pretrained(folders / kind)
        ids = model.generate(
            **tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False),
            max_new_tokens=8,
            num_beams=4,
        )
        text = tokenizer.decode(ids[0], skip_special_tokens=True)
        assert text
        assert pipe(TEXTS[0]) == [{f"{pipe.return_name}_text": text}]

    @pytest.mark.parametrize("task", TASKS)
    def test_accepts_a_model_object(self, tokenizer, task):
        assert type(pipeline(task, model=make_model("t5"), tokenizer=tokenizer)) is TASKS[task]

    @pytest.mark.parametrize("task", TASKS)
    def test_without_a_model_the_error_says_what_to_pass(self, task):
        with pytest.raises(ValueError, match=r"no default model.*model="):
            pipeline(task)

    def test_without_a_tokenizer_the_error_says_what_to_pass(self):
        with pytest.raises(Exception, match="tokenizer"):
            pipeline("translation", model=make_model("marian"))

    @pytest.mark.parametrize("task", ["summarization", "translation_", "translation_en-de"])
    def test_other_tasks_stay_unknown(self, task):
        with pytest.raises(KeyError, match=task):
            pipeline(task, model=make_model("marian"), tokenizer=make_tokenizer())

    @pytest.mark.parametrize("model", ["decoder", "speech"])
    def test_other_kinds_of_models_are_refused(self, tokenizer, model):
        if model == "decoder":
            model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=9))
        else:
            model = WhisperForConditionalGeneration(WhisperConfig(**BART_TINY))
        expected = rf"expects an encoder-decoder.*got {type(model).__name__}"
        with pytest.raises(ValueError, match=expected):
            pipeline("translation", model=model, tokenizer=tokenizer)

    def test_registering_again_changes_nothing(self, caplog):
        registry = pipelines.PIPELINE_REGISTRY
        before = {task: registry.check_task(task) for task in TASKS}
        register_translation_pipelines()
        assert {task: registry.check_task(task) for task in TASKS} == before
        assert not caplog.records

    def test_other_pipelines_are_found_as_before(self):
        assert pipelines.check_task("ner")[0] == "token-classification"


class TestNesting:
    """One dictionary per text, in the nesting of transformers 4."""

    def test_string(self, translator):
        (result,) = translator(TEXTS[0])
        assert list(result) == ["translation_text"]

    def test_list(self, translator):
        assert translator(TEXTS) == [translator(text)[0] for text in TEXTS]
        assert translator(TEXTS[:1]) == translator(TEXTS[0])

    def test_empty_list(self, translator):
        assert translator([]) == []

    def test_other_sequences_count_as_lists(self, translator):
        column = Dataset.from_dict({"en": TEXTS})["en"]
        assert translator(tuple(TEXTS)) == translator(column) == translator(TEXTS)

    def test_several_sequences_per_text(self, translator):
        one = translator(TEXTS[0], num_return_sequences=3)
        assert len(one) == 3
        assert translator(TEXTS[:2], num_return_sequences=3)[0] == one

    @pytest.mark.parametrize("own", [None, 2])
    def test_a_config_without_a_number_of_sequences_keeps_the_models(
        self, translator, monkeypatch, own
    ):
        config = GenerationConfig(num_beams=3, num_return_sequences=own)
        expected = translator(TEXTS[:2], num_beams=3, num_return_sequences=3)
        monkeypatch.setattr(translator.model.generation_config, "num_return_sequences", 3)
        wanted = [row[: own or 3] for row in expected]
        assert translator(TEXTS[:2], generation_config=config, batch_size=2) == wanted

    def test_generator_is_read_lazily(self, translator):
        seen = []
        results = translator(seen.append(text) or text for text in TEXTS)
        assert next(iter(results)) == translator(TEXTS[0])
        assert len(seen) < len(TEXTS)

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_dataset(self, translator, batch_size):
        column = KeyDataset(Dataset.from_dict({"en": TEXTS}), "en")
        results = list(translator(column, batch_size=batch_size))
        assert results == [[result] for result in translator(TEXTS)]

    @pytest.mark.parametrize("padding_side", ["left", "right"])
    def test_batches_do_not_change_results(self, tokenizer, folders, padding_side):
        pipe = pipeline("translation", model=str(folders / "ours"), max_new_tokens=6)
        pipe.tokenizer.padding_side = padding_side
        assert pipe(TEXTS, batch_size=3) == pipe(TEXTS)


class TestParameters:
    def test_return_tensors(self, translator, tokenizer):
        (ids,) = translator(TEXTS[0], return_tensors=True)
        (both,) = translator(TEXTS[0], return_tensors=True, return_text=True)
        assert list(ids) == ["translation_token_ids"]
        assert list(both) == ["translation_token_ids", "translation_text"]
        tokens = ids["translation_token_ids"]
        assert tokens.ndim == 1
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert text == both["translation_text"] == translator(TEXTS[0])[0]["translation_text"]

    def test_clean_up_tokenization_spaces(self, translator, monkeypatch):
        spaces = []
        monkeypatch.setattr(
            translator.tokenizer,
            "decode",
            lambda ids, **kwargs: spaces.append(kwargs["clean_up_tokenization_spaces"]) or "",
        )
        translator(TEXTS[0], clean_up_tokenization_spaces=True)
        translator(TEXTS[0])
        assert spaces == [True, False]

    def test_truncation(self, translator, generate_calls, monkeypatch):
        monkeypatch.setattr(translator.tokenizer, "model_max_length", 3)
        translator(TEXTS[2], truncation=True)
        assert generate_calls[0]["input_ids"].shape == (1, 3)

    def test_stop_sequence_ends_the_output(self, translator):
        (result,) = translator(TEXTS[0], num_beams=1, max_new_tokens=8)
        text = result["translation_text"]
        (stopped,) = translator(TEXTS[0], num_beams=1, max_new_tokens=8, stop_sequence=text[1])
        assert len(stopped["translation_text"]) < len(text)

    def test_return_dict_in_generate_is_supported(self, translator):
        assert translator(TEXTS[0], return_dict_in_generate=True) == translator(TEXTS[0])

    def test_parameters_of_the_call_override_the_constructors(self, tokenizer, monkeypatch):
        model = make_model("marian")
        pipe = pipeline("translation", model=model, tokenizer=tokenizer, num_beams=2, max_length=7)
        calls = spy(pipe, monkeypatch)
        pipe("a", num_beams=3)
        assert (calls[0]["num_beams"], calls[0]["max_length"]) == (3, 7)
        assert "max_new_tokens" not in calls[0]

    def test_defaults_only_apply_to_unset_parameters(self, tokenizer, monkeypatch):
        model = make_model("marian")
        pipe = pipeline("translation", model=model, tokenizer=tokenizer)
        calls = spy(pipe, monkeypatch)
        pipe("a")
        assert (calls[0]["num_beams"], calls[0]["max_new_tokens"]) == (4, 256)
        model.generation_config.update(num_beams=1, max_length=40)
        pipe("a")
        assert not {"num_beams", "max_new_tokens"} & calls[1].keys()

    @pytest.mark.parametrize(("trained_for", "beams"), [(1, 1), (5, 5), (None, 1)])
    def test_a_trained_model_keeps_its_beams(self, tokenizer, tmp_path, trained_for, beams):
        options = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        options |= {"predict_with_generate": True, "generation_num_beams": trained_for}
        trainer = small_trainer(tmp_path, tokenizer, **options)
        trainer.train()
        trainer.save_model()
        assert beams_used(pipeline("translation", model=str(tmp_path))) == beams

    def test_a_model_without_a_number_of_beams_gets_four(self, folders):
        assert beams_used(pipeline("translation", model=str(folders / "ours"))) == 4

    def test_a_given_generation_config_is_used_unchanged(self, translator, monkeypatch):
        calls = spy(translator, monkeypatch)
        translator._forward_params.clear()
        config = GenerationConfig(num_beams=1, max_new_tokens=2)
        translator("a", generation_config=config)
        assert calls[0]["generation_config"] is config
        assert not {"num_beams", "max_new_tokens"} & calls[0].keys()

    def test_our_models_keep_their_own_length_limit(self, folders, monkeypatch):
        pipe = pipeline("translation", model=str(folders / "ours"))
        calls = spy(pipe, monkeypatch)
        pipe("a")
        assert calls[0]["num_beams"] == 4
        assert "max_new_tokens" not in calls[0]

    @pytest.mark.parametrize("kind", ["marian", "ours"])
    def test_there_are_no_warnings(self, folders, caplog, monkeypatch, recwarn, kind):
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        pipe = pipeline("translation_en_to_de", model=str(folders / kind))
        pipe.model.generation_config.max_length = 9
        pipe([*TEXTS, ""], batch_size=2)
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
        assert [str(w.message) for w in recwarn] == []


class TestTaskSpecificParams:
    """T5 keeps a prefix and generation parameters per task in its config."""

    @pytest.fixture
    def calls(self, tokenizer, monkeypatch):
        def run(task, *args, **kwargs):
            pipe = pipeline(task, model=make_model("t5"), tokenizer=tokenizer)
            calls = spy(pipe, monkeypatch)
            pipe(*args, **kwargs)
            calls[0]["source"] = tokenizer.decode(calls[0]["input_ids"][0])
            return calls[0]

        return run

    def test_are_those_of_the_task(self, calls):
        call = calls("translation_en_to_de", "a dog")
        assert call["source"] == "to German: a dog</s>"
        assert (call["num_beams"], call["max_length"]) == (2, 9)
        assert "max_new_tokens" not in call

    def test_are_overridden_by_the_users(self, calls):
        call = calls("translation_en_to_de", "a dog", num_beams=3, max_new_tokens=4)
        assert (call["num_beams"], call["max_new_tokens"]) == (3, 4)
        assert "max_length" not in call

    @pytest.mark.parametrize("limit", [{"extra_output_tokens": 3}, {"max_length_factor": 2.0}])
    def test_are_overridden_by_any_length_limit_of_the_users(self, limit, folders, monkeypatch):
        pipe = pipeline("translation", model=str(folders / "ours"))
        monkeypatch.setattr(pipe, "_task_params", {"max_length": 9})
        calls = spy(pipe, monkeypatch)
        pipe("a dog", **limit)
        assert "max_length" not in calls[0]

    def test_do_not_apply_to_other_tasks(self, calls):
        call = calls("translation", "a dog")
        assert call["source"] == "a dog</s>"
        assert call["num_beams"] == 4

    def test_a_prefix_in_the_config_applies_to_all_tasks(self, tokenizer, monkeypatch):
        model = make_model("marian")
        model.config.prefix = ">>de<< "
        pipe = pipeline("text2text-generation", model=model, tokenizer=tokenizer)
        calls = spy(pipe, monkeypatch)
        pipe("a dog")
        assert tokenizer.decode(calls[0]["input_ids"][0]) == ">>de<< a dog</s>"


@pytest.mark.parametrize("kind", ["ours", "t5"])
def test_a_model_that_trains_translates_without_dropout_and_trains_on_with_it(kind):
    """`Trainer` leaves its model in training mode."""
    model = make_model(kind)
    pipe = pipeline("translation", model=model, tokenizer=make_tokenizer(), max_new_tokens=9)
    expected = pipe(TEXTS)
    modes = [module.training for module in model.train().modules()]
    assert pipe(TEXTS) == expected
    assert [module.training for module in model.modules()] == modes


class MultilingualTokenizer(PreTrainedTokenizerFast):
    """Marks languages as NLLB's does: the source's in the text, the target's as a forced token."""

    def _build_translation_inputs(self, text, return_tensors, src_lang, tgt_lang, **kwargs):
        inputs = self(f"{src_lang}: {text}", return_tensors=return_tensors, **kwargs)
        inputs["forced_bos_token_id"] = self.convert_tokens_to_ids(tgt_lang)
        return inputs


class TestLanguages:
    @pytest.fixture
    def multilingual(self):
        def make(task, **kwargs):
            tokenizer = make_tokenizer(MultilingualTokenizer)
            return pipeline(task, model=make_model("marian"), tokenizer=tokenizer, **kwargs)

        return make

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_the_output_starts_with_the_target_language(self, multilingual, batch_size):
        pipe = multilingual("translation_en_to_de", max_new_tokens=3, return_tensors=True)
        for result in pipe(["", *TEXTS], batch_size=batch_size)[1:]:
            assert result["translation_token_ids"][1] == pipe.tokenizer.convert_tokens_to_ids("de")

    def test_a_batch_has_one_target_language(self, multilingual, monkeypatch):
        pipe = multilingual("translation_en_to_de")
        calls = spy(pipe, monkeypatch)
        pipe(TEXTS, batch_size=3)
        assert calls[0]["forced_bos_token_id"] == pipe.tokenizer.convert_tokens_to_ids("de")

    def test_a_forced_token_of_the_call_overrides_the_languages(self, multilingual):
        pipe = multilingual("translation_en_to_de", max_new_tokens=3, return_tensors=True)
        pipe._task_params["forced_bos_token_id"] = 5  # overridden by the language
        german = pipe.tokenizer.convert_tokens_to_ids("de")
        for call, first in (({}, german), ({"forced_bos_token_id": 7}, 7)):
            (result,) = pipe(TEXTS[0], **call)
            assert result["translation_token_ids"][1] == first

    @pytest.mark.parametrize(
        ("task", "init", "call", "languages"),
        [
            ("translation_en_to_de", {}, {}, ("en", "de")),
            ("translation_eng_Latn_to_deu_Latn", {}, {}, ("eng_Latn", "deu_Latn")),
            ("translation", {"src_lang": "en", "tgt_lang": "de"}, {}, ("en", "de")),
            ("translation_en_to_de", {"tgt_lang": "fr"}, {}, ("en", "fr")),
            ("translation_en_to_de", {"tgt_lang": "fr"}, {"src_lang": "cs"}, ("cs", "fr")),
        ],
    )
    def test_come_from_the_call_the_constructor_or_the_task(
        self, multilingual, monkeypatch, task, init, call, languages
    ):
        pipe = multilingual(task, **init)
        seen = []
        monkeypatch.setattr(
            pipe.tokenizer,
            "_build_translation_inputs",
            lambda text, return_tensors, src_lang, tgt_lang: (
                seen.append((src_lang, tgt_lang)) or pipe.tokenizer(text, return_tensors="pt")
            ),
        )
        pipe("a dog", max_new_tokens=2, **call)
        assert seen == [languages]

    @pytest.mark.parametrize("given", [{}, {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}])
    def test_the_tokenizer_keeps_its_source_language(self, given):
        """Scores and other pipelines use it too."""
        pieces = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁a": 4}
        languages = {"src_lang": "fra_Latn", "tgt_lang": "spa_Latn"}
        tokenizer = NllbTokenizer(vocab=pieces, merges=[], **languages)
        pipe = pipeline("translation", model=make_model("marian"), tokenizer=tokenizer)
        french = tokenizer("a")["input_ids"]
        first, second = (pipe.preprocess("a", **{**languages, **given}) for _ in range(2))
        assert first["input_ids"].tolist() == second["input_ids"].tolist()
        assert (first["input_ids"].tolist() == [french]) == (not given)
        assert (tokenizer.src_lang, tokenizer("a")["input_ids"]) == ("fra_Latn", french)

    def test_are_ignored_by_other_tokenizers(self, translator):
        assert translator("a dog", src_lang="en", tgt_lang="de") == translator("a dog")


class TestUnusualSources:
    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    def test_blank_source_has_an_empty_translation(self, translator, batch_size):
        sources = ["", TEXTS[0], " \t\n", TEXTS[2], "\u00a0\u3000"]
        one, other = translations(translator([TEXTS[0], TEXTS[2]]))
        results = translations(translator(sources, batch_size=batch_size))
        assert results == ["", one, "", other, ""]

    def test_blank_source_never_reaches_the_model(self, translator, generate_calls):
        assert translator("") == [{"translation_text": ""}]
        translator(["", TEXTS[0]], batch_size=2)
        (call,) = generate_calls
        assert call["input_ids"].shape[0] == 1
        assert call["attention_mask"].all()

    def test_blank_source_is_nested_like_other_texts(self, translator):
        results = translator(["", TEXTS[0]], num_return_sequences=2)
        assert [len(result) for result in results] == [2, 2]
        assert results[0] == [{"translation_text": ""}] * 2

    def test_blank_source_has_no_token_ids(self, translator):
        (result,) = translator(" ", return_tensors=True)
        assert result["translation_token_ids"].shape == (0,)
        assert result["translation_token_ids"].dtype == torch.long

    @pytest.mark.parametrize("padding_side", ["left", "right"])
    def test_a_text_without_tokens_counts_as_blank(self, padding_side):
        tokenizer = make_tokenizer(closing="$A", padding_side=padding_side)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("\u200b", "removed")
        assert tokenizer("\u200b")["input_ids"] == []
        pipe = pipeline("translation", model=make_model("marian"), tokenizer=tokenizer)
        results = translations(pipe(["\u200b", "dog"], batch_size=2, max_new_tokens=3))
        assert results[0] == ""
        assert results[1] == translations(pipe("dog", max_new_tokens=3))[0] != ""

    def test_long_and_unusual_texts_are_translated(self, folders):
        pipe = pipeline("translation", model=str(folders / "ours"), num_beams=1, max_new_tokens=2)
        sources = ["x" * 5000, "👩‍👩‍👧 🏳️‍🌈", "שלום עולם‏", "a\x00b\x07\x1b[0m\u2028", "\u200b"]
        assert len(pipe.tokenizer(sources[0])["input_ids"]) > 5000
        results = translations(pipe(sources, batch_size=2))
        assert results == [translations(pipe(source))[0] for source in sources]

    @pytest.mark.parametrize(
        ("source", "name"),
        [(5, "int"), (None, "NoneType"), (b"ab", "bytes"), ({"en": "a"}, "dict")],
    )
    def test_a_non_string_is_reported(self, translator, generate_calls, source, name):
        expected = rf"TranslationPipeline expects a string.*, but got {name}"
        for sources in (source, (text for text in [source])):
            with pytest.raises(TypeError, match=f"{expected}$"):
                list(translator(sources))
        for place in (0, 2):
            with pytest.raises(TypeError, match=f"{expected} at position {place}$"):
                translator([*TEXTS[:place], source])
        assert generate_calls == []

    def test_a_chat_or_nested_list_is_refused_too(self, translator):
        for source in ({"role": "user", "content": "a"}, TEXTS):
            with pytest.raises(TypeError, match=f"got {type(source).__name__} at position 0"):
                translator([source])


WITHOUT_PACKAGE = """
import json, sys
from transformers import pipeline
marian, ours, copy, text = sys.argv[1:-1]
outcome = {}

def attempt(name, *args, **kwargs):
    try:
        pipe = pipeline(*args, **kwargs)
        outcome[name] = [type(pipe).__module__.split(".")[0], pipe(text, max_new_tokens=6)]
        return pipe
    except Exception as error:
        outcome[name] = [type(error).__name__, str(error)]

for task in ("translation", "translation_en_to_de", "text2text-generation"):
    attempt(f"marian {task}", task, model=marian)
for task in ("text2text-generation", "translation"):
    pipe = attempt(f"ours {task}", task, model=ours, trust_remote_code=True)
attempt("ours without trust", "translation", model=ours, trust_remote_code=False)
attempt("ours without task", model=ours, trust_remote_code=True)
pipe.save_pretrained(copy)
attempt("copy", "translation", model=copy, trust_remote_code=True)
print(json.dumps(outcome))
"""


@pytest.fixture(scope="module")
def saved(folders):
    """Our checkpoint, as the pipeline itself saves it."""
    pipeline("translation", model=str(folders / "ours")).save_pretrained(folders / "saved")
    return folders / "saved"


@pytest.fixture(scope="module")
def outcome(folders, saved, tmp_path_factory):
    """What a process without this package gets from the folders."""
    folder = tmp_path_factory.mktemp("without")
    paths = [folders / "marian", saved, folder / "copy"]
    found = in_new_process(WITHOUT_PACKAGE, False, folder, *paths, TEXTS[0])
    return found | {"copy folder": str(folder / "copy")}


class TestCheckpoints:
    def test_config_names_pipelines_that_the_folder_contains(self, saved):
        tasks = json.loads((saved / "config.json").read_text())["custom_pipelines"]
        assert set(tasks) == {"translation", "text2text-generation"}
        for task, entry in tasks.items():
            module, name = entry["impl"].split(".")
            assert getattr(our_pipelines, name) is TASKS[task]
            assert (saved / f"{module}.py").is_file()

    @pytest.mark.parametrize("trust_remote_code", [None, False, True])
    def test_with_the_package_the_installed_code_runs(self, folders, saved, trust_remote_code):
        for folder in (folders / "ours", saved):
            pipe = pipeline("translation", model=str(folder), trust_remote_code=trust_remote_code)
            assert type(pipe) is TranslationPipeline
            assert type(pipe.model) is VanillaTransformerForConditionalGeneration

    def test_a_different_model_is_saved_as_in_transformers_4(self, folders, tmp_path):
        pipe = pipeline("translation", model=str(folders / "t5"), max_new_tokens=6)
        pipe.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.py"))
        assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
        again = pipeline("translation", model=str(tmp_path), max_new_tokens=6)
        assert again(TEXTS[0]) == pipe(TEXTS[0])

    @pytest.mark.parametrize("task", TASKS)
    def test_without_the_package_transformers_refuses_the_task(self, outcome, task):
        """The patches of `register_translation_pipelines` are needed."""
        error, message = outcome[f"marian {task}"]
        assert error == "KeyError"
        assert task in message

    @pytest.mark.parametrize("task", ["translation", "text2text-generation"])
    def test_without_the_package_the_folders_code_runs(self, outcome, saved, task):
        pipe = pipeline(task, model=str(saved), max_new_tokens=6)
        assert outcome[f"ours {task}"] == ["transformers_modules", pipe(TEXTS[0])]

    def test_without_the_package_trust_remote_code_is_required(self, outcome):
        error, message = outcome["ours without trust"]
        assert error == "ValueError"
        assert "trust_remote_code=True" in message

    def test_without_a_task_the_error_names_the_tasks(self, outcome):
        error, message = outcome["ours without task"]
        assert error == "RuntimeError"
        assert "translation, text2text-generation" in message

    def test_a_folder_saved_without_the_package_loads_both_ways(self, outcome, saved):
        assert outcome["copy"] == outcome["ours translation"]
        pipe = pipeline("translation", model=outcome["copy folder"], max_new_tokens=6)
        assert type(pipe) is TranslationPipeline
        assert pipe(TEXTS[0]) == outcome["copy"][1]

    def test_the_file_only_imports_torch_and_transformers(self):
        path = Path(our_pipelines.__file__)
        assert set(get_imports(path)) - set(sys.stdlib_module_names) == {"torch", "transformers"}
        assert get_relative_imports(path) == []
