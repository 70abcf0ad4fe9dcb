"""Runs that two studies have in common are trained once."""

import shutil

import pytest

from benchmarks.paper.run_sharing import is_watched, make_key, share_runs
from neumann.lab.storage.reading import read_summary
from neumann.lab.studies.comparison import Session
from neumann.lab.studies.study_toml import read_study_toml
from tests.support.small_studies import write_study

WHOLE = '[arms."with more"]\nopt = "sgd"\nlr = "sgd"\nweight_decay = 0.1\n'


def read(folder, name, **changes):
    return read_study_toml(write_study(folder / f"{name}.toml", **changes), folder / name)


def list_states(study):
    return [run.state for run in study.list_runs()]


@pytest.mark.slow
def test_the_same_runs_are_shared_and_others_are_trained(tmp_path):
    first = read(tmp_path, "first")
    first.test(first.search(Session()), Session())
    second = read(tmp_path, "second", more=f"micro_batch_size = 512\n{WHOLE}", seeds=3)
    assert len(share_runs(second, [first.folder])) == 3  # the search; the rest is not known yet
    found = second.search(Session())
    shared = share_runs(second, [first.folder])
    assert sorted(path.relative_to(second.folder).as_posix() for path in shared) == [
        "final/sgd/seed-0",
        "final/sgd/seed-1",
    ]
    assert share_runs(second, [first.folder]) == []
    assert sorted(list_states(second)) == ["finished"] * 5 + ["to do"] * 4
    for state in ("empty", "cut short"):  # what a kill leaves, before the copy or inside it
        place = second.folder / "final/sgd/seed-1"
        shutil.rmtree(place)
        place.mkdir()
        if state == "cut short":
            place.with_name(".seed-1.part").mkdir()
        assert share_runs(second, [first.folder]) == [place]
    damaged = tmp_path / "damaged/final/sgd/seed-0"
    damaged.mkdir(parents=True)
    (damaged / "summary.json").touch()
    assert share_runs(second, [tmp_path / "damaged"]) == []
    second.test(found, Session())  # accepts what was copied, and trains the other four
    assert set(list_states(second)) == {"finished"}
    for place in ("final/sgd/seed-0", "final/sgd/seed-1"):
        assert read_summary(second.folder / place) == read_summary(first.folder / place)
    other = read_summary(second.folder / "final/with more/seed-0")
    assert other != read_summary(first.folder / "final/sgd/seed-0")


def test_what_makes_runs_the_same():
    config = {"batch_size": 512, "micro_batch_size": None, "lr": 0.1, "seed": 0}
    assert make_key(config) == make_key({**config, "micro_batch_size": 8192})
    assert make_key(config) == make_key({**config, "eval_every": 10})
    for change in ({"seed": 1}, {"lr": 0.2}, {"micro_batch_size": 256}, {"epochs": 9}):
        assert make_key(config) != make_key({**config, **change})


def test_a_run_that_was_looked_at_less_often_is_not_shared():
    often, seldom = {"eval_every": 1, "log_every": 10}, {"eval_every": 10, "log_every": 50}
    assert is_watched(often, seldom)
    assert not is_watched(seldom, often)
