"""The scripts, run as by contributors."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.metadata import version
from threading import Thread
from zipfile import ZipFile

import pytest
from conftest import REPOSITORY, random_ids, run_module
from transformers import TrainerCallback

from scripts.benchmarks import ablations, bulk, plan
from scripts.benchmarks.speed import with_setting
from scripts.benchmarks.turns import Runner
from scripts.checks import faults, load
from scripts.overlay import make_overlay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scripts")


@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_a_missing_python_is_reported_in_one_line(script, tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("setup", script):
        (tmp_path / "scripts" / name).write_bytes((REPOSITORY / "scripts" / name).read_bytes())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "basename"):
        path = subprocess.run(["which", tool], capture_output=True, text=True, check=True)
        (tools / tool).symlink_to(path.stdout.strip())
    process = subprocess.run(
        ["bash", str(tmp_path / "scripts" / script)],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert (
        process.stderr
        == f"{script}: needs Python 3.11 or newer with venv; set PYTHON to its path\n"
    )


def with_options():
    """The modules that scripts/checks/README.md and scripts/benchmarks/README.md list."""
    readmes = (REPOSITORY / "scripts" / name / "README.md" for name in ("checks", "benchmarks"))
    text = "".join(readme.read_text() for readme in readmes)
    return sorted({*re.findall(r"python -m (\S+?)`? ", text)} - {"scripts.benchmarks.table3"})


@pytest.mark.parametrize("name", with_options())
def test_the_help_says_what_a_script_does(name, monkeypatch, capsys):
    program = f"{name}.__main__" if name.endswith(".gpu") else name
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        import_module(program).main()
    assert import_module(program).__doc__.strip() in capsys.readouterr().out


# ---------------------------------------------------------------- versions


def test_the_workflow_tests_the_oldest_supported_versions():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    bounds = (dependency.split(",")[0] for dependency in project["dependencies"])
    oldest = dict(bound.split(">=") for bound in bounds)
    workflow = (REPOSITORY / ".github/workflows/test.yml").read_text()
    options = f"--transformers {oldest['transformers']}.0 --torch {oldest['torch']}.0"
    assert f"scripts/test {options}\n" in workflow


@pytest.mark.slow
def test_an_overlay_has_its_own_versions_and_otherwise_those_below(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = tmp_path / "tabulate-99.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        record = {"METADATA": "Metadata-Version: 2.1\nName: tabulate\nVersion: 99.0\n"}
        record["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        record["RECORD"] = ""
        for name, text in record.items():
            archive.writestr(f"tabulate-99.0.dist-info/{name}", text)
    programs = make_overlay(tmp_path / "overlay", str(wheel))
    report = "from importlib.metadata import version as v; print(v('tabulate'), v('torch'))"
    found = subprocess.check_output([programs / "python", "-c", report], text=True)
    assert found.split() == ["99.0", version("torch")]
    mark = tmp_path / "overlay" / "mark"
    mark.touch()
    make_overlay(tmp_path / "overlay", str(wheel))
    assert mark.exists()
    monkeypatch.setattr(sys, "version", "4.0")  # as in a new .venv
    make_overlay(tmp_path / "overlay", str(wheel))
    assert not mark.exists()


# ---------------------------------------------------------------- benchmark


@pytest.mark.slow
@pytest.mark.parametrize("workloads", [["G3"], ["T1", "G3"]])
def test_the_benchmark_writes_ratios_a_table_and_a_chart(folder, workloads):
    flags = ["--quick", "--workloads", *workloads, "--peers", "vanilla_transformer", "torch"]
    process = run_module("scripts.benchmarks.speed", *flags, "--output_dir", "speed", cwd=folder)
    results = json.loads((folder / "speed/benchmark.json").read_text())
    assert [result["workload"] for result in results] == workloads
    ours = {"vanilla_transformer", "vanilla_transformer, best setting", "marian"}
    for result in results:
        trained_alone = {"torch"} if result["workload"] == "T1" else set()
        assert set(result["ratios"]) == ours | trained_alone
        assert result["ratios"]["marian"] == 1
        assert all(len(seconds) == 2 for seconds in result["seconds"].values())
    table = (folder / "speed/benchmark.md").read_text()
    assert f"|  | {' | '.join(f'{name} tiny' for name in workloads)} |" in table
    assert f"| marian |{' 1.00 |' * len(workloads)}" in table
    assert table.strip() in process.stdout
    assert (folder / "speed/benchmark.png").stat().st_size > 0


@pytest.mark.slow
def test_a_process_only_imports_the_package_from_a_different_checkout(tmp_path):
    for name in ("vanilla_transformer", "scripts/benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "scripts/benchmarks/turns.py").write_text("raise ImportError")
    mark = tmp_path / "imported"
    (tmp_path / "vanilla_transformer/__init__.py").write_text(f"open({str(mark)!r}, 'w')")
    runner = Runner(1, 0, tmp_path)
    for module in ("scripts.benchmarks.turns", "vanilla_transformer"):
        runner.prepare(import_module, module).result()
    runner.stop()
    assert mark.exists()
    assert str(tmp_path) not in sys.path


@pytest.mark.slow
def test_the_benchmark_compares_two_checkouts(folder):
    package = folder / "older/vanilla_transformer"
    shutil.copytree(REPOSITORY / "vanilla_transformer", package)
    with (package / "__init__.py").open("a") as file:
        file.write(f"\nopen({str(folder / 'imported')!r}, 'a').write(__file__ + '\\n')\n")
    (folder / "older/scripts/benchmarks").mkdir(parents=True)
    (folder / "older/scripts/benchmarks/speed.py").write_text("raise ImportError\n")
    flags = ["--quick", "--workloads", "G3", "--peers", "marian", "--against", "older"]
    run_module("scripts.benchmarks.speed", *flags, "--output_dir", "two", cwd=folder)
    (result,) = json.loads((folder / "two/benchmark.json").read_text())
    assert set(result["ratios"]) == {
        name + setting
        for name, settings in (
            ("marian", [""]),
            ("vanilla_transformer", ["", ", best setting"]),
            ("before", ["", ", best setting"]),
        )
        for setting in settings
    }
    assert len((folder / "imported").read_text().splitlines()) == 2  # a process for each setting
    ratio = result["ratios"]["vanilla_transformer"] / result["ratios"]["before"]
    assert (
        f"| before = 1 | G3 tiny |\n| --- | --- |\n| vanilla_transformer | {ratio:.2f} |"
        in (folder / "two/benchmark.md").read_text()
    )


@pytest.mark.slow
def test_measurements_of_all_starts_are_combined(folder):
    flags = ["--sizes", "tiny", "--workloads", "G1", "--peers", "marian", "--starts", "2"]
    run_module(
        "scripts.benchmarks.speed", *flags, "--rounds", "3", "--output_dir", "starts", cwd=folder
    )
    (result,) = json.loads((folder / "starts/benchmark.json").read_text())
    assert all(len(seconds) == 6 for seconds in result["seconds"].values())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_int8_weights_change_the_logits_only_slightly(model):
    inputs = {"input_ids": random_ids(2, 5), "decoder_input_ids": random_ids(2, 4)}
    expected = model(**inputs).logits
    rounded = with_setting(model, {"int8": True})(**inputs).logits
    assert 0 < (rounded - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.slow
def test_a_model_compiled_for_the_benchmark_generates_the_same(model):
    prompts = random_ids(1, 5)
    tokens = model.generate(prompts, max_new_tokens=4)
    compiled = with_setting(model, {"compiled": {}})
    assert compiled.generate(prompts, max_new_tokens=4).tolist() == tokens.tolist()


@pytest.mark.slow
def test_the_shares_of_a_profile_add_up_to_the_time_of_a_run(folder):
    flags = ["--sizes", "tiny", "--workloads", "G3", "--runs", "1", "--output_dir", "profile"]
    process = run_module("scripts.benchmarks.profile_steps", *flags, cwd=folder)
    (shares,) = json.loads((folder / "profile/profile.json").read_text()).values()
    assert min(shares.values()) >= 0
    assert shares["matrix products"] > 0 == shares["optimizer"]
    table = (folder / "profile/profile.md").read_text()
    assert "|  | G3 tiny |" in table
    assert table.strip() in process.stdout


@pytest.mark.slow
def test_the_benchmark_measures_ctranslate2_if_it_is_installed(folder):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    flags = ["--quick", "--workloads", "G2", "--peers", "ctranslate2", "ctranslate2, int8"]
    run_module("scripts.benchmarks.speed", *flags, "--output_dir", "compiled", cwd=folder)
    (result,) = json.loads((folder / "compiled/benchmark.json").read_text())
    assert {"ctranslate2", "ctranslate2, int8"} < set(result["ratios"])
    assert min(result["ratios"].values()) > 0


@pytest.mark.slow
def test_the_benchmark_of_memory_compares_peaks(folder):
    flags = ["--size", "tiny", "--peers", "vanilla_transformer", "--output_dir", "memory"]
    process = run_module("scripts.benchmarks.memory", *flags, cwd=folder)
    results = json.loads((folder / "memory/memory.json").read_text())
    assert [result["workload"] for result in results] == ["train", "beam"]
    for result in results:
        assert set(result["ratios"]) == {"vanilla_transformer", "marian"}
        assert 0.1 < result["ratios"]["vanilla_transformer"] < 1.1
        assert result["ratios"]["marian"] == 1
    assert (folder / "memory/memory.md").read_text().strip() in process.stdout


@pytest.mark.slow
def test_the_benchmark_of_lengths_writes_tables_and_a_plot(folder):
    flags = ["--longest", "32", "--largest", "2", "--runs", "1", "--output_dir", "lengths"]
    process = run_module("scripts.benchmarks.lengths", *flags, cwd=folder)
    series = json.loads((folder / "lengths/lengths.json").read_text())
    assert [(entry["workload"], entry["axis"]) for entry in series] == [
        (workload, axis) for workload in ("train", "generate") for axis in ("length", "batch")
    ]
    for entry in series:
        (point,) = entry["points"]
        assert (point["length"], point["batch"]) == (32, 2)
        assert point["seconds"] > 0
        assert point["mebibytes"] > 0
    table = (folder / "lengths/lengths.md").read_text()
    assert "| tokens | 32 |" in table
    assert "| generate, memory | 1.00 |" in table
    assert table.strip() in process.stdout
    assert (folder / "lengths/lengths.png").stat().st_size > 0


@pytest.mark.slow
def test_the_benchmark_of_programs_finds_shares_and_ratios(folder):
    sources = [f"a man in a red shirt sees dog number {count}" for count in range(20)]
    for split in ("train", "val", "test_2016_flickr"):
        for suffix in ("en", "de"):
            (folder / f"{split}.{suffix}").write_text("\n".join(sources) + "\n")
    flags = ["--programs", "train", "translate", "--max_steps", "2", "--rounds", "1"]
    run_module(
        "scripts.benchmarks.programs", "--data", ".", "--output_dir", "programs", *flags, cwd=folder
    )
    results = json.loads((folder / "programs/programs.json").read_text())
    assert set(results) == {"train", "translate"}
    shares = results["train"]
    assert 0 < shares["forward, backward, optimizer, of all steps"] <= 1
    assert sum(share for name, share in shares.items() if name.endswith(", of all")) <= 1
    assert results["translate"]["same"] > 0


def test_the_benchmark_of_files_begins_with_the_shortest():
    """Its table is relative to the first one."""
    assert bulk.BulkArguments(lines=[10_000, 100, 1000]).lines == [100, 1000, 10_000]


def test_the_memory_estimate_includes_the_number_of_devices(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", "--devices", "1", "8"])
    plan.main()
    one, eight = capsys.readouterr().out.split("GiB on each of 8 devices:\n\n")
    assert one.startswith("GiB on one device:\n\n")
    assert "| base | 63 | 0.94 | 0.94 | 0.94 | 0.94 | 0.94 |" in one
    assert "| base | 63 | 0.94 | 0.53 | 0.32 | 0.20 | 0.12 |" in eight


@pytest.mark.slow
def test_several_processes_are_compared_with_one(folder):
    flags = ["--sizes", "tiny", "--tokens", "100", "--rounds", "1", "--output_dir", "scaling"]
    process = run_module("scripts.benchmarks.scaling", *flags, cwd=folder)
    (result,) = json.loads((folder / "scaling/scaling.json").read_text())
    assert {name: len(seconds) for name, seconds in result["seconds"].items()} == {
        "1 process": 1, "2 processes": 1, "2 independent processes": 1,
    }  # fmt: skip
    table = (folder / "scaling/scaling.md").read_text()
    assert table.startswith("| speed, 1 process = 1 | 2 processes | 2 independent processes |")
    assert f"| tiny | {result['speeds']['2 processes']:.2f} |" in table
    assert table.strip() in process.stdout


@pytest.mark.slow
def test_ablations_are_trained_once_and_listed_in_a_table(folder):
    flags = ["--output_dir", "ablations", "--steps", 2, "--train_size", 40, "--test_size", 4]
    flags += ["--seeds", 1, 2, "--rows", "h = 1,", "d_model", "averaged"]
    table = run_module("scripts.benchmarks.ablations", *flags, cwd=folder).stdout
    assert table.count("±") == 8
    assert "Rank correlation of exact match with the paper's BLEU, 3 rows:" in table
    results = folder / "ablations/results.json"
    runs = json.loads(results.read_text())["runs"]
    assert {(run["row"], run["seed"]) for run in runs} == {
        (row, seed)
        for row in (
            "(A) h = 1, d_k = d_v = 128", "(C) d_model = 64", "(C) d_model = 256",
            "last 5 checkpoints averaged",
        )
        for seed in (1, 2)
    }  # fmt: skip
    assert runs[0]["parameters"] > 100_000
    written = results.stat().st_mtime_ns
    assert run_module("scripts.benchmarks.ablations", *flags, cwd=folder).stdout == table
    assert results.stat().st_mtime_ns == written
    refused = run_module(
        "scripts.benchmarks.ablations", *flags, "--steps", 3, cwd=folder, check=False
    )
    assert "results.json is of --steps 2, not 3: choose another --output_dir" in refused.stderr


class Terminate(TrainerCallback):
    """Sends this process SIGTERM in its first step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupted_ablation_has_no_score(tmp_path, monkeypatch):
    def make_trainer(*args):
        trainer = make(*args)
        trainer.add_callback(Terminate())
        return trainer

    make = ablations.make_trainer
    monkeypatch.setattr(ablations, "make_trainer", make_trainer)
    monkeypatch.setattr(ablations.transformers_logging, "set_verbosity_error", lambda: None)
    flags = f"--output_dir {tmp_path} --steps 2 --train_size 40 --test_size 4 --rows base"
    precision = "--options=--float32_matmul_precision=highest"  # also used by the other tests
    monkeypatch.setattr(sys, "argv", ["ablations", *flags.split(), precision])
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        ablations.main()
    assert not (tmp_path / "results.json").exists()


def test_the_order_of_ablations_is_compared_with_the_papers():
    def runs(*exact_match):
        return [
            {"parameters": 1000, "exact_match": value, "loss": 1.0, "seed": seed}
            for seed, value in enumerate(exact_match)
        ]

    rows = {"base": runs(90.0, 80.0), "(C) N = 1": runs(50.0), "(E) learned positions": runs(70.0)}
    table = ablations.to_markdown({**rows, "pre-norm": runs(99.0)})
    assert table.splitlines()[2] == "| base | 1,000 | 85.0 ± 7.1 | 1.0000 ± 0.0000 | 25.8 |"
    assert "the paper's BLEU, 3 rows: 1.00 (Spearman).\n" in table
    opposite = {**rows, "(C) N = 1": runs(95.0)}
    assert ablations.agreement(opposite).endswith(": -0.50 (Spearman).")
    assert ablations.agreement({"base": runs(90.0)}) == ""


def test_a_claim_of_the_paper_is_confirmed_if_it_holds_with_every_seed():
    def runs(*pairs):
        return [
            {"exact_match": value, "loss": loss, "seed": seed}
            for seed, (value, loss) in enumerate(pairs, 1)
        ]

    rows = {
        "base": runs((80.0, 0.2), (90.0, 0.25)),
        "(C) N = 1": runs((70.0, 0.3), (85.5, 0.4), (1.0, 1.0)),  # the base lacks a seed
        "(C) d_ff = 128": runs((81.0, 0.2), (89.0, 0.2)),
        "(D) no label smoothing": runs((79.0, 0.1), (80.0, 0.2)),
        "(E) learned positions": runs((40.0, 0.5), (90.0, 0.5)),
    }
    assert [line.split(" | ")[-2:] for line in ablations.claims(rows).splitlines()[2:]] == [
        ["+10.0, +4.5", "yes |"],
        ["-1.0, +1.0", "unclear |"],
        ["+1.0, +10.0", "yes |"],
        ["+0.1000, +0.0500", "yes |"],
        ["-40.0, +0.0", "no |"],
    ]
    assert ablations.claims({"base": rows["base"]}) == ""


def test_the_claims_are_about_rows_of_the_table():
    assert {row for claim in ablations.CLAIMS for row in (claim.better, claim.worse)} <= set(
        ablations.ROWS
    )


class Parrot(BaseHTTPRequestHandler):
    """Translates each text to itself, and treats invalid JSON as text."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            answer = {"translatedText": json.loads(body)["q"]}
        except ValueError:
            answer = {"translatedText": body.decode()}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def test_wrong_answers_to_broken_requests_are_counted(monkeypatch):
    monkeypatch.setattr(load, "BROKEN", (load.broken_json,))
    with ThreadingHTTPServer(("127.0.0.1", 0), Parrot) as server:
        Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        target = load.Target(url, {}, ["one", "two"], [{"one"}, {"two"}])
        arguments = load.LoadArguments("en-de=model", "lines", broken=0.5)
        found = asyncio.run(load.put_under_load(target, arguments, 2, 20))
        server.shutdown()
    wrong = found["outcomes"]["broken_json, wrong"]
    assert 0 < wrong == 20 - found["outcomes"]["right"] < 20
    speeds = {"batches of 32": 2.0, "line by line": 1.0}
    results = {"plain loop, sentences/s": speeds, "loads": [found], "memory, MiB": [390]}
    report = load.to_markdown(results)
    assert f" | {wrong} | 390 |" in report
    assert report.startswith("Plain loop, sentences/s: batches of 32: 2.0; line by line: 1.0\n")
    assert report.endswith(f"\n\nbroken_json, wrong: {wrong}; right: {20 - wrong}")


def test_a_training_is_interrupted_until_it_has_two_checkpoints(tmp_path, monkeypatch):
    def go_on(folder, fault):
        step = 3 * (1 + len(faults.checkpoints_by_step(folder)))  # earlier than a scheduled one
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for file in faults.FILES:
            (checkpoint / file).write_text("whole")
        codes.append(128 + signal.SIGTERM if len(codes) != 1 else 0)  # the second one is too late
        assert len(codes) < 9
        return codes[-1]

    codes = []
    arguments = faults.FaultArguments(faults=[], steps=10)
    harness = faults.Harness(tmp_path, arguments)
    monkeypatch.setattr(harness, "go_on", go_on)
    assert harness.break_one("missing", tmp_path / "run", {}) == (1, True)
    assert list(faults.checkpoints_by_step(tmp_path / "run")) == [3, 6]
    assert len(codes) == 4
    found = [len(list((tmp_path / f"run/checkpoint-{step}").iterdir())) for step in (3, 6)]
    assert found == [len(faults.FILES), len(faults.FILES) - 1]


@pytest.mark.slow
def test_trainings_with_faults_lose_nothing(folder):
    run_module("scripts.checks.faults", "--times", 10, "--output_dir", "faults", cwd=folder)
    results = json.loads((folder / "faults/faults.json").read_text())
    assert {"kill", "terminate", "truncated", "full", "nan", "rank_stalled"} < set(results)
    assert all(result["tried"] >= 2 and result["lost"] == 0 for result in results.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "fairseq"], "--peers fairseq: expected one of vanilla_transformer; marian"),
        (["--rounds", "0"], "--rounds 0: expected a positive number"),
        (["--starts", "0"], "--starts 0: expected a positive number"),
        (["--sizes", "huge"], "--sizes huge: expected one of tiny; base"),
        (["--against", "nowhere"], "--against nowhere: expected a folder with vanilla_transformer"),
    ],
)
def test_a_benchmark_with_invalid_options_is_refused(folder, flags, message):
    process = run_module("scripts.benchmarks.speed", *flags, cwd=folder, check=False)
    assert process.returncode != 0
    assert f"error: {message}" in process.stderr
    assert "Traceback" not in process.stderr
