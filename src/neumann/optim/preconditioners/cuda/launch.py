"""Launches Triton kernels with little work for the host."""

from collections.abc import Mapping
from typing import Any

import torch

from neumann.optim.triton_runtime import is_interpreted, launches_compiled

# What Triton has compiled, and its constants, by everything that it compiles for.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    form: tuple[Any, ...],
    device: torch.device,
    **options: Any,
) -> None:
    """Launch the kernel on a device, compiled now unless a launch had this form before.

    What Triton compiled is launched directly: Triton would inspect every argument again, which
    takes longer than all other Python of a launch. `form` has to say whatever Triton compiles for:
    the kernel, dtypes, whether 16 divides pointers and integers, constants and options.
    """
    if is_interpreted(kernel):
        kernel[(programs,)](*arguments, **constants)
        return
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(kernel, programs, arguments, constants, form, device, **options)
        return
    if not launches_compiled(kernel):
        kernel[(programs,)](*arguments, **constants, **options)
        return
    known = _compiled.get((device, *form))
    if known is None:
        compiled = kernel[(0,)](*arguments, **constants, **options)  # without programs nothing runs
        known = _compiled[(device, *form)] = (compiled, tuple(constants.values()))
    compiled, values = known
    compiled[(programs, 1, 1)](*arguments, *values)


def is_aligned(tensor: Any) -> bool:
    """Whether a kernel can read 16 bytes at a time; None, in place of a tensor, cannot be read."""
    return tensor is not None and tensor.data_ptr() % 16 == 0
