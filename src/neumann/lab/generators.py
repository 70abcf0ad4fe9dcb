"""The state of the random generators a training draws from, in a form a checkpoint can hold.

Python's `random`, NumPy's global generator and torch's for the CPU and for the current CUDA device
are taken. The other CUDA devices are left alone: to ask for their state would claim memory on each.
A `torch.Generator` or `numpy.random.Generator` of one's own is not covered; save its state beside
this.
"""

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of all generators, as tensors, tuples and numbers (loads with weights_only)."""
    # What a library draws from NumPy without a generator of its own comes from the legacy one.
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, position, has_gauss, gauss = numpy_state
    # Without a CUDA context nothing was drawn there, and making one takes memory.
    with_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if with_cuda else None,
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Continue where `rng_state` was taken.

    A state taken with CUDA and restored without (or the other way round) leaves out what is not
    there: the run goes on, but cannot have the same bits. ValueError if a part is missing.
    """
    missing = sorted({"python", "numpy", "torch", "cuda"} - state.keys())
    if missing:
        raise ValueError(
            f"state must come from rng_state(); it has no {', '.join(map(repr, missing))}"
        )
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
