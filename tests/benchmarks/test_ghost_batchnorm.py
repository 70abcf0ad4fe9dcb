"""The benchmark of ghost batches measures the two forms it names."""

import argparse

import torch

from benchmarks.step import ghost_batchnorm


def test_both_forms_take_steps(monkeypatch):
    sizes = []
    use = ghost_batchnorm.use_ghost_batches
    monkeypatch.setattr(
        ghost_batchnorm, "use_ghost_batches", lambda m, size: (sizes.append(size), use(m, size))
    )
    arguments = argparse.Namespace(group=4, width=2, steps=1, rounds=2, compile=False)
    found = ghost_batchnorm.measure(8, torch.device("cpu"), arguments)
    assert found.keys() == {"plain", "ghost"}
    assert [len(times) for times in found.values()] == [2, 2]
    assert sizes == [4]  # one of the two networks has ghost batches
