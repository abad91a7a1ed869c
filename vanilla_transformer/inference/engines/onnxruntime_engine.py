"""ONNX Runtime behind the interface of our models: all of `generate()` works.

It runs the two graphs that `vanilla_transformer.export.onnx_graphs` writes. The search is
transformers', as for a model in torch; encoder and decoder steps run in ONNX Runtime. Tensors are
passed between the two without copies.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import EncoderDecoderCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ...model.attention import repeat_sources
from ...model.cache import CACHE_NAME, is_generation_cache, new_cache, takes_either_name
from ...model.configuration_vanilla_transformer import VanillaTransformerConfig
from ...model.generation import VanillaTransformerGenerationMixin
from ...model.pretrained import VanillaTransformerPreTrainedModel
from ...model.validation import expect_in_range, validate_inputs

NAME, TARGET = "onnxruntime", "onnx"
ENCODER, DECODER = "encoder_model.onnx", "decoder_model.onnx"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def recognizes(folder: Path) -> bool:
    """Whether this folder was exported to ONNX."""
    return all((folder / name).is_file() for name in (ENCODER, DECODER, "config.json"))


def load(
    folder: Path, *, device: str | torch.device = "cpu", dtype: str | None = None
) -> "OnnxRuntimeModel":
    """The model of an exported folder.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: The type that the graphs were exported with, or "auto"; no others are possible.

    Raises:
        ImportError: ONNX Runtime is not installed.
        ValueError: ONNX Runtime can't run on the device, the graphs have a different type, or a
            file is damaged.
    """
    model = OnnxRuntimeModel(Path(folder), torch.device(device))
    own = str(model.dtype).removeprefix("torch.")
    if dtype not in (None, "auto", own):
        raise ValueError(f"dtype={dtype!r}: expected {own!r}, the type of the graphs in {folder}")
    return model


class Graph:
    """An ONNX graph that takes and returns torch tensors.

    Raises:
        ImportError, ValueError: As `load`.
    """

    def __init__(self, path: Path, device: torch.device):
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{path.parent} needs the package onnxruntime: "
                "pip install 'vanilla-transformer[export]'"
            ) from error
        provider, available = PROVIDERS.get(device.type), onnxruntime.get_available_providers()
        if provider not in available:
            kinds = [kind for kind, name in PROVIDERS.items() if name in available]
            raise ValueError(
                f"device={str(device)!r}: expected {' or '.join(kinds)}, which the installed "
                "onnxruntime supports; onnxruntime-gpu brings cuda"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        place = {"device_id": device.index or 0} if device.type == "cuda" else {}
        try:
            self.session = onnxruntime.InferenceSession(path, options, [(provider, place)])
        except Exception as error:  # such as for a file that is cut short: they share no class
            raise ValueError(f"{path}: can't open the graph: {error}") from error
        self.place = device.type, device.index or 0
        self.to_ort = onnxruntime.OrtValue.from_dlpack
        self.types = {put.name: put.type for put in self.session.get_inputs()}
        self.shapes = {put.name: put.shape for put in self.session.get_inputs()}

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs by name."""
        binding = self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, self.to_ort(value.contiguous()))
        names = [output.name for output in self.session.get_outputs()]
        for name in names:
            binding.bind_output(name, *self.place)
        self.session.run_with_iobinding(binding)
        return dict(zip(names, map(torch.from_dlpack, binding.get_outputs()), strict=True))


class OnnxRuntimeEncoder:
    """The encoder, as `generate()` calls it.

    Args:
        graph: Its graph.
        model: The model that it is a part of.
    """

    main_input_name = "input_ids"

    def __init__(self, graph: Graph, model: "OnnxRuntimeModel"):
        self.graph, self.model = graph, model

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """(batch, source_length) ids and mask to (batch, source_length, d_model) states.

        Raises:
            IndexError: A token id or a position has no embedding.
            ValueError: The caller wants what the graph does not compute.
        """
        expect_none(kwargs)
        assert input_ids is not None  # or inputs_embeds, which are rejected
        expect_in_range(self.model, {"input_ids": input_ids})
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        outputs = self.graph(input_ids=input_ids.long(), attention_mask=attention_mask.long())
        return BaseModelOutput(**outputs)

    __call__ = forward


class OnnxRuntimeModel(VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin):
    """An exported model. It has no parameters: ONNX Runtime holds the weights.

    Args:
        folder: The exported folder.
        device: Where to run it.
    """

    def __init__(self, folder: Path, device: torch.device):
        super().__init__(VanillaTransformerConfig.from_pretrained(folder))
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self._device = device
        self._encoder = OnnxRuntimeEncoder(Graph(folder / ENCODER, device), self)
        self._decoder = Graph(folder / DECODER, device)
        for name in (ENCODER, DECODER):  # memory-mapped, to identify the weights
            path = folder / name
            content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
            self.register_buffer(path.stem, content, persistent=False)
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where the graphs run."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The type of states, keys and values."""
        is_half = self._decoder.types["encoder_hidden_states"] == "tensor(float16)"
        return torch.float16 if is_half else torch.float32

    @property
    def version(self) -> str:
        """The libraries that compute, and their versions; torch does the search."""
        import onnxruntime

        return f"torch {torch.__version__}, {NAME} {onnxruntime.__version__}"

    def to(self, device: Any) -> "OnnxRuntimeModel":
        """This model: it stays on the device that it was loaded for.

        Raises:
            ValueError: `device` is a different one.
        """
        if torch.device(device).type != self.device.type:
            raise ValueError(
                f"device={str(device)!r}: expected {str(self.device)!r}, which the model was "
                "loaded for"
            )
        return self

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The module that turns a source into states."""
        return self._encoder

    @takes_either_name
    @validate_inputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits (batch, target_length, vocabulary) and the cache, like the model's `forward`.

        Raises:
            IndexError: A token id or a position has no embedding.
            ValueError: The caller wants what the graph does not compute.
        """
        expect_none(kwargs)
        assert decoder_input_ids is not None  # or inputs_embeds, which are rejected
        if decoder_attention_mask is not None and not decoder_attention_mask.all():
            raise ValueError("decoder_attention_mask with zeros: expected targets without padding")
        if encoder_outputs is None:
            encoder_outputs = self._encoder(input_ids, attention_mask)
        states = encoder_outputs[0]
        states, mask = repeat_sources(decoder_input_ids, states, attention_mask)
        mask = states.new_ones(states.shape[:2]) if mask is None else mask
        expect_in_range(self, {"decoder_input_ids": decoder_input_ids, "cache": cache})
        cache = new_cache(self.config) if cache is None else cache
        if cache.is_compileable:
            raise ValueError("cache_implementation: expected None, the graphs grow their cache")
        outputs = self._decoder(
            input_ids=decoder_input_ids.long(),
            encoder_hidden_states=states,
            encoder_attention_mask=mask.long(),
            **self._past(cache, len(states)),
        )
        logits = outputs.pop("logits")
        self._fill(cache, outputs)
        return Seq2SeqLMOutput(
            logits=logits,
            **{CACHE_NAME: None if use_cache is False else cache},
            encoder_last_hidden_state=states,
        )

    def _past(self, cache: EncoderDecoderCache, rows: int) -> dict[str, torch.Tensor]:
        """The cache as inputs of the graph, of length 0 before the first step."""
        past = {}
        for name, shape in self._decoder.shapes.items():
            if name.startswith("past_key_values."):
                layer, kind = _layer(cache, name)
                held = getattr(layer, f"{kind}s")
                if held is None:
                    held = torch.empty(rows, shape[1], 0, shape[3], dtype=self.dtype)
                past[name] = held.to(self.device)
        return past

    def _fill(self, cache: EncoderDecoderCache, present: dict[str, torch.Tensor]) -> None:
        """Put the graph's outputs into the cache; there are none for a known source."""
        for name, states in present.items():
            layer, kind = _layer(cache, name)
            if not states.shape[2]:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(states, states)
            setattr(layer, f"{kind}s", states)

    def _use_fast_cache(self, prompt_length: int, options: Any) -> None:
        """Same as a model's, but the beams of a source do not share its keys."""
        super()._use_fast_cache(prompt_length, options)
        cache = options.kwargs.get(CACHE_NAME)
        if is_generation_cache(cache):
            for layer in cache.cross_attention_cache.layers:
                layer.rows_per_source = 1


def _layer(cache: EncoderDecoderCache, name: str) -> tuple[Any, str]:
    """The layer of a cache and the part of it, "key" or "value", that a graph's input or output
    holds, such as `present.0.encoder.key`."""
    _, number, stack, kind = name.split(".")
    own = cache.self_attention_cache if stack == "decoder" else cache.cross_attention_cache
    return own.layers[int(number)], kind


def expect_none(options: dict[str, Any]) -> None:
    """Raise a ValueError unless these options are unset or ask for nothing."""
    for name, value in options.items():
        if value is not None and value is not False and name != "return_dict":
            raise ValueError(f"{name}: expected None, the graphs of ONNX don't compute it")
