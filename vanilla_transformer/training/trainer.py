"""Makes the `Seq2SeqTrainer` of this package, with R-Drop, and averages its checkpoints."""

import copy
import logging
import tempfile
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import has_length

from ..data.collation import PairCollator
from ..data.token_batches import RepeatedStream
from ..inference.decoding import expect_valid_options
from ..inference.metrics import make_compute_metrics
from ..model.generation_options import LIMITS, first_given
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import TranslationTrainingArguments
from .averaging import checkpoints_with_weights, write_average
from .callbacks import (
    CurvesCallback,
    EpochCallback,
    OwnDropoutCallback,
    ResilientTensorBoardCallback,
    ResumableEarlyStoppingCallback,
    evaluations_without_gain,
)
from .checkpoints import AtomicCheckpointTrainer, from_worst_to_best, is_off_schedule
from .compilation import compile_layers
from .diagnosis import LossGapCallback, SourceUseCallback
from .distributed import ShardedTrainer, load_full_weights, uses_fsdp
from .finite_gradients import FiniteGradientsCallback
from .interruption import InterruptibleTrainer
from .model_card import ModelCardTrainer
from .r_drop import can_fuse_r_drop, fused_r_drop_loss, r_drop_loss
from .token_batches import TokenBudgetTrainer

logger = logging.getLogger(__name__)


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TranslationTrainingArguments,
    splits: dict[str, Any],
) -> Seq2SeqTrainer:
    """Make a `Seq2SeqTrainer` for tokenized splits, with scores and learning curves.

    Args:
        splits: "train" and optionally "validation", with columns `input_ids` and `labels`.

    Raises:
        ValueError: An option would have no effect on this model.
    """
    # Trainer saves this in the model's configuration. Losses need no cache in any case.
    arguments.use_cache = True
    is_ours = isinstance(model, VanillaTransformerForConditionalGeneration)
    if arguments.ddp_find_unused_parameters is None and is_ours:
        # M2M-100 drops layers: without the search, the processes would wait for each other forever.
        arguments.ddp_find_unused_parameters = False
    if arguments.load_best_model_at_end and arguments.save_total_limit == 1:
        # It keeps the best checkpoint and the last one in both cases. With 1, `Trainer` deletes the
        # last at the end, and the same command would continue from the best.
        arguments.save_total_limit = 2
    set_generation_options(model, arguments)
    if arguments.neftune_noise_alpha and getattr(model.config, "shares_embeddings", False):
        raise ValueError(
            f"neftune_noise_alpha={arguments.neftune_noise_alpha}: expected a model whose source "
            "and target don't share their embeddings, or transformers adds no noise"
        )
    metrics = None
    if arguments.predict_with_generate:
        shown = arguments.log_translations if arguments.process_index == 0 else 0
        metrics = make_compute_metrics(
            tokenizer, arguments.metrics, arguments.bleu_tokenize, log_translations=shown
        )
    patience = arguments.early_stopping_patience
    train_dataset = splits["train"]
    if arguments.max_tokens is None and not has_length(train_dataset):
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
        if compile_layers(model, **how):  # in place of the entire model
            trainer.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    trainer.add_callback(OwnDropoutCallback(trainer.share_of_batches()))
    trainer.add_callback(CurvesCallback(trainer))
    if trainer.pop_callback(TensorBoardCallback) is not None:
        trainer.add_callback(ResilientTensorBoardCallback())
    return trainer


def set_generation_options(model: PreTrainedModel, arguments: TranslationTrainingArguments) -> None:
    """Put the decoding options into the model's generation config: `generation_num_beams` and
    `generation_kwargs`, then what the file `generation_config` sets, then the model's own. A limit
    of length replaces the model's, also one of another kind.

    Raises:
        ValueError: The model can't generate with them, or its config can't be saved with them.
    """
    if arguments.generation_config is not None:
        own = model.generation_config.to_dict()
        given = Seq2SeqTrainer.load_generation_config(arguments.generation_config)
        given.update(**own, defaults_only=True, allow_custom_entries=True)
        model.generation_config = given
        arguments.generation_config = None  # `Seq2SeqTrainer` would use it instead
    config = model.generation_config
    config.num_beams = arguments.generation_num_beams or config.num_beams or 1
    wanted: Any = arguments.generation_kwargs or {}  # transformers has read the JSON
    limit = first_given(*(name for name in LIMITS if wanted.get(name) is not None))
    if limit is not None:
        for name in LIMITS[: LIMITS.index(limit)]:
            setattr(config, name, None)  # the model's own would apply in its place
        config.max_length = None  # `generate()` warns about two limits
    for name, value in wanted.items():
        setattr(config, name, value)
    expect_valid_options(model, wanted)
    try:
        config.validate(strict=True)  # as each save of a checkpoint does
    except ValueError as error:
        raise ValueError(f"{error}\nIn generation_kwargs, null unsets an option.") from error


class TranslationTrainer(
    InterruptibleTrainer,
    ShardedTrainer,
    AtomicCheckpointTrainer,
    TokenBudgetTrainer,
    ModelCardTrainer,
    Seq2SeqTrainer,
):
    """`Seq2SeqTrainer` with all of these mixins and R-Drop."""

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Same as that of `InterruptibleTrainer`, but also with no epochs left if training had
        stopped early: it would continue up to the next evaluation."""
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        patience, state = self.args.early_stopping_patience, self.resumed_state()
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
        """Same as `Trainer.compute_loss`, but with `r_drop_alpha`, after `r_drop_start` updates of
        training, the R-Drop loss of two passes."""
        starts = self.state.global_step >= self.args.r_drop_start
        if self.args.r_drop_alpha and starts and model.training:
            return self._compute_r_drop_loss(model, inputs, return_outputs, num_items_in_batch)
        counts_items = isinstance(self.model, VanillaTransformerForConditionalGeneration)
        has_own_loss = self.label_smoother is not None or self.compute_loss_func is not None
        if num_items_in_batch is None or has_own_loss or counts_items:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # Stock models return the mean of a batch, regardless of the labels in the update. `Trainer`
        # (5.17 to 5.24) treats it as the batch's share of the update's mean.
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        share = (inputs["labels"] != -100).sum() / num_items_in_batch
        if self.args.average_tokens_across_devices:  # DDP divides by the number of its batches
            share = share * (self.accelerator.num_processes // self.get_tp_size())
        return (loss * share, outputs) if return_outputs else loss * share

    def _compute_r_drop_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any
    ) -> Any:
        # Both passes have the same labels. Without labels, models return all logits.
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
        """Same as `Seq2SeqTrainer.prediction_step`, but with one translation per source, which is
        blank for a blank source, as in `translate`, with a loss without label smoothing for stock
        models too, and without changes to the model's generation config. transformers (5.17 to
        5.24) writes all defaults into it, which would be saved with the model, such as a maximum of
        20 tokens."""
        generation_config = self.model.generation_config
        smoother: Any = self.label_smoother  # type: ignore[has-type]
        self.label_smoother = None
        self.model.generation_config = config = copy.deepcopy(generation_config)
        config.num_return_sequences, config.return_dict_in_generate = 1, False
        try:
            loss, outputs, labels = super().prediction_step(
                model, inputs, prediction_loss_only, *args, **kwargs
            )
        finally:
            self.model.generation_config = generation_config
            self.label_smoother = smoother
        if self.args.predict_with_generate and outputs is not None:
            nothing = self.processing_class("")["input_ids"]
            is_blank = inputs["attention_mask"].sum(1) <= len(nothing)
            outputs[is_blank.to(outputs.device)] = self.processing_class.pad_token_id
        return loss, outputs, labels


def load_averaged_checkpoints(trainer: Seq2SeqTrainer) -> None:
    """Load the mean of the last `average_checkpoints` checkpoints into the trainer's model, or that
    of the best ones with `load_best_model_at_end`.

    If there are fewer checkpoints, the mean is over all. If there are none, as after resuming a
    finished run in another folder, the model is unchanged.
    """
    args = trainer.args
    if not args.average_checkpoints:
        return
    checkpoints = checkpoints_with_weights(args.output_dir)
    # A run that resumed from an earlier step may end before the checkpoints of the previous run.
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
        write_average([checkpoints[step] for step in chosen], averaged)
        load_full_weights(trainer.model, averaged)
    trainer.averaged_steps = chosen
