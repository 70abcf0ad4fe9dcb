"""What tests of the optimizer find around them.

Those that name the implementation "triton" run the CUDA path on CPU tensors, interpreted.
"""

import pytest

from neumann.optim import execution


@pytest.fixture(autouse=True)
def _cuda_path_on_cpu_tensors(request, monkeypatch):
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if parameters.get("implementation") == "triton":
        cuda = execution.Implementation.CUDA
        monkeypatch.setattr(execution, "_fused", lambda devices: (cuda, None))
