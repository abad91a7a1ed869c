"""The original 2017 Transformer as a first-class Hugging Face model.

Importing the package registers its classes under transformers' Auto classes and brings back
`pipeline("translation")` and `pipeline("text2text-generation")`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .model.configuration_vanilla_transformer import VanillaTransformerConfig
from .model.modeling_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from .model.pipelines import (
    Text2TextGenerationPipeline,
    TranslationPipeline,
    register_translation_pipelines,
)
from .model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

__version__ = "0.1.0"

AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration)
AutoModelForTextEncoding.register(VanillaTransformerConfig, VanillaTransformerEncoderModel)
AutoModelForCausalLM.register(VanillaTransformerConfig, VanillaTransformerForCausalLM)
# The tokenizer for folders that name none is a stock one.
AutoTokenizer.register(
    VanillaTransformerConfig,
    tokenizer_class=PreTrainedTokenizerFast,
    fast_tokenizer_class=VanillaTransformerTokenizer,
)
# `Trainer` (5.17 to 5.24) asks this table, which `register` leaves alone, whether to shift labels.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[VanillaTransformerConfig.model_type] = (
    VanillaTransformerForCausalLM.__name__
)
register_translation_pipelines()

__all__ = [
    "Text2TextGenerationPipeline",
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerTokenizer",
]
