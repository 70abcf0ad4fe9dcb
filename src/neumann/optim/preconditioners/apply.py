"""Applies P to the gradients of a step: after weight decay, before the update.

The gradients of a group with a P are unscaled, negated for `maximize`, given L2 weight decay at the
displaced weights, widened, and passed through P. None of this is left for the update to do.

If P needs a whole tensor of which each process has a shard, one process gathers it, computes the
direction and sends its parts back (`journey`). Where that is not wanted or not possible, every
process gathers it, computes the whole direction and keeps its part. Either way every layout has the
directions of a single process.

State of P that the optimizer keeps in bfloat16 is widened for P and rounded stochastically after it
(`narrow_memory`). If a step is skipped on the device, P's state is restored.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neumann.optim.dtensor import distribute_like, is_dtensor, local_part
from neumann.optim.precision import as_real, wide_dtype
from neumann.optim.preconditioners.exchange import Exchange, Part, holds_whole_matrices
from neumann.optim.preconditioners.journey import Journey
from neumann.optim.preconditioners.memory import PREFIX, create_memory, preconditioner_of, stages_of
from neumann.optim.preconditioners.narrow_memory import WideMemory, widen
from neumann.optim.preconditioners.protocol import Preconditioner
from neumann.optim.state import CLOCK
from neumann.optim.tensors import Tensors


@dataclass
class Bucket:
    """Gradients of a group with the same device and dtype, on their way through P."""

    group: Tensors
    chosen: list[int]  # their places in the group
    gradients: list[Tensor]  # wide; later the directions
    memory: list[dict[str, Tensor]]  # as P sees it
    used: list[Tensor]  # the tensors of `memory`
    kept: list[Tensor]  # those of the optimizer's state
    before: list[Tensor] | None  # copies of these, if the step may be skipped
    wide: WideMemory | None = None  # of those in bfloat16; `used` has its tensors in their place

    @property
    def parameters(self) -> list[Tensor]:
        return [self.group.parameters[i] for i in self.chosen]


def precondition(
    groups: list[Tensors],
    grad_scale: Tensor | None,
    skip: Tensor | None,
    exchange: Exchange | None = None,
) -> tuple[list[Tensors], Tensor | None]:
    """The groups with P(±g/grad_scale + λw) in place of gradients, and the scale left to divide by.

    Where `skip` is not zero, P's state stays as it was. A group without P has its gradients divided
    by the scale, because the update does not see the scale. `exchange` divides matrices among
    processes.
    """
    if all(group.options["precondition"] is None for group in groups):
        return groups, grad_scale
    parts = [] if exchange is None else exchange.divide(groups)
    if parts:
        return _precondition_divided(groups, grad_scale, skip, parts), None
    # Matrices keep a GPU busy longest. While it works on them, the host launches the rest.
    found = {
        i: precondition_group(groups[i], grad_scale, skip)
        for i in sorted(range(len(groups)), key=lambda i: not has_matrices(groups[i]))
    }
    return [found[i] for i in range(len(groups))], None


def has_matrices(group: Tensors) -> bool:
    """Whether the group's P is one of matrices, such as the spectral one."""
    return hasattr(preconditioner_of(group.options), "count_operations")


def precondition_group(group: Tensors, grad_scale: Tensor | None, skip: Tensor | None) -> Tensors:
    """One group, with every process on its own."""
    preconditioner = preconditioner_of(group.options)
    if preconditioner is None:
        return _unscale_group(group, grad_scale)
    found: list[Tensor | None] = [None] * len(group.parameters)
    for chosen in _make_buckets(group.gradients):
        bucket = _open_bucket(group, chosen, grad_scale, skip)
        for stage in stages_of(preconditioner):
            _apply_stage(bucket, stage, range(len(chosen)))
        _close_bucket(bucket, skip, found)
    return group.replace_gradients(found, remove_applied(group.options))


def _precondition_divided(
    groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None, parts: Sequence[Part]
) -> list[Tensors]:
    """The same with P's matrices divided among processes, for all groups at once."""
    divided = {p for part in parts for p in part.parameters}
    opened: list[Bucket] = []
    for group in groups:
        if group.options["precondition"] is not None:
            for chosen in _make_buckets(group.gradients):
                bucket = _open_bucket(group, chosen, grad_scale, skip)
                for stage in stages_of(preconditioner_of(group.options))[:-1]:
                    _apply_stage(bucket, stage, range(len(chosen)))
                opened.append(bucket)
    given = {
        p: g
        for bucket in opened
        for p, g in zip(bucket.parameters, bucket.gradients, strict=True)
        if p in divided
    }
    journeys = [Journey(part, given, _apply_to_wholes) for part in parts]
    for journey in journeys:
        journey.start()
    for bucket in opened:  # while those are on their way
        last = stages_of(preconditioner_of(bucket.group.options))[-1]
        rest = [i for i, p in enumerate(bucket.parameters) if p not in divided]
        _apply_stage(bucket, last, rest)
    directions = {p: d for journey in journeys for p, d in journey.finish().items()}
    found: dict[int, list[Tensor | None]] = {}
    for bucket in opened:
        named = zip(bucket.parameters, bucket.gradients, strict=True)
        bucket.gradients = [directions.get(p, g) for p, g in named]
        own = found.setdefault(id(bucket.group), [None] * len(bucket.group.parameters))
        _close_bucket(bucket, skip, own)
    return [
        _unscale_group(group, grad_scale)
        if group.options["precondition"] is None
        else group.replace_gradients(
            found.get(id(group), [None] * len(group.parameters)), remove_applied(group.options)
        )
        for group in groups
    ]


def _unscale_group(group: Tensors, grad_scale: Tensor | None) -> Tensors:
    if grad_scale is None:
        return group
    unscaled = [None if g is None else _unscale(g, grad_scale) for g in group.gradients]
    return group.replace_gradients(unscaled)


def remove_applied(options: Any) -> dict[str, Any]:
    """The group's options without those that have been applied here."""
    weight_decay = options["weight_decay"] if options["decoupled_weight_decay"] else 0.0
    return {**options, "weight_decay": weight_decay, "maximize": False}


def _open_bucket(
    group: Tensors, chosen: list[int], grad_scale: Tensor | None, skip: Tensor | None
) -> Bucket:
    """The gradients ±g/grad_scale + λw, with what P remembers of them."""
    options = group.options
    sign = -1 if options["maximize"] else 1
    weight_decay = 0.0 if options["decoupled_weight_decay"] else options["weight_decay"]
    stages = stages_of(preconditioner_of(options))
    narrow = {key for stage in stages for key in getattr(stage, "narrow", ())}
    wide = [_widen(group.gradients[i]) for i in chosen]
    if grad_scale is not None:
        factor = grad_scale.reshape(()).to(wide[0]).reciprocal()
        wide = list(torch._foreach_mul(wide, factor))
    if sign < 0:
        wide = list(torch._foreach_neg(wide))
    if weight_decay:
        wide_weights = [_widen(group.weights[i]) for i in chosen]
        wide = list(torch._foreach_add(wide, wide_weights, alpha=weight_decay))
    memory = [_memory_of(group.states[i], group.parameters[i], options) for i in chosen]
    kept = _list_tensors(memory)
    before = None if skip is None else [tensor.clone() for tensor in kept]
    wide_memory, memory = _widen_narrow(memory, narrow)
    return Bucket(group, chosen, wide, memory, _list_tensors(memory), kept, before, wide_memory)


def _close_bucket(bucket: Bucket, skip: Tensor | None, found: list[Tensor | None]) -> None:
    """Write P's state back, restored if the step is skipped, and the directions into `found`."""
    if bucket.wide is not None:
        bucket.wide.write_back(bucket.group.states[bucket.chosen[0]][CLOCK])
    if skip is not None and bucket.before:
        for tensor, old in zip(bucket.kept, bucket.before, strict=True):
            tensor.copy_(torch.where(skip.to(tensor.device) != 0, old, tensor))
    for i, direction in zip(bucket.chosen, bucket.gradients, strict=True):
        w = bucket.group.weights[i]
        result = torch.view_as_complex(direction) if w.is_complex() else direction
        found[i] = result if result.dtype is w.dtype else result.to(w.dtype)


def _apply_stage(bucket: Bucket, stage: Preconditioner, places: Sequence[int]) -> None:
    """Replace some of a bucket's gradients by what a stage of P makes of them."""
    if not places:
        return
    gradients = [bucket.gradients[i] for i in places]
    memory = [bucket.memory[i] for i in places]
    parameters = [bucket.group.parameters[bucket.chosen[i]] for i in places]
    kept = bucket.used if len(places) == len(bucket.chosen) else _list_tensors(memory)
    sharded = any(map(is_dtensor, parameters))
    if sharded:
        gradients = [_gather(g, p, stage) for g, p in zip(gradients, parameters, strict=True)]
    gradients = _check_result(stage.apply(gradients, memory), gradients, stage)
    _check_memory(memory, kept, stage)
    if sharded:
        gradients = [_take_part(d, p, stage) for d, p in zip(gradients, parameters, strict=True)]
    for i, direction in zip(places, gradients, strict=True):
        bucket.gradients[i] = direction


def _apply_to_wholes(stage: Preconditioner, gradients: list[Tensor]) -> list[Tensor]:
    """P of whole gradients that it remembers nothing of."""
    return _check_result(stage.apply(gradients, [{} for _ in gradients]), gradients, stage)


def _unscale(gradient: Tensor, scale: Tensor) -> Tensor:
    """g/scale, in float32 at least: the gradient's dtype may hold neither."""
    wide = _widen(gradient)
    wide = wide / scale.to(wide)
    return torch.view_as_complex(wide) if gradient.is_complex() else wide


def _widen(tensor: Any) -> Tensor:
    real: Tensor = as_real(tensor.detach())
    return real if real.dtype is torch.float32 else real.to(wide_dtype(real.dtype))


def _widen_narrow(
    memory: list[dict[str, Tensor]], narrow: set[str]
) -> tuple[WideMemory | None, list[dict[str, Tensor]]]:
    """Float32 copies of the tensors that were narrowed, and the states with them instead."""
    found = [
        (place, key, tensor)
        for place, state in enumerate(memory)
        for key, tensor in state.items()
        if key in narrow and tensor.dtype is torch.bfloat16
    ]
    if not found:
        return None, memory
    wide_memory = widen([tensor for _, _, tensor in found])
    widened = [dict(state) for state in memory]
    for (place, key, _), tensor in zip(found, wide_memory.wide, strict=True):
        widened[place][key] = tensor
    return wide_memory, widened


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


def _works_on_shard(p: Tensor, stage: Preconditioner) -> bool:
    """Whether what this process has of a parameter is all that its direction depends on."""
    return not is_dtensor(p) or stage.elementwise(p) or holds_whole_matrices(stage, p)


def _gather(gradient: Tensor, p: Tensor, stage: Preconditioner) -> Tensor:
    """The whole gradient, if the stage needs it."""
    if _works_on_shard(p, stage):
        return gradient
    whole: Tensor = distribute_like(gradient, p).full_tensor()
    return whole


def _take_part(direction: Tensor, p: Any, stage: Preconditioner) -> Tensor:
    """The part of a whole direction that belongs to the weights that this process holds."""
    if _works_on_shard(p, stage):
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
    own = {}
    for key, value in state.items():
        if key.startswith(PREFIX):
            plain = type(value) is Tensor and not value.is_complex()  # as nearly all are
            own[key[len(PREFIX) :]] = value if plain else as_real(local_part(value))
    return own


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
        f"apply of the preconditioner {stage.name!r} must write to its state's tensors in place, "
        f"as with copy_, and has replaced {', '.join(map(repr, replaced)) or 'or removed some'}"
    )


def _list_shapes(shapes: Sequence[torch.Size | None]) -> str:
    shown = ", ".join("none" if shape is None else str(tuple(shape)) for shape in shapes[:4])
    return shown + (", …" if len(shapes) > 4 else "")
