"""A study continues from the archive of its finished runs."""

import subprocess

import pytest

from benchmarks.paper.run_archives import ARCHIVES, pack, unpack
from neumann.lab.errors import UsageError
from neumann.lab.storage.folders import FolderLock
from neumann.lab.storage.reading import SUMMARY, read_summary
from neumann.lab.studies.comparison import Session
from neumann.lab.studies.study_toml import read_study_toml
from tests.support.small_studies import write_study


def read(folder):
    return read_study_toml(write_study(folder / "study.toml"), folder / "runs")


def test_archives_are_committed():
    """They are what the next sitting continues from."""
    ignored = ["git", "check-ignore", str(ARCHIVES / "main-cifar10.tar.xz")]
    found = subprocess.run(ignored, cwd=ARCHIVES.parents[2], capture_output=True, text=True)
    if found.returncode == 128:
        pytest.skip("not a git repository")
    assert found.stdout == ""


@pytest.mark.slow
def test_a_study_continues_from_its_archive(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    study, archive = read(here), tmp_path / "study.tar.xz"
    study.write()
    found = study.search(Session())
    assert pack(study.folder, archive) == 3
    study.test(found, Session())
    half_done = study.folder / "final/sgd/seed-1"
    trained = read_summary(half_done)
    (half_done / SUMMARY).unlink()
    assert pack(study.folder, archive) == 4
    first = archive.read_bytes()
    pack(study.folder, archive)
    assert archive.read_bytes() == first

    elsewhere = read(there)
    assert unpack(archive, elsewhere.folder) == 4
    assert unpack(archive, elsewhere.folder) == 0
    assert [run.state for run in elsewhere.list_runs()] == ["finished"] * 4 + ["to do"]
    elsewhere.test(elsewhere.search(Session()), Session())
    assert {run.state for run in elsewhere.list_runs()} == {"finished"}
    again = read_summary(elsewhere.folder / "final/sgd/seed-1")
    assert again["accuracy"] == trained["accuracy"]

    few = elsewhere.folder.with_name("few")
    unpack(archive, few)
    (few / "final/sgd/seed-0" / SUMMARY).unlink()
    with pytest.raises(UsageError, match=r"has 1 runs that .*few lacks: unpack it there first"):
        pack(few, archive)
    assert archive.read_bytes() == first
    (few / "final/sgd/seed-0/checkpoints").mkdir()
    (few / "final/sgd/seed-0/metrics.jsonl").write_text("half of it")
    assert unpack(archive, few) == 1  # the archive has finished what the folder had begun
    assert not (few / "final/sgd/seed-0/checkpoints").exists()
    assert pack(few, archive) == 4

    (few / "final/sgd/seed-0" / SUMMARY).write_text("{}")
    with pytest.raises(UsageError, match=r"summary\.json differs from the one in"):
        pack(few, archive)
    (few / "final/sgd/seed-0" / SUMMARY).unlink()
    with (
        FolderLock(few / "final/sgd/seed-0"),
        pytest.raises(UsageError, match="is in use by another process"),
    ):
        unpack(archive, few)

    changed = elsewhere.folder / "final/sgd/seed-0" / SUMMARY
    changed.write_text("{}")
    with pytest.raises(UsageError, match=r"summary\.json differs from the one in"):
        unpack(archive, elsewhere.folder)
