"""Where the preconditioner stands in a step: after weight decay, before the one update.

A group whose `precondition` is not None has its gradients turned into directions here: unscaled,
negated for maximize, with L2 decay at the displaced weights, widened, and through P. The update
then has nothing of this left to do.

Shards of a tensor of which P needs the whole are gathered; each process computes the whole
direction and keeps its part. That costs an all-gather of those gradients, and gives every layout
the directions of one process; orthogonalising rows by themselves would be another P.

A step that is skipped on the device leaves P's state as it was.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.optim.checkpoint import PRECONDITIONER
from neumann.optim.preconditioner_state import created, preconditioner_of, stages
from neumann.optim.preconditioners import Preconditioner
from neumann.optim.shards import as_part_of, is_dtensor, local
from neumann.optim.update import as_real, decayed_gradients, wide_dtype


def left_to_update(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group's options as the update sees them: without what has been done to the gradients."""
    if group["precondition"] is None:
        return group
    decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    return {**group, "weight_decay": decay, "maximize": False}


def directions(
    parameters: Sequence[Tensor],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[dict[str, Any]],
    group: Mapping[str, Any],
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> list[Tensor | None]:
    """P(±g/grad_scale + λw) of every parameter that has a gradient; the lists are aligned.

    Where `skip` is not zero the states stay what they were. A group without P has its gradients
    divided by the scale, which the update no longer sees.
    """
    preconditioner = preconditioner_of(group)
    if preconditioner is None and grad_scale is None:
        return list(gradients)
    if preconditioner is None:
        assert grad_scale is not None
        return [None if g is None else _unscaled(g, grad_scale) for g in gradients]
    decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
    found: list[Tensor | None] = [None] * len(gradients)
    for chosen in _buckets(gradients):
        wide = [_widened(gradients[i]) for i in chosen]
        if grad_scale is not None:
            factor = grad_scale.reshape(()).to(wide[0]).reciprocal()
            wide = list(torch._foreach_mul(wide, factor))
        at = [_widened(weights[i]) for i in chosen] if decay else []
        wide = decayed_gradients(wide, at, decay, group["maximize"])
        own = [_own(states[i], parameters[i], group) for i in chosen]
        kept = _tensors(own)
        before = None if skip is None else [tensor.clone() for tensor in kept]
        here = [parameters[i] for i in chosen]
        sharded = any(map(is_dtensor, here))
        for stage in stages(preconditioner):
            if sharded:
                wide = [_whole(g, p, stage) for g, p in zip(wide, here, strict=True)]
            wide = _checked(stage.apply(wide, own), wide, stage)
            _check_kept(own, kept, stage)
            if sharded:
                wide = [_part(d, p, stage) for d, p in zip(wide, here, strict=True)]
        if skip is not None and before:
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(torch.where(skip.to(tensor.device) != 0, old, tensor))
        for i, direction in zip(chosen, wide, strict=True):
            w = weights[i]
            result = torch.view_as_complex(direction) if w.is_complex() else direction
            found[i] = result if result.dtype is w.dtype else result.to(w.dtype)
    return found


def _unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """g/scale, in float32 at least: neither need be a number of the gradient's dtype."""
    wide = _widened(gradient)
    wide = wide / scale.to(wide)
    return torch.view_as_complex(wide) if gradient.is_complex() else wide


def _checked(found: Any, given: Sequence[Tensor], stage: Preconditioner) -> list[Tensor]:
    """What P gave, if there is one direction for every gradient, of its shape."""
    if torch.compiler.is_compiling():  # where shapes that do not fit are an error anyway
        return list(found)
    wanted = [g.shape for g in given]
    if not isinstance(found, list | tuple):
        raise ValueError(_broken(stage, wanted, repr(found)))
    shapes = [getattr(direction, "shape", None) for direction in found]
    if shapes != wanted:
        raise ValueError(_broken(stage, wanted, f"{len(shapes)} of shapes {_listed(shapes)}"))
    return list(found)


def _check_kept(
    states: Sequence[dict[str, Tensor]], kept: Sequence[Tensor], stage: Preconditioner
) -> None:
    """Refuse a state whose tensors were replaced: the optimizer would never see the new ones."""
    if torch.compiler.is_compiling():
        return
    now = _tensors(states)
    if len(now) == len(kept) and all(map(operator.is_, now, kept)):
        return
    known = set(map(id, kept))
    replaced = sorted({key for state in states for key, t in state.items() if id(t) not in known})
    raise ValueError(
        f"apply of the preconditioner {stage.name!r} must write to the tensors of a state, as "
        f"with copy_, and has replaced {', '.join(map(repr, replaced)) or 'or removed some'}"
    )


def _tensors(states: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def _broken(stage: Preconditioner, wanted: Sequence[torch.Size], got: str) -> str:
    return (
        f"the preconditioner {stage.name!r} must give a list, for every gradient a direction of "
        f"its shape: {len(wanted)} of shapes {_listed(wanted)}, got {got}"
    )


def _listed(shapes: Sequence[torch.Size | None]) -> str:
    shown = ", ".join("none" if shape is None else str(tuple(shape)) for shape in shapes[:4])
    return shown + (", …" if len(shapes) > 4 else "")


def _buckets(gradients: Sequence[Tensor | None]) -> list[list[int]]:
    """The gradients there are, by device and dtype of the arithmetic."""
    buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            dtype = gradient.dtype
            wide = dtype if dtype is torch.float32 else wide_dtype(as_real(gradient).dtype)
            key = gradient.device, wide
            buckets.setdefault(key, []).append(index)
    return list(buckets.values())


def _widened(tensor: Any) -> Tensor:
    real: Tensor = as_real(tensor.detach())
    return real if real.dtype is torch.float32 else real.to(wide_dtype(real.dtype))


def _whole(gradient: Tensor, p: Tensor, preconditioner: Preconditioner) -> Tensor:
    if not is_dtensor(p) or preconditioner.elementwise(p):
        return gradient
    whole: Tensor = as_part_of(gradient, p).full_tensor()
    return whole


def _part(direction: Tensor, p: Any, preconditioner: Preconditioner) -> Tensor:
    """Of a direction what belongs to the weights that this process holds."""
    if not is_dtensor(p) or preconditioner.elementwise(p):
        return direction
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    spread = DTensor.from_local(direction, p.device_mesh, everywhere, run_check=False)
    part: Tensor = local(spread.redistribute(placements=p.placements))
    return part


def _own(state: dict[str, Any], p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """P's share of a parameter's state: the very tensors, made now if P was chosen only now."""
    own = _own_of(state)
    if not own:
        state.update(created(p, group))
        own = _own_of(state)
    return own


def _own_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        key[len(PRECONDITIONER) :]: as_real(local(value))
        for key, value in state.items()
        if key.startswith(PRECONDITIONER)
    }
