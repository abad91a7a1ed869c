"""A signal ends training with a checkpoint; a training resumed from it ends as if there had been no
signal."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from conftest import REPOSITORY, run_program, small_trainer
from transformers import TrainerCallback, TrainerState

from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.averaging import select_checkpoints
from vanilla_transformer.training.checkpoints import checkpoints_by_step, find_defect
from vanilla_transformer.training.resumption import (
    OptionsCallback,
    expect_same_options,
    find_outdated_scores,
    fixed_options,
    warn_of_another_text,
)
from vanilla_transformer.training.trainer import load_averaged_checkpoints

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@pytest.fixture(autouse=True)
def short_worker_timeout(monkeypatch):
    """Without this, torch takes 5 seconds to end a data loading process that is left in
    mid-epoch."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


class Signal(TrainerCallback):
    """Sends this process a signal during a step, or during the evaluation after it."""

    def __init__(self, number, step, times=1, evaluating=False):
        self.number, self.step, self.times, self.evaluating = number, step, times, evaluating

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.evaluating and state.global_step == self.step - 1:
            self.send()

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.evaluating and state.global_step == self.step:
            self.send()

    def send(self):
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)


def weights_of(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def evaluations(trainer):
    history = trainer.state.log_history
    return [(log["step"], log["eval_loss"]) for log in history if "eval_loss" in log]


@BOTH
def test_a_signal_leaves_a_checkpoint_and_its_exit_code(tokenizer, tmp_path, number):
    whole = small_trainer(tmp_path / "whole", tokenizer)
    whole.train()
    before = signal.getsignal(number)
    trainer = small_trainer(tmp_path / "stopped", tokenizer, Signal(number, 5), save_strategy="no")
    trainer.train()
    assert signal.getsignal(number) == before
    with pytest.raises(SystemExit) as stopped:
        trainer.exit_if_interrupted()
    assert stopped.value.code == 128 + number
    assert list(checkpoints_by_step(tmp_path / "stopped")) == [5]
    again = small_trainer(tmp_path / "stopped", tokenizer)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-5"))
    again.exit_if_interrupted()
    assert torch.equal(weights_of(again), weights_of(whole))


EVALUATING = pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "steps", "eval_steps": 3},
        pytest.param({"eval_strategy": "epoch"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # an early one
    "save_strategy": "best",
    "learning_rate": 1e-2,
    "per_device_eval_batch_size": 2,
}


@EVALUATING
@pytest.mark.parametrize(
    ("evaluating", "folder"), [(False, "stopped"), (True, "stopped"), (True, "elsewhere")]
)
def test_an_evaluation_is_interrupted_at_once_and_repeated_on_resuming(
    tokenizer, tmp_path, options, evaluating, folder
):
    """Six steps are an epoch, and two times three: the signal comes before or in their
    evaluation. The best model is chosen by all of them."""
    whole = small_trainer(tmp_path / "whole", tokenizer, **options, **BEST)
    whole.train()
    one = Signal(signal.SIGTERM, 6, evaluating=evaluating)
    trainer = small_trainer(tmp_path / "stopped", tokenizer, one, **options, **BEST)
    with pytest.raises(SystemExit) if evaluating else nullcontext():
        trainer.train()
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        trainer.exit_if_interrupted()
    assert 6 in checkpoints_by_step(tmp_path / "stopped")
    assert 6 not in dict(evaluations(trainer))
    again = small_trainer(tmp_path / folder, tokenizer, **options, **BEST)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-6"))
    assert evaluations(again) == evaluations(whole)
    assert again.state.best_global_step == whole.state.best_global_step
    assert torch.equal(weights_of(again), weights_of(whole))


def test_an_interrupted_evaluation_keeps_no_frame_of_the_training_loop(tokenizer, tmp_path):
    """It would refer to the wrapped model, which must be freed before the process group ends."""
    one = Signal(signal.SIGTERM, 3, evaluating=True)
    trainer = small_trainer(tmp_path, tokenizer, one, eval_strategy="steps", eval_steps=3)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert "_inner_training_loop" not in [entry.name for entry in ended.traceback]
    assert ended.value.__context__ is None


class Failure(TrainerCallback):
    """Fails once, in the second step, as if memory ran out."""

    def __init__(self):
        self.failures = [torch.OutOfMemoryError("CUDA out of memory.")]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.failures and state.global_step == 1:
            raise self.failures.pop()


@BOTH
def test_the_previous_signal_handlers_return_however_training_ends(tokenizer, tmp_path, number):
    """In a notebook, the next Ctrl-C would otherwise have no effect."""
    before = signal.getsignal(number)
    options = {"eval_strategy": "steps", "eval_steps": 3}
    one = Signal(number, 3, evaluating=True)
    with pytest.raises(SystemExit):
        small_trainer(tmp_path / "interrupted", tokenizer, one, **options).train()
    assert signal.getsignal(number) == before
    with pytest.raises(torch.OutOfMemoryError):
        small_trainer(tmp_path / "failed", tokenizer, Failure()).train()
    assert signal.getsignal(number) == before
    once_more = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    small_trainer(tmp_path / "restarted", tokenizer, Failure(), **once_more).train()
    assert signal.getsignal(number) == before


def test_the_same_trainer_goes_on_after_a_signal(tokenizer, tmp_path):
    """As in a notebook."""
    options = {"eval_strategy": "steps", "eval_steps": 3}
    one = Signal(signal.SIGINT, 3, evaluating=True)
    trainer = small_trainer(tmp_path, tokenizer, one, **options)
    with pytest.raises(SystemExit):
        trainer.train()
    one.step = 0
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8


class SignalAfterStep(Signal):
    """Sends it when the step has been checked for signals, and is being logged."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step == self.step and "loss" in logs:
            self.send()


@pytest.mark.parametrize("steps", [8, 6])
def test_a_signal_after_the_last_step_of_an_epoch_skips_no_evaluation(tokenizer, tmp_path, steps):
    """Other processes may not have received it: all of them start with the evaluation."""
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": steps}
    whole = small_trainer(tmp_path / "whole", tokenizer, **options)
    whole.train()
    one = SignalAfterStep(signal.SIGTERM, 6)
    with pytest.raises(SystemExit):
        small_trainer(tmp_path / "stopped", tokenizer, one, **options).train()
    assert list(checkpoints_by_step(tmp_path / "stopped")) == [6]
    again = small_trainer(tmp_path / "stopped", tokenizer, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-6"))
    assert evaluations(again) == evaluations(whole)


@EVALUATING
def test_a_missed_evaluation_of_the_last_step_is_made_on_resuming_too(tokenizer, tmp_path, options):
    """Its number is no multiple of three, nor is it the last of an epoch."""
    one = Signal(signal.SIGTERM, 8, evaluating=True)
    stopped = small_trainer(tmp_path, tokenizer, one, **options, **BEST)
    with pytest.raises(SystemExit):
        stopped.train()
    again = small_trainer(tmp_path, tokenizer, **options, **BEST)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert evaluations(again)[:-1] == evaluations(stopped)
    assert evaluations(again)[-1][0] == 8


def test_an_evaluation_made_on_resuming_sets_the_learning_rate_too(tokenizer, tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    options |= {"eval_steps": 1, "max_steps": 4}
    options["lr_scheduler_kwargs"] = {"factor": 0.5, "patience": 0, "threshold": 0.9}

    def rates(trainer):
        return [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]

    whole = small_trainer(tmp_path / "whole", tokenizer, **options)
    whole.train()
    small_trainer(tmp_path, tokenizer, Signal(signal.SIGTERM, 2), **options).train()
    again = small_trainer(tmp_path, tokenizer, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rates(again) == rates(whole)
    assert rates(whole)[-1] < rates(whole)[-2]


def test_an_evaluation_made_on_resuming_can_be_interrupted_too(tokenizer, tmp_path):
    """The checkpoint of its step is there, with the random numbers to continue with."""
    options = {"eval_strategy": "steps", "eval_steps": 3, **BEST}
    whole = small_trainer(tmp_path / "whole", tokenizer, **options)
    whole.train()
    resumed = None
    for _ in range(2):
        one = Signal(signal.SIGTERM, 6, evaluating=True)
        trainer = small_trainer(tmp_path / "stopped", tokenizer, one, **options)
        with pytest.raises(SystemExit):
            trainer.train(resume_from_checkpoint=resumed)
        resumed = str(tmp_path / "stopped/checkpoint-6")
    again = small_trainer(tmp_path / "stopped", tokenizer, **options)
    again.train(resume_from_checkpoint=resumed)
    assert evaluations(again) == evaluations(whole)
    assert torch.equal(weights_of(again), weights_of(whole))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_steps": -1, "num_train_epochs": 1.5},
        pytest.param(
            {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"},
            marks=pytest.mark.slow,
        ),
        {"max_tokens": 8, "gradient_accumulation_steps": 2},
        pytest.param({"max_tokens": 8, "streaming": True}, marks=pytest.mark.slow),
        {"eval_strategy": "steps", "eval_steps": 2, **BEST, "save_strategy": "steps"},
    ],
    ids=str,
)
def test_a_run_resumed_at_its_end_makes_no_more_steps(tokenizer, tmp_path, options):
    """As one that is killed while its checkpoints are averaged, or in its last evaluation."""

    def train(resumed=None):
        trainer = small_trainer(tmp_path, tokenizer, average_checkpoints=2, **options)
        trainer.train(resume_from_checkpoint=resumed)
        trained = weights_of(trainer)
        load_averaged_checkpoints(trainer)
        return trainer.state, list(checkpoints_by_step(tmp_path)), trained, weights_of(trainer)

    state, checkpoints, *weights = train()
    again, checkpoints_again, *weights_again = train(resumed=True)  # from the newest
    assert again.global_step == state.global_step == checkpoints[-1]
    assert again.epoch == state.epoch
    assert checkpoints_again == checkpoints
    assert not any("train_loss" in entry for entry in again.log_history)  # the mean of no step
    for ours, expected in zip(weights_again, weights, strict=True):
        assert torch.equal(ours, expected)


DIFFERENT = [{"input_ids": [n, *[6] * (n % 3), 2], "labels": [n + 1, 2]} for n in range(5, 17)]


@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"streaming": True},
        {"streaming": True, "gradient_accumulation_steps": 4},
        pytest.param({"streaming": True, "dataloader_num_workers": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_second_epoch_resumes_with_the_next_pair(options, tokenizer, tmp_path):
    """The epoch has 6 batches of pairs that all differ."""
    options = {"pairs": DIFFERENT, "max_steps": 10, **options}
    whole = small_trainer(tmp_path / "whole", tokenizer, **options)
    whole.train()
    resumed = small_trainer(tmp_path / "resumed", tokenizer, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-8"))
    assert torch.equal(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize("batches", [{}, {"max_tokens": 6}], ids=str)
def test_persistent_workers_do_not_change_a_resumed_training(batches, tokenizer, tmp_path):
    """Starting them draws a number from the random generator that dropout uses."""
    options = {"pairs": DIFFERENT, "max_steps": 14, "dataloader_num_workers": 1, **batches}
    options["dataloader_persistent_workers"] = True
    whole = small_trainer(tmp_path / "whole", tokenizer, **options)
    whole.train()
    resumed = small_trainer(tmp_path / "resumed", tokenizer, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-4"))
    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_an_update_can_start_in_one_pass_over_a_stream_and_end_in_the_next(tokenizer, tmp_path):
    """An update has 4 batches, a pass 6, so that two passes are 3 updates."""
    options = {"streaming": True, "gradient_accumulation_steps": 4, "max_steps": 3}
    options["config"] = {"dropout": 0.0}
    weights = []
    for name, pairs in (("once", DIFFERENT), ("twice", [*DIFFERENT, *DIFFERENT])):
        trainer = small_trainer(tmp_path / name, tokenizer, pairs=pairs, **options)
        trainer.train()
        weights.append(weights_of(trainer))
    assert torch.equal(*weights)


def test_a_finished_run_can_be_continued_with_more_steps(tokenizer, tmp_path):
    small_trainer(tmp_path, tokenizer, max_steps=4).train()
    trainer = small_trainer(tmp_path, tokenizer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == 8


def test_the_summary_of_a_resumed_run_is_about_its_own_steps(tokenizer, tmp_path):
    small_trainer(tmp_path, tokenizer, max_steps=6).train()
    trainer = small_trainer(tmp_path, tokenizer, max_steps=8)
    found = trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6")).metrics
    losses = [log["loss"] for log in trainer.state.log_history if log["step"] > 6 and "loss" in log]
    assert len(losses) == 2
    assert found["train_loss"] == pytest.approx(sum(losses) / 2)
    for name, number in (("samples", 4), ("steps", 2)):
        done = found[f"train_{name}_per_second"] * found["train_runtime"]
        assert done == pytest.approx(number, rel=0.02)


def test_evaluations_do_not_change_the_training(tokenizer, tmp_path):
    without = small_trainer(tmp_path / "without", tokenizer)
    without.train()
    options = {"eval_strategy": "steps", "eval_steps": 1}
    evaluated = small_trainer(tmp_path / "evaluated", tokenizer, **options)
    evaluated.train()
    assert torch.equal(weights_of(evaluated), weights_of(without))


def test_all_processes_exit_if_one_has_received_a_signal_after_the_last_step(
    tokenizer, tmp_path, monkeypatch
):
    trainer = small_trainer(tmp_path, tokenizer, max_steps=1)
    trainer.train()
    trainer.exit_if_interrupted()
    monkeypatch.setattr("vanilla_transformer.training.interruption.any_process", lambda *args: True)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        trainer.exit_if_interrupted()


def test_the_same_signal_twice_stops_at_once(tokenizer, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trainer = small_trainer(tmp_path, tokenizer, Signal(signal.SIGINT, 5, times=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) == before
    assert list(checkpoints_by_step(tmp_path)) == [2, 4]


ON_A_TERMINAL = """
import fcntl, os, signal, sys, termios, time
sys.path.insert(0, sys.argv[1])
from conftest import small_trainer
from transformers import AutoTokenizer, TrainerCallback

class Closing(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            print("close me", flush=True)
            while trainer.interruption.received is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGHUP)  # as the shell may do

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
options = {"save_strategy": "no", "disable_tqdm": False, "logging_steps": 1}
trainer = small_trainer("out", tokenizer, Closing(), **options)
trainer.train()
trainer.exit_if_interrupted()
"""


def test_a_closed_terminal_leaves_a_checkpoint(tokenizer, tmp_path):
    """Also if errors and the progress bar go through a pipe to a program that ends with it."""
    pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
    tokenizer.save_pretrained(tmp_path)
    ours, its = pty.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, REPOSITORY / "tests", tmp_path]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=its, stdout=its, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as training:  # fmt: skip
        os.close(its)
        shown = b""
        while b"close me" not in shown:
            shown += os.read(ours, 1000)
        training.stderr.close()
        os.close(ours)
        assert training.wait(60) == 128 + signal.SIGHUP
    assert list(checkpoints_by_step(tmp_path / "out")) == [3]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_with_nohup_training_goes_on_when_the_terminal_is_closed(tokenizer, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = small_trainer(tmp_path, tokenizer, Signal(signal.SIGHUP, 5))
        trainer.train()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trainer.state.global_step == 8


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import small_trainer
from test_interruption import Signal
from transformers import AutoTokenizer

rank = int(os.environ["RANK"])
callbacks = [Signal(signal.SIGTERM, 3)] if rank == 1 else []
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
trainer = small_trainer("out", tokenizer, *callbacks, ddp_backend="gloo", save_strategy="no")
trainer.train()
assert trainer.state.global_step == 3, trainer.state.global_step
Path(f"ended-{rank}").touch()
trainer.exit_if_interrupted()
"""


AT_ITS_END = """
import operator, os, sys
sys.path.insert(0, sys.argv[1])
from conftest import small_trainer
from test_interruption import weights_of
from transformers import AutoTokenizer
from vanilla_transformer.training.distributed import end_training

tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
options = {"ddp_backend": "gloo", "max_tokens": 8}
whole = small_trainer("out", tokenizer, **options)
whole.train()
again = small_trainer("out", tokenizer, **options)
again.train(resume_from_checkpoint="out/checkpoint-8")
assert again.state.global_step == 8, again.state.global_step
assert weights_of(again).equal(weights_of(whole))
again.compute_metrics = lambda scored: {"pairs": len(scored.label_ids)}
again.eval_dataset = again.eval_dataset.select(range(11))
for again.args.eval_max_tokens in (None, 12):
    assert again.evaluate()["eval_pairs"] == 11, "copies that even out batches count"
again.args.eval_max_tokens, again.args.per_device_eval_batch_size = None, 4
losses = [again.model(**again.data_collator([row])).loss.item() for row in again.eval_dataset]
labels = [len(row["labels"]) for row in again.eval_dataset]
expected = sum(map(operator.mul, losses, labels)) / sum(labels)
found = again.evaluate()["eval_loss"]
assert abs(found - expected) < 1e-4, (found, losses)
assert again.args.average_tokens_across_devices
end_training(again)
"""


def test_two_processes_resumed_at_the_end_only_score_each_pair_once(checkpoint, tmp_path):
    failed, output = run_program(2, AT_ITS_END, REPOSITORY / "tests", checkpoint, cwd=tmp_path)
    assert not failed, output
    assert list(checkpoints_by_step(tmp_path / "out")) == [2, 4, 6, 8]


STALLED = """
import os, sys, time
from vanilla_transformer.training.arguments import TranslationTrainingArguments

arguments = TranslationTrainingArguments("out", use_cpu=True, ddp_timeout=1)
if os.environ["RANK"] == "1":
    time.sleep(3)
import torch
from torch import distributed
distributed.all_reduce(torch.ones(1))
"""


def test_a_process_waits_for_the_others_no_longer_than_ddp_timeout(tmp_path):
    """On CPUs transformers does not pass the timeout on; the others would wait for 30 minutes."""
    failed, output = run_program(2, STALLED, cwd=tmp_path)
    assert failed
    assert "Timed out" in output


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(checkpoint, tmp_path):
    failed, output = run_program(2, PROGRAM, REPOSITORY / "tests", checkpoint, cwd=tmp_path)
    assert failed
    assert "not left" not in output
    assert {path.name for path in tmp_path.glob("ended-*")} == {"ended-0", "ended-1"}, output
    assert list(checkpoints_by_step(tmp_path / "out")) == [3]
    assert find_defect(tmp_path / "out/checkpoint-3") is None


# ---------------------------------------------------------------- Options that a checkpoint decides


@pytest.mark.parametrize(
    ("model_options", "options", "message"),
    [
        ({}, {"learning_rate": 0.5}, r"learning_rate=0.5: expected 0.001, as in .*checkpoint-2"),
        ({"lowercase": True}, {}, r"lowercase=True: expected False"),
        (
            {},
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "lr_scheduler_type='reduce_lr_on_plateau': expected 'linear'",
        ),
        ({}, {"optim_args": "a=1"}, "optim_args='a=1': expected None"),
        (
            {"tokenizer_name": "elsewhere/other"},
            {},
            r"tokenizer_name=\['other'\]: expected \['mine'",
        ),
    ],
)
def test_a_resumed_training_ignores_no_option(tokenizer, tmp_path, model_options, options, message):
    def all_options(model_options, **options):
        return fixed_options(
            ModelArguments(**{"tokenizer_name": "here/mine", **model_options}),
            TranslationTrainingArguments(str(tmp_path), **{"learning_rate": 1e-3, **options}),
        )

    callback = OptionsCallback(all_options({}))
    small_trainer(tmp_path, tokenizer, callback, max_steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    changed = {"max_steps": 9, "lr_scheduler_type": "cosine"}
    expect_same_options(checkpoint, all_options({"tokenizer_name": "moved/mine"}, **changed))
    with pytest.raises(ValueError, match=message):
        expect_same_options(checkpoint, all_options(model_options, **options))


def test_the_files_of_a_tokenizer_may_move(tmp_path):
    for name in ("sentencepiece_model", "bpe_codes"):
        found = []
        for folder in ("here", "moved"):
            (file := tmp_path / folder / name).parent.mkdir(exist_ok=True)
            file.touch()
            options = ModelArguments(**{name: [str(file)]})
            found.append(fixed_options(options, TranslationTrainingArguments(str(tmp_path))))
        assert found[0] == found[1]


def test_a_schedule_by_metric_is_resumed_with_its_settings(tmp_path):
    """Its state holds them; `Trainer` would ignore different ones. The metric determines the
    mode."""

    def options(**changed):
        schedule = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
        arguments = TranslationTrainingArguments(str(tmp_path), **{**schedule, **changed})
        return fixed_options(ModelArguments(tokenizer_name="mine"), arguments)

    state = TrainerState(stateful_callbacks={"OptionsCallback": OptionsCallback(options()).state()})
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    expect_same_options(tmp_path, options(max_steps=9))
    with pytest.raises(ValueError, match=r"lr_scheduler_kwargs=\{.factor.: 0.5\}: expected None"):
        expect_same_options(tmp_path, options(lr_scheduler_kwargs={"factor": 0.5}))


@pytest.mark.parametrize("callback", [{}, {"OptionsCallback": OptionsCallback({"old": 1}).state()}])
def test_options_that_a_checkpoint_or_this_version_lacks_are_not_compared(tmp_path, callback):
    """The checkpoint of a different trainer, and that of a version with different options."""
    TrainerState(stateful_callbacks=callback).save_to_json(str(tmp_path / "trainer_state.json"))
    expect_same_options(tmp_path, {"learning_rate": 1e-3})
    assert find_outdated_scores(tmp_path, {"bleu_tokenize": "char"}) == set()


def test_a_resumed_training_saves_as_often_as_its_options_say(tokenizer, tmp_path):
    """`Trainer` (5.17 to 5.24) uses the checkpoint's intervals."""
    options = {"max_steps": 6, "save_total_limit": None}
    for own, expected in ((False, [2, 4, 6]), (True, [2, 3, 4, 5, 6])):
        folder, callback = tmp_path / str(own), [OptionsCallback({})] if own else []
        small_trainer(folder, tokenizer, *callback, **options | {"max_steps": 2}).train()
        again = small_trainer(folder, tokenizer, *callback, **options | {"save_steps": 1})
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert list(checkpoints_by_step(folder)) == expected


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ((3, 30, 20), None),
        ((2, 30, 20), "has 2 pairs, 30 source and 20 target tokens, but that of "),
        ((3, 31, 20), "has 3 pairs, 31 source and 20 target tokens, but that of "),
        ((3, 30, 1500), "has 3 pairs, 30 source and 1,500 target tokens, but that of "),
        (None, None),  # a stream
    ],
)
def test_resuming_with_a_different_text_gives_a_warning(tokenizer, tmp_path, caplog, text, warning):
    names = ("pairs", "source_tokens", "target_tokens")
    before = dict(zip(names, (3, 30, 20), strict=True))
    small_trainer(tmp_path, tokenizer, OptionsCallback({}, before), max_steps=2).train()
    text = text and dict(zip(names, text, strict=True))
    warn_of_another_text(tmp_path / "checkpoint-2", text)
    messages = [each for each in caplog.messages if "The training text" in each]
    assert len(messages) == (warning is not None)
    assert warning is None or warning in messages[0]


def test_a_checkpoint_without_the_size_of_its_text_can_be_resumed(tokenizer, tmp_path, caplog):
    small_trainer(tmp_path, tokenizer, OptionsCallback({}), max_steps=2).train()
    text = {"pairs": 3, "source_tokens": 30, "target_tokens": 20}
    warn_of_another_text(tmp_path / "checkpoint-2", text)
    assert not any("The training text" in each for each in caplog.messages)


def test_resuming_with_different_epoch_lengths_gives_a_warning(tokenizer, tmp_path, caplog):
    epochs = {"max_steps": -1, "num_train_epochs": 2}
    small_trainer(tmp_path, tokenizer, per_device_train_batch_size=2, **epochs).train()
    last = str(max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name[11:])))
    again = small_trainer(tmp_path, tokenizer, per_device_train_batch_size=2, **epochs)
    again.train(resume_from_checkpoint=last)
    assert "epochs have" not in caplog.text
    other = small_trainer(tmp_path, tokenizer, per_device_train_batch_size=1, **epochs)
    other.train(resume_from_checkpoint=last)
    before, now = again.state.max_steps, other.state.max_steps
    assert now > before
    assert f"2 epochs have {now} updates with this text and these batches, but had {before}" in (
        caplog.text
    )


def test_resuming_at_a_different_point_of_an_epoch_gives_a_warning(tokenizer, tmp_path, caplog):
    """With a different batch size, the same number of updates is a different part of an epoch."""
    small_trainer(tmp_path, tokenizer, per_device_train_batch_size=2).train()
    last = str(tmp_path / "checkpoint-8")
    for size in (2, 3):
        assert "An epoch has" not in caplog.text
        again = small_trainer(tmp_path, tokenizer, per_device_train_batch_size=size, max_steps=9)
        again.train(resume_from_checkpoint=last)
    message = "An epoch has 4 updates with this text and these batches, but had about 6 in "
    assert f"{message}{last}: training resumes at epoch 2.00 instead of 1.33" in caplog.text


LAST_TWO = {"average_checkpoints": 2, "save_total_limit": 2}


def test_a_checkpoint_saved_only_on_a_signal_is_not_averaged(tokenizer, tmp_path):
    """Nor does it replace one that is."""
    whole = small_trainer(tmp_path / "whole", tokenizer, **LAST_TWO)
    whole.train()
    load_averaged_checkpoints(whole)
    folder = tmp_path / "stopped"
    one = Signal(signal.SIGTERM, 7)
    small_trainer(folder, tokenizer, one, **LAST_TWO).train()
    assert list(checkpoints_by_step(folder)) == [4, 6, 7]
    assert select_checkpoints(folder, last=2) == [folder / "checkpoint-4", folder / "checkpoint-6"]
    resumed = small_trainer(folder, tokenizer, **LAST_TWO)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-7"))
    load_averaged_checkpoints(resumed)
    assert list(checkpoints_by_step(folder)) == [6, 8]
    assert torch.equal(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize(
    "options", [{}, {"save_strategy": "epoch"}, {"save_strategy": "epoch", "max_steps": 6}]
)
def test_a_scheduled_checkpoint_counts_even_after_a_signal(options, tokenizer, tmp_path):
    small_trainer(tmp_path, tokenizer, Signal(signal.SIGTERM, 6), **options).train()
    assert select_checkpoints(tmp_path, last=1) == [tmp_path / "checkpoint-6"]


NO_GAIN = {  # after the first evaluation
    "learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1,
    "load_best_model_at_end": True,
}  # fmt: skip


def test_a_training_that_stopped_early_says_so_and_is_not_continued(tokenizer, tmp_path, caplog):
    options = {**NO_GAIN, "early_stopping_patience": 2}
    with caplog.at_level("INFO"):
        small_trainer(tmp_path, tokenizer, **options).train()
    assert "training stops early at step 3: 2 evaluations without a better loss than" in caplog.text
    for patience, steps in ((2, 3), (4, 5)):
        options["early_stopping_patience"] = patience
        again = small_trainer(tmp_path, tokenizer, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert again.state.global_step == steps


def test_an_evaluation_made_on_resuming_can_end_training(tokenizer, tmp_path):
    options = {**NO_GAIN, "early_stopping_patience": 2}
    one = Signal(signal.SIGTERM, 3, evaluating=True)
    with pytest.raises(SystemExit):
        small_trainer(tmp_path, tokenizer, one, **options).train()
    again = small_trainer(tmp_path, tokenizer, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 3
    assert [step for step, _ in evaluations(again)] == [1, 2, 3]


def test_an_evaluation_before_eval_delay_is_not_missed(tokenizer, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5}
    small_trainer(tmp_path, tokenizer, max_steps=5, **options).train()
    resumed = small_trainer(tmp_path, tokenizer, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [step for step, _ in evaluations(resumed)] == [6, 8]


def test_a_thread_can_train_though_it_receives_no_signals(tokenizer, tmp_path):
    trainer = small_trainer(tmp_path, tokenizer, max_steps=1)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(trainer.train).result()
    assert trainer.state.global_step == 1


def test_the_last_checkpoint_is_kept_next_to_the_best(tokenizer, tmp_path):
    """Without it, the same command would train again."""
    small_trainer(tmp_path, tokenizer, max_steps=4, save_total_limit=1, **NO_GAIN).train()
    assert list(checkpoints_by_step(tmp_path)) == [1, 4]


def test_repeating_an_evaluation_at_the_start_does_not_count_for_early_stopping(
    tokenizer, tmp_path
):
    """With `eval_on_start`, a resumed training evaluates its checkpoint again."""
    options = {**NO_GAIN, "early_stopping_patience": 2, "eval_on_start": True}
    small_trainer(tmp_path, tokenizer, max_steps=2, **options).train()
    resumed = small_trainer(tmp_path, tokenizer, max_steps=8, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [step for step, _ in evaluations(resumed)] == [0, 1, 2, 2, 3]


def test_early_stopping_patience_continues_from_a_checkpoint(tokenizer, tmp_path):
    options = {**NO_GAIN, "early_stopping_patience": 3}
    small_trainer(tmp_path, tokenizer, max_steps=3, **options).train()
    resumed = small_trainer(tmp_path, tokenizer, max_steps=8, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 4
