"""Training with `Seq2SeqTrainer`: arguments, recipes, and the objects that a run is made of."""

import copy
import logging
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import get_last_checkpoint

from .averaging import average_checkpoints, checkpoints_in
from .batching import TokenBudgetArguments, TokenBudgetTrainer
from .bpe_dropout import BPEDropoutDataset
from .configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .data import SPLITS, DataArguments, iter_texts
from .evaluation import make_compute_metrics
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .r_drop import r_drop_loss
from .tokenization import train_tokenizer

logger = logging.getLogger(__name__)

# Local files on the command line replace the data set that a recipe names.
LOCAL_DATA_FLAGS = {
    f"--{split}_{side}" for split in SPLITS for side in ("source", "target", "file")
}
REMOTE_DATA_OPTIONS = {"dataset_name", "dataset_config_name"}


@dataclass
class ModelArguments:
    """Which model to train, and with which tokenizer.

    Raises:
        ValueError: An option is not among its choices, or `config_overrides` can't be read.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Fine-tune this checkpoint. Default: train from scratch."}
    )
    preset: str = field(
        default="base", metadata={"help": f"Shape of a new model: {', '.join(PRESETS)}."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Fields unlike the preset's, e.g. dropout=0.2,norm_position=pre."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer to use; by default, one is trained on the data."}
    )
    vocab_size: int = field(
        default=8000, metadata={"help": "Size of the tokenizer trained on the data."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "eager, sdpa, flex_attention, flash_attention_2, ..."}
    )
    float32_matmul_precision: str | None = field(
        default=None,
        metadata={
            "help": "torch.set_float32_matmul_precision: highest, high or medium, which on CPUs "
            "with AVX-512 or AMX trains up to twice as fast at next to no loss of precision."
        },
    )

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r}: expected one of {', '.join(PRESETS)}")
        precisions = (None, "highest", "high", "medium")
        if self.float32_matmul_precision not in precisions:
            raise ValueError(
                f"float32_matmul_precision={self.float32_matmul_precision!r}: "
                "expected highest, high or medium"
            )
        self.overrides()

    def overrides(self) -> dict[str, Any]:
        """`config_overrides` as fields and values."""
        fields: dict[str, Any] = {}
        for item in (self.config_overrides or "").split(","):
            name, equals, value = (part.strip() for part in item.partition("="))
            if name and not equals:
                raise ValueError(f"config_overrides has {item!r}: expected name=value")
            if name and name not in VanillaTransformerConfig.__dataclass_fields__:
                raise ValueError(f"config_overrides has {name!r}: no field of the configuration")
            if name:
                fields[name] = yaml.safe_load(value)
        return fields


@dataclass
class TranslationTrainingArguments(TokenBudgetArguments, Seq2SeqTrainingArguments):
    """transformers' arguments, and those of the paper's training that it has none for.

    Raises:
        ValueError: Checkpoints are to be averaged that would not be there; alpha is negative; the
            generation config has no such field.
    """

    _VALID_DICT_FIELDS = [*Seq2SeqTrainingArguments._VALID_DICT_FIELDS, "generation_kwargs"]

    average_checkpoints: int | None = field(
        default=None,
        metadata={
            "help": "At the end of training, let the mean of the last so many checkpoints be the "
            "model (the paper: 5, and 20 for the big model); with load_best_model_at_end of the "
            "best by metric_for_best_model."
        },
    )
    r_drop_alpha: float = field(
        default=0.0,
        metadata={
            "help": "Weight of R-Drop's divergence between two passes with other dropout, 5 in "
            "its paper for translation; 0: one pass. Each batch is then worked on twice at a time."
        },
    )
    generation_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "What the model's generation config is to hold besides generation_num_beams, "
            'e.g. {"length_penalty": 0.6, "length_penalty_type": "gnmt"}.'
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r_drop_alpha < 0:
            raise ValueError(f"r_drop_alpha={self.r_drop_alpha}: expected a number from 0")
        known = GenerationConfig().to_dict().keys() | {"length_penalty_type"}
        for name in self.generation_kwargs or {}:
            if name not in known:
                raise ValueError(f"generation_kwargs has {name!r}: no field of GenerationConfig")
        self._check_averages()

    def _check_averages(self) -> None:
        wanted, limit = self.average_checkpoints, self.save_total_limit
        if wanted is None:
            return
        if wanted < 1:
            raise ValueError(f"average_checkpoints={wanted}: expected a positive number")
        if limit is not None and limit < wanted:
            raise ValueError(
                f"average_checkpoints={wanted}: save_total_limit={limit} keeps fewer, expected as "
                "many at least"
            )
        if self.save_strategy == "no":
            raise ValueError(f"average_checkpoints={wanted}: save_strategy='no' keeps none")

    def limit(self, data: DataArguments) -> None:
        """Let tokenisation cut what the budget can't take, if that is wished."""
        if self.oversized != "cut" or self.max_tokens is None:
            return
        for name in ("max_source_length", "max_target_length"):
            setattr(data, name, min(getattr(data, name) or self.max_tokens, self.max_tokens))


def parse_arguments(dataclass_types: Iterable[Any], argv: Sequence[str] | None = None) -> tuple:
    """Parse a command line in which `--config recipe.yaml` gives defaults and flags override them.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        argv: The command line without the program's name; `sys.argv`'s by default.

    Returns:
        One instance of each dataclass.

    Raises:
        ValueError: The recipe is not a mapping, or a name in it is not an option.
        FileNotFoundError: There is no such recipe.
    """
    parser = HfArgumentParser(dataclass_types, allow_abbrev=False)
    parser.add_argument("--config", help="YAML recipe: any option by its name; flags override it.")
    argv = sys.argv[1:] if argv is None else list(argv)
    if not torch.accelerator.is_available():
        # Left to themselves, several processes on CPUs would each train a model of their own.
        parser.set_defaults(use_cpu=True)
    recipe_path = parser.parse_known_args(argv)[0].config
    if recipe_path is not None:
        recipe = yaml.safe_load(Path(recipe_path).read_text(encoding="utf-8"))
        if not isinstance(recipe, dict):
            raise ValueError(f"{recipe_path}: expected a mapping from options to values")
        unknown = sorted(set(map(str, recipe)) - {action.dest for action in parser._actions})
        if unknown:
            raise ValueError(f"{recipe_path}: unknown options {', '.join(unknown)}")
        if any(flag.partition("=")[0] in LOCAL_DATA_FLAGS for flag in argv):
            recipe = {name: recipe[name] for name in recipe.keys() - REMOTE_DATA_OPTIONS}
        parser.set_defaults(**recipe)
    return parser.parse_args_into_dataclasses(argv)[: len(parser.dataclass_types)]


def find_checkpoint(arguments: Seq2SeqTrainingArguments) -> str | None:
    """Where to resume from; `None` to start anew.

    `resume_from_checkpoint` is a checkpoint's folder, or "true" for the newest in `output_dir`, or
    "auto" for the same where there is one.

    Raises:
        FileNotFoundError: The checkpoint does not exist.
        FileExistsError: `output_dir` is a file, or holds a model that would be overwritten.
    """
    output_dir, wanted = Path(arguments.output_dir), arguments.resume_from_checkpoint
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"output_dir={output_dir} is a file: expected a folder")
    newest = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    mode = str(wanted).lower()
    if mode in ("auto", "true"):
        if newest is None and mode == "true":
            raise FileNotFoundError(f"{output_dir}: no checkpoint to resume from")
        if newest is not None:
            return newest
    elif wanted is not None:
        if not Path(wanted, "trainer_state.json").is_file():
            raise FileNotFoundError(f"resume_from_checkpoint={wanted}: not a trainer's checkpoint")
        return str(wanted)
    if newest is not None or (output_dir / "config.json").exists():
        raise FileExistsError(
            f"output_dir={output_dir} already holds a model: choose another folder, or go on "
            "training it with --resume_from_checkpoint true"
        )
    return None


def make_tokenizer(
    arguments: ModelArguments, training_data: Any, checkpoint: str | None
) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, the one named, or a new one trained on the data."""
    name = checkpoint or arguments.tokenizer_name or arguments.model_name_or_path
    if name is not None:
        return AutoTokenizer.from_pretrained(name)
    logger.info("Training a tokenizer of %d tokens", arguments.vocab_size)
    return train_tokenizer(iter_texts(training_data), arguments.vocab_size)


def make_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, checkpoint: str | None
) -> PreTrainedModel:
    """A new model with the tokenizer's vocabulary and special tokens, or the one to fine-tune.

    Raises:
        ValueError: The checkpoint to resume from is of another shape.
    """
    if arguments.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(arguments.float32_matmul_precision)
    attention = {"attn_implementation": arguments.attn_implementation}
    if arguments.model_name_or_path is not None:
        return AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, **attention)
    config = VanillaTransformerConfig.from_preset(
        arguments.preset,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
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
    """A `Seq2SeqTrainer` over tokenised splits, with scores, curves and TensorBoard.

    Args:
        splits: "train" and perhaps "validation", with columns `input_ids` and `labels`.
    """
    if not arguments.report_to and is_tensorboard_available():
        arguments.report_to = ["tensorboard"]
    # Trainer writes this into the model's configuration, where it would outlive the training.
    arguments.use_cache = not arguments.gradient_checkpointing
    model.generation_config.num_beams = arguments.generation_num_beams or 1
    for name, value in (arguments.generation_kwargs or {}).items():
        setattr(model.generation_config, name, value)
    metrics = make_compute_metrics(tokenizer) if arguments.predict_with_generate else None
    return TranslationTrainer(
        model=model,
        args=arguments,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=metrics,
        callbacks=[CurvesCallback(), EpochCallback()],
    )


class TranslationTrainer(TokenBudgetTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with token budgets and R-Drop, and less one habit: while it evaluates,
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
        self.compute_loss_func = lambda outputs, labels, num_items_in_batch: r_drop_loss(
            outputs.logits, labels, alpha, eps, num_items_in_batch
        )
        try:
            inputs = {**twice, "labels": inputs["labels"], "use_cache": False}
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.compute_loss_func = None  # type: ignore[assignment]

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple:
        """As `Seq2SeqTrainer.prediction_step`, the generation config left as it was."""
        generation_config = copy.deepcopy(self.model.generation_config)
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.model.generation_config = generation_config


def average_last(trainer: Seq2SeqTrainer) -> None:
    """Let the trainer's model be the mean of its last `average_checkpoints`, or of its best ones,
    if that is wished; of all there are, where training was too short for so many."""
    args = trainer.args
    if args.average_checkpoints is None:
        return
    checkpoints = checkpoints_in(args.output_dir)
    steps = list(checkpoints)
    if args.load_best_model_at_end:
        metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        scores = {log["step"]: log[metric] for log in trainer.state.log_history if metric in log}
        sign = 1 if args.greater_is_better else -1
        steps = sorted(checkpoints.keys() & scores.keys(), key=lambda step: sign * scores[step])
    chosen = sorted(steps[-args.average_checkpoints :])
    if len(chosen) < args.average_checkpoints:
        logger.warning("there are not %d checkpoints to average", args.average_checkpoints)
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


class CurvesCallback(TrainerCallback):
    """Draws loss and BLEU over the steps into `curves.png`, beside the checkpoint."""

    def on_evaluate(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Redraw with the newest scores."""
        self.on_train_end(args, state, control)

    def on_train_end(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Draw, on the main process alone."""
        if state.is_world_process_zero:
            draw_curves(state.log_history, Path(args.output_dir, "curves.png"))


def draw_curves(log_history: list[dict[str, float]], path: Path) -> None:
    """Draw a trainer's log: training and validation loss on the left, BLEU and chrF on the right.

    Args:
        log_history: `TrainerState.log_history`.
        path: The picture; its suffix names the format.
    """
    from matplotlib.figure import Figure  # drawing is rare, matplotlib's import slow

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    curves = [
        (panels[0], {"loss": "training", "eval_loss": "validation"}, "loss"),
        (panels[1], {"eval_bleu": "BLEU", "eval_chrf": "chrF"}, "score on the validation set"),
    ]
    for axes, names, label in curves:
        for name, legend in names.items():
            points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
            if points:
                axes.plot(*zip(*points, strict=True), label=legend)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)
