"""`vanilla-transformer convert`."""

import pytest
import torch
from conftest import run_command
from conversion.reference import checkpoint_folder
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.conversion import ConversionOptions, find_format
from vanilla_transformer.conversion.check import check, of_targets


@pytest.fixture
def checkpoint():
    return checkpoint_folder("fairseq/post")


def test_it_converts_there_and_back(checkpoint, tmp_path):
    printed = run_command("convert", checkpoint, "--output_dir", "one", cwd=tmp_path).stdout
    assert printed == "The converted model is in one\n"
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "one").config.d_model == 32
    card = (tmp_path / "one" / "README.md").read_text()
    assert "Converted from fairseq" in card
    run_command("convert", "one", "--to", "fairseq", "--output_dir", "two", cwd=tmp_path)
    assert (tmp_path / "two" / "checkpoint_best.pt").is_file()


def test_it_writes_shards_and_the_licence(checkpoint, tmp_path):
    file = checkpoint / "checkpoint_best.pt"
    flags = ("--max_shard_size", "100KB", "--license", "mit", "--output_dir", "an/out")
    run_command("convert", file, *flags, cwd=tmp_path)
    folder = tmp_path / "an" / "out"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).config.d_model == 32
    card = (folder / "README.md").read_text()
    assert "license: mit" in card
    assert 'pipeline("translation", model="an/out", trust_remote_code=True)' in card


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cut.pt", "--output_dir", "out"], "cut.pt: expected a complete torch checkpoint ("),
        (["nowhere", "--output_dir", "out"], "nowhere: expected a checkpoint"),
        (["sub", "--output_dir", "out"], "sub: not recognized, expected a checkpoint of "),
        (["two", "--output_dir", "out"], "torch_nn, or one of a.pt, b.pt; with --format, the "),
        ([".", "--output_dir", "out", "--format", "lua"], "format='lua': expected one of "),
        ([".", "--output_dir", "out", "--to", "fairseq"], "expected the record of a conversion"),
        ([".", "--output_dir", "."], "output_dir='.': expected a new or empty folder"),
        ([".", "--output_dir", "out", "--like", "moses"], "like='moses': expected 'transformers'"),
        ([".", "--output_dir", "out", "--moses", "de"], "moses=['de']: expected two languages"),
    ],
)
def test_unsupported_conversions_are_reported(tmp_path, words, message):
    (tmp_path / "sub").mkdir()
    (tmp_path / "two").mkdir()
    torch.save({}, tmp_path / "whole")
    for name in ("a.pt", "b.pt"):
        torch.save({}, tmp_path / "two" / name)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    process = run_command("convert", *words, cwd=tmp_path, check=False)
    assert process.returncode != 0
    assert message in process.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_options_without_effect_on_converting_back_are_reported(checkpoint, tmp_path):
    run_command("convert", checkpoint, "--output_dir", "one", cwd=tmp_path)
    for flags, message in (
        (["--license", "mit"], "license='mit' has no effect with to='fairseq'"),
        (["--format", "marian"], "format='marian' has no effect with to='fairseq'"),
        (["--max_shard_size", "1KB"], "max_shard_size='1KB' has no effect with to='fairseq'"),
    ):
        back = ("convert", "one", "--to", "fairseq", "--output_dir", "two", *flags)
        process = run_command(*back, cwd=tmp_path, check=False)
        assert message in process.stderr.splitlines()[-1]
        assert not (tmp_path / "two").exists()


def test_a_model_can_only_be_converted_back_to_its_own_toolkit(checkpoint, tmp_path):
    run_command("convert", checkpoint, "--output_dir", "one", cwd=tmp_path)
    flags = ("--to", "fsmt", "--output_dir", "two")
    process = run_command("convert", "one", *flags, cwd=tmp_path, check=False)
    assert "to='fsmt': one comes from fairseq, expected 'fairseq'" in process.stderr


class Echo:
    """A toolkit that returns what the converted model does. It can have an error, which also adds a
    word to the first translation and to each source, and it can report only the target's own
    tokens."""

    def __init__(self, folder, error, of_targets_alone):
        from vanilla_transformer.conversion.check import Converted

        self.model, self.error, self.of_targets_alone = Converted(folder), error, of_targets_alone

    def known(self, sources):
        return sources

    def encode(self, line):
        return [*self.model.encode(line), *([10] if self.error else [])]

    def translate(self, sources):
        first, *others = self.model.translate(sources)
        return [[10, *first] if self.error else first, *others]

    def log_probs(self, sources, targets):
        rows = [row + self.error for row in self.model.log_probs(sources, targets)]
        return of_targets(rows, targets) if self.of_targets_alone else rows


@pytest.mark.parametrize(
    ("error", "of_targets_alone", "shown"),
    [(0.0, False, "0.0e+00"), (0.25, False, "2.5e-01"), (0.0, True, "0.0e+00"),
     (0.25, True, "2.5e-01"), (float("nan"), False, "nan")],
)  # fmt: skip
def test_a_check_reports_the_largest_difference(
    checkpoint, tmp_path, monkeypatch, error, of_targets_alone, shown
):
    run_command("convert", checkpoint, "--output_dir", "one", cwd=tmp_path)
    (tmp_path / "lines.de").write_text("maus drei neun\nbaum haus\n\n")
    module = find_format(checkpoint)
    toolkit = Echo(tmp_path / "one", error, of_targets_alone)
    monkeypatch.setattr(module, "load_toolkit", lambda path, options: toolkit)
    table = check(checkpoint, tmp_path / "one", tmp_path / "lines.de", module)
    assert f"largest difference of log-probabilities  {shown}" in table
    equal = "2 (66.7%)" if error else "3 (100.0%)"
    assert f"equal greedy translations                {equal}" in table
    equal = "0 (0.0%)" if error else "3 (100.0%)"
    assert f"equal token ids                          {equal}" in table
    moses = ConversionOptions(moses=["de", "en"])
    table = check(checkpoint, tmp_path / "one", tmp_path / "lines.de", module, moses)
    assert "equal token ids" not in table


def test_a_check_without_the_toolkit_reports_it(checkpoint, tmp_path):
    (tmp_path / "lines.de").write_text("baum haus\n")
    flags = ("--output_dir", "one", "--check", "lines.de")
    printed = run_command("convert", checkpoint, *flags, cwd=tmp_path).stdout
    assert "fairseq can't be imported" in printed
    assert "nothing was compared" in printed
