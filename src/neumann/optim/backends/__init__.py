"""How the update runs: the backends, and the choice between them.

`base` is the interface, and `host` the base class of all backends but CUDA. `reference` is for
reading and for autograd, `lists` runs anywhere, `cpu` (numba) and `cuda` (Triton) make one pass
over memory. `traced` is not a backend: it is the step that torch.compile sees.

To add a fused backend, subclass `host.HostBackend` (only `prepare_update` is left to write) or
implement `base.Backend`, and list the class in `FUSED`.
"""

import torch

from neumann.optim.backends.base import Backend, Scalars
from neumann.optim.backends.cpu import NumbaBackend
from neumann.optim.backends.cuda import TritonBackend
from neumann.optim.backends.lists import ListBackend
from neumann.optim.backends.reference import ReferenceBackend
from neumann.optim.options import GroupOptions

__all__ = ["FUSED", "Backend", "Scalars", "choose_backend"]

# One pass over memory. The first that is made for the parameters' device and can run is taken.
FUSED: list[type[Backend]] = [TritonBackend, NumbaBackend]


def choose_backend(
    options: GroupOptions, devices: set[torch.device], sums: int = 1
) -> type[Backend]:
    """The backend that the flags ask for, or the fastest there is where they leave it open.

    Args:
        options: of any group; all have the same flags.
        devices: of the parameters.
        sums: how many sums of squares must be kept apart (see `distributed`).

    Raises:
        RuntimeError: `fused=True` or `capturable=True` cannot run here; says why.
    """
    if options["differentiable"] or options["foreach"] is False:
        return ReferenceBackend
    if options["foreach"] or (options["fused"] is False and not options["capturable"]):
        return ListBackend
    chosen, why = _find_fused(devices, sums) if devices else (None, None)
    if devices and options["capturable"] and (chosen is None or not chosen.on_device):
        on_cpu = all(device.type == "cpu" for device in devices)
        reason = "the parameters are on the CPU" if on_cpu else why
        raise RuntimeError(
            f"capturable=True needs the fused CUDA kernel, which cannot run here: {reason}"
        )
    if options["fused"] is False:
        return ListBackend
    if why is not None and options["fused"]:
        raise RuntimeError(f"fused=True cannot run here: {why}")
    return chosen or ListBackend


def _find_fused(devices: set[torch.device], sums: int) -> tuple[type[Backend] | None, str | None]:
    """The fused backend for these devices, or why there is none."""
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        return None, f"the parameters must be on one device, and are on {found}"
    (device,) = devices
    why = f"there is no kernel for {device.type}"
    for backend in FUSED:
        if backend.device_type == device.type:
            reason = backend.unavailable(sums)
            if reason is None:
                return backend, None
            why = reason
    return None, why
