"""Configuration of the 2017 Transformer, and the rows of the paper's Table 3 as presets.

Source: Vaswani et al. (2017), "Attention Is All You Need", https://arxiv.org/abs/1706.03762
"""

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

if TYPE_CHECKING:
    # Never executed. transformers saves a file together with its relative imports, so these lines
    # put every model and the pipeline into every checkpoint folder.
    from .modeling_vanilla_transformer import VanillaTransformerModel  # noqa: F401
    from .pipelines import TranslationPipeline  # noqa: F401

_MODELING = "modeling_vanilla_transformer"
AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": f"{_MODELING}.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": f"{_MODELING}.VanillaTransformerForConditionalGeneration",
    "AutoModelForTextEncoding": f"{_MODELING}.VanillaTransformerEncoderModel",
    "AutoModelForCausalLM": f"{_MODELING}.VanillaTransformerForCausalLM",
}
CUSTOM_PIPELINES = {
    "translation": {
        "impl": "pipelines.TranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
    },
    "text2text-generation": {
        "impl": "pipelines.Text2TextGenerationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
    },
}


class CustomPipelines(dict):
    """Where `pipeline()` looks up a task by its full name. It changes the result in place."""

    def __contains__(self, task: object) -> bool:
        return super().__contains__(self._base(task))

    def __getitem__(self, task: object) -> dict[str, Any]:
        return copy.deepcopy(super().__getitem__(self._base(task)))

    @staticmethod
    def _base(task: object) -> object:
        """The task that "translation_en_to_de" and the like belong to."""
        return "translation" if str(task).startswith("translation_") else task


def _layers(n: int) -> dict[str, Any]:
    return {"encoder_layers": n, "decoder_layers": n}


def _heads(h: int) -> dict[str, Any]:
    return {"encoder_attention_heads": h, "decoder_attention_heads": h}


def _ffn(d_ff: int) -> dict[str, Any]:
    return {"encoder_ffn_dim": d_ff, "decoder_ffn_dim": d_ff}


# What each row changes in the base model, which is the configuration's default (Table 3). "tiny" is
# not from the paper but the Multi30k model of Wu et al. (2021),
# https://aclanthology.org/2021.acl-long.480
PRESETS: dict[str, dict[str, Any]] = {
    "base": {},
    "A-h1": _heads(1),
    "A-h4": _heads(4),
    "A-h16": _heads(16),
    "A-h32": _heads(32),
    "B-dk16": {"head_dim": 16, "value_head_dim": 64},
    "B-dk32": {"head_dim": 32, "value_head_dim": 64},
    "C-N2": _layers(2),
    "C-N4": _layers(4),
    "C-N8": _layers(8),
    "C-d256": {"d_model": 256},
    "C-d1024": {"d_model": 1024},
    "C-ff1024": _ffn(1024),
    "C-ff4096": _ffn(4096),
    "D-drop0.0": {"dropout": 0.0},
    "D-drop0.2": {"dropout": 0.2},
    "D-ls0.0": {"label_smoothing": 0.0},
    "D-ls0.2": {"label_smoothing": 0.2},
    "E-learned": {"position_encoding": "learned"},
    "big": {"d_model": 1024, **_ffn(4096), **_heads(16), "dropout": 0.3},
    "tiny": {"d_model": 128, **_ffn(256), **_heads(4), **_layers(4), "dropout": 0.3},
}

# The largest sizes, so that a malicious file can't use up memory or time: the deepest published
# model has a thousand layers (https://arxiv.org/abs/2203.00555), and float32, in which positions
# are encoded, has all integers up to 2^24.
MOST_LAYERS, MOST = 1000, 2**24
HEAD_SIZES = {"d_model", "encoder_attention_heads", "decoder_attention_heads"}


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Hyper-parameters of the encoder-decoder Transformer; the defaults are the paper's base model.

    Args:
        vocab_size: Size of the vocabulary that source and target share, or of the source's.
        decoder_vocab_size: Size of a separate target vocabulary, equal or not; `None` shares the
            source's.
        d_model: Width of every layer's input and output.
        encoder_layers, decoder_layers: N.
        encoder_attention_heads, decoder_attention_heads: h.
        encoder_ffn_dim, decoder_ffn_dim: d_ff.
        head_dim: d_k, the width of a query or key in one head. `None` becomes d_model / h, also
            after later changes of d_model or h, or stays `None` if encoder and decoder differ in h.
        value_head_dim: d_v, the width of a value in one head; `None` is d_k.
        attention_bias: Biases in the four projections of attention. The paper's are plain matrices.
        dropout: P_drop, on each sub-layer's output and on embedding plus position (section 5.4).
        attention_dropout: Dropout on the attention weights. Not in the paper.
        activation_dropout: Dropout inside the feed-forward network. Not in the paper.
        activation_function: Name in transformers' `ACT2FN`.
        label_smoothing: epsilon_ls (section 5.4), used by the model's own loss while training.
        norm_position: "post" is LayerNorm(x + Sublayer(x)), the paper's; "pre" is
            x + Sublayer(LayerNorm(x)) with one more LayerNorm after each stack.
        decoder_norm_position: The same for the decoder; `None` is `norm_position`.
        final_layer_norm: Which stacks end in a layer normalization: "both", "encoder", "decoder" or
            "none". `None` means those with pre-norm. Not in the paper.
        embedding_layer_norm: Layer normalization of embedding plus position. Not in the paper.
        layer_norm_eps: Added to the variance; the default is tensor2tensor's, as the paper names
            none.
        position_encoding: "sinusoidal" has no length limit; "learned" is row (E) of Table 3.
        sinusoid_frequencies: "paper" is 10000^(-2i / d_model); "tensor2tensor", as in its code and
            in fairseq and Marian, is 10000^(-2i / (d_model - 2)).
        position_offset: The first token's position in the sinusoids. The paper's is 0.
        max_position_embeddings: Number of learned positions; sinusoids have no limit.
        scale_embedding: Multiply embeddings by sqrt(d_model) on input (section 3.4).
        tie_word_embeddings: Source embedding, target embedding and pre-softmax projection are one
            matrix (section 3.4); with two vocabularies, the latter two.
        lm_head_bias: A bias in the projection before the softmax. The paper has none.
        pad_token_id, bos_token_id, eos_token_id, decoder_start_token_id: Special token ids.
        initializer: How weights are initialized: "depth_scaled" lets post-norm models learn sooner,
            "tensor2tensor" is what the paper's own code does. See `_init_weights`.
        use_cache: Keep keys and values of earlier positions while generating.

    Raises:
        huggingface_hub.errors.StrictDataclassError: A value has the wrong type, is out of range, or
            contradicts another; the message names it and what was expected.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # the latter up to transformers 5.23
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    # Names within a stack, or in the models around it: each class keeps those of its own modules.
    base_model_tp_plan = {
        "shared": "embedding_rowwise",
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.encoder_attn.q_proj": "colwise",
        "layers.*.encoder_attn.k_proj": "colwise",
        "layers.*.encoder_attn.v_proj": "colwise",
        "layers.*.encoder_attn.out_proj": "rowwise",
        "layers.*.ffn.fc1": "colwise",
        "layers.*.ffn.fc2": "rowwise",
    }
    base_model_fsdp_plan = {"layers.*": "free_full_weight"}
    _auto_class = "AutoConfig"

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    head_dim: int | None = None
    value_head_dim: int | None = None
    attention_bias: bool = False
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    label_smoothing: float | int = 0.1
    norm_position: Literal["post", "pre"] = "post"
    decoder_norm_position: Literal["post", "pre"] | None = None
    final_layer_norm: Literal["both", "encoder", "decoder", "none"] | None = None
    embedding_layer_norm: bool = False
    layer_norm_eps: float = 1e-6
    position_encoding: Literal["sinusoidal", "learned"] = "sinusoidal"
    sinusoid_frequencies: Literal["paper", "tensor2tensor"] = "paper"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1
    initializer: Literal["depth_scaled", "tensor2tensor"] = "depth_scaled"
    is_encoder_decoder: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs["auto_map"] = self._auto_map(kwargs.pop("auto_map", None) or {})
        # `pipeline()` requires `trust_remote_code` if this is set, even if the code is installed.
        kwargs.pop("custom_pipelines", None)
        if __name__.startswith("transformers_modules."):
            kwargs["custom_pipelines"] = CustomPipelines(CUSTOM_PIPELINES)
        head_dim = self.head_dim
        self._take_other_names(kwargs)
        # transformers reads the width of keys and values from here; sizes are checked below
        self.head_dim = self._share_of_each_head() if head_dim is None else head_dim
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Same as transformers' method, but a `head_dim` that equals d_model / h follows them."""
        is_size = self.attribute_map.get(name, name) in HEAD_SIZES
        follows = is_size and self.head_dim in (None, self._share_of_each_head())
        super().__setattr__(name, value)
        if follows:
            super().__setattr__("head_dim", self._share_of_each_head())

    def _share_of_each_head(self) -> int | None:
        """d_model / h; None if encoder and decoder differ in h, or h does not divide d_model."""
        heads = self.encoder_attention_heads
        is_share = heads == self.decoder_attention_heads and heads and self.d_model % heads == 0
        return self.d_model // heads if is_share else None

    def _auto_map(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Our classes, as every folder has all of their code, and those that the folder of a user's
        subclass names. If the configuration is such a subclass too, ours are not needed."""
        ours = tuple("." + place.partition(".")[2] for place in AUTO_MAP.values())
        own = {name: place for name, place in saved.items() if not str(place).endswith(ours)}
        return {**AUTO_MAP, **own} if type(self) is VanillaTransformerConfig else own

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Same as transformers' method, which assigns `kwargs` in their order, but `head_dim` comes
        last, as it follows the sizes, and the result is valid."""
        head_dim = kwargs.pop("head_dim", None)
        last = {} if head_dim is None else {"head_dim": head_dim}
        found = super().from_dict(config_dict, **kwargs, **last)
        (found[0] if isinstance(found, tuple) else found).expect_valid()
        return found

    def _take_other_names(self, given: dict[str, Any]) -> None:
        """Set `hidden_size` and the like before other values are derived from them."""
        for alias in given.keys() & self.attribute_map.keys():
            name, value = self.attribute_map[alias], given.pop(alias)
            held = getattr(self, name)
            if held not in (value, self.__dataclass_fields__[name].default):
                raise ValueError(
                    f"{alias}={value!r} is another name of {name}={held!r}: expected one"
                )
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """The fields to save, with the pipelines, for processes that lack this package."""
        return {**super().to_dict(), "custom_pipelines": copy.deepcopy(CUSTOM_PIPELINES)}

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "VanillaTransformerConfig":
        """The configuration of a row of the paper's Table 3.

        Args:
            name: A key of `PRESETS`, such as "base", "big", "A-h1", "E-learned" or "tiny".
            overrides: Fields set on top of the preset's.

        Raises:
            ValueError: No preset has that name.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def target_vocab_size(self) -> int:
        """Size of the vocabulary that the decoder reads and predicts."""
        return self.decoder_vocab_size or self.vocab_size

    @property
    def shares_embeddings(self) -> bool:
        """Whether source and target embedding are one matrix (section 3.4)."""
        return self.tie_word_embeddings and self.decoder_vocab_size is None

    def has_pre_norm(self, stack: str) -> bool:
        """Whether this stack, "encoder" or "decoder", normalizes what its sub-layers read."""
        position = self.decoder_norm_position if stack == "decoder" else None
        return (position or self.norm_position) == "pre"

    def ends_in_layer_norm(self, stack: str) -> bool:
        """Whether this stack, "encoder" or "decoder", ends in a layer normalization."""
        if self.final_layer_norm is None:
            return self.has_pre_norm(stack)
        return self.final_layer_norm in ("both", stack)

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PreTrainedConfig:
        """This configuration, or the part for one stack under the names of a single stack."""
        if decoder and not encoder:
            # The base class renames decoder_X to X, and neither of these can be None.
            explicit = copy.copy(self)
            explicit.decoder_vocab_size = self.target_vocab_size
            explicit.decoder_norm_position = "pre" if self.has_pre_norm("decoder") else "post"
            return super(VanillaTransformerConfig, explicit).get_text_config(decoder=True)
        return super().get_text_config(decoder=decoder, encoder=encoder)

    def for_both_stacks(self) -> "VanillaTransformerConfig":
        """The configuration of encoder and decoder, even if this one is for only one of them."""
        return self._with(is_encoder_decoder=True)

    def for_one_stack(self, stack: Literal["encoder", "decoder"]) -> "VanillaTransformerConfig":
        """This configuration for one stack. The other's sizes follow it, because transformers reads
        `num_hidden_layers`, `num_attention_heads` and `vocab_size` from the encoder's."""
        fields: dict[str, Any] = {
            f"{either}_{size}": getattr(self, f"{stack}_{size}")
            for either in ("encoder", "decoder")
            for size in ("layers", "attention_heads", "ffn_dim")
        }
        fields["vocab_size"] = self.vocab_size if stack == "encoder" else self.target_vocab_size
        fields["head_dim"] = self.head_dim or self.d_model // fields["encoder_attention_heads"]
        return self._with(is_encoder_decoder=False, decoder_vocab_size=None, **fields)

    def _with(self, **fields: Any) -> "VanillaTransformerConfig":
        """This configuration if it has these values, otherwise a copy with them."""
        if all(getattr(self, name) == value for name, value in fields.items()):
            return self
        config = copy.deepcopy(self)
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    def expect_valid(self) -> None:
        """Raise a ValueError unless the fields are valid, also after changes. `validate` refuses
        `output_attentions` as well, before it is known which attention a model gets."""
        self.validate_sizes()
        self.validate_widths()
        self.validate_probabilities()
        self.validate_activation()
        self.validate_token_ids()

    def validate_sizes(self) -> None:
        """Every size is a positive integer up to its limit."""
        stacks = ("layers", "attention_heads", "ffn_dim")
        sizes = [f"{stack}_{size}" for stack in ("encoder", "decoder") for size in stacks]
        sizes += ["vocab_size", "d_model", "max_position_embeddings"]
        for name in (*sizes, "decoder_vocab_size", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            if value is None and name not in sizes:
                continue
            most = MOST_LAYERS if name.endswith("layers") else MOST
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a positive integer")
            if value > most:
                raise ValueError(f"{name}={value!r}: expected at most {most}")

    def validate_widths(self) -> None:
        """Without `head_dim` the heads divide d_model; all heads together are at most as wide as a
        model may be; sinusoids need an even d_model."""
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(self, name)
            if self.head_dim is None and self.d_model % heads:
                raise ValueError(
                    f"d_model={self.d_model} is not divisible by {name}={heads}: "
                    "expected a multiple, or an explicit head_dim"
                )
            for width in ("head_dim", "value_head_dim"):
                value = getattr(self, width) or 1
                if heads * value > MOST:
                    raise ValueError(
                        f"{name}={heads} of {width}={value}: expected at most {MOST} together"
                    )
        if self.position_encoding == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model}: sinusoidal positions come in pairs of sine and cosine, "
                "expected an even number"
            )
        if self.sinusoid_frequencies == "tensor2tensor" and self.d_model < 4:
            raise ValueError(
                f"d_model={self.d_model} with sinusoid_frequencies='tensor2tensor': expected at "
                "least 4, as their exponents are divided by d_model - 2"
            )
        if not 0 <= self.position_offset <= MOST:
            raise ValueError(
                f"position_offset={self.position_offset}: expected an integer from 0 to {MOST}"
            )

    def validate_probabilities(self) -> None:
        """Rates of dropout and label smoothing are in [0, 1), the layer norm's epsilon above 0."""
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value!r}: expected a number in [0, 1)")
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(
                f"layer_norm_eps={self.layer_norm_eps!r}: expected a finite number above 0"
            )

    def validate_activation(self) -> None:
        """The activation function is one that transformers has."""
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function={self.activation_function!r}: "
                f"expected one of {', '.join(sorted(ACT2FN))}"
            )

    def validate_token_ids(self) -> None:
        """Special ids are in the vocabulary that they index (the base class only warns)."""
        source, target = self.vocab_size, self.target_vocab_size
        limits = {
            "pad_token_id": min(source, target),
            "bos_token_id": min(source, target),
            "eos_token_id": min(source, target),
        }
        if self.is_encoder_decoder:  # the encoder alone keeps it, but not the target's vocabulary
            limits["decoder_start_token_id"] = target
        for name, limit in limits.items():
            value = getattr(self, name)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < limit:
                    raise ValueError(
                        f"{name}={value!r} is outside the vocabulary: expected 0 <= id < {limit}"
                    )


__all__ = ["PRESETS", "VanillaTransformerConfig"]
