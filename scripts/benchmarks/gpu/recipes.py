"""Two recipes with transformers' trainer: the paper's base model on random text with the lengths of
WMT, and Multi30k to its score.

Both use `TokenBudgetTrainer`, as `vanilla-transformer train` does, and no package that this command
would need for its data.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from scripts.benchmarks.gpu.cells import Cell, Worker
from scripts.benchmarks.gpu.multi30k import TEST, TRAINING, read_split
from scripts.benchmarks.gpu.plan import Plan
from scripts.benchmarks.gpu.timing import begin, peak_gib
from scripts.benchmarks.gpu.training import SOURCE_MEAN, wmt_lengths
from scripts.benchmarks.peers import EOS, PEERS
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.token_batches import TokenBudgetSampler
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.inference.metrics import score_translations
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.training.averaging import average_checkpoints, checkpoints_with_weights
from vanilla_transformer.training.recipes import find_recipe
from vanilla_transformer.training.token_batches import TokenBudgetArguments, TokenBudgetTrainer

WMT = "wmt14_en_de_base"
EPOCH_BATCHES = 100  # of random text
WARM_UP = 20  # steps that are not timed
PAPER_UPDATES = 100_000  # section 5.2
# Wu et al. (2021), https://aclanthology.org/2021.acl-long.480: Transformer-Tiny.
MULTI30K = {
    "max_tokens": 8192,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "inverse_sqrt",
    "warmup_steps": 2000,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-9,
    "bf16": True,
    "save_strategy": "epoch",
    "save_only_model": True,
    "save_total_limit": 10,
}
BEAMS = 5
SHARES = {"wmt": 0.2, "multi30k": 0.65}  # of the part's time, for training
LABELS = ("recipe",)
COLUMNS = {
    "updates": "{:,}",
    "wanted_updates": "{:,}",
    "tokens_per_second": "{:,.0f}",
    "days_to_100000_updates": "{:.2f}",
    "minutes": "{:.1f}",
    "bleu": "{:.2f}",
    "peak_gib": "{:.2f}",
}
NOTES = """\
tokens_per_second counts source and target tokens without padding. Multi30k: BLEU (tokenised,
lower-cased, as the text is) of the mean of the last 10 epochs on test 2016 with 5 beams; minutes
are those of training. Time may end training before the wanted updates."""


def cells(plan: Plan, worker: Worker) -> list[Cell]:
    limit = plan.limits["recipes"]
    wmt, multi30k = (SHARES[name] * limit for name in ("wmt", "multi30k"))
    return [
        Cell({"recipe": f"{WMT}, random text"}, measure_wmt, (plan, wmt), limit),
        Cell({"recipe": "Multi30k"}, measure_multi30k, (plan, multi30k), limit),
    ]


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return []  # the issue names none


# ---------------------------------------------------------------- Training


@dataclass
class RecipeArguments(TokenBudgetArguments, Seq2SeqTrainingArguments):
    """The arguments that a recipe sets of the trainer."""


class RecipeTrainer(TokenBudgetTrainer, Seq2SeqTrainer):
    """Batches with a token budget."""


class Clock(TrainerCallback):
    """Times the steps after the first ones, and ends training in time."""

    def __init__(self, seconds: float, warm_up: int):
        self.end, self.warm_up = time.monotonic() + seconds, warm_up
        self.begin = 0.0

    def on_step_end(
        self,
        args: Seq2SeqTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.global_step == self.warm_up:
            self.begin = now()
        if time.monotonic() > self.end:
            control.should_training_stop = True


def now() -> float:
    """The time when the GPU has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def train(
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[dict[str, list[int]]],
    clock: Clock,
    **settings: Any,
) -> int:
    """Train on pairs of `input_ids` and `labels`, and return the number of updates."""
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 100}
    arguments = RecipeArguments(**{**settings, **quiet, "use_cpu": plan.is_dry})
    trainer = RecipeTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[clock],
    )
    trainer.train()
    return trainer.state.global_step


def measure_wmt(plan: Plan, seconds: float) -> dict[str, Any]:
    begin(plan)
    size = plan.sizes["base"]
    recipe = yaml.safe_load(find_recipe(WMT).read_text(encoding="utf-8"))
    settings = {
        name: value
        for name, value in recipe.items()
        if name in RecipeArguments.__dataclass_fields__
    }
    settings |= {"max_tokens": plan.tokens, "max_steps": plan.updates}
    settings |= {"eval_strategy": "no", "save_strategy": "no"}
    lengths = wmt_lengths(EPOCH_BATCHES * plan.tokens // SOURCE_MEAN, seed=0)
    random = np.random.default_rng(0)

    def sentence(length: int) -> list[int]:
        return random.integers(EOS + 1, size.vocab_size, length).tolist()

    pairs = [
        {"input_ids": sentence(source), "labels": sentence(target)}
        for source, target in zip(*lengths, strict=True)
    ]
    tokenizer = train_tokenizer(["only for its padding"], 300, show_progress=False)
    clock = Clock(seconds, min(WARM_UP, plan.updates // 2))
    with tempfile.TemporaryDirectory() as folder:
        model = PEERS["vanilla_transformer"](size)
        updates = train(plan, model, tokenizer, pairs, clock, output_dir=folder, **settings)
    rate = (updates - clock.warm_up) / (now() - clock.begin)  # updates per second
    batches = len(TokenBudgetSampler(*lengths, plan.tokens))
    return {
        "updates": updates,
        "wanted_updates": plan.updates,
        "tokens_per_second": rate * sum(int(side.sum()) for side in lengths) / batches,
        "days_to_100000_updates": PAPER_UPDATES / rate / 86_400,
        "peak_gib": peak_gib(plan),
    }


# ---------------------------------------------------------------- Multi30k


def measure_multi30k(plan: Plan, seconds: float) -> dict[str, Any]:
    if plan.data is None:
        raise ValueError("--data is not given: expected a folder with Multi30k")
    begin(plan)
    texts = read_split(plan.data, TRAINING)
    tokenizer = train_tokenizer([*texts[0], *texts[1]], plan.vocab_size, show_progress=False)
    sources = tokenizer(texts[0])["input_ids"]
    targets = tokenizer(text_target=texts[1])["input_ids"]
    pairs = [
        {"input_ids": source, "labels": target}
        for source, target in zip(sources, targets, strict=True)
    ]
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer))
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    assert all(getattr(config, name) == getattr(tokenizer, name) for name in special)
    torch.manual_seed(1)
    model = VanillaTransformerForConditionalGeneration(config)
    started = now()
    clock = Clock(seconds, 0)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**MULTI30K, "max_steps": plan.multi30k_updates, "output_dir": folder}
        updates = train(plan, model, tokenizer, pairs, clock, **settings)
        minutes = (now() - started) / 60
        averaged = Path(folder, "averaged")
        average_checkpoints(list(checkpoints_with_weights(folder).values()), averaged)
        model = VanillaTransformerForConditionalGeneration.from_pretrained(averaged)
    model = model.to(plan.device)
    lines, references = read_split(plan.data, TEST)
    limit = {"max_new_tokens": plan.new_tokens} if plan.is_dry else {}
    translations = translate(lines, model, tokenizer, batch_size=128, num_beams=BEAMS, **limit)
    scores = score_translations(list(translations), references, tokenize="none")
    return {
        "updates": updates,
        "wanted_updates": plan.multi30k_updates,
        "minutes": minutes,
        "bleu": scores["bleu"],
        "bleu_signature": scores["bleu_signature"],
        "peak_gib": peak_gib(plan),
    }
