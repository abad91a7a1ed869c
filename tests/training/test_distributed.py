"""Sharded checkpoints, which torch pickles: they are read without running any code in them.
Training in shards is in test_layouts.py."""

import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, Payload, run_program
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from vanilla_transformer.training.distributed import (
    FORCE_WEIGHTS_ONLY,
    SHARDED_MODEL,
    check_index,
    force_weights_only,
)


@pytest.fixture
def shards(tmp_path):
    """A model and its optimizer, in as many files as there are processes: one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=tmp_path / SHARDED_MODEL, no_dist=True)
    return tmp_path / SHARDED_MODEL, state


def read(folder):
    """Shards, as training reads them."""
    check_index(folder.parent)
    with force_weights_only(), tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch, "full.pt"))
        return torch.load(Path(scratch, "full.pt"))


def test_shards_are_read(shards):
    folder, state = shards
    found = read(folder)
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    moments = state["optimizer"]["state"]["weight"]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"]["weight"]["exp_avg"], moments)
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


def test_a_payload_in_the_index_is_not_executed(shards, mark):
    folder, _ = shards
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    message = r"\.metadata is not a checkpoint's index: \w+\.mkdir is not allowed"
    with pytest.raises(ValueError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.serialization", "_open_zipfile_writer_file"),
        ("torch.serialization", "tarfile.TarFile"),
    ],
)
def test_an_index_cannot_contain_classes_that_open_files(shards, mark, module, name):
    folder, _ = shards
    call = b"".join(
        [
            b"\x80\x04",
            *(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)),
            b"\x93\x8c" + bytes([len(str(mark))]) + str(mark).encode() + b"\x85R.",
        ]
    )
    (folder / ".metadata").write_bytes(call)
    with pytest.raises(ValueError, match=rf"index: {module}\.{name} is not allowed"):
        read(folder)


@pytest.mark.filterwarnings("ignore")
def test_getattr_in_an_index_only_finds_enum_members(shards):
    """Python 3.11.0 to 3.11.3 pickle them with getattr, which itself would find any function."""
    folder, _ = shards

    class Planted:
        def __reduce__(self):
            return getattr, ("".join, "__self__")

    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(ValueError, match="is not a checkpoint's index"):
        check_index(folder.parent)

    class Member:
        def __reduce__(self):
            return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")

    (folder / ".metadata").write_bytes(pickle.dumps(Member()))
    check_index(folder.parent)


def test_a_payload_among_the_values_is_not_executed(tmp_path, mark):
    state = {"model": {"weight": torch.ones(2)}, "optimizer": {"lr": Payload(mark)}}
    checkpoint.save(state, checkpoint_id=tmp_path / SHARDED_MODEL, no_dist=True)
    with pytest.raises(ValueError, match=r"(?s)shards can't be read: .*(?i:weights.only)"):
        read(tmp_path / SHARDED_MODEL)


def test_a_truncated_index_is_reported(shards):
    folder, _ = shards
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"\.metadata is not a checkpoint's index"):
        read(folder)


def test_the_environment_variable_is_restored(shards, monkeypatch):
    name = FORCE_WEIGHTS_ONLY
    for before in (None, "0"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        read(shards[0])
        assert os.environ.get(name) == before


LEAVING = """
import sys, weakref
sys.path.insert(0, sys.argv[1])
from conftest import small_config
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.distributed import end_training

trainer = Trainer(
    VanillaTransformerForConditionalGeneration(small_config()),
    TrainingArguments("out", use_cpu=True, max_steps=2, save_strategy="no", report_to="none"),
    train_dataset=[{"input_ids": [5, 6, 2], "labels": [7, 8, 2]}] * 4,
)
trainer.train()
assert isinstance(trainer.model_wrapped, DistributedDataParallel)
wrapped = weakref.ref(trainer.model_wrapped)
leave, left = distributed.destroy_process_group, []

def leave_without_it(*arguments):
    left.append(wrapped() is None)
    leave(*arguments)

distributed.destroy_process_group = leave_without_it
end_training(trainer)
assert left == [True], "the wrapped model was the last to refer to the group"
"""


def test_the_wrapped_model_is_freed_before_the_process_group_ends(tmp_path):
    failed, output = run_program(2, LEAVING, REPOSITORY / "tests", cwd=tmp_path)
    assert not failed, output


MASKS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from accelerate.utils import gather_object
from conftest import small_trainer
from transformers import AutoTokenizer
from vanilla_transformer.model.dropout import dropout
from vanilla_transformer.training.distributed import end_training

def compare(module, inputs):
    masks.append(gather_object([dropout(torch.ones(64), 0.5, True).tolist()]))
    seeds.append(gather_object([torch.initial_seed()]))

masks, seeds = [], []
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
pairs = [{"input_ids": [5, 6, 2], "labels": [7, 8, 2]}] * 8
options = {"ddp_backend": "gloo", "save_strategy": "no", "max_steps": 2}
trainer = small_trainer("out", tokenizer, pairs=pairs, **options)
trainer.model.register_forward_pre_hook(compare)
trainer.train()
assert len(masks) == 2
for one, other in masks:
    for moved in range(32):
        length = 64 - moved
        assert one[moved:] != other[:length] and other[moved:] != one[:length], moved
assert all(one == other for one, other in seeds), "accelerate would shuffle differently"
end_training(trainer)
"""


def test_each_process_draws_its_own_dropout(checkpoint, tmp_path):
    """Also for batches of the same shape, and though all have the same seed."""
    failed, output = run_program(2, MASKS, REPOSITORY / "tests", checkpoint, cwd=tmp_path)
    assert not failed, output
