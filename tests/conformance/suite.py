"""transformers' own test classes, applied to our models or, for comparison, to Marian's.

This file only works where `run.py` copies it: next to the tests of transformers.
"""

import contextlib
import os
import unittest
import unittest.mock

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_fsdp_mixin import FSDPTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_pipeline_mixin import PipelineTesterMixin
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from tiny_models import SIZES
from transformers import MarianConfig, MarianForCausalLM, MarianModel, MarianMTModel
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device
from transformers.utils import is_torchvision_available

from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)

# Without these lists, the distributed tests run for every model.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
# Processes over gloo can outnumber the CPUs; HSDP (2 replicas of 2 shards) takes four.
test_fsdp_mixin._get_available_fsdp_workers = lambda: 4

# Without torchvision, transformers 5.17 has no table of image processors, in which a pipeline test
# looks up every model.
with contextlib.suppress(ImportError):  # this module is only in a checkout
    from tests.pipelines import test_pipelines_feature_extraction as feature_extraction

    if not is_torchvision_available():
        feature_extraction.IMAGE_PROCESSOR_MAPPING = {}

SUBJECTS = {
    "vanilla_transformer": {
        "config": VanillaTransformerConfig,
        "seq2seq": (VanillaTransformerModel, VanillaTransformerForConditionalGeneration),
        "causal": VanillaTransformerForCausalLM,
        "encoder": VanillaTransformerEncoderModel,
        "options": {"label_smoothing": 0.0},
        "left_padding": True,
    },
    "marian": {
        "config": MarianConfig,
        "seq2seq": (MarianModel, MarianMTModel),
        "causal": MarianForCausalLM,
        "encoder": None,
        "options": {},
        "left_padding": False,
    },
}
SUBJECT = SUBJECTS[os.environ["CONFORMANCE_SUBJECT"]]

# The tests use these tables to tell which classes have a loss. The tables only hold transformers'
# own models; `AutoModel.register` does not add to them.
name = VanillaTransformerConfig.model_type
modeling_auto.MODEL_MAPPING_NAMES[name] = (
    "VanillaTransformerModel",
    "VanillaTransformerEncoderModel",
)
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[name] = (
    "VanillaTransformerForConditionalGeneration"
)
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] = "VanillaTransformerForCausalLM"


class ModelTester:
    """A tiny configuration and inputs, with the names that transformers' tests expect."""

    batch_size, seq_length, is_training = 13, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    is_encoder_decoder = True
    config_class = SUBJECT["config"]
    causal_lm_class = SUBJECT["causal"]

    def get_config(self):
        # Tests compare training between processes and with greedy output: no dropout, no smoothing.
        return self.config_class(
            vocab_size=99,
            d_model=self.hidden_size,
            **SIZES,
            dropout=0.0,
            **SUBJECT["options"],
            max_position_embeddings=100,
            pad_token_id=0,  # not 1, which is the prompt of the overfitting test
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            is_encoder_decoder=self.is_encoder_decoder,
        )

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        tokens = [
            ids_tensor([self.batch_size, self.seq_length], config.vocab_size).clamp(3)
            for _ in range(2)
        ]
        masks = [torch.ones_like(ids).to(torch_device) for ids in tokens]
        names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        inputs = dict(zip(names, (tokens[0], masks[0], tokens[1], masks[1]), strict=True))
        return config, inputs


class OneStackTester(ModelTester):
    is_encoder_decoder = False

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, {name: inputs[name] for name in ("input_ids", "attention_mask")}


class Suite(
    ModelTesterMixin,
    GenerationTesterMixin,
    PipelineTesterMixin,
    TrainingTesterMixin,
    TensorParallelTesterMixin,
    FSDPTesterMixin,
):
    tester_class = ModelTester
    model_tester = None  # the mixins declare it as an abstract property

    def setUp(self):
        self.model_tester = self.tester_class()

    def test_config(self):
        ConfigTester(self, config_class=SUBJECT["config"]).run_common_tests()


class Seq2SeqTest(Suite, unittest.TestCase):
    all_model_classes = SUBJECT["seq2seq"]
    is_encoder_decoder = True
    pipeline_model_mapping = {"feature-extraction": SUBJECT["seq2seq"][0]}


class CausalTest(Suite, unittest.TestCase):
    tester_class = OneStackTester
    all_model_classes = (SUBJECT["causal"],)
    pipeline_model_mapping = {"text-generation": SUBJECT["causal"]}

    if SUBJECT["left_padding"] and hasattr(
        GenerationTesterMixin, "test_left_padding_compatibility"
    ):

        def test_left_padding_compatibility(self):
            # The test is skipped if the configuration has a field named encoder_*.
            to_dict = SUBJECT["config"].to_dict

            def without_encoder(config):
                fields = to_dict(config)
                return {k: fields[k] for k in fields if not k.startswith("encoder")}

            with unittest.mock.patch.object(SUBJECT["config"], "to_dict", without_encoder):
                super().test_left_padding_compatibility()


if SUBJECT["encoder"]:

    class EncoderTest(ModelTesterMixin, PipelineTesterMixin, unittest.TestCase):
        all_model_classes = (SUBJECT["encoder"],)
        pipeline_model_mapping = {"feature-extraction": SUBJECT["encoder"]}

        def setUp(self):
            self.model_tester = OneStackTester()
