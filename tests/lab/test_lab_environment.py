"""The environment of a run: complete, without the machine's name, and never a failure."""

import errno
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import neumann
from neumann.lab import environment as surroundings
from neumann.lab.records import Records, environment, read_environment


def test_the_environment_says_what_a_reader_needs_and_not_whose_machine(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("asked for the host's name"))
    monkeypatch.setattr("platform.node", lambda: pytest.fail("asked for the host's name"))
    found = environment()
    assert {"python", "torch", "neumann", "numpy", "system"} <= found["versions"].keys()
    assert found["hardware"]["cpu_count"] == os.cpu_count()
    assert found["hardware"]["memory_bytes"] > 1 << 20
    assert found["hardware"]["cpu"]
    assert (found["hardware"]["gpu"] is None) == (not torch.cuda.is_available())
    json.dumps(found)


def git(folder, *arguments):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    )


def test_the_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # As if the package were installed, without a repository of its own.
    monkeypatch.setattr(neumann, "__file__", str(tmp_path / "__init__.py"))
    assert environment()["git"] is None
    git(folder, "init")
    assert environment()["git"] is None
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "-m", "one")
    found = environment()["git"]
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (folder / "runs").write_text("not tracked")
    assert environment()["git"] == found
    (folder / "file").write_text("2")
    assert environment()["git"] == {**found, "dirty": True}


def test_the_commit_is_that_of_the_code_not_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = environment(Path(neumann.__file__).parent)["git"]
    assert environment()["git"] == inside


def test_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["git"] is None
    Records.create(tmp_path / "x", {})
    assert read_environment(tmp_path / "x")["git"] is None


def test_what_the_system_does_not_tell_is_none(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(surroundings.Path, "read_text", refuse)
    monkeypatch.setattr(surroundings.platform, "processor", lambda: "")
    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    found = surroundings.hardware()
    assert (found["cpu"], found["memory_bytes"], found["cpu_usable"]) == (None, None, None)
