"""Private names of transformers and accelerate that the package overrides or reads: each still
exists, is still called, and still has the parameters that we use. A failure here says what to look
at before `pyproject.toml` allows the new version.
"""

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import pytest
import transformers
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState, PartialState
from conftest import small_config
from huggingface_hub import ModelCard
from sacrebleu import significance
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    Pipeline,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
)
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import DistributedMixin
from transformers.models.auto.auto_factory import _LazyAutoMapping

import vanilla_transformer
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.checkpoints import STAGING_DIR

# Names with an underscore that authors of models and pipelines have to define for transformers.
OFFICIAL = {
    "_auto_class", "_can_compile_fullgraph", "_can_record_outputs", "_init_weights",
    "_keys_to_ignore_on_load_unexpected", "_no_split_modules", "_supports_attention_backend",
    "_supports_flash_attn", "_supports_flex_attn", "_supports_sdpa", "_tp_plan",
    "_forward", "_sanitize_parameters", "_load_tokenizer", "_load_processor",
    "_load_image_processor", "_load_video_processor", "_load_feature_extractor",
    "_VALID_DICT_FIELDS",
}  # fmt: skip
MADE_BY_PYTHON = {"_abc_impl", "_backward_cls"}
OTHERS = ("transformers", "accelerate", "huggingface_hub", "tokenizers")


@dataclass(frozen=True)
class Override:
    """A private method that this package overrides.

    Attributes:
        owner: The class that has it.
        name: Its name.
        caller: The method of the owner that calls it.
        parameters: Those that the override uses.
        look_at: What to read in this package if it changes.
    """

    owner: type
    name: str
    caller: str
    parameters: tuple[str, ...]
    look_at: str

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


GENERATION = "model/generation.py"
OVERRIDES = [
    Override(
        GenerationMixin, "_sample", "generate",
        ("input_ids", "stopping_criteria", "generation_config", "model_kwargs"),
        f"{GENERATION}: a large vocabulary is projected onto in pieces",
    ),
    Override(
        GenerationMixin, "_beam_search", "generate",
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "model_kwargs"),
        f"{GENERATION}: as _sample, and only the best tokens are looked at",
    ),
    Override(
        PreTrainedModel, "_finalize_model_loading", "from_pretrained",
        ("model", "load_config", "loading_info"),
        "model/pretrained.py: weights that a checkpoint lacks are refused if they are huge",
    ),
    Override(
        PreTrainedModel, "_resize_token_embeddings", "resize_token_embeddings",
        ("new_num_tokens", "pad_to_multiple_of", "mean_resizing"),
        "model/pretrained.py: two vocabularies, or matrices that are not shared",
    ),
    Override(
        PreTrainedTokenizerBase, "_add_tokens", "add_tokens", ("new_tokens", "special_tokens"),
        "model/tokenization_vanilla_transformer.py: both sides get special tokens",
    ),
    Override(
        PreTrainedTokenizerBase, "_encode_plus", "__call__", ("text", "is_split_into_words"),
        "model/tokenization_vanilla_transformer.py: where Moses splits a text",
    ),
    Override(
        PreTrainedTokenizerBase, "_save_pretrained", "save_pretrained",
        ("save_directory", "file_names", "legacy_format", "filename_prefix"),
        "model/tokenization_vanilla_transformer.py: the target's file is saved too",
    ),
    Override(
        Trainer, "_get_output_dir", "_save_checkpoint", ("trial",),
        "training/checkpoints.py: a checkpoint is written to a staging folder",
    ),
    Override(
        Trainer, "_run_epoch", "_inner_training_loop", ("model", "epoch"),
        "training/interruption.py: no step after an evaluation that ended training",
    ),
    Override(
        Trainer, "_save_checkpoint", "_maybe_log_save_evaluate", ("model", "trial"),
        "training/checkpoints.py: a complete checkpoint is renamed",
    ),
    Override(
        Trainer, "_push_from_checkpoint", "_save_checkpoint", ("checkpoint_folder",),
        "training/checkpoints.py: a checkpoint is uploaded after its rename",
    ),
    Override(
        Trainer, "_get_num_items_in_batch", "prediction_step", (),
        "training/token_batches.py: the loss of an evaluation with tensor parallelism",
    ),
    Override(
        Trainer, "_get_train_sampler", "get_train_dataloader", ("train_dataset",),
        "training/token_batches.py: the order of batches by length follows from seed and epoch",
    ),
    Override(
        Trainer, "_get_eval_sampler", "get_eval_dataloader", ("eval_dataset",),
        "training/token_batches.py: an evaluation keeps the order of the data set",
    ),
]  # fmt: skip

# Private attributes that a property of ours replaces: the owner, where it is read, and what to look
# at.
PROPERTIES: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "_tokenizer": (
        PreTrainedTokenizerFast, ("_encode_plus", "_decode", "convert_ids_to_tokens"),
        "model/tokenization_vanilla_transformer.py: each thread has a side of its own",
    ),
}  # fmt: skip

# Private names that are read or called: their owner, and what reads them.
READ: dict[str, tuple[Any, str]] = {
    "_attn_implementation": (PreTrainedConfig, "modeling, attention, analysis"),
    "_get_top_k_continuations": (GenerationMixin, "model/decoding_steps.py"),
    "_beam_search_has_unfinished_sequences": (GenerationMixin, "model/running_rows.py"),
    "_keys_to_ignore_on_save": (PreTrainedModel, "training/distributed.py"),
    "_get_resized_embeddings": (PreTrainedModel, "model/pretrained.py"),
    "_get_resized_lm_head": (PreTrainedModel, "model/pretrained.py"),
    "_determine_best_metric": (Trainer, "training/interruption.py"),
    "_evaluate": (Trainer, "training/interruption.py"),
    "_get_collator_with_removed_columns": (Trainer, "training/token_batches.py"),
    "lazy_initialization": (CacheLayerMixin, "model/cache.py"),
    "is_compileable": (CacheLayerMixin, "model/cache.py"),
    "get_tp_size": (Trainer, "training/token_batches.py, training/trainer.py"),
    "_compute_p_value": (significance, "inference/metrics.py, which replaces it"),
}


def classes_of_the_package():
    for module in pkgutil.walk_packages(vanilla_transformer.__path__, "vanilla_transformer."):
        if module.name.endswith("__main__"):
            continue
        try:
            found = vars(importlib.import_module(module.name)).values()
        except ModuleNotFoundError as error:  # part of an extra that is not installed
            if str(error.name).startswith("vanilla_transformer"):
                raise
            continue
        for value in found:
            if inspect.isclass(value) and value.__module__.startswith("vanilla_transformer"):
                yield value


def private_overrides():
    """(name, owner) for each private name of others that a class of ours overrides."""
    for cls in classes_of_the_package():
        for name in vars(cls):
            owners = [base for base in cls.__mro__[1:] if name in vars(base)]
            foreign = [base for base in owners if base.__module__.split(".")[0] in OTHERS]
            if re.match("_[^_]", name) and foreign and name not in OFFICIAL | MADE_BY_PYTHON:
                yield name, foreign[-1].__name__


def test_every_override_of_a_private_name_has_a_contract():
    known = {override.name for override in OVERRIDES} | PROPERTIES.keys()
    lacking = {(name, owner) for name, owner in private_overrides() if name not in known}
    assert not lacking, "add an Override for each: its caller, what it takes, what to look at"


def test_every_contract_is_for_a_name_that_is_overridden():
    overridden = {name for name, _ in private_overrides()}
    assert {override.name for override in OVERRIDES} | PROPERTIES.keys() <= overridden


@pytest.mark.parametrize("name", PROPERTIES)
def test_an_attribute_that_a_property_replaces_is_still_read(name):
    owner, readers, look_at = PROPERTIES[name]
    for reader in readers:
        assert f"self.{name}." in inspect.getsource(getattr(owner, reader)), look_at


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
def test_an_overridden_method_exists_is_called_and_has_the_same_parameters(override):
    hint = f"{override} changed in transformers {transformers.__version__}: {override.look_at}"
    method = getattr(override.owner, override.name, None)
    assert method is not None, hint
    taken = inspect.signature(method).parameters
    for name in override.parameters:
        by_keyword = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        assert name in taken or by_keyword, f"{name}: {hint}"
    source = inspect.getsource(getattr(override.owner, override.caller))
    if override.name in ("_sample", "_beam_search"):  # found by a table of modes
        source += repr(transformers.generation.utils.GENERATION_MODES_MAPPING)
    assert re.search(rf"\b{override.name}\b", source), f"{override.caller} calls it no more: {hint}"


@pytest.mark.parametrize("name", READ)
def test_private_names_that_are_read_exist(name):
    owner, reader = READ[name]
    assert hasattr(owner, name), f"{owner.__name__}.{name} is gone: look at {reader}"


def test_the_first_initial_training_value_is_the_number_of_epochs():
    # training/interruption.py changes the first value by the last.
    source = inspect.getsource(Trainer._inner_training_loop)
    values = re.search(r"\(([^()]*)\) = self\.set_initial_training_values", source)[1]
    names = [name.strip() for name in values.split(",") if name.strip()]
    assert (names[0], names[-1]) == ("num_train_epochs", "max_steps")
    assert "in range(epochs_trained, num_train_epochs)" in source


def test_the_summary_of_a_training_counts_the_steps_since_resuming_or_all_steps():
    # training/interruption.py corrects the second way, which lacks this attribute.
    source = inspect.getsource(Trainer._finalize_training)
    since_resuming = "self.state.global_step - self._initial_global_step" in source
    assert since_resuming != ("num_steps=self.state.max_steps" in source)


def test_the_model_is_wrapped_between_creating_optimizer_and_scheduler():
    # training/distributed.py hides embeddings from accelerate between the two.
    source = inspect.getsource(Trainer._prepare_for_training)
    places = [
        source.index(name)
        for name in ("self.create_optimizer()", "accelerator.prepare(", "self.create_scheduler(")
    ]
    assert places == sorted(places)


def test_a_generation_config_has_its_tokens_as_tensors():
    # model/generation.py reads `_pad_token_tensor` and `_eos_token_tensor`.
    model, seen = VanillaTransformerForConditionalGeneration(small_config()), []

    def keep(model, input_ids, generation_config, **kwargs):
        seen.append(generation_config)
        return input_ids

    ids = vanilla_transformer.VanillaTransformerConfig().bos_token_id
    model.generate(model.dummy_inputs["input_ids"] * 0 + ids, custom_generate=keep)
    assert seen[0]._pad_token_tensor == 0
    assert seen[0]._eos_token_tensor.tolist() == [2]


def test_beam_search_checks_what_has_ended_and_lets_the_model_reorder_its_cache():
    # model/running_rows.py gives a copy of the model methods of these names.
    source = inspect.getsource(GenerationMixin._beam_search)
    assert "self._reorder_cache(" in source
    call = re.search(r"self\._beam_search_has_unfinished_sequences\(([^()]*)\)", source)[1]
    assert [name.strip() for name in call.split(",") if name.strip()] == [
        "is_early_stop_heuristic_unsatisfied",
        "is_sent_finished",
        "next_token_hits_stopping_criteria",
        "early_stopping",
    ]


def test_a_pipeline_stores_its_parameters_and_its_registered_class():
    # model/pipelines.py sets `_preprocess_params` and deletes `_registered_impl`.
    source = inspect.getsource(Pipeline.__init__)
    assert "self._preprocess_params" in source
    register = transformers.pipelines.PipelineRegistry.register_pipeline
    assert "_registered_impl" in inspect.getsource(register)
    assert "check_task" in vars(transformers.pipelines.PipelineRegistry)


def test_layers_of_a_cache_are_those_that_the_decoder_replaces():
    # model/cache.py replaces `DynamicLayer` with its own layers.
    cache = DynamicCache(config=small_config().get_text_config(decoder=True))
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 3
    assert cache.offloading is False
    for name in ("keys", "values", "is_initialized"):
        assert hasattr(cache.layers[0], name), name


@pytest.mark.parametrize("attend", [sdpa_attention_forward, flash_attention_forward])
def test_attention_functions_have_the_parameters_that_the_model_passes(attend):
    # model/attention.py calls them, and adds the ends of packed rows.
    taken = list(inspect.signature(attend).parameters)
    assert taken[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"scaling", "dropout", "kwargs"} <= set(taken)


def test_plans_of_parallel_layers_are_dictionaries_of_names():
    # model/pretrained.py deletes from `_tp_plan` and `_fsdp_plan` what a class lacks.
    model = VanillaTransformerForConditionalGeneration(small_config())
    assert "init_parallel_plans" in vars(DistributedMixin)
    assert "model.decoder.layers.*.ffn.fc1" in model._tp_plan
    assert model._fsdp_plan


def test_accelerate_skips_batches_and_shares_its_state_as_batching_expects():
    # training/token_batches.py creates `DataLoaderShard`s and reads the active loader.
    taken = inspect.signature(DataLoaderShard.__init__).parameters
    assert "device" in taken
    for name in ("end_of_dataloader", "active_dataloader"):
        assert hasattr(GradientState, name), name
    for name in ("destroy_process_group", "wait_for_everyone"):
        assert hasattr(PartialState, name), name


def test_a_trainer_still_reads_a_table_that_registering_does_not_update():
    # vanilla_transformer/__init__.py adds the causal model to it.
    assert "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()" in inspect.getsource(Trainer.compute_loss)
    for register in (AutoModelForCausalLM.register, _LazyAutoMapping.register):
        assert "MAPPING_NAMES" not in inspect.getsource(register)


def test_a_push_to_the_hub_leaves_out_unfinished_checkpoints():
    # training/checkpoints.py writes checkpoints there; a push must not upload them.
    assert fnmatch(f"{STAGING_DIR}/checkpoint-2/optimizer.pt", "_*")
    for push in (Trainer.push_to_hub, Trainer._push_from_checkpoint):
        assert 'ignore_patterns=["_*"' in inspect.getsource(push)


def test_a_card_is_filled_in_from_a_template():
    # model_card.py passes `template_str`.
    assert "template_str" in inspect.signature(ModelCard.from_template).parameters
