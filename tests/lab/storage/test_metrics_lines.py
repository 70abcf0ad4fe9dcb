"""Every line of the metrics has a known kind, and what the config of its run asks for."""

import json

import pytest

from neumann.lab.storage.metrics_lines import LINES
from neumann.lab.storage.reading import RecordsError
from neumann.lab.storage.run_files import read_run_files
from tests.support.fake_records import fake_run

TEXT = {"data": "text:words.txt", "tokens": "chars"}


def change_line(folder, kind, edit):
    """Edit the first line of a kind, and return its number."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = [line["kind"] for line in lines].index(kind)
    edit(lines[number])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return number + 1


def refuse(folder, kind, edit, message):
    number = change_line(folder, kind, edit)
    with pytest.raises(RecordsError) as caught:
        read_run_files(folder)
    assert f"metrics.jsonl is damaged in line {number}: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [1.5, [], {}, None, True, "", "far"])
@pytest.mark.parametrize("kind", ["timetable", "step", "epoch", "spectrum"])
def test_an_unknown_kind_is_refused(kind, wrong, tmp_path):
    folder = fake_run(tmp_path, "neumann", epochs=2, spectrum=10)
    message = f"kind should be {' or '.join(map(repr, LINES))}, got {wrong!r}"
    refuse(folder, kind, lambda line: line.update(kind=wrong), message)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("timetable", "kind step warmup_steps resets"),
        ("step", "kind step epoch lr train_loss optimizer"),
        ("epoch", "kind step epoch train_loss seconds loss accuracy accuracy_recalibrated"),
        ("epoch", "perplexity bits_per_byte"),
        ("spectrum", "kind step epoch lr momentum probe current"),
    ],
)
def test_a_missing_key_is_refused(kind, keys, tmp_path):
    for key in keys.split():
        folder = fake_run(tmp_path / key, "neumann", epochs=2, spectrum=10, **TEXT)
        refuse(folder, kind, lambda line, key=key: line.pop(key), f"{key} is missing")


def test_what_the_optimizer_reports_is_checked(tmp_path):
    for number, key in enumerate(("step", "skipped", "phase", "t", "distance", "groups")):
        folder = fake_run(tmp_path / str(number), "neumann", epochs=1)
        refuse(folder, "step", lambda m, k=key: m["optimizer"].pop(k), f"in optimizer, {key} is")
    folder = fake_run(tmp_path / "phase", "neumann", epochs=1)
    message = "in optimizer, phase should be 'warm-up' or 'reset' or 'iterate', got 'far'"
    refuse(folder, "step", lambda line: line["optimizer"].update(phase="far"), message)


def test_measurements_are_checked_and_may_have_failed(tmp_path):
    folder = fake_run(tmp_path, epochs=1, spectrum=10)
    failed = {"examples": 8, "failed": "a product is not finite"}
    change_line(folder, "spectrum", lambda line: line.update(probe=failed))
    read_run_files(folder)
    refuse(folder, "spectrum", lambda line: line["current"].pop("noise"), "in current, noise is")


def test_only_some_lines_need_scores_and_reports(tmp_path):
    folder = fake_run(tmp_path, "sgd", epochs=3, eval_every=2)
    scores = ("loss", "accuracy", "accuracy_recalibrated")
    change_line(folder, "epoch", lambda line: [line.pop(key) for key in scores])
    files = read_run_files(folder)
    assert not any("optimizer" in line for line in files.lines)
    assert [line["epoch"] for line in files.lines if line["kind"] == "epoch"] == [1, 2, 3]
    assert "loss" not in next(line for line in files.lines if line["kind"] == "epoch")


def test_lines_may_have_keys_of_a_newer_version(tmp_path):
    folder = fake_run(tmp_path, "neumann", epochs=1)
    for kind in ("timetable", "step", "epoch"):
        change_line(folder, kind, lambda line: line.update(future=[1]))
    read_run_files(folder)
