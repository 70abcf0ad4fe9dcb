"""Weight decay by how often data are repeated."""

import pytest

from benchmarks.ablations import decay_by_epochs
from benchmarks.ablations.decay_by_epochs import make_data, make_network, train


@pytest.mark.slow
def test_repeated_rows_need_more_decay(monkeypatch):
    monkeypatch.setattr(decay_by_epochs, "STEPS", 40)
    repeated, fresh = make_data(1_000), make_data(40 * decay_by_epochs.BATCH)
    assert train(repeated, False, 10.0, seed=0) < train(repeated, False, 0.0, seed=0)
    assert train(fresh, False, 2.5, seed=0) < train(fresh, False, 20.0, seed=0)


def test_the_network_with_batch_norms():
    names = [type(layer).__name__ for layer in make_network(normalized=True)]
    assert names.count("BatchNorm1d") == 2
    assert "BatchNorm1d" not in [type(layer).__name__ for layer in make_network(False)]
