r"""Train a translation model from scratch, or fine-tune one.

    vanilla-transformer train --config phrases --output_dir outputs/phrases
    vanilla-transformer train --config multi30k_tiny --output_dir outputs/mine \
        --train_source train.en --train_target train.de \
        --validation_source valid.en --validation_target valid.de
    torchrun --nproc_per_node 2 -m vanilla_transformer train --config multi30k_tiny \
        --max_tokens 1024 --output_dir outputs/multi30k
    accelerate launch --config_file "$(vanilla-transformer recipes --path accelerate/ddp)" \
        -m vanilla_transformer train --config multi30k_tiny --max_tokens 1024 \
        --output_dir outputs/multi30k

Options override those of the recipe (--config), and local files replace its data set. The output
folder gets the model, its tokenizer, a model card and learning curves. See docs/training.md.
"""

import json
import logging
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import logging as transformers_logging

from ..data.data_options import DataArguments
from ..inference.decoding import as_option, position_limits
from ..inference.metrics import METRICS, score_translations
from ..inference.translation import translate
from ..training.arguments import ModelArguments, TranslationTrainingArguments
from ..training.distributed import end_training, load_saved_model
from ..training.folder_lock import locked
from ..training.parsing import parse_arguments
from ..training.preparation import prepare
from ..training.resumption import (
    OptionsCallback,
    expect_same_options,
    find_checkpoint,
    find_outdated_scores,
    fixed_options,
    scoring_options,
    warn_of_another_text,
)
from ..training.trainer import load_averaged_checkpoints, make_trainer
from .train_options import make_parser

logger = logging.getLogger("train")


def main() -> None:
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, DataArguments, TranslationTrainingArguments),
        make_parser=partial(make_parser, description=__doc__),
    )
    log_to_stderr(training_args)
    with locked(training_args.output_dir):
        train(model_args, data_args, training_args)


def log_to_stderr(training_args: TrainingArguments) -> None:
    """Print what goes on, once, and the warnings of every process and package, unless `--log_level`
    and `--log_level_replica` say otherwise."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    transformers_logging.set_verbosity_warning()  # the meaning of "passive", the default
    level = training_args.get_process_log_level()
    transformers_logging.set_verbosity(level)
    if training_args.should_log and training_args.log_level == "passive":
        level = logging.INFO
    for own in ("vanilla_transformer", logger.name):
        logging.getLogger(own).setLevel(level)


def train(model_args: ModelArguments, data_args: DataArguments, training_args: Any) -> None:
    """Train, average, save and score a model."""
    checkpoint = find_checkpoint(training_args)
    prepared = prepare(model_args, data_args, training_args, checkpoint)
    options = fixed_options(model_args, training_args)
    text = None if prepared.size is None else prepared.size._asdict()
    if checkpoint is not None:
        expect_same_options(checkpoint, options)
        warn_of_another_text(checkpoint, text)
    model, tokenizer, pairs = prepared.model, prepared.tokenizer, prepared.pairs
    trainer = make_trainer(model, tokenizer, training_args, prepared.splits)
    scoring = scoring_options(trainer)
    if checkpoint is not None:
        trainer.outdated_scores = find_outdated_scores(checkpoint, scoring)
    trainer.add_callback(OptionsCallback(options, text, scoring))
    trainer.card_arguments = model_args, data_args
    trainer.target_tokens_per_epoch = prepared.target_tokens
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.exit_if_interrupted()
    load_averaged_checkpoints(trainer)
    trainer.save_model()
    trainer.save_state()
    torch.set_float32_matmul_precision("highest")  # so that users get the scores of the card
    model = load_saved_model(model, training_args.output_dir).to(training_args.device)
    scores = {
        split: evaluate(model, tokenizer, pairs[split], training_args)
        for split in ("validation", "test")
        if split in pairs
    }
    end_training(trainer)
    if trainer.is_world_process_zero():
        trainer.finish_card(model, scores)
        logger.info("The model and its card are in %s", training_args.output_dir)


def evaluate(model: Any, tokenizer: Any, pairs: Any, training_args: Any) -> dict[str, Any]:
    """Translate a split on all processes together, and score it on the first. Sources are only cut
    where the model's table of positions ends."""
    is_first = training_args.process_index == 0
    longest, _ = position_limits(model)
    translations = translate(
        (pair["source"] for pair in pairs),
        model,
        tokenizer,
        batch_size=training_args.per_device_eval_batch_size,
        show_progress=is_first and not training_args.disable_tqdm,
        together=True,
        max_source_length=as_option(longest),
    )
    predictions = list(translations)
    if not is_first:
        return {}
    references = [pair["target"] for pair in pairs]
    scores = score_translations(
        predictions,
        references,
        metrics=[*METRICS, *training_args.metrics],
        tokenize=training_args.bleu_tokenize,
    )
    print(json.dumps(scores))
    return scores
