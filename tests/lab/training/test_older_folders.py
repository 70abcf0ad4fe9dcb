"""Run folders written by version 0.1.0 load, resume with the same numbers, and have reports.

The archive holds two folders of one small run on digits, with the schedule `rescaled`: `whole` ran
to its end (without its checkpoints), `interrupted` was stopped after step 8 of 20. The network is a
multilayer perceptron with one hidden layer of 4 units, which keeps the archive small.
"""

import dataclasses
import tarfile
from pathlib import Path

import pytest

from neumann.lab.config import TrainConfig
from neumann.lab.config_files import parse_settings
from neumann.lab.models.image_models import mlp
from neumann.lab.report import drawing, write_report
from neumann.lab.storage.reading import read_config, read_environment, read_metrics, read_summary
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process

NEW = {"gradient_norm", "top5"}  # numbers that version 0.1.0 did not record
ARCHIVE = Path(__file__).parents[2] / "data" / "run_folders_0.1.0.tar.xz"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(mlp, "__defaults__", ((4,),))
    with tarfile.open(ARCHIVE) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(tmp_path, **safe)
    return tmp_path


def resume(folder):
    config = parse_settings(read_config(folder), TrainConfig)
    return Training(dataclasses.replace(config, resume="auto"), Process()).run(folder)


def numbers(line):
    """All numbers of a line but the time, by their names."""
    flat = {}
    for key, value in line.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": number for name, number in numbers(value).items()}
        elif isinstance(value, int | float) and "seconds" not in key:
            flat[key] = value
    return flat


def test_an_interrupted_run_continues_as_it_would_have(folders):
    summary = resume(folders / "interrupted")
    ours, theirs = (read_metrics(folders / name) for name in ("interrupted", "whole"))
    assert [line["kind"] for line in ours] == [line["kind"] for line in theirs]
    for our, their in zip(ours, theirs, strict=True):
        found = {key: value for key, value in numbers(our).items() if key not in NEW}
        assert found == pytest.approx(numbers(their), rel=1e-4, abs=1e-6)
    expected = read_summary(folders / "whole")
    assert summary.accuracy == pytest.approx(expected["accuracy"], abs=0.6)  # 2 of 360 examples
    assert summary.loss == pytest.approx(expected["loss"], rel=1e-4)
    assert (summary.steps, summary.steps_to_target) == (20, 15)


def test_a_finished_run_is_read_and_not_repeated(folders):
    before = (folders / "whole" / "metrics.jsonl").read_bytes()
    summary = resume(folders / "whole")
    assert summary.as_record() == read_summary(folders / "whole")
    assert (folders / "whole" / "metrics.jsonl").read_bytes() == before
    assert read_environment(folders / "whole")["versions"]["neumann"] == "0.1.0"


def test_the_checkpoint_loads(folders):
    loaded = Checkpoints(folders / "interrupted" / "checkpoints").load_latest()
    assert (loaded.step, loaded.damaged) == (8, ())
    assert {"model", "optimizer", "processes"} <= loaded.payload.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interrupted", "whole"])
def test_it_has_a_report(folders, name, monkeypatch):
    """Without the pictures; other tests draw them."""
    monkeypatch.setattr(drawing, "draw", lambda plot: drawing.Picture("<svg></svg>", b"png"))
    page = write_report(folders / name).read_text().replace("<wbr>", "")
    assert "neumann:warmup_epochs=1,reset_epochs=1" in page
