"""Comparisons: paired, resumable, and honest about what diverged."""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from neumann.cli import main
from neumann.lab import locks, workers
from neumann.lab.checkpoints import Checkpoints
from neumann.lab.compare import compare
from neumann.lab.comparison import read, run_folder
from neumann.lab.errors import UsageError
from neumann.lab.naming import fresh_folder
from neumann.lab.progress import _Ends
from neumann.lab.reading import read_metrics
from neumann.lab.studies import CompareConfig, SweepConfig
from neumann.lab.tables import table
from neumann.lab.workers import Watch


class Ends(Watch):
    """Keeps what has ended, and how many were there before."""

    def __init__(self):
        self.there, self.keys = None, []

    def began(self, there, total):
        self.there = there

    def ended(self, arm, seed, result):
        self.keys.append((arm, seed))


class Stop(Exception):
    pass


class StopAtFirst(Watch):
    def ended(self, arm, seed, result):
        raise Stop


SMALL = CompareConfig(
    arms=("neumann:warmup_epochs=1", "sgd", "sgd:lr=1e30"), seeds=2, epochs=2, target=50.0
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    ends = Ends()
    comparison = compare(SMALL, folder, ends)
    return folder, comparison, ends


def test_every_training_is_done_seed_by_seed(finished):
    _, _, ends = finished
    assert ends.there == 0
    assert ends.keys == [(arm, seed) for seed in range(2) for arm in SMALL.arms]


def test_arms_share_initial_weights_and_data(finished):
    """The first step's loss is that of the same weights on the same batch."""
    folder, _, _ = finished
    config = CompareConfig(arms=("sgd:lr=0.0", "adamw:lr=0.0"), seeds=1, epochs=1, log_every=1)
    compare(config, folder / "still")
    losses = [
        [m["train_loss"] for m in read_metrics(run_folder(folder / "still", arm, 0))]
        for arm in config.arms
    ]
    assert losses[0] == losses[1]


def test_rows(finished):
    _, comparison, _ = finished
    first, sgd, wild = comparison.rows
    assert first.difference is None
    assert sgd.difference.n == 2
    assert sgd.difference.mean == pytest.approx(first.accuracy.mean - sgd.accuracy.mean)
    assert all(run.epochs_to_target == run.steps_to_target / 22 for run in sgd.runs.values())
    assert wild.accuracy.mean is None
    assert wild.accuracy.diverged == 2
    assert wild.difference.n == 0


def test_a_diverged_arm_is_a_row_that_says_so(finished):
    _, comparison, _ = finished
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(comparison))
    lines = console.export_text().splitlines()
    assert "diverged" in next(line for line in lines if line.startswith("sgd:lr=1e30"))
    assert any("diverged" in sentence for sentence in comparison.verdicts())


def test_a_finished_comparison_repeats_nothing(finished, monkeypatch):
    folder, comparison, _ = finished
    monkeypatch.setattr("neumann.lab.compare.train", None)  # would be called otherwise
    assert compare(SMALL, folder) == comparison


def test_an_interrupted_comparison_goes_on(tmp_path, finished):
    """The first training is there already."""
    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0)
    with pytest.raises(Stop):
        compare(config, tmp_path, StopAtFirst())
    before = os.stat(run_folder(tmp_path, config.arms[0], 0) / "summary.json").st_mtime_ns
    comparison = compare(config, tmp_path)
    after = os.stat(run_folder(tmp_path, config.arms[0], 0) / "summary.json").st_mtime_ns
    assert before == after
    assert [row.runs[0].accuracy for row in comparison.rows] == [
        row.runs[0].accuracy for row in finished[1].rows[:2]
    ]


def test_side_by_side_is_the_same(tmp_path, finished):
    folder, comparison, _ = finished
    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0, jobs=2)
    rows = compare(config, tmp_path).rows
    assert [r.runs[0].accuracy for r in rows] == [r.runs[0].accuracy for r in comparison.rows[:2]]
    for arm in config.arms:
        ours, theirs = (
            Checkpoints(run_folder(where, arm, 0) / "checkpoints").latest().payload["model"]
            for where in (tmp_path, folder)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arms": ()}, "--arms must name at least one"),
        ({"arms": ("sgd", "sgd")}, "--arms names sgd twice"),
        ({"arms": ("sgdd",)}, "unknown optimizer 'sgdd'"),
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"jobs": 0}, "--jobs must be at least 1"),
        ({"lr": -1.0}, "--lr must be at least 0"),
        ({"model": "mlpp"}, "unknown model 'mlpp'; the nearest: mlp"),
        ({"arms": ("sgd", "adamw:betas=3")}, "adamw:betas=3"),
        ({"batch_size": 10_000, "jobs": 2}, "larger than the training set"),
        (
            {"arms": ("adam:betas=(0.9,0.99)", "adam:betas=[0.9,0.99]")},
            r"'adam:betas=\(0.9,0.99\)' and 'adam:betas=\[0.9,0.99\]' would share the folder",
        ),
        ({"arms": (f"sgd:momentum=0.{9:0300}",)}, "sgd:momentum=0.000.*… is too long"),
    ],
)
def test_bad_comparisons_are_refused_before_anything_is_trained(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        compare(CompareConfig(**settings), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def no_report(monkeypatch):
    """Pictures take seconds."""
    monkeypatch.setattr("neumann.report.write_report", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("no_report")
def test_the_command(tmp_path, capsys):
    words = ["compare", "--arms", "sgd", "adamw:lr=2e-3", "sgd:lr=1e30", "--target", "50"]
    words += ["--seeds", "1", "--epochs", "1", "--output", str(tmp_path / "x")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "adamw:lr=2e-3" in printed.out
    assert "steps to" in printed.out
    assert f"records: {tmp_path / 'x'}" in printed.out
    assert "…" not in printed.out  # nothing is cut where it is not a terminal
    lines = printed.err.splitlines()
    assert re.fullmatch(r"2/3  adamw:lr=2e-3  seed 0  \d+\.\d\d %", lines[1])
    assert lines[2] == "3/3  sgd:lr=1e30  seed 0  diverged"
    assert main(words) == 0
    assert capsys.readouterr().err.splitlines()[0] == "3/3  finished before"


def test_a_folder_that_holds_something_else_is_refused(finished):
    folder, _, _ = finished
    run = run_folder(folder, "sgd", 0)
    with pytest.raises(UsageError, match="holds a run already"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=1), run)
    assert not (run / "comparison.json").exists()


def test_seeds_and_arms_can_be_added_but_settings_not_changed(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    compare(config, tmp_path)
    more = CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1)
    ends = Ends()
    compare(more, tmp_path, ends)
    assert ends.there == 1
    assert ends.keys == [("adamw", 0), ("sgd", 1), ("adamw", 1)]
    assert read(tmp_path).missing == 0
    with pytest.raises(UsageError, match="other settings: epochs is 1 there, 2 here"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=2), tmp_path)
    assert len(read(tmp_path).rows) == 2


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_training_with_other_settings_is_refused_finished_or_not(tmp_path):
    """As where "auto" was something else on the machine that trained it."""
    compare(CompareConfig(arms=("sgd",), seeds=1, epochs=1), tmp_path)
    run = run_folder(tmp_path, "sgd", 0)
    change_json(run / "config.json", lambda content: content["config"].update(amp="bf16"))
    before = (tmp_path / "comparison.json").read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"seed-0 holds .*: amp is 'bf16' there, 'off' here"):
            compare(CompareConfig(arms=("sgd", "adamw"), seeds=1, epochs=1), tmp_path)
        (run / "summary.json").unlink(missing_ok=True)
    assert (tmp_path / "comparison.json").read_bytes() == before
    assert not run_folder(tmp_path, "adamw", 0).exists()


def test_a_comparison_that_is_older_than_a_setting_goes_on(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    compare(config, tmp_path)
    for file, part in (
        (tmp_path / "comparison.json", "settings"),
        (run_folder(tmp_path, "sgd", 0) / "config.json", "config"),
    ):
        change_json(file, lambda content, part=part: content[part].pop("cuda_graph"))
        change_json(file, lambda content, part=part: content[part].pop("spectrum_every"))
    with pytest.raises(UsageError, match="spectrum_every is not set there, 9 here"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=1, spectrum_every=9), tmp_path)
    ends = Ends()
    compare(config, tmp_path, ends)
    assert (ends.there, ends.keys) == (1, [])


def test_the_folder_is_for_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)

    class Meanwhile(Watch):
        def line(self, arm, seed, line):
            with pytest.raises(UsageError, match=f"{tmp_path} is in use by another process"):
                compare(config, tmp_path)

    compare(config, tmp_path, Meanwhile())
    compare(config, tmp_path)
    assert not (tmp_path / locks.LOCK).exists()


@pytest.mark.usefixtures("no_report")
def test_notes_about_what_the_table_cannot_say(tmp_path, capsys):
    words = ["compare", "--epochs", "1", "--output", str(tmp_path)]
    assert main([*words, "--arms", "neumann", "sgd", "adamw", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    warmup = "neumann: all 22 steps were its SGD warm-up; the Neumann iteration never began"
    assert lines[-4:-2] == [warmup, "p values are not corrected for multiple comparisons"]
    assert main([*words, "--arms", "sgd", "adamw", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"\n4 finished trainings in {tmp_path} are not shown\n" in printed
    assert "never began" not in printed
    assert "not corrected" not in printed
    assert main([*words, "--arms", "neumann", "sgd", "adamw", "--seeds", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "6/6  finished before\n"
    assert "not shown" not in printed.out


def test_after_its_warm_up_neumann_is_itself(finished):
    _, comparison, _ = finished
    assert comparison.rows[0].warmup is None
    assert comparison.limits() == []


@pytest.mark.parametrize("command", ["compare", "sweep", "demo"])
def test_torchrun_is_refused(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command, "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"neumann: neumann {command} is one process")
    assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arms", ['"neumann"', "3", "[3]"])
def test_arms_in_a_file_are_a_list(arms, tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(f"arms = {arms}")
    assert main(["compare", "--config", str(file), "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert 'arms must be a list, as in ["neumann", "sgd"]; got ' in errors
    assert errors.count("\n") == 1


def test_a_long_path_does_not_make_a_name_too_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = fresh_folder(SweepConfig(data=f"folder:{'/ä' * 300}").title)
    folder.mkdir(parents=True)
    assert folder.name.endswith("-mlp-sweep-1")


def test_an_unfinished_comparison_can_be_read(tmp_path):
    with pytest.raises(Stop):
        compare(CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1), tmp_path, StopAtFirst())
    found = read(tmp_path)
    assert found.missing == 3
    assert found.rows[1].difference.pairs == 0


# ---------------------------------------------------------------------- stopped from outside

LONG = CompareConfig(arms=("sgd", "adamw"), seeds=1, epochs=400, log_every=5)
FLAGS = ["compare", "--arms", *LONG.arms, "--seeds", "1", "--epochs", "400", "--log-every", "5"]


def begin(folder):
    """The command in a session of its own, once both of its workers train."""
    words = [sys.executable, "-m", "neumann", *FLAGS, "--jobs", "2", "--output", str(folder)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(list(folder.glob("*/seed-0/metrics.jsonl"))) == 2, process)
    return process


def wait_until(happened, process=None):
    end = time.monotonic() + 60
    while not happened() and (process is None or process.poll() is None):
        assert time.monotonic() < end
        time.sleep(0.01)


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


class StopAtLine(Watch):
    def line(self, arm, seed, line):
        self.at = arm, line["step"]
        raise Stop


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)],  # Ctrl-C reaches the whole group
)
def test_a_signal_stops_all_and_the_same_command_goes_on(tmp_path, number, send):
    folder = tmp_path / "x"
    process = begin(folder)
    workers = workers_of(process)
    assert len(workers) == 2
    send(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert errors == (
        f"neumann: stopped by {number.name} after 0 of 2 trainings; the same command with "
        f"--output {folder} goes on\n"
    )
    assert not any(map(is_running, workers))
    saved = {arm: saved_step(folder, arm) for arm in LONG.arms}
    assert all(saved.values())
    watch = StopAtLine()
    with pytest.raises(Stop):
        compare(LONG, folder, watch)
    assert watch.at[0] == "sgd"
    assert 0 < watch.at[1] - saved["sgd"] <= 5


def saved_step(folder, arm):
    return Checkpoints(run_folder(folder, arm, 0) / "checkpoints").latest().step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["line", "ended"])
def test_a_signal_stops_a_single_job_too(tmp_path, capsys, monkeypatch, number, moment):
    """While it trains, and between two trainings."""
    monkeypatch.setattr(_Ends, moment, lambda *arguments: os.kill(os.getpid(), number))
    words = ["compare", "--arms", "sgd", "adamw", "--seeds", "1", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 128 + number
    ended = 1 if moment == "ended" else 0
    assert f"by {number.name} after {ended} of 2 trainings" in capsys.readouterr().err


def test_a_worker_that_is_killed_is_an_error_and_the_others_save(tmp_path):
    folder = tmp_path / "x"
    process = begin(folder)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert re.match(r"neumann: the process that trained \w+ seed 0 was killed by SIGKILL; ", errors)
    assert any(Checkpoints(file).latest() for file in folder.glob("*/seed-0/checkpoints"))


def test_killed_with_its_workers_at_work_the_same_command_goes_on_at_once(tmp_path):
    process = begin(tmp_path)
    workers = workers_of(process)
    process.kill()
    process.communicate(timeout=60)
    with pytest.raises(Stop):
        compare(LONG, tmp_path, StopAtLine())
    assert not any(map(is_running, workers))
    for arm in LONG.arms:
        lines = [(m["step"], m["kind"]) for m in read_metrics(run_folder(tmp_path, arm, 0))]
        assert len(lines) == len(set(lines))


PARENT = """
import time
from pathlib import Path
from neumann.lab import workers
from neumann.lab.studies import CompareConfig

def train(*arguments):  # says nothing for a long time
    Path("at-work").touch()
    time.sleep(600)

workers.train = train  # in the worker, too, which imports this file

if __name__ == "__main__":
    worker = workers.Worker(1)
    worker.start(("sgd", 0), CompareConfig(device="cpu").run("sgd", 0, Path("x")))
    time.sleep(600)
"""


def test_a_worker_ends_with_its_parent_even_if_it_has_nothing_to_say(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path)
    wait_until((tmp_path / "at-work").exists, parent)
    (worker,) = workers_of(parent)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    try:
        while is_running(worker):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        if is_running(worker):
            os.kill(worker, signal.SIGKILL)


class Pipe:
    """A worker's end, in this process."""

    def __init__(self, *runs):
        self.runs, self.words = [*runs, None], []

    def recv(self):
        return self.runs.pop(0)

    def send(self, word):
        self.words.append(pickle.loads(pickle.dumps(word)))


def test_a_worker_says_what_it_cannot_use_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "setsid", lambda: None)
    config = CompareConfig(arms=("sgd",), epochs=1)
    first, second = (config.run("sgd", seed, tmp_path / "x") for seed in range(2))
    pipe = Pipe(first, second, first)
    workers._work(pipe, None)
    ends = [word for word in pipe.words if not isinstance(word, dict)]
    assert ends[0] is ends[2] is None
    assert isinstance(ends[1], UsageError)
    assert "holds a run with another config: seed is 0 there, 1 here" in str(ends[1])


def test_jobs_share_the_threads(monkeypatch):
    threads = []
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert workers._threads(3) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (workers._threads(3), workers._threads(20)) == (2, 1)
    workers._work(Pipe(), None)
    workers._work(Pipe(), 2)
    assert threads == [2]
