"""The model card that training writes: data, recipe, command and scores."""

import json
import logging
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ..data.data_options import DataArguments
from ..inference.derived_cards import language_codes
from ..inference.metrics import LABELS
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from .arguments import ModelArguments
from .checkpoints import UNSEEN, step_of

logger = logging.getLogger(__name__)

USAGE = """```python
from transformers import pipeline

translate = pipeline("translation", model="{place}", trust_remote_code=True)
```

`trust_remote_code=True` runs the Python files of this repository. Read them, and pass the hash of
the commit that you have read as `revision="..."`, so that a later change does not run unread. After
`import vanilla_transformer`, `trust_remote_code` is not needed."""

USAGE_OF_STOCK_MODEL = """```python
from transformers import pipeline

import vanilla_transformer  # adds the pipeline

translate = pipeline("translation", model="{place}")
```"""

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

A {{ model_type }} with {{ parameters }} parameters for {{ direction }}, trained on {{ data }}.

{{ usage }}

## Scores

{{ scores }}

## Training

{{ steps }} steps{% if epochs is defined %}, {{ epochs }} epochs{% endif %}\
{% if target_tokens %}, {{ target_tokens }} target tokens{% endif %}\
, on {{ device }}{% if processes > 1 %} in {{ processes }} processes{% endif %}\
, with torch {{ torch }} and transformers {{ transformers }}.\
{% if weights %} The weights are {{ weights }}.{% endif %}
{% if curves %}
![Loss and scores over steps](curves.png)
{% endif %}
```
{{ command }}
```

The options that differ from their defaults, as given, in the recipe or chosen from the text:

```yaml
{{ recipe }}
```
"""


class ModelCardTrainer(Trainer):
    """A mixin for any trainer: `class MyTrainer(ModelCardTrainer, Seq2SeqTrainer)`.

    Set `card_arguments` to the model and data arguments. The trainer then writes its card with
    `write_model_card`, and every push to the Hub includes it, with the model's code. With
    `target_tokens_per_epoch`, it also says how many tokens the model saw, and with
    `averaged_steps`, which steps the weights are averaged over.
    """

    card_arguments: tuple[Any, ...] = ()
    averaged_steps: Sequence[int] = ()
    target_tokens_per_epoch: int | None = None
    scores: dict[str, dict[str, Any]] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_CompletePush(self))

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Same as `Trainer.init_hf_repo`; also creates the branch `hub_revision` if necessary,
        unless it belongs to a pull request."""
        super().init_hf_repo(*args, **kwargs)
        branch, token = self.args.hub_revision, self.args.hub_token
        if branch and not branch.startswith("refs/") and self.is_world_process_zero():
            HfApi().create_branch(self.hub_model_id, branch=branch, token=token, exist_ok=True)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Same as `Trainer.create_model_card`; our card ignores the arguments."""
        if not self.card_arguments:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            self._write_card(self.model)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `Trainer.push_to_hub`, but if it fails, only a warning says so: the scores can
        still be measured, and `finish_card` uploads everything again."""
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            if not self.card_arguments:
                raise
            logger.warning("The upload to the Hub failed, and is repeated at the end: %s", error)
            return None

    def finish_card(self, model: PreTrainedModel, scores: dict[str, dict[str, Any]]) -> None:
        """Write the card with scores. With `push_to_hub`, upload it, and what changed in the folder
        or failed to be uploaded before.

        Args:
            model: The full model; the trainer's own may be sharded.
            scores: As for `write_model_card`.

        Raises:
            ConnectionError: The upload failed.
        """
        self.scores = scores
        folder = self._write_card(model).parent
        if not self.args.push_to_hub:
            return
        try:
            HfApi().upload_folder(
                repo_id=self.hub_model_id,
                folder_path=folder,
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                commit_message="Model card",
                ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"],
            )
        except Exception as error:
            raise ConnectionError(
                f"the model and its card are in {self.args.output_dir}, but their upload failed: "
                f"{error}; `vanilla-transformer push {self.args.output_dir} {self.hub_model_id}` "
                "uploads them"
            ) from error

    def _write_card(self, model: PreTrainedModel) -> Path:
        steps, epochs = self.state.global_step, self.state.epoch or 0.0
        epochs -= self.state.stateful_callbacks.get(UNSEEN, {}).get("epochs", 0.0)
        log: dict[str, Any] = {"steps": steps}
        if has_length(self.train_dataset):  # `Trainer` counts all steps on a stream as one epoch
            log["epochs"] = round(epochs, 2)
        if self.target_tokens_per_epoch is not None:
            log["target_tokens"] = f"{round(epochs * self.target_tokens_per_epoch):,}"
        log["weights"] = self._weights()
        model_arguments, data_arguments = self.card_arguments
        return write_model_card(
            model, self.scores, log, model_arguments, data_arguments, self.args, self.hub_model_id
        )

    def _weights(self) -> str | None:
        """Which steps the weights are from, unless from the last one."""
        steps, best = list(self.averaged_steps), self.state.best_model_checkpoint
        if not steps and not self.is_in_train and self.args.load_best_model_at_end and best:
            steps = [step_of(best)]
        if steps in ([], [self.state.global_step]):
            return None
        if len(steps) == 1:
            return f"those of step {steps[0]}"
        return f"the mean of those of the steps {', '.join(map(str, steps))}"


class _CompletePush(TrainerCallback):
    """Before a push, writes our card and adds the model's code: `Trainer` does neither when it
    pushes a checkpoint."""

    def __init__(self, trainer: ModelCardTrainer) -> None:
        self.trainer = trainer

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write only missing or changed files: a thread may still read those of the last push."""
        if self.trainer.card_arguments:
            self.trainer.create_model_card()
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        for code in checkpoint.glob("*.py"):
            pushed = Path(args.output_dir, code.name)
            if not pushed.exists() or pushed.read_bytes() != code.read_bytes():
                shutil.copy(code, pushed)


def write_model_card(
    model: PreTrainedModel,
    scores: dict[str, dict[str, Any]] | None,
    log: dict[str, Any],
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    training_arguments: Seq2SeqTrainingArguments,
    repository: str | None = None,
) -> Path:
    """Write `README.md` into the run's output folder.

    Args:
        scores: For each split, the result of `metrics.score_translations`; `None` if not measured
            yet.
        log: `steps` done and, if known, `epochs` and the `target_tokens` in them, and which
            `weights` these are if not from the last step.
        repository: The name on the Hub, if the model is pushed.

    Returns:
        The card's path.
    """
    output_dir = Path(training_arguments.output_dir).resolve()  # "." has no name
    name = Path(repository or output_dir).name
    languages = list(filter(None, [data_arguments.source_lang, data_arguments.target_lang]))
    recipe = _recipe(model, model_arguments, data_arguments, training_arguments)
    has_code = isinstance(model.config, VanillaTransformerConfig)
    usage = USAGE if has_code else USAGE_OF_STOCK_MODEL
    card = ModelCard.from_template(
        ModelCardData(
            **language_codes(languages),
            license=model_arguments.license,
            library_name="transformers",
            pipeline_tag="translation",
            tags=[model.config.model_type],
            datasets=_on_the_hub(data_arguments.dataset_name, "phrases"),
            metrics=_measured(scores) or None,
            base_model=_on_the_hub(model_arguments.model_name_or_path),
            model_name=name,
            eval_results=_eval_results(scores, data_arguments) or None,
        ),
        template_str=TEMPLATE,
        name=name,
        usage=usage.format(place=repository or training_arguments.output_dir),
        model_type=model.config.model_type,
        parameters=f"{get_model_param_count(model):,}",
        direction=" to ".join(languages) or "sequence-to-sequence tasks",
        data=", ".join(f"`{name}`" for name in _data_names(data_arguments)),
        scores=_score_table(scores),
        curves=(output_dir / "curves.png").exists(),
        device=training_arguments.device.type,
        processes=training_arguments.world_size,
        torch=torch.__version__,
        transformers=transformers.__version__,
        command=_command(training_arguments.hub_token),
        recipe=yaml.safe_dump(recipe, sort_keys=True, allow_unicode=True).strip(),
        **log,
    )
    path = output_dir / "README.md"
    card.save(path)
    return path


def _on_the_hub(name: str | None, *built_in: str) -> str | None:
    """The name, if it belongs to a repository on the Hub: metadata links to it."""
    return None if name is None or name in built_in or Path(name).exists() else name


def _data_names(arguments: DataArguments, split: str = "train") -> list[str]:
    if arguments.dataset_name is not None:
        return [arguments.dataset_name]
    return [Path(corpus[0]).name for corpus in arguments.corpora(split)]


def _eval_results(
    scores: dict[str, dict[str, Any]] | None, arguments: DataArguments
) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="translation",
            dataset_type=", ".join(_data_names(arguments, split)),
            dataset_name=", ".join(_data_names(arguments, split)),
            dataset_config=arguments.dataset_config_name,
            dataset_split=split,
            metric_type=metric,
            metric_value=round(measured[metric], 2),
        )
        for split, measured in (scores or {}).items()
        for metric in LABELS
        if metric in measured
    ]


def _measured(scores: dict[str, dict[str, Any]] | None) -> list[str]:
    """The metrics of the scores, which are the same for all splits."""
    measured = next(iter((scores or {}).values()), {})
    return [metric for metric in LABELS if metric in measured]


def _score_table(scores: dict[str, dict[str, Any]] | None) -> str:
    if scores is None:
        return "Not measured yet."
    if not scores:
        return "Not measured: the run had no validation or test data."
    metrics, signatures = _measured(scores), next(iter(scores.values()))
    rows = [f"| split | {' | '.join(LABELS[metric] for metric in metrics)} |"]
    rows.append(f"|---{'|---' * len(metrics)}|")
    for split, measured in scores.items():
        cells = (f"{measured[metric]:.2f}" for metric in metrics)
        rows.append(f"| {split} | {' | '.join(cells)} |")
    signed = [metric for metric in metrics if f"{metric}_signature" in signatures]
    notes = (f"{LABELS[metric]} `{signatures[f'{metric}_signature']}`" for metric in signed)
    rows += ["", ", ".join(notes)]
    return "\n".join(rows)


def _command(token: str | None) -> str:
    words = [word.replace(token, "<HUB_TOKEN>") if token else word for word in sys.argv]
    return f"{words[0]} {shlex.join(words[1:])}"


# Options that don't describe a training: those that another option replaces, those that are set for
# a machine, and those that follow from others.
REPLACED = {
    "num_train_epochs": "max_steps",
    "per_device_train_batch_size": "max_tokens",
    "gradient_accumulation_steps": "batches_per_update",
}
INCIDENTAL = {
    "dataloader_pin_memory", "disable_tqdm", "do_eval", "resume_from_checkpoint", "use_cache",
    "use_cpu",
}  # fmt: skip


def _recipe(model: PreTrainedModel, options: ModelArguments, *others: Any) -> dict[str, Any]:
    """The options that differ from their defaults, and the dropout if it follows from the text."""
    recipe = _changed((options, *others))
    if options.model_name_or_path is None and not options.states_dropout():
        recipe["config_overrides"] = {**options.overrides(), "dropout": model.config.dropout}
    return recipe


def _changed(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The options that differ from their defaults, without secrets and options without effect."""
    changed: dict[str, Any] = {}
    for group in arguments:
        for name, spec in type(group).__dataclass_fields__.items():
            default = spec.default if spec.default_factory is MISSING else spec.default_factory()
            value = getattr(group, name)
            if not spec.init or not isinstance(value, (str, int, float, bool, list, dict)):
                continue
            # `TrainingArguments` turns some names into lists, and masks secrets by their ending.
            is_off = value is False and default is None
            if value not in (default, [default], []) and not (is_off or name.endswith("_token")):
                changed[name] = value
    replaced = {one for one, other in REPLACED.items() if other in changed}
    kept = {name: changed[name] for name in changed.keys() - replaced - INCIDENTAL}
    return json.loads(json.dumps(kept, default=str))
