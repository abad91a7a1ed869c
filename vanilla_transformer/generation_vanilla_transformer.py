"""What the paper's decoding adds to transformers' `GenerationMixin`."""

from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` with the paper's default output length."""

    # Section 6.1: "we set the maximum output length during inference to input length + 50"
    extra_output_tokens = 50

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        has_default_min_length: bool,
        model_input_name: str,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
        **kwargs: Any,
    ) -> GenerationConfig:
        """Input length + 50 where the caller set no limit; transformers' own default is 20 tokens.

        Args:
            inputs_tensor: The encoder's input, of shape (batch, source_length) or
                (batch, source_length, d_model).
        """
        unlimited = has_default_max_length and generation_config.max_new_tokens is None
        if unlimited and self.config.is_encoder_decoder:
            generation_config.max_new_tokens = inputs_tensor.shape[1] + self.extra_output_tokens
        return super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            has_default_min_length=has_default_min_length,
            model_input_name=model_input_name,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )
