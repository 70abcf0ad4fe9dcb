"""Training weights w and evaluation weights w − μm: switching the parameters between them.

Subtracting μm and adding it again would lose bits. So evaluation mode keeps a copy of w in the
state, which goes into checkpoints too. In the warm-up m = 0, and the two are the same.

An interrupt may come between any two bytecode instructions, so what belongs together changes in
one: every group's mode together with the copies of all parameters. Before that every parameter
holds w, and there is no copy. After it there is a copy of each w, whatever the parameters hold.
Both functions can be called again after they were cut short, and then finish the work.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from neumann.optim.dtensor import distribute_like, local_part
from neumann.optim.precision import wide_dtype
from neumann.optim.state import ITERATE, MOMENTUM, OFFSET, WEIGHTS

Groups = Sequence[dict[str, Any]]
Entries = Sequence[tuple[Tensor, dict[str, Any]]]  # parameters with their state


def switch_to_evaluation(groups: Groups, entries: Entries) -> None:
    """Put w − μm into the parameters, and copies of w into the state."""
    states = [state for _, state in entries]
    copies = [state[WEIGHTS] if WEIGHTS in state else p.detach().clone() for p, state in entries]
    _run_at_once(
        map(dict.__setitem__, states, repeat(WEIGHTS), copies),
        map(dict.__setitem__, groups, repeat("training"), repeat(False)),
    )
    for p, state in entries:
        local_part(p).copy_(compute_evaluation(local_part(state[WEIGHTS]), state))


def switch_to_training(groups: Groups, entries: Entries) -> None:
    """Put w back. A parameter without a copy has m = 0 and holds w already."""
    for p, state in entries:
        if WEIGHTS in state:
            local_part(p).copy_(local_part(state[WEIGHTS]))
    states = [state for _, state in entries]
    _run_at_once(
        map(dict.pop, states, repeat(WEIGHTS), repeat(None)),
        map(dict.__setitem__, groups, repeat("training"), repeat(True)),
    )


def _run_at_once(*calls: Iterable[Any]) -> None:
    """Make calls of builtin functions without bytecode in between, so that nothing interrupts."""
    deque(chain(*calls), maxlen=0)


def compute_evaluation(w: Tensor, state: dict[str, Any]) -> Tensor:
    """w − μm of one parameter."""
    return _subtract_product(w, state[MOMENTUM], local_part(state[ITERATE]))


def differs_from_evaluation(entries: Entries) -> bool:
    """Whether, in evaluation mode, a parameter no longer holds the w − μm that was put there."""
    return any(
        p.device != state[WEIGHTS].device  # moved in between
        or not torch.equal(local_part(p), compute_evaluation(local_part(state[WEIGHTS]), state))
        for p, state in entries
        if WEIGHTS in state
    )


def compute_average(w: Tensor, state: dict[str, Any]) -> Tensor:
    """v = w − δ of one parameter."""
    if OFFSET not in state:
        return w.clone()
    return _subtract_product(w, 1.0, local_part(state[OFFSET]))


def _subtract_product(w: Tensor, factor: Any, state: Tensor) -> Tensor:
    """w − factor·state, as a new tensor of w's dtype."""
    wide = wide_dtype(torch.promote_types(w.dtype, state.dtype))
    result: Tensor = w.to(wide) - factor * state.to(wide)
    return result.to(w.dtype)


def derive_params(
    groups: Groups,
    states: Any,
    compute: Callable[[Tensor, dict[str, Any]], Tensor],
) -> dict[str, Tensor] | list[Tensor]:
    """`compute` of each parameter's w and state, by name if all have one; copies if frozen."""
    derived = []
    for group in groups:
        for p in group["params"]:
            state = states.get(p)
            w = local_part(p.detach() if state is None else state.get(WEIGHTS, p.detach()))
            derived.append(distribute_like(w.clone() if state is None else compute(w, state), p))
    if not all("param_names" in group for group in groups):
        return derived
    names = [name for group in groups for name in group["param_names"]]
    return dict(zip(names, derived, strict=True))
