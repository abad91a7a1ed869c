"""However a training is distributed over processes, its result is the same."""

import json
import os
import shutil

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from conftest import REPOSITORY, Payload, run_module, run_ranks, slow
from safetensors.torch import load_file
from transformers import Seq2SeqTrainingArguments
from transformers.integrations import deepspeed

from scripts.checks import layouts
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.token_batches import TokenBudgetSampler
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.recipes import find_recipe, recipe_path
from vanilla_transformer.training.resumption import find_checkpoint

CONFIGS = sorted((REPOSITORY / "vanilla_transformer/recipes/accelerate").glob("*.yaml"))
fsdp = pytest.mark.parametrize("layout", ["2, FSDP2", *slow("2, FSDP2, full state")])
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


LAST = "checkpoint-4"


AT_EXIT = """
import atexit, os, sys

@atexit.register
def expect_to_have_left():
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        print("This process ends in a group that it has not left", file=sys.stderr, flush=True)
        os._exit(1)
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """Trains the model of scripts/checks/layouts.py for four steps; it saves a checkpoint of the
    second. A process that ends without leaving the process group, which sometimes aborts, counts as
    failed."""
    scratch = tmp_path_factory.mktemp("layouts")
    (scratch / "sitecustomize.py").write_text(AT_EXIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(scratch), prepend=os.pathsep)
        yield layouts.Harness(scratch, layouts.LayoutArguments(steps=4, pairs=100))


@pytest.fixture(scope="module")
def train(harness):
    """A layout's training, or a training resumed from a checkpoint of a different layout; each runs
    once."""
    made = {}

    def train(layout, before=None):
        if (layout, before) not in made:
            checkpoint = before and train(before)[0] / "checkpoint-2"
            folder = harness.scratch / f"{before} to {layout}"
            if (layout, before) == ("1 process", None):
                run_module(*harness.script(folder)[1:], cwd=REPOSITORY)
                made[layout, before] = folder, None
            elif (layout, before) == ("2, FSDP2", None):
                made[layout, before] = folder, train_in_copies(harness, layout, folder)
            else:
                made[layout, before] = folder, harness.train(layout, folder, checkpoint)
        return made[layout, before]

    return train


def train_in_copies(harness, layout, folder):
    """Let `accelerate launch` do everything except start the processes: they are copies of this
    one, in which all slow imports are done. Slow tests start them as users do."""
    _, _, _, launch, *options = layouts.LAYOUTS[layout]
    assert launch == "launch"

    def start(options):
        script = ("-m", options.training_script, *options.training_script_args)
        assert options.module
        failed, output = run_ranks(int(options.nproc_per_node), *script, cwd=REPOSITORY)
        assert not failed, output
        outputs.append(output)

    outputs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.run.run", start)
        launch_command(launch_command_parser().parse_args([*options, *harness.script(folder)]))
    return layouts.parameters_held(outputs[0])


def assert_same(actual, expected):
    """Adam divides by the size of gradients, which amplifies rounding errors in them."""
    differences = layouts.differences(
        layouts.read_training(actual), layouts.read_training(expected)
    )
    assert differences["loss"] < 1e-5
    assert differences["weights"] < 1e-4


# ---------------------------------------------------------------- training


@fsdp
def test_sharded_models_learn_the_same_as_on_one_process(train, layout):
    folder, held = train(layout)
    expected, _ = train("1 process")
    assert_same(folder, expected)
    parameters = sum(
        tensor.numel() for tensor in load_file(expected / "model.safetensors").values()
    )
    assert parameters / 2 <= held < 0.6 * parameters
    if layout == "2, FSDP2":
        parts = {path.name for path in folder.glob("checkpoint-4/pytorch_model_fsdp_0/*.distcp")}
        assert parts == {"__0_0.distcp", "__1_0.distcp"}


@fsdp
@pytest.mark.slow
def test_fsdp_resumes_from_its_own_checkpoints(train, layout):
    assert_same(train(layout, layout)[0], train("1 process")[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2, DDP", "2, FSDP2"])
def test_a_training_resumed_at_its_end_is_unchanged(harness, layout):
    """Nothing is left to do, in mid-epoch, except to score the model, which all processes do
    together."""
    folder, small = harness.scratch / f"in mid-epoch on {layout}", ["--max_tokens", "60"]
    harness.train(layout, folder, None, *small)
    sides = [f"--validation_{side}={harness.scratch / side}" for side in ("source", "target")]
    expected = layouts.read_training(folder)["weights"]
    scores = []
    for name in (layout,) if "FSDP" in layout else (layout, "1 process"):
        again = harness.scratch / f"{layout}, at its end on {name}"
        harness.train(name, again, folder / LAST, *small, *sides)
        assert json.loads((again / "trainer_state.json").read_text())["global_step"] == 4
        for key, weight in layouts.read_training(again)["weights"].items():
            assert torch.equal(weight, expected[key]), key
        card = (again / "README.md").read_text()
        scores.append(card.partition("## Scores")[2].partition("## Training")[0])
    assert "| validation |" in scores[0]
    assert len(set(scores)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("before", "layout"), [("1 process", "2, DDP"), ("2, DDP", "1 process")])
def test_one_process_and_ddp_resume_from_each_others_checkpoints(train, layout, before):
    assert_same(train(layout, before)[0], train("1 process")[0])


@fsdp
def test_the_final_model_is_saved_as_by_one_process(train, layout):
    folder, expected = train(layout)[0], train("1 process")[0]
    assert load_file(folder / "model.safetensors").keys() == (
        load_file(expected / "model.safetensors").keys()
    )
    assert (folder / "config.json").read_text() == (expected / "config.json").read_text()
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    assert not any(type(one).__name__ == "DTensor" for one in model.parameters())
    assert model.lm_head.weight is model.get_encoder().embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts.ZERO)
def test_deepspeed_learns_the_same_as_one_process(train, layout, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    expected = train("1 process")[0]
    assert_same(train(layout)[0], expected)
    assert_same(train(layout, layout)[0], expected)
    checkpoint = train(layout)[0] / "checkpoint-2"
    with pytest.raises(
        ValueError,
        match="the optimizer state of DeepSpeed, expected that of one process",
    ):
        find_checkpoint(Unprepared(str(tmp_path), resume_from_checkpoint=str(checkpoint)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts.ZERO)
def test_a_payload_among_deepspeeds_records_is_not_executed(train, harness, mark, layout):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    planted = harness.scratch / f"planted in {layout}"
    shutil.copytree(train(layout)[0] / "checkpoint-2", planted)
    (planted / "checksums.json").unlink()  # which know the files that are there
    for path in planted.glob("global_step2/*optim_states.pt"):
        torch.save({"optimizer_state_dict": Payload(mark)}, path)
    with pytest.raises(RuntimeError, match="Weights only load failed"):
        harness.train(layout, harness.scratch / f"from planted, {layout}", planted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "average"),
    [
        ("2, DDP", 2),
        ("2, FSDP2", 0),  # averaging shards is refused
        ("2, FSDP2, full state", 2),
        ("2, ZeRO 2", 2),
        ("2, ZeRO 3", 0),
    ],
)
def test_the_best_model_or_the_mean_is_that_of_one_process(harness, layout, average):
    """Here the best model is the one with the highest loss, which is not the last."""
    if layout in layouts.ZERO:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    options = {
        "validation_source": harness.scratch / "source",
        "validation_target": harness.scratch / "target",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        **({"average_checkpoints": average} if average else {}),
    }
    more = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    folders = [harness.scratch / f"{layout}, {average}, {side}" for side in ("one", "other")]
    for folder, name in zip(folders, (layout, "1 process"), strict=True):
        harness.train(name, folder, None, *more)
    assert_same(*folders)
    best, last = (
        load_file(folder / "model.safetensors") for folder in (folders[1], folders[1] / LAST)
    )
    assert all(not torch.equal(best[name], last[name]) for name in last)


@pytest.mark.slow
def test_the_table_names_layouts_and_differences(tmp_path, capsys, monkeypatch):
    options = ["--steps", "2", "--pairs", "100", "--layouts", "2, DDP", "--output_dir"]
    monkeypatch.setattr("sys.argv", ["layouts.py", *options, str(tmp_path)])
    layouts.main()
    results = json.loads((tmp_path / "layouts.json").read_text())
    assert [(result["layout"], result["resumed from"]) for result in results] == [
        ("1 process", None),
        ("2, DDP", None),
        ("2, DDP", "1 process"),
        ("1 process", "2, DDP"),
    ]
    assert results[0]["loss"] == results[0]["weights"] == 0
    assert all(result["weights"] < 1e-5 for result in results)
    assert capsys.readouterr().out.strip() == (tmp_path / "layouts.md").read_text().strip()


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="--layouts 3, DDP: expected one of 1 process; 2, DDP"):
        layouts.LayoutArguments(layouts=["3, DDP"])


# ---------------------------------------------------------------- batches and updates


def test_an_epoch_has_the_same_batches_on_any_number_of_processes():
    lengths = torch.randint(4, 40, (2, 203), generator=torch.Generator().manual_seed(0)).numpy()

    def batches(processes):
        parts = [
            TokenBudgetSampler(*lengths, 100, num_replicas=processes, rank=rank, multiple_of=8)
            for rank in range(processes)
        ]
        return [batch for together in zip(*parts, strict=True) for batch in together]

    alone = batches(1)
    assert len(alone) % 8 == 0
    assert sorted(index for batch in alone for index in batch) == list(range(203))
    for processes in (2, 4, 8):
        assert batches(processes) == alone


@pytest.mark.parametrize(
    ("processes", "accumulated"),
    [(1, 8), (4, 2), (8, 1)],
)
def test_an_update_has_as_many_batches_on_any_number_of_processes(
    tmp_path, monkeypatch, processes, accumulated
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    prepared = Unprepared(output_dir=str(tmp_path), batches_per_update=8)
    assert prepared.gradient_accumulation_steps == accumulated


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"batches_per_update": 6}, {}, "batches_per_update=6: expected a positive multiple of 4"),
        ({"batches_per_update": 0}, {}, "batches_per_update=0: expected a positive multiple of 4"),
        (
            {"average_checkpoints": 2},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
            "average_checkpoints=2: expected FSDP with FULL_STATE_DICT",
        ),
    ],
)
def test_work_that_cannot_be_distributed_is_refused(
    tmp_path, monkeypatch, options, environment, message
):
    for name, value in {"WORLD_SIZE": "4", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Unprepared(output_dir=str(tmp_path), **options)


class Unprepared(TranslationTrainingArguments):
    """Arguments of one of several processes, without the others."""

    distributed_state = None
    _setup_devices = torch.device("cpu")
    n_gpu = 0


# ---------------------------------------------------------------- accelerate's files


@every_config
def test_accelerate_knows_each_option_of_its_files(path):
    config = load_config_from_file(str(path))
    known = vars(launch_command_parser().parse_args(["train"]))
    assert {*config.fsdp_config, *config.deepspeed_config} <= known.keys()
    layers = config.fsdp_config.get("fsdp_transformer_layer_cls_to_wrap")
    if layers is not None:
        assert layers.split(",") == VanillaTransformerForConditionalGeneration._no_split_modules


@every_config
def test_each_accelerate_file_says_how_it_is_used(path):
    comment = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    words = comment.split()
    launch = words.index("--config_file") + 1
    assert " ".join(words[launch : launch + 4]) == (
        f'"$(vanilla-transformer recipes --path accelerate/{path.stem})"'
    )
    assert words[words.index("-m") + 1 :][:2] == ["vanilla_transformer", "train"]
    assert find_recipe(words[words.index("--config") + 1]).is_file()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_deepspeed_files_agree_with_the_trainers_options(tmp_path, monkeypatch, stage):
    path = recipe_path(f"accelerate/deepspeed_zero{stage}")
    assert "mixed_precision" not in yaml.safe_load(path.read_text())
    settings = load_config_from_file(str(path)).deepspeed_config
    assert not {"deepspeed_config_file", "gradient_clipping"} & settings.keys()
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", raising=False)
    monkeypatch.delenv("ACCELERATE_GRADIENT_CLIPPING", raising=False)
    plugin = DeepSpeedPlugin(
        zero_stage=settings["zero_stage"],
        zero3_init_flag=settings["zero3_init_flag"],
        zero3_save_16bit_model=settings.get("zero3_save_16bit_model"),
    )

    class WithoutDeepSpeed(deepspeed.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        pass  # if deepspeed is not installed, transformers' own class is not a configuration

    monkeypatch.setattr(deepspeed, "dep_version_check", lambda package: None)
    config = WithoutDeepSpeed(plugin.deepspeed_config)
    deepspeed.unset_hf_deepspeed_config()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=3, max_grad_norm=0.5, use_cpu=True
    )
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, None, 10)
    assert "auto" not in json.dumps(config.config)
    assert config.config["zero_optimization"]["stage"] == stage
    assert config.config["gradient_accumulation_steps"] == 3
    assert config.config["gradient_clipping"] == 0.5
    gathers = "stage3_gather_16bit_weights_on_model_save"
    assert stage != 3 or config.config["zero_optimization"][gathers]  # else no model is saved
