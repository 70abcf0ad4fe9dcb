"""The environment of a run: complete, without the machine's name, and it never raises."""

import errno
import json
import os
import shutil
import socket
import subprocess

import pytest
import torch

import neumann
from neumann.lab.storage.reading import read_environment
from neumann.lab.training import environment
from neumann.lab.training.environment import describe_environment
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


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository that holds the package, as if it were cloned there."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    package = tmp_path / "clone" / "neumann"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("not tracked")
    monkeypatch.setattr(neumann, "__file__", str(package / "__init__.py"))
    git(package.parent, "init")
    return package.parent


def commit(repository):
    git(repository, "add", "neumann/__init__.py")
    git(repository, "commit", "-m", "one")


def test_the_commit_and_whether_the_code_differs_from_it(repository, monkeypatch, tmp_path):
    assert describe_environment()["git"] is None  # no commit yet
    commit(repository)
    found = describe_environment()["git"]
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (repository / "runs").write_text("not tracked")
    assert describe_environment()["git"] == found
    code = repository / "neumann" / "__init__.py"
    code.write_text("2\n")
    assert describe_environment()["git"] == {**found, "dirty": True}
    code.write_bytes(b"1\r\n")  # as git may check it out on Windows
    assert describe_environment()["git"] == found
    code.unlink()
    assert describe_environment()["git"] == {**found, "dirty": True}


def test_the_commit_is_that_of_the_code_not_of_the_working_folder(
    repository, tmp_path, monkeypatch
):
    commit(repository)
    found = describe_environment()["git"]
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init")
    git(other, "commit", "--allow-empty", "-m", "two")
    monkeypatch.chdir(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as inside a hook of git
    assert describe_environment()["git"] == found


def test_a_package_installed_inside_another_repository_has_no_commit(repository):
    git(repository, "commit", "--allow-empty", "-m", "somebody else's")
    assert describe_environment()["git"] is None


def test_a_repository_runs_no_code(repository, tmp_path, monkeypatch):
    """Neither that of the working folder nor the package's own, whatever their settings say."""
    commit(repository)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    git(hostile, "init")
    (hostile / "file").write_text("1")
    git(hostile, "add", "file")
    git(hostile, "commit", "-m", "one")
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\ncat\n")
    script.chmod(0o755)
    for folder in (hostile, repository):
        (folder / ".git" / "info" / "attributes").write_text("* filter=evil diff=evil\n")
        for key in (
            *("core.fsmonitor", "core.pager", "core.sshCommand", "diff.external"),
            *("diff.evil.textconv", "filter.evil.clean", "alias.ls-tree"),
        ):
            git(folder, "config", key, str(script))
        (folder / ".git" / "hooks").mkdir(exist_ok=True)
        shutil.copy(script, folder / ".git" / "hooks" / "post-index-change")
        os.utime(folder / "file" if folder is hostile else folder / "neumann" / "__init__.py")
    monkeypatch.chdir(hostile)
    assert describe_environment()["git"]["dirty"] is False
    assert not (tmp_path / "ran").exists()
    # The settings are harmful: this is what `git status` would do.
    subprocess.run(["git", "status"], check=False, capture_output=True)
    assert (tmp_path / "ran").exists()


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
