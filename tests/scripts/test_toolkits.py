"""The check of other toolkits takes nothing of an earlier run that would differ now."""

import pytest

pytest.importorskip("subword_nmt", reason="needs subword-nmt")

from scripts.checks import toolkit_training, toolkits


def test_a_model_of_as_many_updates_is_trained_once(tmp_path, monkeypatch):
    trained = []

    def record(data, folder, steps):
        trained.append(steps)

    monkeypatch.setitem(toolkit_training.TRAININGS, "mine", record)
    for steps in (3, 3, 4):
        toolkit_training.train("mine", tmp_path, tmp_path / "model", steps)
    assert trained == [3, 4]


def test_a_checkpoint_is_converted_each_time(tmp_path, monkeypatch):
    """With the converter as it is now."""

    class ConvertedError(Exception):
        pass

    def convert(checkpoint, folder, options):
        assert not folder.exists()
        raise ConvertedError

    (tmp_path / "converted").mkdir()
    monkeypatch.setattr(toolkits.conversion, "convert", convert)
    with pytest.raises(ConvertedError):
        toolkits.compare("mine", tmp_path, tmp_path / "converted", tmp_path, 1)
