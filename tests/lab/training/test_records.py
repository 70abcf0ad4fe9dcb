"""Records: continued or refused, never overwritten; readable after a kill at any moment."""

import errno
import json
import math
import os
import random
import select
import signal
import time

import numpy as np
import pytest
import torch

from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import (
    RecordsError,
    is_finished,
    read_config,
    read_environment,
    read_metrics,
    read_summary,
)
from neumann.lab.training.records import Records

CONFIG = {"opt": "neumann", "lr": 0.2, "data": {"name": "digits", "shift": (1, 2)}, "seed": 0}


def steps(folder):
    return [line["step"] for line in read_metrics(folder)]


def test_a_run_from_start_to_end(tmp_path):
    folder = tmp_path / "runs" / "x"
    with Records(folder).begin(CONFIG) as records:
        records.append(kind="step", step=1, loss=0.5)
        assert read_metrics(folder) == [{"kind": "step", "step": 1, "loss": 0.5}]
        records.append(kind="epoch", step=1, epoch=1, phases={"reset": 1}, lrs=[0.1, 0.2])
        assert not is_finished(folder)
        assert read_summary(folder) is None
        records.sync()
        records.finish({"accuracy": 0.9})
    assert is_finished(folder)
    assert read_summary(folder) == {"accuracy": 0.9}
    assert read_config(folder) == {**CONFIG, "data": {"name": "digits", "shift": [1, 2]}}
    assert read_environment(folder)["versions"]["torch"] == str(torch.__version__)
    assert sorted(os.listdir(folder)) == ["config.json", "metrics.jsonl", "summary.json"]
    text = (folder / "metrics.jsonl").read_text()
    assert [json.loads(line)["kind"] for line in text.splitlines()] == ["step", "epoch"]


def test_the_same_config_is_continued(tmp_path):
    Records(tmp_path).begin(CONFIG).append(kind="step", step=1)
    before = (tmp_path / "config.json").read_bytes()
    again = Records(tmp_path).begin({**dict(reversed(CONFIG.items())), "lr": np.float64(0.2)})
    again.append(kind="step", step=2)
    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.4}, "lr is 0.2 there, 0.4 here;"),
        ({"data": {"name": "digits", "shift": (1, 3)}}, "data.shift is [1, 2] there, [1, 3] here;"),
        ({"epochs": 3}, "epochs is not set there, 3 here;"),
        ({"lr": math.nan}, "lr is 0.2 there, 'NaN' here;"),
        ({"data": None}, "data is not set there, None here, data.name is 'digits' there, not set"),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, "c is not set there, 3 here, and 2 more;"),
        ({"opt": "x" * 99}, "'" + "x" * 38 + "… here"),
    ],
)
def test_another_config_is_refused_and_nothing_written(change, message, tmp_path):
    with Records(tmp_path).begin(CONFIG) as records:
        records.append(kind="step", step=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError) as caught:
        Records(tmp_path).begin({**CONFIG, **change})
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_config_with_nan_is_the_same_as_itself(tmp_path):
    config = {"limit": math.nan, "bound": -math.inf}
    Records(tmp_path).begin(config)
    Records(tmp_path).begin(config)
    assert read_config(tmp_path)["bound"] == -math.inf


SETTINGS = TrainConfig(opt="sgd", device="cpu").resolve().as_dict()


@pytest.mark.parametrize(
    ("younger", "here", "difference"),
    [
        ("spectrum_every", 0, None),
        ("cuda_graph", "off", None),  # what "auto" is on a CPU
        ("lr", 0.2, None),  # what None is for SGD
        ("spectrum_every", 5, "spectrum_every is not set there, 5 here"),
        ("cuda_graph", "on", "cuda_graph is not set there, 'on' here"),
        ("lr", 0.3, "lr is not set there, 0.3 here"),
    ],
)
def test_a_setting_newer_than_the_run_had_its_default(younger, here, difference, tmp_path):
    before = {key: value for key, value in SETTINGS.items() if key != younger}
    Records(tmp_path).begin(before).close()
    now = {**SETTINGS, younger: here}
    if difference is None:
        Records(tmp_path).begin(now).close()
        return
    with pytest.raises(UsageError, match=difference):
        Records(tmp_path).begin(now)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("config.json", '{"model_type": "bert"}', UsageError, "is not the config of a run"),
        ("config.json", "[]", RecordsError, "config.json is damaged: it is not a JSON object"),
        ("config.json", '{"for', RecordsError, "config.json is damaged"),
        ("metrics.jsonl", "", UsageError, "holds metrics.jsonl but no config.json"),
        ("summary.json", "{}", UsageError, "holds summary.json but no config.json"),
    ],
)
def test_a_folder_that_is_not_a_runs(name, content, error, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        Records(tmp_path).begin(CONFIG)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == content


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"cannot start a run in .*file"):
            Records(folder).begin(CONFIG)
    with pytest.raises(UsageError, match=r"nowhere is not the folder of a run: it has no config"):
        read_config(tmp_path / "nowhere")
    assert read_metrics(tmp_path / "nowhere") == []


def test_rewind_drops_everything_after_the_step(tmp_path):
    records = Records(tmp_path).begin(CONFIG)
    records.append(kind="start")
    for step in range(1, 6):
        records.append(kind="step", step=step)
        records.append(kind="note", text=f"after {step}")
    records.finish({"accuracy": 0.5})
    records.rewind(9)
    assert not is_finished(tmp_path)
    assert len(read_metrics(tmp_path)) == 11
    records.rewind(3)
    assert [line.get("step", line.get("text")) for line in read_metrics(tmp_path)] == [
        None, 1, "after 1", 2, "after 2", 3, "after 3"
    ]  # fmt: skip
    records.append(kind="step", step=4)
    assert read_metrics(tmp_path)[-1] == {"kind": "step", "step": 4}
    records.rewind(0)
    assert read_metrics(tmp_path) == [{"kind": "start"}]
    records.close()
    assert sorted(os.listdir(tmp_path)) == ["config.json", "metrics.jsonl"]


def test_rewind_before_anything_was_recorded(tmp_path):
    Records(tmp_path).begin(CONFIG).rewind(0)
    assert os.listdir(tmp_path) == ["config.json"]


def test_an_incomplete_line_is_skipped_and_removed_by_the_next_writer(tmp_path):
    with Records(tmp_path).begin(CONFIG) as records:
        for step in (1, 2, 3):
            records.append(kind="step", step=step, note="ü")
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for length in range(start, len(whole) + 1):
        expected = [1, 2] if length < len(whole) - 1 else [1, 2, 3]
        path.write_bytes(whole[:length])
        assert steps(tmp_path) == expected
        Records(tmp_path).rewind(3)
        assert path.read_bytes().endswith(b"}\n")
        assert steps(tmp_path) == expected
        path.write_bytes(whole[:length])
        with Records(tmp_path).begin(CONFIG) as again:
            again.append(kind="step", step=4)
        assert steps(tmp_path) == [*expected, 4]
        # Zeros are what a power cut may leave of a line.
        path.write_bytes(whole[:start] + bytes(length - start))
        assert steps(tmp_path) == [1, 2]


def test_damage_that_a_kill_cannot_explain_is_an_error(tmp_path):
    with Records(tmp_path).begin(CONFIG) as records:
        for step in (1, 2, 3):
            records.append(kind="step", step=step)
    path = tmp_path / "metrics.jsonl"
    damaged = path.read_bytes().replace(b'"step": 2', b'"step": #')
    path.write_bytes(damaged)
    for call in (lambda: read_metrics(tmp_path), lambda: Records(tmp_path).rewind(3)):
        with pytest.raises(RecordsError, match=r"metrics.jsonl is damaged in line 2"):
            call()
    assert path.read_bytes() == damaged
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RecordsError, match=r"summary.json is damaged"):
        read_summary(tmp_path)


def fork_writer(folder, first):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            records = Records(folder).begin(CONFIG)
            records.rewind(first - 1)
            os.write(writing, b"started")
            for step in range(first, first + 100_000):
                records.append(kind="step", step=step, text="x" * (step % 500))
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_while_it_appends(tmp_path):
    chance = random.Random(0)
    first = 1
    for _ in range(25):
        child, reading = fork_writer(tmp_path, first)
        select.select([reading], [], [], 10)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        found = steps(tmp_path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= first - 1
        first = max(1, len(found) - chance.randrange(50))
    assert first > 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_the_earlier_lines(code, tmp_path, monkeypatch):
    records = Records(tmp_path).begin(CONFIG)
    records.append(kind="step", step=1)
    write = os.write
    calls = []

    def refuse(descriptor, data):
        calls.append(data)
        if len(calls) == 1:
            return write(descriptor, data[:5])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(RecordsError, match=r"cannot write .*metrics.jsonl: .*free some space"):
            records.append(kind="step", step=2)
        with pytest.raises(RecordsError, match=r"cannot write .*summary.json: .*--resume auto"):
            records.finish({})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"kind": "step", "step": 1}\n'
    assert not is_finished(tmp_path)
    records.append(kind="step", step=2)
    assert steps(tmp_path) == [1, 2]
