"""The CPU kernel in threads and processes: the same bits, and numba only where it is needed."""

import os
import sys
import threading

import pytest
import torch

pytest.importorskip("numba")

from neumann.optim.backends.cpu import numba_kernel, numba_pass
from tests.support.cpu_passes import (
    BF16,
    COEFFICIENTS,
    F16,
    F32,
    FORCE,
    bits,
    check,
    copy_of,
    laid_out,
    run_pass,
    tensors_of,
)
from tests.support.programs import run


def _step(tensors, **options):
    tensors = copy_of(tensors)
    runner = numba_pass.Pass()
    squared = [
        run_pass(tensors, COEFFICIENTS["iterate"], FORCE, runner=runner, seed=seed, **options)
        for seed in range(3)
    ]
    return squared, bits(tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "state", "rounding"),
    [(F32, F32, "nearest"), (F32, BF16, "stochastic"), (F16, F16, "nearest")],
)
def test_bits_do_not_depend_on_threads(weight, state, rounding):
    tensors = tensors_of([(1_000_003,), (8193,), (5,), (300, 1000)], weight, state=state)
    tensors.gradients[3] = laid_out(tensors.gradients[3], "transposed")  # copied before it is used
    torch.set_num_threads(1)
    expected = _step(tensors, rounding=rounding)
    for threads in (1, 2, 2, 5):
        torch.set_num_threads(threads)
        assert _step(tensors, rounding=rounding) == expected


@pytest.mark.slow
def test_as_many_threads_as_torch_uses(monkeypatch):
    """Without helpers the test above would mean nothing."""
    original, workers = numba_kernel.run, set()

    def run(*arguments):
        workers.add(threading.get_ident())
        original(*arguments)

    monkeypatch.setattr(numba_kernel, "run", run)
    torch.set_num_threads(1)
    check(tensors_of((1_000_003,)), COEFFICIENTS["iterate"])
    assert workers == {threading.get_ident()}
    torch.set_num_threads(2)
    for _ in range(50):  # a helper that comes too late finds nothing left to do
        check(tensors_of((1_000_003,)), COEFFICIENTS["iterate"])
        if len(workers) == 2:
            break
    assert len(workers) == 2


@pytest.mark.slow
def test_two_threads_at_once():
    torch.set_num_threads(2)
    inputs = [tensors_of((400_000, 1000), F32), tensors_of((300_000, 70_000), F32, state=BF16)]
    expected = [_step(tensors) for tensors in inputs]
    failures = []

    def work(index):
        try:
            for _ in range(15):
                assert _step(inputs[index]) == expected[index]
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def _python(script, **environment):
    """What a script prints, in a process of its own."""
    ended = run("-c", RELOAD + script, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


# numba has been imported, so it has to read the environment again; but no kernel has.
RELOAD = """
import sys, numba
assert "neumann.optim.backends.cpu.numba_kernel" not in sys.modules
numba.config.reload_config()
"""
STEP = """
import torch
from neumann.optim.backends.cpu import numba_pass
from neumann.optim.phases import Phase, choose_coefficients
from neumann.optim.tensors import Tensors

def step():
    torch.manual_seed(0)
    tensors = Tensors(*([torch.randn(600_000)] for _ in range(4)))
    coefficients = choose_coefficients(Phase.ITERATE, 0.1, 0.9, 0.99, 0.0)._replace(force=0.1)
    return numba_pass.Pass().prepare(tensors, coefficients)()
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    script = STEP + (
        "step()\n"
        "from neumann.optim.backends.cpu.numba_kernel import run\n"
        "print(sum(run.stats.cache_hits.values()), sum(run.stats.cache_misses.values()))\n"
    )
    assert _python(script, NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "1"]
    assert _python(script, NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "0"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_steps_too():
    script = STEP + (
        "import os, threading, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "torch.set_num_threads(2)\n"
        "def helped():\n"
        "    return any(t.name.startswith('neumann') for t in threading.enumerate())\n"
        "before = step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if not helped() and step() == before and helped() else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), step() == before, helped())\n"
    )
    assert _python(script) == ["0", "True", "True"]


def test_without_a_directory_to_cache_in():
    namespace = {}
    exec("def successor(number): return number + 1", namespace)  # a file that numba cannot find
    assert numba_kernel.compiled(cache=True)(namespace["successor"])(1) == 2


def test_unavailable(monkeypatch):
    import numba

    assert numba_pass.unavailable() is None
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in numba_pass.unavailable()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert 'pip install ".[cpu]"' in numba_pass.unavailable()
