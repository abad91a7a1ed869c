"""The check of other toolkits reuses nothing of an earlier run that would differ now, and does not
hide NaN."""

import math

import pytest
import torch

pytest.importorskip("subword_nmt", reason="needs subword-nmt")

from scripts.checks import layouts, toolkit_training, toolkits


def test_a_model_with_the_same_number_of_updates_is_only_trained_once(tmp_path, monkeypatch):
    trained = []

    def record(data, folder, steps):
        trained.append(steps)

    monkeypatch.setitem(toolkit_training.TRAININGS, "mine", record)
    for steps in (3, 3, 4):
        toolkit_training.train("mine", tmp_path, tmp_path / "model", steps)
    assert trained == [3, 4]


def test_a_different_text_than_in_the_last_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit_training, "MERGES", 2)
    data, other = tmp_path / "data", tmp_path / "other"
    for folder, text in ((data, "ab ab abc\n"), (other, "ab ab abd\n")):
        folder.mkdir()
        for language in ("de", "en"):
            (folder / f"train.{language}").write_text(text)
    prepared = toolkit_training.prepare(data, tmp_path / "prepared")
    assert toolkit_training.prepare(data, prepared) == prepared
    with pytest.raises(ValueError, match=r"prepared holds other text than .*other: expected a new"):
        toolkit_training.prepare(other, prepared)


def test_a_checkpoint_is_converted_each_time(tmp_path, monkeypatch):
    """With the current converter."""

    class ConvertedError(Exception):
        pass

    def convert(checkpoint, folder, options):
        assert not folder.exists()
        raise ConvertedError

    (tmp_path / "converted").mkdir()
    monkeypatch.setattr(toolkits.conversion, "convert", convert)
    with pytest.raises(ConvertedError):
        toolkits.compare("mine", tmp_path, tmp_path / "converted", tmp_path, 1)


def test_a_nan_difference_counts_as_the_largest(monkeypatch):
    found = iter([0.5, math.nan, 0.25])
    monkeypatch.setattr(toolkits, "largest_difference", lambda *arguments: next(found))
    assert math.isnan(toolkits.log_probability_difference(None, None, [[], [], []], [[], [], []]))
    runs = [
        {"losses": {1: 0.5, 2: second}, "weights": dict(enumerate(torch.tensor([0.0, second])))}
        for second in (1.0, math.nan)
    ]
    assert all(map(math.isnan, layouts.differences(*runs).values()))
