"""The global random generators of a run: saved with a checkpoint, restored after a measurement."""

import random
from typing import Any

import numpy as np
import torch


def get_rng_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's global generators, for a checkpoint.

    Of CUDA only the current device is included: asking for others would allocate memory on each.
    """
    # Libraries that draw from NumPy without a generator of their own use the legacy one.
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, position, has_gauss, gauss = numpy_state
    # Without a CUDA context nothing was drawn on the GPU, and creating one takes memory.
    with_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if with_cuda else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `get_rng_state` returned, leaving out CUDA where it was or is not there."""
    missing = sorted({"python", "numpy", "torch", "cuda"} - state.keys())
    if missing:
        names = ", ".join(map(repr, missing))
        raise ValueError(f"state must come from get_rng_state(); it has no {names}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
