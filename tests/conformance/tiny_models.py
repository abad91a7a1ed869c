"""Create tiny random models with a tokenizer for the pipeline tests of transformers.

These tests usually download such models. `tiny_models.py FOLDER` writes them in the same layout.
"""

import json
import sys
from pathlib import Path

from transformers import MarianForCausalLM, MarianModel
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerModel,
)
from vanilla_transformer.data.tokenization import train_tokenizer

ARCHITECTURES = (
    VanillaTransformerModel,
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    MarianModel,
    MarianForCausalLM,
)
SIZES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}


def main(folder: Path) -> None:
    disable_progress_bar()
    tokenizer = train_tokenizer(["This is a test.", "Something else is great!"], vocab_size=320)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    for architecture in ARCHITECTURES:
        config = architecture.config_class(
            vocab_size=len(tokenizer),
            d_model=32,
            max_position_embeddings=512,
            decoder_start_token_id=special["bos_token_id"],
            is_encoder_decoder=architecture in (VanillaTransformerModel, MarianModel),
            **SIZES,
            **special,
        )
        model_folder = folder / config.model_type / architecture.__name__
        architecture(config).save_pretrained(model_folder)
        tokenizer.save_pretrained(model_folder)
    about = {
        "tokenizer_classes": ["PreTrainedTokenizerFast"],
        "processor_classes": [],
        "model_classes": [],
    }
    report = folder / "reports" / "tiny_model_summary.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps({cls.__name__: about for cls in ARCHITECTURES}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
