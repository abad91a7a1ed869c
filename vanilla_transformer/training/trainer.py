"""Makes the tokenizer, the model and the `Seq2SeqTrainer`, and finds the checkpoint to resume."""

import copy
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import TorchDynamoPlugin, broadcast_object_list
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedConfig,
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
from transformers.trainer_utils import has_length

from ..data.bpe_dropout import BPEDropoutDataset
from ..data.collation import PairCollator
from ..data.token_batches import RepeatedStream
from ..inference.metrics import METRICS, make_compute_metrics
from ..inference.translation import expect_valid_options
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .arguments import ModelArguments
from .averaging import average_checkpoints, checkpoints_with_weights
from .checkpoints import (
    AtomicCheckpointTrainer,
    checkpoints_by_step,
    find_defect,
    from_worst_to_best,
    is_off_schedule,
    last_complete_checkpoint,
)
from .compilation import compile_layers
from .defaults import TextSize, choose_dropout
from .diagnosis import LossGapCallback, SourceUseCallback
from .distributed import (
    FULL_OPTIMIZER,
    SHARDED_OPTIMIZER,
    ShardedTrainer,
    load_full_weights,
    saves_shards,
    uses_fsdp,
)
from .finite_gradients import FiniteGradientsCallback
from .interruption import InterruptibleTrainer
from .model_card import ModelCardTrainer
from .r_drop import can_fuse_r_drop, fused_r_drop_loss, r_drop_loss
from .token_batches import TokenBudgetTrainer

logger = logging.getLogger(__name__)


def find_checkpoint(arguments: Seq2SeqTrainingArguments) -> str | None:
    """The checkpoint to resume from, or `None` to start a new training.

    `resume_from_checkpoint` is a checkpoint's folder, "true" for the newest complete checkpoint in
    `output_dir`, or "auto" for the same if there is one. The main process decides for all.

    Raises:
        FileNotFoundError: The checkpoint does not exist, or not for all processes.
        ValueError: The checkpoint is damaged (the message names the file), or holds no optimizer
            state that this run can load.
        FileExistsError: `output_dir` is a file, or holds a model that would be overwritten.
    """
    output_dir, wanted = Path(arguments.output_dir), arguments.resume_from_checkpoint
    layout = _optimizer_layout(arguments)
    found = _run_on_main_process(lambda: _find_checkpoint(output_dir, wanted, layout))
    if found is not None and not Path(found).is_dir():
        raise FileNotFoundError(
            f"{found}: process 0 sees this folder, process {arguments.process_index} does not: "
            "expected a file system that all processes share"
        )
    return found


def _run_on_main_process(make: Callable[[], Any]) -> Any:
    """Call the function on the main process; all processes return its result, or raise its
    error."""
    results: list[Any] = [None]
    if PartialState().is_main_process:
        try:
            results = [make()]
        except Exception as error:
            results = [error]
    broadcast_object_list(results)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _find_checkpoint(output_dir: Path, wanted: str | None, layout: str) -> str | None:
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"output_dir={output_dir} is a file: expected a folder")
    mode = str(wanted).lower()
    if mode in ("auto", "true"):
        newest = last_complete_checkpoint(output_dir)
        if newest is None and mode == "true":
            raise FileNotFoundError(f"{output_dir}: no checkpoint to resume from")
        if newest is not None:
            return _expect_optimizer_state(newest, layout)
    elif wanted is not None:
        if not Path(wanted, "trainer_state.json").is_file():
            raise FileNotFoundError(f"resume_from_checkpoint={wanted}: not a trainer's checkpoint")
        defect = find_defect(wanted)
        if defect is not None:
            raise ValueError(f"resume_from_checkpoint={wanted}: {defect}")
        _expect_optimizer_state(Path(wanted), layout)
        if Path(wanted).resolve().parent != output_dir.resolve():
            _expect_no_model(output_dir)
        return str(wanted)
    _expect_no_model(output_dir)
    return None


def _expect_no_model(output_dir: Path) -> None:
    if checkpoints_by_step(output_dir) or (output_dir / "config.json").exists():
        raise FileExistsError(
            f"output_dir={output_dir} already holds a model: choose another folder, or resume its "
            "training with --resume_from_checkpoint true"
        )


# How an optimizer's state is saved, and the file or folder in a checkpoint that shows it.
OPTIMIZER_LAYOUTS = {
    "DeepSpeed": "global_step*",
    "FSDP with SHARDED_STATE_DICT": SHARDED_OPTIMIZER,
    "FSDP with FULL_STATE_DICT": FULL_OPTIMIZER,
    "one process or DDP": OPTIMIZER_NAME,
}


def _optimizer_layout(arguments: Seq2SeqTrainingArguments) -> str:
    if arguments.deepspeed_plugin is not None:
        return "DeepSpeed"
    if saves_shards():
        return "FSDP with SHARDED_STATE_DICT"
    return "FSDP with FULL_STATE_DICT" if uses_fsdp() else "one process or DDP"


def _expect_optimizer_state(checkpoint: Path, layout: str) -> str:
    held = [name for name, file in OPTIMIZER_LAYOUTS.items() if any(checkpoint.glob(file))]
    if layout not in held:
        holds = f"the optimizer state of {held[0]}" if held else "no optimizer state"
        advice = "--model_name_or_path trains its weights with a new optimizer"
        if held and "SHARDED" in held[0]:
            advice = f"`accelerate merge-weights` gathers its weights, and {advice}"
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} holds {holds}, expected that of {layout}; "
            f"{advice}"
        )
    return str(checkpoint)


def make_tokenizer(
    arguments: ModelArguments, training_data: Any, checkpoint: str | None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the checkpoint or of the options, or train a new one on the data (on
    the main process, for all).

    Raises:
        ValueError: The named tokenizer has no padding token or no `eos_token`.
    """
    name = checkpoint or arguments.tokenizer_name or arguments.model_name_or_path
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        for kind in ("pad_token", "eos_token"):
            if getattr(tokenizer, kind) is None:
                raise ValueError(f"{name}: the tokenizer has no {kind}, expected one")
        return tokenizer
    logger.info("Training a tokenizer with %d tokens", arguments.vocab_size)
    return _run_on_main_process(lambda: arguments.train(training_data))


def make_model(
    arguments: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: str | None,
    size: TextSize | None = None,
) -> PreTrainedModel:
    """Make a new model with the tokenizer's vocabulary and special tokens, or load the one to
    fine-tune. A target starts with `bos_token` or, if there is none, with `pad_token`, as in T5 and
    Marian. Without a dropout in the options, the size of the text decides.

    Raises:
        ValueError: The checkpoint to resume from holds a model with a different configuration.
    """
    if arguments.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(arguments.float32_matmul_precision)
    attention = {"attn_implementation": arguments.attn_implementation}
    saved = None if checkpoint is None else AutoConfig.from_pretrained(checkpoint)
    if arguments.model_name_or_path is not None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # our own models never use it
        name = arguments.model_name_or_path
        config, unknown = AutoConfig.from_pretrained(
            name, return_unused_kwargs=True, **arguments.overrides()
        )
        if unknown:
            first, kind = next(iter(unknown)), type(config).__name__
            raise ValueError(f"config_overrides has {first!r}: no field of {kind}")
        if saved is not None:  # its special tokens became those of the tokenizer and the language
            _expect_same_model(config, saved, checkpoint, with_tokens=False)
        return AutoModelForSeq2SeqLM.from_pretrained(name, config=config, **attention)
    bos = tokenizer.bos_token_id
    separate = {}
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        separate["decoder_vocab_size"] = tokenizer.target_vocab_size
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": bos,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id if bos is None else bos,
    }
    config = VanillaTransformerConfig.from_preset(
        arguments.preset,
        vocab_size=len(tokenizer),
        **separate,
        **attention,
        **{**tokens, **arguments.overrides()},
    )
    if size is not None and not arguments.states_dropout():
        if saved is None:
            config.dropout = choose_dropout(config, size)
        else:  # the text may have changed
            config.dropout = getattr(saved, "dropout", config.dropout)
    if saved is not None:
        _expect_same_model(config, saved, checkpoint)
    return VanillaTransformerForConditionalGeneration(config)


def _expect_same_model(
    config: PreTrainedConfig,
    saved: PreTrainedConfig,
    checkpoint: str | None,
    with_tokens: bool = True,
) -> None:
    """Raise a ValueError unless the checkpoint's model computes what this one does."""
    for name in ("model_type", *type(config).__dataclass_fields__):
        if name in ("architectures", "dtype", "transformers_version", "use_cache"):
            continue
        if name.endswith("_token_id") and not with_tokens:
            continue
        theirs, ours = getattr(saved, name, None), getattr(config, name)
        if isinstance(theirs, PreTrainedConfig) and isinstance(ours, PreTrainedConfig):
            _expect_same_model(ours, theirs, f"{checkpoint}, in its {name},", with_tokens)
        elif theirs != ours:
            raise ValueError(
                f"{checkpoint} holds a different model: its {name} is {theirs!r}, this run's is "
                f"{ours!r}"
            )


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Seq2SeqTrainingArguments,
    splits: dict[str, Any],
) -> Seq2SeqTrainer:
    """Make a `Seq2SeqTrainer` for tokenized splits, with scores and learning curves.

    Args:
        splits: "train" and optionally "validation", with columns `input_ids` and `labels`.

    Raises:
        ValueError: An option would have no effect on this model.
    """
    # Trainer writes this into the model's configuration, which is saved. Losses need no cache.
    arguments.use_cache = True
    if arguments.load_best_model_at_end and arguments.save_total_limit == 1:
        # It keeps the best checkpoint and the last one either way. With 1, `Trainer` deletes the
        # last in the end, and the same command would train again from the best.
        arguments.save_total_limit = 2
    set_generation_options(model, arguments)
    if arguments.neftune_noise_alpha and getattr(model.config, "shares_embeddings", False):
        raise ValueError(
            f"neftune_noise_alpha={arguments.neftune_noise_alpha}: expected a model whose source "
            "and target don't share their embeddings, or transformers adds no noise"
        )
    metrics = None
    if arguments.predict_with_generate:
        names = getattr(arguments, "metrics", METRICS)
        tokenize = getattr(arguments, "bleu_tokenize", None)
        metrics = make_compute_metrics(tokenizer, names, tokenize)
    patience = getattr(arguments, "early_stopping_patience", None)
    train_dataset = splits["train"]
    if getattr(arguments, "max_tokens", None) is None and not has_length(train_dataset):
        train_dataset = RepeatedStream(train_dataset)
    trainer = TranslationTrainer(
        model=model,
        args=arguments,
        train_dataset=train_dataset,
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=PairCollator(tokenizer, model=model),
        compute_metrics=metrics,
        callbacks=[
            EpochCallback(),
            FiniteGradientsCallback(),
            SourceUseCallback(),
            LossGapCallback(),
            *([] if patience is None else [ResumableEarlyStoppingCallback(patience)]),
        ],
    )
    # Replicas of `DataParallel` would all compute with the layers of the first GPU.
    if arguments.torch_compile and arguments.n_gpu <= 1:
        how = {"backend": arguments.torch_compile_backend, "mode": arguments.torch_compile_mode}
        if compile_layers(model, **how):  # and not the model as a whole
            trainer.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    trainer.add_callback(CurvesCallback(trainer))
    if trainer.pop_callback(TensorBoardCallback) is not None:
        trainer.add_callback(ResilientTensorBoardCallback())
    return trainer


def set_generation_options(model: PreTrainedModel, arguments: Seq2SeqTrainingArguments) -> None:
    """Put the decoding options into the model's generation config: `generation_num_beams` and
    `generation_kwargs`, then what the file `generation_config` sets, then the model's own.

    Raises:
        ValueError: The model can't generate with them, or its config can't be saved with them.
    """
    if arguments.generation_config is not None:
        own = model.generation_config.to_dict()
        given = Seq2SeqTrainer.load_generation_config(arguments.generation_config)
        given.update(**own, defaults_only=True, allow_custom_entries=True)
        model.generation_config = given
        arguments.generation_config = None  # which `Seq2SeqTrainer` would put in its place
    config = model.generation_config
    config.num_beams = arguments.generation_num_beams or config.num_beams or 1
    for name, value in (arguments.generation_kwargs or {}).items():
        setattr(config, name, value)
    expect_valid_options(model, {})
    config.validate(strict=True)  # as every checkpoint does


class TranslationTrainer(
    InterruptibleTrainer,
    ShardedTrainer,
    AtomicCheckpointTrainer,
    TokenBudgetTrainer,
    ModelCardTrainer,
    Seq2SeqTrainer,
):
    """`Seq2SeqTrainer` with all of these and R-Drop."""

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Same as that of `InterruptibleTrainer`, but with no epochs left, either, if training had
        stopped early: it would continue up to the next evaluation."""
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        patience = getattr(self.args, "early_stopping_patience", None)
        state = self.resumed_state()
        if state is not None and patience is not None:
            epochs = 0 if evaluations_without_gain(state) >= patience else epochs
        return epochs, *others

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Same as `Trainer.compute_loss`; in training, with `r_drop_alpha`, from the update
        `r_drop_start` on, the R-Drop loss of two passes."""
        starts = self.state.global_step >= getattr(self.args, "r_drop_start", 0)
        if getattr(self.args, "r_drop_alpha", 0.0) and starts and model.training:
            return self._compute_r_drop_loss(model, inputs, return_outputs, num_items_in_batch)
        counts_items = isinstance(self.model, VanillaTransformerForConditionalGeneration)
        has_own_loss = self.label_smoother is not None or self.compute_loss_func is not None
        if num_items_in_batch is None or has_own_loss or counts_items:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # Stock models return the mean of a batch, whatever the number of labels of the update is.
        # `Trainer` (5.17 to 5.24) takes it for the batch's part of the update's mean.
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        share = (inputs["labels"] != -100).sum() / num_items_in_batch
        if self.args.average_tokens_across_devices:  # DDP divides by the number of processes
            share = share * self.accelerator.num_processes
        return (loss * share, outputs) if return_outputs else loss * share

    def _compute_r_drop_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any
    ) -> Any:
        # Both passes share their labels. Models that are given no labels return all logits.
        twice: dict[str, Any] = {
            name: torch.cat([value, value]) for name, value in inputs.items() if name != "labels"
        }
        alpha = self.args.r_drop_alpha
        eps = self.args.label_smoothing_factor or getattr(self.model.config, "label_smoothing", 0.0)
        whole = self.accelerator.unwrap_model(model)
        fuses = can_fuse_r_drop(whole) and not (uses_fsdp() or self.args.deepspeed_plugin)
        if fuses:
            twice |= {"output_hidden_states": True, "logits_to_keep": 1}

        def r_drop(
            outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            options = (labels, alpha, eps, num_items_in_batch)
            if not fuses:
                return r_drop_loss(outputs.logits, *options)
            with self.accelerator.autocast():
                states = outputs.decoder_hidden_states[-1]
                return fused_r_drop_loss(states, whole.lm_head.weight, *options)

        before = self.compute_loss_func  # type: ignore[has-type]  # a stock one, if any
        self.compute_loss_func = r_drop
        try:
            inputs = {**twice, "labels": inputs["labels"], "use_cache": False}
            return super().compute_loss(model, inputs, *args)
        finally:
            self.compute_loss_func = before

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """Same as `Seq2SeqTrainer.prediction_step`, but a blank source has a blank translation, as
        in `translate`, and the model keeps its generation config. transformers (5.17 to 5.24)
        writes all defaults into it, among them a maximum of 20 tokens, which would be saved with
        the model."""
        generation_config = copy.deepcopy(self.model.generation_config)
        try:
            loss, outputs, labels = super().prediction_step(
                model, inputs, prediction_loss_only, *args, **kwargs
            )
        finally:
            self.model.generation_config = generation_config
        if self.args.predict_with_generate and outputs is not None:
            pad, nothing = self.processing_class.pad_token_id, self.processing_class("")
            mask = inputs.get("attention_mask")  # `pad_token` may be an `eos_token` too
            lengths = (inputs["input_ids"].ne(pad) if mask is None else mask).sum(1)
            is_blank = lengths <= len(nothing["input_ids"])
            outputs[is_blank.to(outputs.device)] = pad
        return loss, outputs, labels


def load_averaged_checkpoints(trainer: Seq2SeqTrainer) -> None:
    """Load the mean of the last `average_checkpoints` checkpoints into the trainer's model, or that
    of the best ones with `load_best_model_at_end`.

    If there are fewer checkpoints, it is the mean of all. If there are none, as after resuming a
    finished run in another folder, the model stays as it is.
    """
    args = trainer.args
    if not args.average_checkpoints:
        return
    checkpoints = checkpoints_with_weights(args.output_dir)
    # A run that resumed from an earlier step may end before the last one's checkpoints.
    steps = [
        step
        for step, path in checkpoints.items()
        if step <= trainer.state.global_step and not is_off_schedule(path)
    ]
    if args.load_best_model_at_end:
        steps = from_worst_to_best(args, trainer.state, steps)
    chosen = sorted(steps[-args.average_checkpoints :])
    if len(chosen) < args.average_checkpoints:
        logger.warning(
            "there are only %d checkpoints to average: expected %d",
            len(chosen),
            args.average_checkpoints,
        )
    if not chosen:
        return
    logger.info("The model is the mean of the checkpoints at steps %s", chosen)
    with tempfile.TemporaryDirectory() as averaged:
        average_checkpoints([checkpoints[step] for step in chosen], averaged)
        load_full_weights(trainer.model, averaged)


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """Counts on from the checkpoint's evaluations without an improvement."""

    def on_train_begin(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Take the number from the state that the trainer has loaded."""
        super().on_train_begin(args, state, control, **kwargs)
        if state.global_step:
            self.early_stopping_patience_counter = evaluations_without_gain(state)


def evaluations_without_gain(state: TrainerState) -> int:
    """How many evaluations in a row were no better, up to a checkpoint with this state."""
    saved = state.stateful_callbacks.get(ResumableEarlyStoppingCallback.__name__)
    return saved["attributes"]["early_stopping_patience_counter"] if saved else 0


class EpochCallback(TrainerCallback):
    """Tells a `BPEDropoutDataset`, which differs from epoch to epoch, which epoch begins.
    accelerate does not, if it skips the batches before a checkpoint."""

    def on_epoch_begin(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Set the epoch before its first batch is made."""
        dataset = getattr(train_dataloader, "dataset", None)
        if isinstance(dataset, BPEDropoutDataset):
            dataset.set_epoch(int(state.epoch or 0))


class ResilientTensorBoardCallback(TensorBoardCallback):
    """Continues with a new file of events if someone deletes the old one during training."""

    def on_log(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the logs, to a new file if that fails."""
        try:
            super().on_log(args, state, control, logs=logs, **kwargs)
        except OSError as error:
            logger.warning("TensorBoard's events are lost (%s): they continue in a new file", error)
            self.tb_writer = None
            super().on_log(args, state, control, logs=logs, **kwargs)

    def on_train_end(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the file, if it still exists."""
        try:
            super().on_train_end(args, state, control, **kwargs)
        except OSError as error:
            logger.warning("TensorBoard's last events are lost (%s)", error)


class CurvesCallback(TrainerCallback):
    """Plots loss and scores over steps to `curves.png` in the output folder: at the end of
    training, and after an evaluation, but at most once a minute and not during an upload."""

    INTERVAL = 60.0  # seconds

    def __init__(self, trainer: AtomicCheckpointTrainer) -> None:
        self.trainer = trainer
        self.last_plot = time.monotonic()

    def on_evaluate(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Plot the newest scores."""
        waited = time.monotonic() - self.last_plot >= self.INTERVAL
        if waited and not self.trainer.is_uploading():
            self.on_train_end(args, state, control)
            self.last_plot = time.monotonic()

    def on_train_end(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Plot, on the main process only."""
        if state.is_world_process_zero:
            from ..plotting import plot_curves, save  # matplotlib is slow to import

            folder = Path(args.output_dir).resolve()
            save(plot_curves({folder.name: state.log_history}), folder / "curves.png")
