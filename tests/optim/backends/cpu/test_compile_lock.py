"""The lock around compiling: in the user's own place, and never in the way of a step."""

import sys
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("numba")

from neumann.optim.backends.cpu import address_table, compile_lock, numba_kernel
from tests.support.cpu_passes import COEFFICIENTS, check, tensors_of
from tests.support.programs import run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A fresh process, as far as compiling goes, with a lock of its own."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_lock, "TIMEOUT", 0.2)
    monkeypatch.setattr(compile_lock, "_failed", False)
    monkeypatch.setattr(address_table, "_compiled", set())
    yield tmp_path / "cache" / compile_lock.NAME
    numba_kernel.run._cache.enable()


def step():
    check(tensors_of((3, 70)), COEFFICIENTS["iterate"])


def caches():
    return numba_kernel.run._cache._enabled


def test_the_lock_is_beside_numbas_cache(place):
    step()
    assert place.is_file()
    assert caches()


def test_without_a_cache_directory_it_is_in_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_lock.find_path() == tmp_path / "neumann" / compile_lock.NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert compile_lock.find_path() == tmp_path / ".cache" / "neumann" / compile_lock.NAME
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tmp_path / "Library" / "Caches" in compile_lock.find_path().parents
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert tmp_path / "local" in compile_lock.find_path().parents


def put_a_folder(place):
    place.mkdir(parents=True)


def put_a_link(place):
    place.parent.mkdir()
    (place.parent / "precious").write_text("keep me")
    place.symlink_to(place.parent / "precious")


def put_a_file_for_the_folder(place):
    place.parent.write_text("")  # a folder that cannot be made, as on a read-only file system


@pytest.mark.parametrize("obstacle", [put_a_folder, put_a_link, put_a_file_for_the_folder])
def test_what_is_in_the_way_costs_a_warning(place, obstacle):
    obstacle(place)
    with pytest.warns(UserWarning, match="cannot lock numba's cache") as caught:
        step()
    assert len(caught) == 1
    address_table._compiled.clear()
    step()  # warns no more
    assert "\n" not in str(caught[0].message)
    assert not caches()
    if obstacle is put_a_link:
        assert (place.parent / "precious").read_text() == "keep me"


def test_a_holder_that_never_lets_go(place):
    place.parent.mkdir()
    with FileLock(place), pytest.warns(UserWarning, match=r"cannot lock .*numba.lock"):
        step()
    assert not caches()


def test_a_cache_that_cannot_be_written(place, monkeypatch):
    original, calls = numba_kernel.run, []

    def run(*arguments):
        calls.append(caches_of(original))
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        original(*arguments)

    def caches_of(function):
        return function._cache._enabled

    run._cache = original._cache
    monkeypatch.setattr(numba_kernel, "run", run)
    step()
    assert calls[:2] == [True, False]


@pytest.mark.slow
def test_a_first_step_of_a_process_with_a_folder_in_the_way(tmp_path):
    """The whole way: an optimizer in a new process, without any lock to be had."""
    (tmp_path / compile_lock.NAME).mkdir()
    script = (
        "import sys, numba, torch, warnings\n"
        "assert 'neumann.optim.backends.cpu.numba_kernel' not in sys.modules\n"
        "numba.config.reload_config()  # it has been imported, and read the environment\n"
        "from neumann import Neumann\n"
        "p = torch.nn.Parameter(torch.ones(3))\n"
        "o = Neumann([p], lr=0.1, warmup_steps=1, reset_steps=0, cubic=0, repulsive=0)\n"
        "p.grad = torch.ones(3)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    o.step()\n"
        "print(o._backend.name, len(caught), p.tolist() == torch.full((3,), 0.9).tolist())\n"
    )
    ended = run("-c", script, NUMBA_CACHE_DIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["numba", "1", "True"]
