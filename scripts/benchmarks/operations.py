"""Count the operations and synchronizations of a step on a GPU, on any machine.

python -m scripts.benchmarks.operations --output_dir outputs/operations

Small batches take as long as their operations take to launch, and after each synchronization the
next ones start late. Here tensors claim to be on a GPU, so that all code takes its paths for GPUs,
but they are computed on the CPU. An operation is one of torch's, which may be several kernels;
views and memory allocation are free. Training is forward, backward and AdamW in bfloat16 autocast;
decoding is one more token.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers.hf_argparser import HfArg

from scripts.benchmarks.gpu import varlen
from scripts.benchmarks.gpu.decoding import CACHES, SEARCHES
from scripts.benchmarks.peers import PEERS, Size
from scripts.benchmarks.speed import generation, sources, training, training_batch
from scripts.benchmarks.turns import settle
from scripts.reports import markdown, read_options, write
from vanilla_transformer.model import attention, loss

GPU = torch.device("cuda", 0)
ANSWERS = {  # for the attributes that tell where a tensor is
    torch.Tensor.device.__get__: GPU,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}
COPIES = ("tolist", "numpy", "cpu")  # from a GPU
FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::_unsafe_view")
SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
STEPS = (4, 8)  # tokens: the difference is decoding without the preparations
LABELS = ("step", "what", "operations", "syncs")


@dataclass
class OperationsArguments:
    output_dir: str | None = HfArg(
        default=None, help="Folder for operations.json and operations.md."
    )
    layers: int = HfArg(default=6, help="Layers of encoder and of decoder.")
    vocab_size: int = HfArg(default=37_000, help="Tokens in the vocabulary.")
    sentences: int = HfArg(default=200, help="Pairs in the batch of training.")


def main() -> None:
    arguments = read_options(OperationsArguments, __doc__)
    settle()
    size = Size(64, 128, 2, arguments.layers, arguments.vocab_size)  # widths do not matter
    rows = [*training_rows(size, arguments.sentences), *decoding_rows(size)]
    table = markdown(LABELS, [[row[name] for name in LABELS] for row in rows])
    write(arguments.output_dir, "operations", rows, table)


# ---------------------------------------------------------------- Steps


def training_rows(size: Size, sentences: int) -> Iterator[dict[str, Any]]:
    """A row for each library; ours also without padding."""
    lengths = torch.randint(10, 30, (2, sentences), generator=torch.Generator().manual_seed(0))
    batch = training_batch(*lengths, size.vocab_size, torch.Generator().manual_seed(0))
    contenders = {"ours": "vanilla_transformer", "ours, packed": "vanilla_transformer"}
    contenders |= {name: name for name in ("marian", "bart", "torch")}
    for what, peer in contenders.items():
        model = PEERS[peer](size)
        if what.endswith("packed"):
            varlen.register()
            model.set_attn_implementation(varlen.NAME)
        with on_gpu():
            run = training(model, [batch], autocast=True, fused=True)
            run()  # the optimizer creates its moments
            counted = count(run)
        yield {"step": "training", "what": what, **counted}


def decoding_rows(size: Size) -> Iterator[dict[str, Any]]:
    """A row for each search and cache, ours and Marian's."""
    ids = sources(size, 4, seed=0)
    for search, beams in SEARCHES.items():
        for cache in ("dynamic", "static"):
            for what, peer in {"ours": "vanilla_transformer", "marian": "marian"}.items():
                model = PEERS[peer](size)
                for name, value in CACHES[cache].items():
                    setattr(model.generation_config, name, value)
                few, many = (
                    count_on_gpu(generation(model, ids, beams, tokens)) for tokens in STEPS
                )
                per_token = {
                    name: round((many[name] - few[name]) / (STEPS[1] - STEPS[0])) for name in few
                }
                yield {"step": f"{search}, {cache} cache", "what": what, **per_token}


# ---------------------------------------------------------------- Counting


def count_on_gpu(run: Callable[[], object]) -> dict[str, int]:
    with on_gpu():
        return count(run)


def count(run: Callable[[], object]) -> dict[str, int]:
    """Operations and synchronizations of a run, with its tensors on a GPU that does not exist."""
    with Counter() as counter:
        run()
    return {"operations": counter.operations, "syncs": counter.syncs}


@contextmanager
def on_gpu() -> Iterator[None]:
    """Code in this context finds its tensors, and autocast, on a GPU."""
    autocast = {
        "autocast": partial(torch.autocast, "cpu"),
        "is_autocast_enabled": partial(torch.is_autocast_enabled, "cpu"),
        "get_autocast_dtype": partial(torch.get_autocast_dtype, "cpu"),
    }
    with ExitStack() as stack:
        for name, function in autocast.items():
            stack.enter_context(mock.patch.object(torch, name, without_device(function)))
        stack.enter_context(mock.patch.object(varlen.varlen, "varlen_attn", attend))
        kernel = mock.patch.object(loss, "_gpu_kernel", return_value=softmax_less_label)
        stack.enter_context(kernel)
        stack.enter_context(mock.patch.object(attention, "suits_small_tiles", return_value=False))
        stack.enter_context(mock.patch.object(loss, "_has_wide_products", return_value=True))
        stack.enter_context(mock.patch.object(loss, "_add_product", add_product))
        stack.enter_context(OnGPU())
        yield


def without_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first argument is a device to ignore."""
    return lambda device=None, *args, **options: function(*args, **options)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *ends: Any, **options: Any
) -> torch.Tensor:
    """One operation in place of the kernel for packed sequences, with the same shapes."""
    heads = (states.transpose(0, 1)[None] for states in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*heads).squeeze(0).transpose(0, 1)


def softmax_less_label(
    scores: torch.Tensor, labels: torch.Tensor, weight: float, out: torch.Tensor
) -> torch.Tensor:
    """An operation in place of the loss's kernel, and one for the sum of its output."""
    return out.copy_(scores)[:, 0].sum()


def add_product(total: torch.Tensor, *args: Any) -> None:
    """An operation in place of an accumulated product."""
    total.mul_(1)


class OnGPU(TorchFunctionMode):
    """Tensors claim to be on a GPU; operations for a GPU run on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in ANSWERS:
            return ANSWERS[function]
        if getattr(function, "__name__", "") in COPIES:
            Counter.copies += 1
        args, kwargs = tree_map(on_cpu, (args, kwargs or {}))
        return function(*args, **kwargs)


def on_cpu(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device)
    return "cpu" if is_device and str(value).startswith("cuda") else value


class Counter(TorchDispatchMode):
    """Counts the operations that compute something, and those whose result the CPU waits for."""

    copies = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self._syncs, self._copies = 0, Counter.copies

    @property
    def syncs(self) -> int:
        return self._syncs + Counter.copies - self._copies

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode hides the parts of an operation
            result = operation.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = operation.name()
        self._syncs += name.startswith(SYNCS)
        self.operations += not (operation.is_view or name.startswith((*FREE, *SYNCS[:1])))
        return operation(*args, **kwargs)


if __name__ == "__main__":
    main()
