"""The part of a distributed tensor that this process holds. Every step works on those parts."""

import sys
from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor; there is none before its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Any:
    """The part that this process holds, to be read or written in place."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # gives the tensor itself, not a view with a history
        part = tensor.to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective may still be running


def local_gradient(gradient: Any, parameter: Any) -> Any:
    """The part of a gradient that belongs to this process's part of the parameter."""
    if gradient is not None and is_dtensor(gradient):
        if tuple(gradient.placements) != tuple(parameter.placements):
            gradient = gradient.redistribute(placements=parameter.placements)
        return local_part(gradient)
    return gradient


def distribute_like(part: Tensor, like: Any) -> Any:
    """The tensor with this local part, distributed like another."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,  # it would compare replicas, with a collective
        shape=like.shape,
        stride=like.stride(),
    )


def place_like(tensor: Any, parameter: Any) -> Any:
    """A loaded tensor, distributed like the parameter; whole if the parameter is not a DTensor."""
    if not is_dtensor(parameter):
        return tensor.full_tensor() if is_dtensor(tensor) else tensor
    if is_dtensor(tensor):
        return tensor.redistribute(parameter.device_mesh, parameter.placements)
    from torch.distributed.tensor import distribute_tensor

    whole = tensor.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
