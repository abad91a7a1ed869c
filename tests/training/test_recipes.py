"""Every recipe trains: loaded, and run for two steps on stand-in text of its data set's columns."""

import json
from itertools import product

import pytest
import torch
import yaml
from conftest import REPOSITORY, slow
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, get_scheduler

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.parallel_text import DataArguments
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.parsing import parse_arguments

GROUPS = (ModelArguments, DataArguments, TranslationTrainingArguments)
RECIPES = sorted((REPOSITORY / "vanilla_transformer/recipes").glob("*.yaml"))
TRAINED_ALWAYS = ("back_translation", "g2p", "inflection", "multi30k_tiny", "phrases")
FINE_TUNES = ("marian",)  # tested with the stock models
# The columns of data sets that don't have one column `translation` with a text in each language.
COLUMNS = {"bentrevett/multi30k": ("en", "de")}
TEXTS = ["a house by the lake", "the lake is deep", "see how deep the lake is"] * 8
SMALL = "encoder_layers=1,decoder_layers=1,d_model=32,encoder_ffn_dim=32,decoder_ffn_dim=32"


def stand_in(folder, recipe):
    """A local data set with the columns of the recipe's own."""
    languages = recipe["source_lang"], recipe["target_lang"]
    for split in ("train", "validation", "test"):
        rows = [dict.fromkeys(languages, text) for text in TEXTS]
        if recipe["dataset_name"] not in COLUMNS:
            rows = [{"translation": row} for row in rows]
        count = len(rows) if split == "train" else 2
        text = "".join(json.dumps(row) + "\n" for row in rows[:count])
        (folder / f"{split}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_its_score_or_that_it_was_not_run(path):
    lines = path.read_text().partition("\n\n")[0].splitlines()
    comment = " ".join(line.strip("# ") for line in lines)
    assert ("This recipe was not run." in comment) != ("Score on " in comment)


@pytest.mark.parametrize(
    "path",
    [
        parameter
        for path in RECIPES
        if path.stem not in FINE_TUNES
        for parameter in ([path] if path.stem in TRAINED_ALWAYS else slow(path))
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_trains_and_names_its_source(path, tmp_path, train_here):
    assert "http" in path.read_text().partition("\n\n")[0] or path.stem == "phrases"
    recipe = yaml.safe_load(path.read_text())
    (tmp_path / "data").mkdir()
    files = []
    flags = {
        "config": path,
        "output_dir": tmp_path / "model",
        "config_overrides": ",".join(filter(None, (recipe.get("config_overrides"), SMALL))),
        "max_steps": 2,
        "eval_steps": 1,
        "save_steps": 1,
        "logging_steps": 1,
        "max_source_length": 10,
    }
    if recipe.get("dataset_name") == "phrases":
        sizes = {"train": 40, "validation": 2, "test": 2}
        flags |= {f"phrases_{split}_size": size for split, size in sizes.items()}
    elif "dataset_name" not in recipe:  # it uses files
        several = "corpus_tags" in recipe or "corpus_temperature" in recipe
        for split, side in product(("train", "validation"), ("source", "target")):
            file = tmp_path / "data" / f"{split}.{side}"
            file.write_text("".join(f"{text}\n" for text in TEXTS))
            files += [f"--{split}_{side}", *[file] * (1 + several)]
    else:
        flags |= {"dataset_name": stand_in(tmp_path / "data", recipe), "dataset_config_name": None}
        if "dataset_config_name" in recipe:
            flags["dataset_config_name"] = "default"
    given = [(f"--{name}", value) for name, value in flags.items() if value is not None]
    train_here(*(part for pair in given for part in pair), *files)

    state = json.loads((tmp_path / "model/trainer_state.json").read_text())
    assert state["global_step"] == 2
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert model.generation_config.num_beams == recipe["generation_num_beams"]
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
    assert set(filter(None, recipe.get("corpus_tags", ()))) <= set(vocabulary)
    for name, value in recipe.get("generation_kwargs", {}).items():
        assert getattr(model.generation_config, name) == value


@pytest.mark.parametrize(
    ("name", "d_model", "dropout", "steps", "averaged"),
    [
        ("wmt14_en_de_base", 512, 0.1, 100_000, 5),
        ("wmt14_en_de_big", 1024, 0.3, 300_000, 20),
        ("wmt14_en_fr_big", 1024, 0.1, 300_000, 20),
    ],
)
def test_the_papers_recipes_have_the_papers_settings(
    name, d_model, dropout, steps, averaged, tmp_path
):
    """Sections 5.1 to 5.4 and 6.1."""
    recipe = str(REPOSITORY / f"vanilla_transformer/recipes/{name}.yaml")
    model_args, _, args = parse_arguments(
        GROUPS, ["--config", recipe, "--output_dir", str(tmp_path)]
    )
    config = VanillaTransformerConfig.from_preset(model_args.preset, **model_args.overrides())
    assert (config.d_model, config.dropout, config.label_smoothing) == (d_model, dropout, 0.1)
    assert (args.max_steps, args.average_checkpoints, args.max_tokens) == (steps, averaged, 25_000)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (args.weight_decay, args.max_grad_norm, args.lr_scheduler_type) == (0, 0, "inverse_sqrt")

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam([weight], args.learning_rate)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_steps), steps)
    for step in range(1, 6001):
        optimizer.step()
        scheduler.step()
        rate = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert scheduler.get_last_lr()[0] == pytest.approx(rate, rel=1e-8)
