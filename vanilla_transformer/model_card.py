"""The card that training leaves beside a checkpoint: data, recipe, command and measured scores."""

import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel, Seq2SeqTrainingArguments

from .arguments import ModelArguments
from .data import DataArguments
from .evaluation import METRICS

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

A {{ model_type }} of {{ parameters }} parameters for {{ direction }}, trained on {{ data }}.

```python
from transformers import pipeline

translate = pipeline("translation", model="{{ folder }}", trust_remote_code=True)
```

With `import vanilla_transformer` first, `trust_remote_code` is not needed.

## Scores

{{ scores }}

## Training

{{ steps }} steps, {{ epochs }} epochs, on {{ device }}, with torch {{ torch }} and
transformers {{ transformers }}. The curves are in `curves.png`.

```
{{ command }}
```

The options that differ from their defaults, the recipe's included:

```yaml
{{ recipe }}
```
"""


def write_model_card(
    model: PreTrainedModel,
    scores: dict[str, dict[str, Any]],
    log: dict[str, Any],
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    training_arguments: Seq2SeqTrainingArguments,
) -> Path:
    """Write `README.md` into the run's output folder.

    Args:
        scores: For each split, what `evaluation.score_translations` measured.
        log: `steps` and `epochs` done.

    Returns:
        The card's path.
    """
    output_dir = Path(training_arguments.output_dir).resolve()  # "." has no name
    languages = [data_arguments.source_lang, data_arguments.target_lang]
    arguments = (model_arguments, data_arguments, training_arguments)
    card = ModelCard.from_template(
        ModelCardData(
            language=[language for language in languages if language] or None,
            library_name="transformers",
            pipeline_tag="translation",
            tags=[model.config.model_type],
            model_name=output_dir.name,
            eval_results=_eval_results(scores, data_arguments) or None,
        ),
        template_str=TEMPLATE,
        name=output_dir.name,
        folder=output_dir.name,
        model_type=model.config.model_type,
        parameters=f"{model.num_parameters():,}",
        direction=" to ".join(filter(None, languages)) or "sequence-to-sequence tasks",
        data=_data_name(data_arguments),
        scores=_score_table(scores),
        device=training_arguments.device.type,
        torch=torch.__version__,
        transformers=transformers.__version__,
        command=shlex.join(["python", *sys.argv]),
        recipe=yaml.safe_dump(_changed(arguments), sort_keys=True, allow_unicode=True).strip(),
        **log,
    )
    path = output_dir / "README.md"
    card.save(path)
    return path


def _data_name(arguments: DataArguments) -> str:
    if arguments.dataset_name is not None:
        return f"`{arguments.dataset_name}`"
    return f"`{Path(arguments.paths('train')[0]).name}`"


def _eval_results(scores: dict[str, dict[str, Any]], arguments: DataArguments) -> list[EvalResult]:
    name = _data_name(arguments).strip("`")
    return [
        EvalResult(
            task_type="translation",
            dataset_type=name,
            dataset_name=name,
            dataset_split=split,
            metric_type=metric,
            metric_value=round(measured[metric], 2),
        )
        for split, measured in scores.items()
        for metric in METRICS
    ]


def _score_table(scores: dict[str, dict[str, Any]]) -> str:
    if not scores:
        return "None were measured: the run had no validation and no test data."
    rows = ["| split | BLEU | chrF | exact match, % |", "|---|---|---|---|"]
    for split, measured in scores.items():
        cells = (f"{measured[metric]:.2f}" for metric in METRICS)
        rows.append(f"| {split} | {' | '.join(cells)} |")
    signatures = next(iter(scores.values()))
    rows += ["", f"BLEU `{signatures['bleu_signature']}`, chrF `{signatures['chrf_signature']}`"]
    return "\n".join(rows)


def _changed(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What a user or a recipe set: everything that is not at its default."""
    plain = (str, int, float, bool)
    changed: dict[str, Any] = {}
    for group in arguments:
        for name, spec in type(group).__dataclass_fields__.items():
            value = getattr(group, name)
            value = getattr(value, "value", value)
            default = getattr(spec.default, "value", spec.default)
            if spec.init and isinstance(value, plain) and value != default and "token" not in name:
                changed[name] = value
    return changed
