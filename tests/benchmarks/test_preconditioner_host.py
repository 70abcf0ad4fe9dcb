"""What the host costs is measured without the arithmetic."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.step import preconditioner_host
from neumann.optim.preconditioners import orthogonalization


class Operations(TorchDispatchMode):
    """Counts every operation."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[function.name().partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", preconditioner_host.list_cases())
def test_no_products_are_left(name, monkeypatch):
    for function in ("normalize", "iterate"):  # what `leave_products_out` replaces is put back
        monkeypatch.setattr(orthogonalization, function, getattr(orthogonalization, function))
    preconditioner_host.leave_products_out()
    with Operations() as operations:
        for spectral, gradients in preconditioner_host.list_cases()[name]:
            spectral.apply(gradients, [{} for _ in gradients])
    products = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::matmul"}
    assert operations.found
    assert not products & set(operations.found)
