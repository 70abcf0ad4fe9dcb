"""Seconds of training and of compiling."""

import time

import pytest
import torch

from neumann.lab.training.clock import TrainingClock
from neumann.optim.backends.cpu.compile_lock import take_turn


@pytest.fixture
def clock(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return TrainingClock(torch.device("cpu"))


def test_a_kernel_that_compiles_is_no_training(clock):
    clock.start()
    time.sleep(0.02)
    with take_turn():
        time.sleep(0.05)
    clock.end_lap()
    assert clock.compiling >= 0.05
    assert 0.02 <= clock.training < 0.05
    before = clock.compiling
    time.sleep(0.02)
    clock.end_lap()  # the next lap does not count it again
    assert clock.compiling == before
    assert clock.training >= 0.04


def test_a_lap_of_compiling_counts_once(clock):
    clock.start()
    with take_turn():
        time.sleep(0.02)
    clock.end_lap(compiling=True)
    assert 0.02 <= clock.compiling < 0.2
    assert clock.training == pytest.approx(0.0, abs=1e-9)
