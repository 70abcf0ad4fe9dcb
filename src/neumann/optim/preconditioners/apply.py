"""Applies P to the gradients of a step: after weight decay, before the update.

The gradients of a group with a P are unscaled, negated for `maximize`, given L2 weight decay at the
displaced weights, widened, and passed through P. None of this is left for the update to do.

If P needs a whole tensor of which each process has a shard, the shards are gathered; each process
computes the whole direction and keeps its part. That costs an all-gather of those gradients, and
gives every layout the directions of a single process.

State of P that the optimizer keeps in bfloat16 is widened for P and rounded to nearest after it. If
a step is skipped on the device, P's state is restored.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.optim.dtensor import distribute_like, is_dtensor, local_part
from neumann.optim.precision import as_real, wide_dtype
from neumann.optim.preconditioners.memory import PREFIX, create_memory, preconditioner_of, stages_of
from neumann.optim.preconditioners.protocol import Preconditioner
from neumann.optim.tensors import Tensors


def precondition(
    groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[list[Tensors], Tensor | None]:
    """The groups with directions in place of gradients, and the scale left for the update."""
    if all(group.options["precondition"] is None for group in groups):
        return groups, grad_scale
    return [precondition_group(group, grad_scale, skip) for group in groups], None


def precondition_group(group: Tensors, grad_scale: Tensor | None, skip: Tensor | None) -> Tensors:
    """The group with P(±g/grad_scale + λw) in place of its gradients.

    Where `skip` is not zero, P's state stays as it was. A group without P has its gradients divided
    by the scale, because the update does not see the scale.
    """
    options, parameters, weights = group.options, group.parameters, group.weights
    preconditioner = preconditioner_of(options)
    if preconditioner is None:
        if grad_scale is None:
            return group
        unscaled = [None if g is None else _unscale(g, grad_scale) for g in group.gradients]
        return group.replace_gradients(unscaled)
    decoupled, sign = options["decoupled_weight_decay"], -1 if options["maximize"] else 1
    weight_decay = 0.0 if decoupled else options["weight_decay"]
    narrow = {key for stage in stages_of(preconditioner) for key in getattr(stage, "narrow", ())}
    found: list[Tensor | None] = [None] * len(parameters)
    for chosen in _make_buckets(group.gradients):
        wide = [_widen(group.gradients[i]) for i in chosen]
        if grad_scale is not None:
            factor = grad_scale.reshape(()).to(wide[0]).reciprocal()
            wide = list(torch._foreach_mul(wide, factor))
        if sign < 0:
            wide = list(torch._foreach_neg(wide))
        if weight_decay:
            wide_weights = [_widen(weights[i]) for i in chosen]
            wide = list(torch._foreach_add(wide, wide_weights, alpha=weight_decay))
        memory = [_memory_of(group.states[i], parameters[i], options) for i in chosen]
        kept = _list_tensors(memory)
        before = None if skip is None else [tensor.clone() for tensor in kept]
        widened = [_widen_narrow(state, narrow) for state in memory]
        used = _list_tensors(widened)
        wide = _apply_stages(preconditioner, wide, widened, used, [parameters[i] for i in chosen])
        for tensor, computed in zip(kept, used, strict=True):
            if tensor is not computed:
                tensor.copy_(computed)
        if skip is not None and before:
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(torch.where(skip.to(tensor.device) != 0, old, tensor))
        for i, direction in zip(chosen, wide, strict=True):
            w = weights[i]
            result = torch.view_as_complex(direction) if w.is_complex() else direction
            found[i] = result if result.dtype is w.dtype else result.to(w.dtype)
    left = {
        **options,
        "weight_decay": options["weight_decay"] if decoupled else 0.0,
        "maximize": False,
    }
    return group.replace_gradients(found, left)


def _apply_stages(
    preconditioner: Preconditioner,
    gradients: list[Tensor],
    memory: Sequence[dict[str, Tensor]],
    kept: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """What P and the preconditioners before it make of the gradients."""
    sharded = any(map(is_dtensor, parameters))
    for stage in stages_of(preconditioner):
        if sharded:
            gradients = [_gather(g, p, stage) for g, p in zip(gradients, parameters, strict=True)]
        gradients = _check_result(stage.apply(gradients, memory), gradients, stage)
        _check_memory(memory, kept, stage)
        if sharded:
            gradients = [
                _take_part(d, p, stage) for d, p in zip(gradients, parameters, strict=True)
            ]
    return gradients


def _unscale(gradient: Tensor, scale: Tensor) -> Tensor:
    """g/scale, in float32 at least: the gradient's dtype may hold neither."""
    wide = _widen(gradient)
    wide = wide / scale.to(wide)
    return torch.view_as_complex(wide) if gradient.is_complex() else wide


def _widen(tensor: Any) -> Tensor:
    real: Tensor = as_real(tensor.detach())
    return real if real.dtype is torch.float32 else real.to(wide_dtype(real.dtype))


def _widen_narrow(state: dict[str, Tensor], narrow: set[str]) -> dict[str, Tensor]:
    """The state with the tensors that were narrowed in float32."""
    return {
        key: tensor.to(torch.float32)
        if key in narrow and tensor.dtype is torch.bfloat16
        else tensor
        for key, tensor in state.items()
    }


def _make_buckets(gradients: Sequence[Tensor | None]) -> list[list[int]]:
    """The indices of the gradients that exist, by device and dtype of the arithmetic."""
    buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            dtype = gradient.dtype
            wide = dtype if dtype is torch.float32 else wide_dtype(as_real(gradient).dtype)
            buckets.setdefault((gradient.device, wide), []).append(index)
    return list(buckets.values())


# ------------------------------------------------------------------ shards


def _gather(gradient: Tensor, p: Tensor, stage: Preconditioner) -> Tensor:
    """The whole gradient, if the stage needs it."""
    if not is_dtensor(p) or stage.elementwise(p):
        return gradient
    whole: Tensor = distribute_like(gradient, p).full_tensor()
    return whole


def _take_part(direction: Tensor, p: Any, stage: Preconditioner) -> Tensor:
    """The part of a whole direction that belongs to the weights that this process holds."""
    if not is_dtensor(p) or stage.elementwise(p):
        return direction
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    replicated = DTensor.from_local(direction, p.device_mesh, everywhere, run_check=False)
    part: Tensor = local_part(replicated.redistribute(placements=p.placements))
    return part


# ------------------------------------------------------------------ memory


def _memory_of(state: dict[str, Any], p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """P's part of a parameter's state, created now if P was chosen only now."""
    own = _strip_prefix(state)
    if not own:
        state.update(create_memory(p, group))
        own = _strip_prefix(state)
    return own


def _strip_prefix(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        key[len(PREFIX) :]: as_real(local_part(value))
        for key, value in state.items()
        if key.startswith(PREFIX)
    }


def _list_tensors(memory: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    return [tensor for state in memory for tensor in state.values()]


# ------------------------------------------------------------------ checks


def _check_result(found: Any, given: Sequence[Tensor], stage: Preconditioner) -> list[Tensor]:
    """Raise unless P returned one direction for every gradient, of its shape."""
    if torch.compiler.is_compiling():  # where shapes that do not fit are an error anyway
        return list(found)
    wanted = [g.shape for g in given]
    shapes = None
    if isinstance(found, list | tuple):
        shapes = [getattr(direction, "shape", None) for direction in found]
        if shapes == wanted:
            return list(found)
    got = repr(found) if shapes is None else f"{len(shapes)} of shapes {_list_shapes(shapes)}"
    raise ValueError(
        f"the preconditioner {stage.name!r} must return a list with a direction for every "
        f"gradient, of its shape: {len(wanted)} of shapes {_list_shapes(wanted)}, got {got}"
    )


def _check_memory(
    memory: Sequence[dict[str, Tensor]], kept: Sequence[Tensor], stage: Preconditioner
) -> None:
    """Raise if tensors of the state were replaced: the optimizer would never see the new ones."""
    if torch.compiler.is_compiling():
        return
    now = _list_tensors(memory)
    if len(now) == len(kept) and all(map(operator.is_, now, kept)):
        return
    known = set(map(id, kept))
    replaced = sorted({key for state in memory for key, t in state.items() if id(t) not in known})
    raise ValueError(
        f"apply of the preconditioner {stage.name!r} must write to the tensors of a state, as "
        f"with copy_, and has replaced {', '.join(map(repr, replaced)) or 'or removed some'}"
    )


def _list_shapes(shapes: Sequence[torch.Size | None]) -> str:
    shown = ", ".join("none" if shape is None else str(tuple(shape)) for shape in shapes[:4])
    return shown + (", …" if len(shapes) > 4 else "")
