"""Damaged files of runs and studies: success, or one line that names the file; never a traceback.

The damages are drawn from a seed; tests/soak draws thousands from the same module.
"""

import json
import os
import random
import shutil
import signal
from itertools import islice
from pathlib import Path

import pytest

from neumann.lab.commands.main import main
from neumann.lab.commands.parser import parse_flags
from neumann.lab.report.drawing import Picture
from neumann.lab.storage.reading import read_metrics
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.signals import Interrupted
from tests.support.damage import draw_damages, find_fault, list_damages, read_payload, seal

pytestmark = pytest.mark.slow

SMALL = ["--data", "synthetic:6,3,48", "--batch-size", "8", "--epochs", "2", "--device", "cpu"]
SMALL += ["--log-every", "2"]
ARM = "neumann:warmup_epochs=1,lr=0.02"
TRAIN = ["train", *SMALL, "--opt", ARM, "--output", "run", "--resume", "auto"]
COMPARE = ["compare", *SMALL, "--arms", ARM, "sgd", "--seeds", "1", "--output", "run"]
SWEEP = ["sweep", *SMALL, "--arms", "sgd", "--lr", "0.01:0.1:2", "--seeds", "1", "--output", "run"]
REPORT, SPECTRUM = ["report", "run"], ["spectrum", "--checkpoint", "run", "--max-products", "2"]
COMMANDS = {
    "finished": (REPORT, TRAIN, SPECTRUM),
    "interrupted": (REPORT, TRAIN, SPECTRUM),
    "comparison": (REPORT, COMPARE),
    "sweep": (REPORT, SWEEP),
}


def interrupt(folder, *flags):
    """Train until step 9 of 12, one after a line."""
    config = parse_flags("train", [*SMALL, "--opt", ARM, *flags]).resolve(1)
    training = Training(config, Process())
    take_step = training.learner.take_step

    def stop(pieces):
        loss = take_step(pieces)
        if training.learner.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    training.learner.take_step = stop
    with pytest.raises(Interrupted):
        training.run(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _draw_nothing(patch)
        interrupt(folder / "interrupted")
        for name, words in (("finished", TRAIN), ("comparison", COMPARE), ("sweep", SWEEP)):
            assert main(words) == 0
            (folder / "run").rename(folder / name)
    return folder


def _draw_nothing(patch):
    """Plots take most of the time of a report, and are drawn from checked numbers."""
    patch.setattr("neumann.lab.report.drawing.draw", lambda plot: Picture("<svg/>", b"png"))


@pytest.fixture
def copied(folders, tmp_path, monkeypatch):
    """A function that puts a fresh copy of a folder at "run" in the working folder."""
    monkeypatch.chdir(tmp_path)
    _draw_nothing(monkeypatch)

    def copy(name):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return shutil.copytree(folders / name, tmp_path / "run")

    return copy


@pytest.mark.parametrize(("name", "count"), [(name, 12) for name in COMMANDS])
def test_no_damage_ends_in_a_traceback(name, count, folders, copied):
    chance = random.Random(name)
    faults = []
    for damage in islice(draw_damages(folders / name, chance), count):
        words = chance.choice(COMMANDS[name])
        file = copied(name) / damage.file.relative_to(folders / name)
        kept = damage.file.read_bytes()
        try:
            damage.apply()
            file.unlink()
            if damage.file.exists():
                shutil.copy(damage.file, file)
        finally:
            damage.file.write_bytes(kept)
        faults.append((str(damage), find_fault(words, "run")))
    assert [fault for fault in faults if fault[1]] == []


def refuse(words, part, capsys):
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("name", ["finished", "interrupted"])
def test_metrics_that_end_too_soon_are_refused(name, copied, capsys):
    whole = [str(damage) for damage in list_damages(copied(name), 0)]
    cuts = [text for text in whole if text.startswith("metrics.jsonl: ")]
    wanted = ("empty", "deleted", "half", "only the first", "without line", "twice", "reversed")
    cuts = [text for text in cuts if any(word in text for word in wanted)]
    assert len(cuts) >= 9
    for text in cuts:
        for words in (REPORT, TRAIN):
            damage = next(d for d in list_damages(copied(name), 0) if str(d) == text)
            damage.apply()
            # A checkpoint at step 9 does not need the line of a step that it can still write.
            if name == "interrupted" and damage.kind == "half" and words == REPORT:
                continue
            assert "metrics.jsonl" in refuse(words, "run/metrics.jsonl is damaged", capsys), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "12"}, "steps should be a whole number of at least 0, got '12'"),
        ({"steps": 11}, "11 steps are not 2 whole epochs"),
        ({"accuracy": "NaN"}, "accuracy should be a finite number, got nan"),
        ({"accuracy": 99.5}, "accuracy is 99.5, but "),
        (
            {"steps_to_target": 1.5},
            "steps_to_target should be a whole number of at least 0 or null",
        ),
        ({"diverged": 3}, "it is not a JSON object"),
        ({"diverged": {"step": 3}}, "lr is missing"),
    ],
)
def test_a_wrong_summary_is_refused(change, message, copied, capsys):
    path = copied("finished") / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for words in (REPORT, TRAIN):
        refuse(words, f"run/summary.json is damaged: {message}", capsys)


def test_a_summary_may_have_keys_of_a_newer_version(copied):
    path = copied("finished") / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"future": [1]}))
    assert main(REPORT) == 0
    assert main(TRAIN) == 0


def test_an_error_is_one_line_also_if_the_name_of_the_folder_is_not(copied, tmp_path, capsys):
    folder = copied("finished").rename(tmp_path / "two\nlines")
    (folder / "summary.json").write_text("{")
    refuse(["report", str(folder)], "two lines/summary.json is damaged", capsys)


def test_the_curvature_at_an_older_checkpoint_is_announced(copied, capsys):
    for damage in ("empty", "a link to nowhere"):
        newest = max((copied("finished") / "checkpoints").iterdir())
        newest.unlink()
        if damage == "empty":
            newest.touch()
        else:
            newest.symlink_to("nowhere")
        capsys.readouterr()
        assert main(SPECTRUM) == 0
        told = capsys.readouterr().err
        assert f"run/checkpoints/{newest.name} is damaged; using run/checkpoints/" in told


def test_deep_nesting_is_damage(copied, capsys):
    path = copied("finished") / "summary.json"
    for depth in (60, 100_000):
        path.write_text('{"a": ' * depth + "1" + "}" * depth)
        refuse(REPORT, "summary.json is damaged: it is nested more than 50 levels deep", capsys)


@pytest.mark.parametrize(
    "kind",
    [
        *("sealed a list", "sealed, last.accuracy: a tensor", "sealed, last: removed"),
        *("sealed, processes.0.rng: None", "sealed, processes.0.losses.recent: a tensor"),
        *("sealed, optimizer.state.0.iterate: None", "sealed, config.seed: a tensor"),
    ],
)
def test_a_checkpoint_with_wrong_content_is_refused(kind, copied, capsys):
    files = list_damages(copied("interrupted"))
    damage = [each for each in files if each.kind == kind][-1]
    damage.apply()
    error = refuse(TRAIN, f"run/checkpoints/{damage.file.name} ", capsys)
    assert "remove it" in error


def test_a_checkpoint_that_lacks_the_state_of_a_parameter_is_refused(copied, capsys):
    """Neumann would start that parameter's series again without a word."""
    for lost in ("parameter", "iterate"):
        file = max((copied("interrupted") / "checkpoints").iterdir())
        payload = read_payload(file)
        if lost == "parameter":
            del payload["optimizer"]["state"][1]
        else:
            del payload["optimizer"]["state"][1][lost]
        seal(file, payload)
        assert "parameter 1 has no" in refuse(TRAIN, f"run/checkpoints/{file.name} ", capsys)


def test_a_checkpoint_whose_groups_name_other_parameters_is_refused(copied, capsys):
    """torch would look up the state of parameter -1, and load none."""
    for words in (TRAIN, SPECTRUM):
        file = max((copied("interrupted") / "checkpoints").iterdir())
        payload = read_payload(file)
        payload["optimizer"]["param_groups"][0]["params"][1] = -1
        seal(file, payload)
        error = refuse(words, f"run/checkpoints/{file.name} ", capsys)
        assert "the group's parameters are [0, -1, " in error


def test_a_line_of_a_wrong_kind_is_refused(copied, capsys):
    """The first line, the timetable, is one that no other line asks for."""
    path = copied("interrupted") / "metrics.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(first) | {"kind": []}) + "\n", *rest]))
    for words in (REPORT, TRAIN):
        refuse(words, "run/metrics.jsonl is damaged in line 1: kind should be 'timetable'", capsys)


def test_metrics_whose_steps_go_backwards_are_refused(copied, capsys):
    path = copied("interrupted") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    refuse(TRAIN, "metrics.jsonl is damaged: its steps go backwards", capsys)


def test_spectrum_names_the_file_whose_setting_is_wrong(copied, capsys):
    path = copied("interrupted") / "config.json"
    content = json.loads(path.read_text())
    for change in ({"batch_size": 0}, {"unknown": 1}, {"opt": "adan"}):
        path.write_text(json.dumps(content | {"config": content["config"] | change}))
        refuse(SPECTRUM, "neumann: run/config.json: ", capsys)


# ---------------------------------------------------------------------- another run's checkpoint


def put_checkpoint(theirs, ours):
    shutil.rmtree(ours / "checkpoints")
    (ours / "checkpoints").mkdir()
    file = max((theirs / "checkpoints").iterdir())
    return Path(shutil.copy(file, ours / "checkpoints"))


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--seed", "3"], "seed is 3 there, 0 here"),
        (["--weight-decay", "0.1"], "weight_decay is 0.1 there, 0.0 here"),
        (["--opt", f"{ARM},momentum=0.5"], "opt is "),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_a_checkpoint_of_another_run_is_refused(flags, difference, old, copied, tmp_path, capsys):
    theirs, ours = interrupt(tmp_path / "theirs", *flags), copied("interrupted")
    file = put_checkpoint(theirs, ours)
    before = (ours / "metrics.jsonl").read_bytes()
    if old:  # as version 0.1.0 wrote it
        payload = read_payload(file)
        del payload["config"]
        seal(file, payload)
        error = refuse(TRAIN, str(file.relative_to(tmp_path)), capsys)
        assert "another run" in error or "does not belong to this run" in error
    else:
        for words in (TRAIN, SPECTRUM):
            error = refuse(words, f"{file.name} holds a checkpoint of another run", capsys)
            assert difference in error
    assert (ours / "metrics.jsonl").read_bytes() == before


def test_an_older_checkpoint_of_the_same_run_continues(copied):
    file = max((copied("interrupted") / "checkpoints").iterdir())
    payload = read_payload(file)
    del payload["config"]
    seal(file, payload)
    assert main(TRAIN) == 0
    assert [m["step"] for m in read_metrics(file.parents[1]) if m["kind"] == "epoch"] == [6, 12]


def test_a_folder_with_only_a_checkpoint_is_used(copied, capsys):
    folder = copied("interrupted")
    (folder / "metrics.jsonl").unlink()
    refuse(TRAIN[:-2], "run already holds a run: add --resume auto to continue it", capsys)
    (folder / "config.json").unlink()
    refuse(TRAIN, "run holds checkpoints but no config.json", capsys)
