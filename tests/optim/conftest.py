"""Fixtures for tests of the optimizer."""

import pytest

from tests.support.oracle_runs import use_triton_on_cpu


@pytest.fixture(autouse=True)
def _triton_on_cpu_tensors(request, monkeypatch):
    """Tests of the implementation "triton" run its kernels on CPU tensors, interpreted."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if parameters.get("implementation") == "triton":
        use_triton_on_cpu(monkeypatch)
