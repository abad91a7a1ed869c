"""Two processes, sharing the weights of a model, compute what one process does."""

import copy
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch
from conftest import REPOSITORY, needs, random_ids, run_ranks, slow, small_config
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
from transformers.distributed import DistributedConfig

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model.hooks import is_watched

VARIANTS = [
    {},
    *slow({"tie_word_embeddings": False, "norm_position": "pre"}),
    {"decoder_vocab_size": 60, "position_encoding": "learned"},
]
SHARINGS = ["fsdp_size", "tp_size"]


def join(store, rank):
    """Make this process one of two."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    """Calls a function in both processes, and raises any error of either."""
    store = tmp_path_factory.mktemp("processes") / "store"
    fork = multiprocessing.get_context("fork")  # slow imports are done
    pools = [
        ProcessPoolExecutor(1, mp_context=fork, initializer=join, initargs=(store, rank))
        for rank in range(2)
    ]

    def call(function, *arguments):
        for future in [pool.submit(function, *arguments) for pool in pools]:
            future.result(timeout=120)

    yield call
    call(distributed.destroy_process_group)
    for pool in pools:
        pool.shutdown()


@pytest.fixture(params=VARIANTS, ids=lambda fields: ",".join(fields) or "tied")
def saved(request, tmp_path):
    torch.manual_seed(0)
    config = small_config(dropout=0.0, **request.param)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- in each of the two processes


def load(folder, sharing=None):
    config = DistributedConfig(**{sharing: 2}) if sharing else None
    return VanillaTransformerForConditionalGeneration.from_pretrained(
        folder, distributed_config=config
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_tied_as_configured(model):
    """Source embedding, target embedding and projection are one parameter, two or three."""
    modules = (model.get_encoder().embed_tokens, model.get_decoder().embed_tokens, model.lm_head)
    config = model.config
    expected = 1 if config.shares_embeddings else 2 if config.tie_word_embeddings else 3
    assert len({id(module.weight) for module in modules}) == expected


def assert_trains_as(alone, shared, rows):
    """Two steps of both models give the same losses, gradients and weights; this process trains on
    these rows of each batch."""
    assert_tied_as_configured(shared)
    names = [name for name, _ in alone.named_parameters()]
    assert [name for name, _ in shared.named_parameters()] == names
    optimizers = [
        torch.optim.SGD(model.train().parameters(), lr=0.1, momentum=0.9)
        for model in (alone, shared)
    ]
    for seed in range(2):
        batch = {"input_ids": random_ids(4, 6, seed=seed), "labels": random_ids(4, 5, seed=~seed)}
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = alone(**batch).loss
        outputs = shared(**{name: tensor[rows] for name, tensor in batch.items()})
        assert outputs.logits is None  # as on one device
        loss = outputs.loss
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        torch.testing.assert_close(mean / 2, expected.detach(), atol=1e-5, rtol=1e-5)
        for name, theirs, ours in zip(names, alone.parameters(), shared.parameters(), strict=True):
            assert_close(whole(ours.grad), theirs.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        for name, theirs, ours in zip(names, alone.parameters(), shared.parameters(), strict=True):
            assert_close(whole(ours.detach()), theirs.detach(), name)
    assert_tied_as_configured(shared)


def assert_close(actual, expected, name):
    torch.testing.assert_close(
        actual, expected, atol=1e-5, rtol=1e-4, msg=lambda message: f"{name}: {message}"
    )


def own_rows():
    return slice(distributed.get_rank(), None, 2)


def check_fully_shard(folder):
    """torch's own FSDP, layer by layer and then the rest."""
    alone = load(folder)
    shared = copy.deepcopy(alone)
    for stack in (shared.get_encoder(), shared.get_decoder()):
        for layer in stack.layers:
            fully_shard(layer)
    fully_shard(shared)
    assert all(isinstance(parameter, DTensor) for parameter in shared.parameters())
    assert not is_watched(shared)
    assert_trains_as(alone, shared, own_rows())

    gathered = get_model_state_dict(shared, options=StateDictOptions(full_state_dict=True))
    expected = alone.state_dict()
    assert gathered.keys() == expected.keys()
    for name, weight in gathered.items():
        assert_close(weight, expected[name], name)
    shared.unshard()
    assert_tied_as_configured(shared)
    assert_close(shared.lm_head.weight.detach(), alone.lm_head.weight.detach(), "projection")


def check_outputs(folder):
    """DDP returns what the model does, with and without logits."""
    alone = load(folder)  # in evaluation, without dropout
    shared = DistributedDataParallel(copy.deepcopy(alone))
    batch = {"input_ids": random_ids(4, 6), "labels": random_ids(4, 5)}
    for options in ({"skip_logits": True}, {"skip_logits": False}):
        expected, outputs = alone(**batch, **options), shared(**batch, **options)
        assert outputs.keys() == expected.keys()
        assert_close(outputs.loss, expected.loss, "loss")
        assert (outputs.logits is None) == options["skip_logits"]
    assert_close(outputs.logits, expected.logits, "logits")


def check_first_fsdp(folder, use_orig_params):
    """The first version of FSDP has the same loss."""
    alone = load(folder)
    shared = FullyShardedDataParallel(
        copy.deepcopy(alone), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    batch = {"input_ids": random_ids(4, 6), "labels": random_ids(4, 5)}
    assert_close(shared(**batch).loss, alone(**batch).loss, "loss")


def check_training(folder, sharing):
    rows = own_rows() if sharing == "fsdp_size" else slice(None)
    alone, shared = load(folder), load(folder, sharing)
    assert any(isinstance(parameter, DTensor) for parameter in shared.parameters())
    assert not is_watched(shared)
    assert_trains_as(alone, shared, rows)
    assert_predicts_as(alone.eval(), shared.eval())


def assert_predicts_as(alone, shared):
    inputs = {
        "input_ids": random_ids(3, 6),
        "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
        "decoder_input_ids": random_ids(3, 4, seed=1),
    }
    expected = alone(**inputs).logits.detach()
    assert_close(shared(**inputs).logits.detach(), expected, "with gradients")
    with torch.no_grad():
        assert_close(shared(**inputs).logits, expected, "without gradients")


def check_saving(folder, sharing):
    """One process loads what two save, also after a training step."""
    shared = load(folder, sharing)
    batch = {"input_ids": random_ids(4, 6), "labels": random_ids(4, 5)}
    shared(**batch).loss.backward()
    torch.optim.SGD(shared.parameters(), lr=0.1).step()
    shared.save_pretrained(folder / "again")
    distributed.barrier()
    loaded = load(folder / "again")
    assert_tied_as_configured(loaded)
    for (name, theirs), ours in zip(loaded.named_parameters(), shared.parameters(), strict=True):
        assert_close(whole(ours.detach()), theirs.detach(), name)


def check_generation(folder, sharing):
    """Before any other call of the model, and again after training."""
    alone, shared = load(folder), load(folder, sharing)
    source = random_ids(3, 6)
    # without repetition, because an untrained model repeats one token
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "no_repeat_ngram_size": 1}
    for _ in range(2):
        for num_beams in (1, 3):
            options["num_beams"] = num_beams
            expected = alone.eval().generate(source, **options)
            assert torch.equal(shared.eval().generate(source, **options), expected)
        for model in (alone, shared):
            model.train()(input_ids=source, labels=random_ids(3, 5)).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()


# ---------------------------------------------------------------- the tests


def test_a_model_under_ddp_returns_the_same_as_without(on_two_processes, checkpoint):
    on_two_processes(check_outputs, checkpoint)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_the_first_version_of_fsdp_has_the_same_loss(on_two_processes, saved, use_orig_params):
    on_two_processes(check_first_fsdp, saved, use_orig_params)


def test_fully_sharded_training_equals_training_on_one_device(on_two_processes, saved):
    on_two_processes(check_fully_shard, saved)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_model_on_two_devices_trains_and_predicts_as_on_one(on_two_processes, saved, sharing):
    on_two_processes(check_training, saved, sharing)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_one_device_loads_what_two_devices_saved(on_two_processes, saved, sharing):
    on_two_processes(check_saving, saved, sharing)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_model_on_two_devices_generates_the_same_as_on_one(on_two_processes, saved, sharing):
    on_two_processes(check_generation, saved, sharing)


# ---------------------------------------------------------------- with a trainer

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from accelerate.utils import DistributedType
from conftest import PAIRS
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.distributed import end_training
from vanilla_transformer.training.trainer import make_trainer

folder, tokenizer, processes = sys.argv[2], AutoTokenizer.from_pretrained(sys.argv[3]), sys.argv[4]
arguments = TranslationTrainingArguments(
    folder + processes, max_steps=3, learning_rate=0, logging_steps=1,
    per_device_train_batch_size=2, use_cpu=True, save_strategy="no", report_to="none",
)
sharing = None
if processes == "2":
    sharing = DistributedConfig(tp_size=2)
    # accelerate shares no layers among CPUs
    arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
model = AutoModelForSeq2SeqLM.from_pretrained(folder, distributed_config=sharing)
data = Dataset.from_list(PAIRS[:5])
trainer = make_trainer(model, tokenizer, arguments, {"train": data, "validation": data})
trainer.train()
trainer.evaluate()
if arguments.process_index == 0:
    trainer.state.save_to_json(folder + processes + "/state.json")
end_training(trainer)
"""

T5GEMMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"],
    "dropout_rate": 0.0,
}  # fmt: skip


@needs("accelerate", "1.13", "tensor parallelism in Trainer")
def test_a_trainer_logs_the_losses_of_one_process(checkpoint, tmp_path):
    """Of a stock model too, whose loss is a mean. transformers (5.17 to 5.24) doubles the loss of
    an evaluation. The weights stay: those of this model get wrong gradients in 5.17."""
    vocab_size = VanillaTransformerConfig.from_pretrained(checkpoint).vocab_size
    side = {**T5GEMMA, "vocab_size": vocab_size}
    config = T5GemmaConfig(encoder=side, decoder=side, pad_token_id=0, bos_token_id=1, **side)
    T5GemmaForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    logs = []
    for processes in (1, 2):
        flags = (REPOSITORY / "tests", tmp_path / "model", checkpoint, processes)
        failed, output = run_ranks(processes, tmp_path / "program.py", *flags, cwd=tmp_path)
        assert not failed, output
        state = json.loads((tmp_path / f"model{processes}/state.json").read_text())
        names = ("loss", "eval_loss", "train_loss")
        logs.append([log[name] for log in state["log_history"] for name in names if name in log])
    assert len(logs[0]) == 5
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
