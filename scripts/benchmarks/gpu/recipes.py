"""Recipes with transformers' trainer: the paper's base model on random text with the lengths of
WMT, and, with scores, Multi30k and a language of SIGMORPHON 2020 (words to phones).

They use `TokenBudgetTrainer`, as `vanilla-transformer train` does, but not the packages that this
command needs for data.
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
from scripts.benchmarks.gpu.training import batches_of_lengths
from scripts.benchmarks.peers import EOS, PEERS
from scripts.benchmarks.sigmorphon import WORDS, error_rates, languages_of, read
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.data.vocabularies import pair
from vanilla_transformer.inference.metrics import score_translations
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.training.averaging import average_checkpoints, checkpoints_with_weights
from vanilla_transformer.training.recipes import find_recipe
from vanilla_transformer.training.speeds import measurement_key
from vanilla_transformer.training.token_batches import TokenBudgetArguments, TokenBudgetTrainer

WMT, G2P = "wmt14_en_de_base", "g2p"
EPOCH_BATCHES = 100  # batches of random text
WARM_UP = EPOCH_BATCHES + 10  # steps that are not timed, in which shapes of batches are new
PAPER_UPDATES = 100_000  # section 5.2
# Wu et al. (2021), https://aclanthology.org/2021.acl-long.480: Transformer-Tiny.
MULTI30K = {
    "max_tokens": 8192,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "inverse_sqrt",
    "warmup_steps": 2000,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-9,
    "dataloader_num_workers": 2,
    "dataloader_persistent_workers": True,
    "save_strategy": "epoch",
    "save_only_model": True,
    "save_total_limit": 10,
}
BEAMS = 5
# Shares of the part's time for training. The rest is for preparing, averaging and translating.
SHARES = {"wmt": 0.15, "multi30k": 0.42, "g2p": 0.15}
LABELS = ("recipe",)
Pairs = list[dict[str, list[int]]]  # `input_ids` and `labels`
COLUMNS = {
    "updates": "{:,}",
    "wanted_updates": "{:,}",
    "updates_per_second": "{:.2f}",
    "tokens_per_second": "{:,.0f}",
    "days_to_100000_updates": "{:.2f}",
    "minutes": "{:.1f}",
    "bleu": "{:.2f}",
    "word_error_rate": "{:.2f}",
    "peak_gib": "{:.2f}",
}
NOTES = """\
tokens_per_second counts source and target tokens without padding; `vanilla-transformer plan` takes
the speeds from speeds.json. Multi30k: BLEU (tokenized, lower-cased, as the text is) of the mean of
the last 10 epochs on test 2016 with 5 beams. Words to phones: word error rate, %, on the test words
with 5 beams. minutes are those of training. Time may end training before the wanted updates."""


def cells(plan: Plan, worker: Worker) -> list[Cell]:
    limit = plan.limits["recipes"]
    wmt, multi30k, g2p = (share * limit for share in SHARES.values())
    return [
        Cell({"recipe": f"{WMT}, random text"}, measure_wmt, (plan, wmt), limit),
        Cell({"recipe": "Multi30k"}, measure_multi30k, (plan, multi30k), limit),
        Cell({"recipe": "words to phones"}, measure_g2p, (plan, g2p), limit),
    ]


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return []  # the issue names none


# ---------------------------------------------------------------- Training


@dataclass
class RecipeArguments(TokenBudgetArguments, Seq2SeqTrainingArguments):
    """The trainer's arguments that a recipe sets."""


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
    """The time when the GPU has finished all its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def read_recipe(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All options of a packaged recipe, and those of the trainer."""
    options = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
    known = RecipeArguments.__dataclass_fields__
    settings = {option: value for option, value in options.items() if option in known}
    return options, {**settings, "eval_strategy": "no", "save_strategy": "no"}


def to_pairs(tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str]) -> Pairs:
    """The token ids of each source and its target."""
    ids = tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"]
    return [{"input_ids": one, "labels": other} for one, other in zip(*ids, strict=True)]


def make_model(
    tokenizer: PreTrainedTokenizerBase, **fields: Any
) -> VanillaTransformerForConditionalGeneration:
    """A new tiny model for this tokenizer, with these fields of the configuration."""
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), **fields)
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    assert all(getattr(config, name) == getattr(tokenizer, name) for name in special)
    torch.manual_seed(1)
    return VanillaTransformerForConditionalGeneration(config)


def train(
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Pairs,
    seconds: float,
    **settings: Any,
) -> dict[str, Any]:
    """Train on pairs of `input_ids` and `labels`. `speed` among the figures is a measurement for
    `vanilla-transformer plan`.

    Raises:
        RuntimeError: Time was up before the first timed update.
    """
    started, quiet = now(), {"report_to": "none", "disable_tqdm": True, "logging_steps": 100}
    arguments = RecipeArguments(**{**settings, **quiet, "use_cpu": plan.is_dry})
    clock = Clock(seconds, min(WARM_UP, arguments.max_steps // 2))
    trainer = RecipeTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[clock],
    )
    trainer.train()
    end, updates = now(), trainer.state.global_step
    figures = {"updates": updates, "wanted_updates": arguments.max_steps}
    figures |= {"minutes": (end - started) / 60, "peak_gib": peak_gib(plan)}
    if updates <= clock.warm_up:
        raise RuntimeError(f"{updates} updates in {seconds:.0f} s: expected more to measure")
    rate = (updates - clock.warm_up) / (end - clock.begin)
    batches = len(trainer.get_train_dataloader())
    source, target = (rate / batches * sum(len(pair[side]) for pair in pairs) for side in pairs[0])
    key = measurement_key(model, arguments, pairs)
    row = {**key, "target_tokens_per_second": target, "gib": figures["peak_gib"]}
    figures |= {"updates_per_second": rate, "tokens_per_second": source + target}
    return {**figures, "speed": row}


def measure_wmt(plan: Plan, seconds: float) -> dict[str, Any]:
    begin(plan)
    size = plan.sizes["base"]
    settings = read_recipe(WMT)[1] | {"max_tokens": plan.tokens, "max_steps": plan.updates}
    settings["dataloader_persistent_workers"] = True  # the epochs are short
    lengths = map(np.concatenate, zip(*batches_of_lengths(plan.tokens, EPOCH_BATCHES), strict=True))
    random = np.random.default_rng(0)

    def sentence(length: int) -> list[int]:
        return random.integers(EOS + 1, size.vocab_size, length).tolist()

    pairs = [
        {"input_ids": sentence(source), "labels": sentence(target)}
        for source, target in zip(*lengths, strict=True)
    ]
    tokenizer = train_tokenizer(["only for its padding"], 300, show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        model = PEERS["vanilla_transformer"](size)
        figures = train(plan, model, tokenizer, pairs, seconds, output_dir=folder, **settings)
    days = PAPER_UPDATES / figures["updates_per_second"] / 86_400
    return {**figures, "days_to_100000_updates": days}


# ---------------------------------------------------------------- To a score


def beam_search(
    plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: list[str]
) -> list[str]:
    """The best translation of each line."""
    limit = {"max_new_tokens": plan.new_tokens} if plan.is_dry else {}
    model = model.to(plan.device)
    return [*translate(lines, model, tokenizer, batch_size=128, num_beams=BEAMS, **limit)]


def measure_multi30k(plan: Plan, seconds: float) -> dict[str, Any]:
    if plan.data is None:
        raise ValueError("--data is not given: expected a folder with Multi30k")
    begin(plan)
    # A small model's time is spent on launching operations, many of which are casts with bfloat16.
    torch.set_float32_matmul_precision("high")
    texts = read_split(plan.data, TRAINING)
    tokenizer = train_tokenizer([*texts[0], *texts[1]], plan.vocab_size, show_progress=False)
    pairs, model = to_pairs(tokenizer, *texts), make_model(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**MULTI30K, "max_steps": plan.multi30k_updates, "output_dir": folder}
        figures = train(plan, model, tokenizer, pairs, seconds, **settings)
        averaged = Path(folder, "averaged")
        average_checkpoints(list(checkpoints_with_weights(folder).values()), averaged)
        model = VanillaTransformerForConditionalGeneration.from_pretrained(averaged)
    lines, references = read_split(plan.data, TEST)
    translations = beam_search(plan, model, tokenizer, lines)
    scores = score_translations(translations, references, tokenize="none")
    return {**figures, **{name: scores[name] for name in ("bleu", "bleu_signature")}}


def measure_g2p(plan: Plan, seconds: float) -> dict[str, Any]:
    if plan.g2p_data is None:
        raise ValueError("--g2p_data is not given: expected a folder with words and phones")
    begin(plan)
    language = languages_of(plan.g2p_data)[0]
    recipe, settings = read_recipe(G2P)
    torch.set_float32_matmul_precision(recipe["float32_matmul_precision"])
    sides = [[*side] for side in zip(*read(plan.g2p_data, language, "train"), strict=True)]
    tokenizer = pair(
        *(
            train_tokenizer(
                texts,
                tokenizer_type=recipe[f"{side}tokenizer_type"],
                unicode_normalization=recipe[f"{side}unicode_normalization"],
                show_progress=False,
            )
            for side, texts in zip(("", "target_"), sides, strict=True)
        )
    )
    shape = yaml.safe_load(f"{{{recipe['config_overrides'].replace('=', ': ')}}}")
    model = make_model(tokenizer, decoder_vocab_size=tokenizer.target_vocab_size, **shape)
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"max_steps": plan.g2p_updates, "output_dir": folder}
        figures = train(plan, model, tokenizer, to_pairs(tokenizer, *sides), seconds, **settings)
    words, phones = zip(*read(plan.g2p_data, language, "test"), strict=True)
    found = beam_search(plan, model, tokenizer, [*words])
    word_error_rate = error_rates(found, phones, [WORDS])[WORDS]
    return {**figures, "language": language, "word_error_rate": word_error_rate}
