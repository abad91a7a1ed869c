"""Training with `Seq2SeqTrainer`: the objects that a run is made of."""

import copy
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer import OPTIMIZER_NAME

from ..data.bpe_dropout import BPEDropoutDataset
from ..data.parallel_text import iter_texts
from ..data.tokenization import train_tokenizer
from ..inference.metrics import make_compute_metrics
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import ModelArguments
from .averaging import average_checkpoints, with_weights
from .checkpoints import (
    WholeCheckpointTrainer,
    checkpoints_in,
    defect_of,
    newest_whole_checkpoint,
)
from .distributed import SHARDED_OPTIMIZER, ShardedTrainer
from .finite_gradients import FiniteGradientTrainer
from .interruption import InterruptibleTrainer
from .model_card import ModelCardTrainer
from .r_drop import r_drop_loss
from .token_batches import TokenBudgetTrainer

logger = logging.getLogger(__name__)


def find_checkpoint(arguments: Seq2SeqTrainingArguments) -> str | None:
    """Where to resume from; `None` to start anew.

    `resume_from_checkpoint` is a checkpoint's folder, or "true" for the newest whole one in
    `output_dir`, or "auto" for the same where there is one. Of several processes the first looks,
    for all of them.

    Raises:
        FileNotFoundError: The checkpoint does not exist, or not for all processes.
        ValueError: It is damaged; the message names the file. It holds no optimizer's state that
            this run can go on with.
        FileExistsError: `output_dir` is a file, or holds a model that would be overwritten.
    """
    output_dir, wanted = Path(arguments.output_dir), arguments.resume_from_checkpoint
    by_deepspeed = arguments.deepspeed_plugin is not None
    found = _made_by_first_process(lambda: _find_checkpoint(output_dir, wanted, by_deepspeed))
    if found is not None and not Path(found).is_dir():
        raise FileNotFoundError(
            f"{found}: process 0 sees it, process {arguments.process_index} does not, expected "
            "one file system for all"
        )
    return found


def _made_by_first_process(make: Callable[[], Any]) -> Any:
    """What the first process makes, for all of them; what it raises, all of them raise."""
    made: list[Any] = [None]
    if PartialState().is_main_process:
        try:
            made = [make()]
        except Exception as error:
            made = [error]
    broadcast_object_list(made)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _find_checkpoint(output_dir: Path, wanted: str | None, by_deepspeed: bool) -> str | None:
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"output_dir={output_dir} is a file: expected a folder")
    mode = str(wanted).lower()
    if mode in ("auto", "true"):
        newest = newest_whole_checkpoint(output_dir)
        if newest is None and mode == "true":
            raise FileNotFoundError(f"{output_dir}: no checkpoint to resume from")
        if newest is not None:
            return _with_state(newest, by_deepspeed)
    elif wanted is not None:
        if not Path(wanted, "trainer_state.json").is_file():
            raise FileNotFoundError(f"resume_from_checkpoint={wanted}: not a trainer's checkpoint")
        defect = defect_of(wanted)
        if defect is not None:
            raise ValueError(f"resume_from_checkpoint={wanted}: {defect}")
        return _with_state(Path(wanted), by_deepspeed)
    if checkpoints_in(output_dir) or (output_dir / "config.json").exists():
        raise FileExistsError(
            f"output_dir={output_dir} already holds a model: choose another folder, or go on "
            "training it with --resume_from_checkpoint true"
        )
    return None


def _with_state(checkpoint: Path, by_deepspeed: bool) -> str:
    """The checkpoint, if an optimizer's state is there, DeepSpeed's or all others'."""
    others = (checkpoint / name for name in (OPTIMIZER_NAME, SHARDED_OPTIMIZER))
    held = {True: any(checkpoint.glob("global_step*")), False: any(p.exists() for p in others)}
    if not held[by_deepspeed]:
        whose = {True: "DeepSpeed's", False: "no"}
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} holds {whose[held[True]]} optimizer state, "
            f"expected {'that of DeepSpeed' if by_deepspeed else 'one'}: "
            "--model_name_or_path trains its weights with a new optimizer"
        )
    return str(checkpoint)


def make_tokenizer(
    arguments: ModelArguments, training_data: Any, checkpoint: str | None
) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, the one named, or a new one, which the first process trains on
    the data for all.

    Raises:
        ValueError: The tokenizer that is named does not pad, or does not end a sequence.
    """
    name = checkpoint or arguments.tokenizer_name or arguments.model_name_or_path
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        _expect_special_tokens(tokenizer, name)
        return tokenizer
    size = arguments.vocab_size
    logger.info("Training a tokenizer of %d tokens", size)
    return _made_by_first_process(lambda: train_tokenizer(iter_texts(training_data), size))


def _expect_special_tokens(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    for kind in ("pad_token", "eos_token"):
        if getattr(tokenizer, kind) is None:
            raise ValueError(f"{name}: the tokenizer has no {kind}, expected one")
    if tokenizer.eos_token_id not in tokenizer(text_target="a")["input_ids"]:
        raise ValueError(
            f"{name}: the tokenizer does not add its eos_token {tokenizer.eos_token!r} to a text, "
            "expected one that does: a model could not learn where a target ends"
        )


def make_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, checkpoint: str | None
) -> PreTrainedModel:
    """A new model with the tokenizer's vocabulary and special tokens, or the one to fine-tune. A
    target starts with `bos_token`, or with `pad_token`, as T5's and Marian's, if there is none.

    Raises:
        ValueError: The checkpoint to resume from is of another shape.
    """
    if arguments.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(arguments.float32_matmul_precision)
    attention = {"attn_implementation": arguments.attn_implementation}
    if arguments.model_name_or_path is not None:
        options = {**attention, **arguments.overrides()}
        return AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, **options)
    bos = tokenizer.bos_token_id
    config = VanillaTransformerConfig.from_preset(
        arguments.preset,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=bos,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id if bos is None else bos,
        **attention,
        **arguments.overrides(),
    )
    if checkpoint is not None:
        _check_same_model(config, checkpoint)
    return VanillaTransformerForConditionalGeneration(config)


def _check_same_model(config: VanillaTransformerConfig, checkpoint: str) -> None:
    saved = AutoConfig.from_pretrained(checkpoint)
    for name in ("model_type", *type(config).__dataclass_fields__):
        if name in ("architectures", "dtype", "transformers_version"):
            continue
        if getattr(saved, name, None) != getattr(config, name):
            raise ValueError(
                f"{checkpoint} holds another model: its {name} is {getattr(saved, name, None)!r}, "
                f"this run's {getattr(config, name)!r}"
            )


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Seq2SeqTrainingArguments,
    splits: dict[str, Any],
) -> Seq2SeqTrainer:
    """A `Seq2SeqTrainer` over tokenised splits, with scores and curves.

    Args:
        splits: "train" and perhaps "validation", with columns `input_ids` and `labels`.
    """
    # Trainer writes this into the model's configuration, where it would outlive the training.
    arguments.use_cache = not arguments.gradient_checkpointing
    model.generation_config.num_beams = arguments.generation_num_beams or 1
    for name, value in (arguments.generation_kwargs or {}).items():
        setattr(model.generation_config, name, value)
    metrics = make_compute_metrics(tokenizer) if arguments.predict_with_generate else None
    trainer = TranslationTrainer(
        model=model,
        args=arguments,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=metrics,
        callbacks=[CurvesCallback(), EpochCallback()],
    )
    if trainer.pop_callback(TensorBoardCallback) is not None:
        trainer.add_callback(LastingTensorBoardCallback())
    return trainer


class TranslationTrainer(
    InterruptibleTrainer,
    FiniteGradientTrainer,
    WholeCheckpointTrainer,
    ShardedTrainer,
    TokenBudgetTrainer,
    ModelCardTrainer,
    Seq2SeqTrainer,
):
    """`Seq2SeqTrainer` with all of these and R-Drop, and less one habit: while it evaluates,
    transformers (5.17 to 5.23) writes all defaults into the model's generation config, and from
    then on, also once saved and loaded, the model stops after 20 tokens."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As `Trainer.compute_loss`; with `r_drop_alpha` that of two passes while training."""
        alpha = getattr(self.args, "r_drop_alpha", 0.0)
        if not alpha or not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        # Without labels, of which there is one for both passes, models give all logits.
        twice: dict[str, Any] = {
            name: torch.cat([value, value]) for name, value in inputs.items() if name != "labels"
        }
        eps = self.args.label_smoothing_factor or getattr(self.model.config, "label_smoothing", 0.0)

        def r_drop(
            outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            return r_drop_loss(outputs.logits, labels, alpha, eps, num_items_in_batch)

        before = self.compute_loss_func  # type: ignore[has-type]  # a stock one, if any
        self.compute_loss_func = r_drop
        try:
            inputs = {**twice, "labels": inputs["labels"], "use_cache": False}
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.compute_loss_func = before

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple:
        """As `Seq2SeqTrainer.prediction_step`, the generation config left as it was."""
        generation_config = copy.deepcopy(self.model.generation_config)
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.model.generation_config = generation_config


def average_last(trainer: Seq2SeqTrainer) -> None:
    """Let the trainer's model be the mean of its last `average_checkpoints`, or of its best ones,
    if that is wished; of all there are, where training was too short for so many. A run that was
    resumed at its end in another folder has none there, and its model stays."""
    args = trainer.args
    if args.average_checkpoints is None:
        return
    checkpoints = with_weights(args.output_dir)
    steps = list(checkpoints)
    if args.load_best_model_at_end:
        metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        scores = {log["step"]: log[metric] for log in trainer.state.log_history if metric in log}
        sign = 1 if args.greater_is_better else -1
        steps = sorted(checkpoints.keys() & scores.keys(), key=lambda step: sign * scores[step])
    chosen = sorted(steps[-args.average_checkpoints :])
    if len(chosen) < args.average_checkpoints:
        logger.warning("there are not %d checkpoints to average", args.average_checkpoints)
    if not chosen:
        return
    logger.info("The model is the mean of the checkpoints of the steps %s", chosen)
    with tempfile.TemporaryDirectory() as averaged:
        average_checkpoints([checkpoints[step] for step in chosen], averaged)
        trainer._load_from_checkpoint(averaged)


class EpochCallback(TrainerCallback):
    """Tells a data set that differs from epoch to epoch which it is. accelerate does, but not once
    it skips the batches before a checkpoint; `TokenBudgetStream` sees to itself."""

    def on_epoch_begin(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Before the epoch's first batch is made."""
        dataset = getattr(train_dataloader, "dataset", None)
        if isinstance(dataset, BPEDropoutDataset):
            dataset.set_epoch(int(state.epoch or 0))


class LastingTensorBoardCallback(TensorBoardCallback):
    """Training does not end because somebody removed the folder of its events: they begin anew."""

    def on_log(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the scores; where that fails, into a new file."""
        try:
            super().on_log(args, state, control, logs=logs, **kwargs)
        except OSError as error:
            logger.warning("TensorBoard's events are lost (%s): they go on in a new file", error)
            self.tb_writer = None
            super().on_log(args, state, control, logs=logs, **kwargs)

    def on_train_end(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the file, if it is there."""
        try:
            super().on_train_end(args, state, control, **kwargs)
        except OSError as error:
            logger.warning("TensorBoard's last events are lost (%s)", error)


class CurvesCallback(TrainerCallback):
    """Draws loss and BLEU over the steps into `curves.png`, beside the checkpoint: in the end, and
    after evaluations once a minute, since a picture takes longer than many a small evaluation."""

    PAUSE = 60.0  # seconds

    def __init__(self) -> None:
        self.drawn = time.monotonic()

    def on_evaluate(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Redraw with the newest scores."""
        if time.monotonic() - self.drawn >= self.PAUSE:
            self.on_train_end(args, state, control)
            self.drawn = time.monotonic()

    def on_train_end(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Draw, on the main process alone."""
        if state.is_world_process_zero:
            from ..plotting import plot_curves, save  # matplotlib takes long to import

            folder = Path(args.output_dir).resolve()
            save(plot_curves({folder.name: state.log_history}), folder / "curves.png")
