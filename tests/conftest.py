import faulthandler
import functools
import gc
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from contextlib import ExitStack
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

# Set before transformers and datasets are imported: no test must access a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch
from accelerate.state import AcceleratorState
from alone import run_alone
from packaging.version import Version
from torch import distributed
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.data.tokenization import train_tokenizer

gc.set_threshold(50_000, 20, 20)  # more frequent collections would free little
REPOSITORY = Path(__file__).parents[1]
# transformers 5.17 and some later versions read back tensors before they are completely offloaded.
OFFLOADS_IN_ORDER = "prefetch_stream.wait_stream" in inspect.getsource(Cache.update)

# Small, and with every size different, so that no two can be confused.
SMALL = {
    "vocab_size": 50,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36,
}


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports():
    """Freezes all objects imported so far: after each training, accelerate runs a garbage
    collection, which would search them for half a second."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks():
    """Saving a checkpoint normally waits until its files are on the disk; tests have no power
    failures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers for a test, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def curves(request, monkeypatch):
    """Only tests marked with `curves` draw the curves of a training, which take half of its time.
    Without the packages for training, there is nothing to draw."""
    if request.node.get_closest_marker("curves") is None and find_spec("datasets"):
        draw = "vanilla_transformer.training.callbacks.CurvesCallback.on_train_end"
        monkeypatch.setattr(draw, lambda *args, **kwargs: None)


@pytest.fixture(autouse=True)
def verbosity():
    """What transformers logs in a test does not depend on the tests that ran before it."""
    before = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(before)


def needs(package, version, feature):
    """Skips a test if an installed package is too old for it."""
    too_old = Version(installed_version(package)) < Version(version)
    return pytest.mark.skipif(too_old, reason=f"needs {package} {version}: {feature}")


def small_config(**overrides):
    known = VanillaTransformerConfig()
    for name in overrides.keys() - {"attn_implementation"}:
        assert hasattr(known, name), f"{name} is no field, and transformers swallows it"
    return VanillaTransformerConfig(**{**SMALL, **overrides})


def slow(*values):
    """Marks tests with these parameters as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def random_ids(rows, length, vocab_size=SMALL["vocab_size"], seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab_size, (rows, length), generator=generator)


def seq2seq(**options):
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config(**options))


def ragged(*lengths, padding_side="right"):
    """(rows, longest) token ids and their mask."""
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    if padding_side == "left":
        mask = mask.flip(1)
    return random_ids(len(lengths), longest) * mask, mask


def watch(module, look):
    """Call look(args, kwargs, output) after each forward pass of the module. Unlike this, a hook
    disables the fast paths."""
    forward = module.forward

    @functools.wraps(forward)
    def watched(*args, **kwargs):
        output = forward(*args, **kwargs)
        look(args, kwargs, output)
        return output

    module.forward = watched


# Sentence pairs for a trainer: 6 batches of 2 make an epoch.
PAIRS = [{"input_ids": [5, 6, 7, 2], "labels": [8, 9, 2]}, {"input_ids": [9, 2], "labels": [2]}] * 6


def as_typed(folder):
    """A folder as people type it: relative, with a redundant dot and slash."""
    return f"./{os.path.relpath(folder)}/"


def small_trainer(
    folder, tokenizer, *callbacks, config=None, pairs=PAIRS, streaming=False, **options
):
    """A trainer of 8 steps without output, with a checkpoint after every second step."""
    from datasets import Dataset

    from vanilla_transformer.training.arguments import TranslationTrainingArguments
    from vanilla_transformer.training.trainer import make_trainer

    torch.manual_seed(0)
    config = small_config(vocab_size=len(tokenizer), **(config or {}))
    defaults = {
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": None if "max_tokens" in options else 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TranslationTrainingArguments(as_typed(folder), **{**defaults, **options})
    data = Dataset.from_list(pairs)
    splits = {"train": data.to_iterable_dataset() if streaming else data, "validation": data}
    model = VanillaTransformerForConditionalGeneration(config)
    trainer = make_trainer(model, tokenizer, arguments, splits)
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config()).eval()


@pytest.fixture(scope="session")
def tokenizer():
    texts = ["a house by the lake", "ein Haus am See", "the lake is deep", "der See ist tief"] * 3
    return train_tokenizer(texts, 300, show_progress=False)


@pytest.fixture(scope="session")
def onnx_folder(tmp_path_factory):
    """A model, its folder, and the folder of its export, shared by all processes of the test
    run."""
    from export.onnx_folder import exported_model

    root = tmp_path_factory.getbasetemp()
    return exported_model((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "onnx")


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """A folder as training leaves it: a small random model and its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    config = small_config(vocab_size=len(tokenizer))
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_fsmt(folder, targets):
    """Saves a random FSMT for sources of the letters a, b and c, and targets of the given ones."""
    from transformers import FSMTConfig, FSMTForConditionalGeneration, FSMTTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    for side, letters in (("src", "abc"), ("tgt", targets)):
        vocab = [*special, *(f"{letter}</w>" for letter in letters)]
        numbers = {token: number for number, token in enumerate(vocab)}
        (folder / f"vocab-{side}.json").write_text(json.dumps(numbers))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = FSMTTokenizer.from_pretrained(folder, langs=["en", "de"], eos_token="</s>")
    tokenizer.save_pretrained(folder)
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=7, tgt_vocab_size=7, d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    FSMTForConditionalGeneration(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_options():
    """Options of `train` for a model that trains in seconds."""
    shape = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=16,decoder_ffn_dim=16"
    return f"--use_cpu --config_overrides={shape}"


@pytest.fixture
def multi30k_folder(tmp_path):
    """A folder with the files of Multi30k, each with 16 pairs."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "val", "test_2016_flickr"):
        (folder / f"{split}.en").write_text("a house by the lake\nthe lake\n" * 8)
        (folder / f"{split}.de").write_text("ein haus am see\nder see\n" * 8)
    return folder


@pytest.fixture
def ray_environment(tmp_path):
    """Environment variables for an isolated Ray, without a token in the home folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # its sockets need a short path
        yield {
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": str(tmp_path),
        }


# ---------------------------------------------------------------- scripts


def run_command(name, *flags, **options):
    """`vanilla-transformer NAME ...`, as `run_module` runs it."""
    return run_module("vanilla_transformer", name, *flags, **options)


def run_module(module, *flags, cwd, stdin=None, check=True, fresh=False):
    """Runs `python -m MODULE ...` as a user does, and returns its output and exit code. Unless
    `fresh` is set, it runs in a copy of this process, in which slow imports are done."""
    command = [sys.executable, "-m", module, *map(str, flags)]
    environment = {**os.environ, "HF_HOME": str(Path(cwd) / "huggingface"), "COLUMNS": "80"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    options = {"args": command, "cwd": cwd, "input": stdin, "env": environment}
    if fresh or torch.cuda.is_initialized():  # which cannot be forked
        process = subprocess.run(**options, capture_output=True, text=True, check=False)
    else:
        process = run_in_copy(**options)
    if check:
        assert process.returncode == 0, process.stderr[-4000:]
    return process


def lines_of(text):
    """Lines that end in a line feed. Random models also generate other characters at which
    `splitlines` splits."""
    return text.removesuffix("\n").split("\n")


def in_new_process(code, package, cache, *flags):
    """The JSON that the code prints in a new process, with or without the package."""
    # A None among the modules makes every import of that name fail.
    absent = 'import sys; sys.modules["vanilla_transformer"] = None\n'
    code = ("import vanilla_transformer\n" if package else absent) + textwrap.dedent(code)
    return run_alone(code, *flags, "" if package else "trust", cwd=cache)


@pytest.fixture
def train_here(tmp_path, monkeypatch):
    """Runs `train` with the given flags in this process, and undoes its effects on the process."""
    import datasets

    from vanilla_transformer.cli import train

    def train_with(*flags):
        monkeypatch.setattr(sys, "argv", ["train", *map(str, flags)])
        train.main()

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    precision = torch.get_float32_matmul_precision()
    loggers = [logging.root, *map(logging.getLogger, ("vanilla_transformer", "train"))]
    handlers, levels = logging.root.handlers[:], [logger.level for logger in loggers]
    yield train_with
    torch.set_float32_matmul_precision(precision)
    logging.root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def run_in_copy(args, cwd, input=None, env=None):
    """`subprocess.run` of a Python script or module in a copy of this process."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(input or "")
        files[0].seek(0)
        child = _start_copy(args[1:], cwd, env or {}, files)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in files:
            file.seek(0)
        _, stdout, stderr = (file.read() for file in files)
    return subprocess.CompletedProcess(args, code, stdout, stderr)


class BackgroundCopy:
    """`python -m MODULE ...` in a copy of this process, with the interface of `subprocess.Popen`.
    It prints to an open file."""

    def __init__(self, module, *flags, cwd, output, **environment):
        argv, env = ["-m", module, *map(str, flags)], {**os.environ, **environment}
        with open(os.devnull) as stdin:
            self.pid = _start_copy(argv, cwd, env, [stdin, output, output])
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=60):
        end = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < end, f"the copy still runs after {timeout} seconds"
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def run_program(processes, text, *flags, cwd):
    """The same as `run_ranks` for the text of a program."""
    (cwd / "program.py").write_text(text)
    return run_ranks(processes, cwd / "program.py", *flags, cwd=cwd)


def run_ranks(processes, script, *flags, cwd, timeout=240):
    """Runs a script, or "-m" and a module, in copies of this process that form a process group as
    with `torchrun`, and returns whether one failed, and their output. After a failure the others
    have 5 seconds to end. A process that ends without leaving the group fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    running, failed, end = [], False, time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryFile("w+") as output:
        for rank in map(str, range(processes)):
            size = str(processes)
            env = {**os.environ, **meeting, "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
            env |= {"LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
            argv = [str(script), *map(str, flags)]
            running.append(_start_copy(argv, cwd, env, [stdin, output, output]))
        while running:
            for child in list(running):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    running.remove(pid)
                    if status != 0 and not failed:
                        print(f"a process ended with {os.waitstatus_to_exitcode(status)}")
                        failed, end = True, time.monotonic() + 5
            if time.monotonic() > end:
                failed = True
                _end_with_stacks(running)
            time.sleep(0.05)
        output.seek(0)
        return failed, output.read()


def _end_with_stacks(children):
    """Kill them after each has printed its stack."""
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for child in children:
            os.kill(child, number)
        time.sleep(1)


def _start_copy(argv, cwd, env, files):
    child = os.fork()
    if child == 0:
        _become(argv, cwd, env, [file.fileno() for file in files])
    return child


def _become(argv, cwd, env, descriptors):
    """Let this process be the script; it does not return."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        encoding = env.get("PYTHONIOENCODING")
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding=encoding)
        sys.stderr = os.fdopen(2, "w")
        faulthandler.register(signal.SIGUSR1, file=2)
        logging.root.handlers.clear()  # pytest's
        transformers_logging.get_logger().handlers = [logging.StreamHandler()]
        os.chdir(cwd)
        os.environ.update(env)
        AcceleratorState._reset_state(reset_partial_state=True)  # that of the test process
        # torch replaces its thread pool at the first use in a fork, and fails if two threads do so.
        torch.set_num_threads(torch.get_num_threads())
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if distributed.is_initialized():
            print("This process ends in a group that it has not left")
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """The folder that a payload creates; a test fails if it exists at the end."""
    trace = tmp_path / "mark"
    yield trace
    assert not trace.exists(), "a payload was executed"
