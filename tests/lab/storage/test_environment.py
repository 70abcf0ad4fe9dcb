"""The environment of a run: complete, without the machine's name, and it never raises."""

import errno
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import neumann
from neumann.lab.storage import environment
from neumann.lab.storage.environment import describe_environment
from neumann.lab.storage.reading import read_environment
from neumann.lab.training.records import Records


def test_the_environment_is_complete_without_the_name_of_the_machine(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("asked for the host's name"))
    monkeypatch.setattr("platform.node", lambda: pytest.fail("asked for the host's name"))
    found = describe_environment()
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


def test_the_commit_and_whether_the_code_differs_from_it(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # As if the package were installed, without a repository of its own.
    monkeypatch.setattr(neumann, "__file__", str(tmp_path / "__init__.py"))
    assert describe_environment()["git"] is None
    git(folder, "init")
    assert describe_environment()["git"] is None
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "-m", "one")
    found = describe_environment()["git"]
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (folder / "runs").write_text("not tracked")
    assert describe_environment()["git"] == found
    (folder / "file").write_text("2")
    assert describe_environment()["git"] == {**found, "dirty": True}


def test_the_commit_is_that_of_the_code_not_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = describe_environment(Path(neumann.__file__).parent)["git"]
    assert describe_environment()["git"] == inside


def test_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment()["git"] is None
    Records(tmp_path / "x").begin({})
    assert read_environment(tmp_path / "x")["git"] is None


def test_what_the_system_does_not_report_is_none(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(environment.Path, "read_text", refuse)
    monkeypatch.setattr(environment.platform, "processor", lambda: "")
    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    found = environment.describe_hardware()
    assert (found["cpu"], found["memory_bytes"], found["cpu_usable"]) == (None, None, None)
