"""P in a CUDA graph: with `capturable=True` the host launches one graph in place of P's kernels.

A network with many shapes needs about a hundred launches for P, which take the host longer than the
kernels take the GPU. After a few steps whose tensors have the same form (addresses, shapes,
options), P is captured. It reads copies of the gradients, because those move, and leaves the
directions where the update finds them. As soon as the form changes, steps are ordinary again until
the new one has lasted as long.

Only preconditioners of this package are captured: one of your own may do what a graph does not
repeat. Nor is P captured where it communicates, or inside of your own capture, which then holds it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neumann.caller_warnings import warn_caller
from neumann.optim.preconditioners.apply import has_matrices, leave_options, precondition
from neumann.optim.preconditioners.diagonal import Diagonal
from neumann.optim.preconditioners.memory import preconditioner_of, stages_of
from neumann.optim.preconditioners.momentum import Momentum, SlowMomentum
from neumann.optim.preconditioners.spectral import Spectral
from neumann.optim.tensors import Tensors

ORDINARY_STEPS = 3  # before a capture; in these, kernels are compiled and state is created
KNOWN = (Spectral, Diagonal, Momentum, SlowMomentum)
Call = Callable[[], Any]


class CapturedPreconditioner:
    """Applies P as `apply.precondition` does, in a graph where that is possible."""

    def __init__(self) -> None:
        self._form: Any = None
        self._steps = 0  # ordinary ones, of this form
        self._recording: Recording | None = None
        self._refused = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start without a graph."""
        return CapturedPreconditioner, ()

    def precondition(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> tuple[list[Tensors], Tensor | None]:
        """See `apply.precondition`. Call it on a GPU, outside of captures."""
        if self._refused or not can_capture(groups):
            return precondition(groups, grad_scale, skip)
        form = describe(groups, grad_scale, skip)
        if form != self._form:
            self._form, self._steps, self._recording = form, 0, None
        if self._recording is None and self._steps < ORDINARY_STEPS:
            self._steps += 1
            return precondition(groups, grad_scale, skip)
        if self._recording is None:
            try:
                self._recording = Recording(groups, grad_scale, skip)
            except Exception as error:  # whatever a capture raises
                self._refused = True
                reason = (str(error).strip() or repr(error)).splitlines()[0]
                warn_caller(
                    f"P could not be captured in a CUDA graph ({reason}); its kernels are launched "
                    "one by one, which gives the same steps and takes the host longer"
                )
                return precondition(groups, grad_scale, skip)
        return self._recording.replay(groups, grad_scale, skip), None


class Recording:
    """P of some groups in a graph, with tensors of its own for all that moves between steps."""

    def __init__(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> None:
        self._groups = [
            group.replace_gradients(
                [None if g is None else torch.empty_like(g) for g in group.gradients]
            )
            for group in groups
        ]
        self._scale, self._skip = (
            None if given is None else given.clone() for given in (grad_scale, skip)
        )
        self._directions, self._replay = capture(
            lambda: [
                group.gradients for group in precondition(self._groups, self._scale, self._skip)[0]
            ]
        )

    def replay(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> list[Tensors]:
        """The groups with their directions, which the next replay overwrites."""
        own = [g for group in self._groups for g in group.gradients if g is not None]
        given = [g for group in groups for g in group.gradients if g is not None]
        for dtype in {g.dtype for g in given}:  # torch copies lists of one dtype together
            same = [i for i, g in enumerate(given) if g.dtype is dtype]
            torch._foreach_copy_([own[i] for i in same], [given[i] for i in same])
        for mine, theirs in ((self._scale, grad_scale), (self._skip, skip)):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        self._replay()
        return [
            group.replace_gradients(
                found,
                None if group.options["precondition"] is None else leave_options(group.options),
            )
            for group, found in zip(groups, self._directions, strict=True)
        ]


def can_capture(groups: Sequence[Tensors]) -> bool:
    """Whether there are matrices, and every P does what a graph repeats."""
    return any(map(has_matrices, groups)) and all(
        type(part) in KNOWN
        for group in groups
        for stage in stages_of(preconditioner_of(group.options))
        for part in (stage, getattr(stage, "vectors", stage))
    )


def describe(groups: Sequence[Tensors], grad_scale: Tensor | None, skip: Tensor | None) -> Any:
    """All that a graph of P takes for granted."""
    return grad_scale is None, skip is None, [_describe_group(group) for group in groups]


def _describe_group(group: Tensors) -> Any:
    options = group.options
    return (
        options["precondition"],
        options["weight_decay"],
        options["decoupled_weight_decay"],
        options["maximize"],
        options["state_dtype"],
        list(map(Tensor.data_ptr, group.weights)),
        [None if g is None else (g.dtype, g.shape, g.stride()) for g in group.gradients],
        [
            value.data_ptr()
            for state in group.states
            for value in state.values()
            if isinstance(value, Tensor)
        ],
    )


def capture(call: Call) -> tuple[Any, Call]:
    """What the call returns, and what repeats it; nothing has been computed yet.

    Other threads may go on: they may load data, for example.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _find_stream(torch.cuda.current_device())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = call()
    return found, graph.replay


@cache
def _find_stream(device: int) -> torch.cuda.Stream:
    """One for all optimizers: torch keeps memory for products on every stream it has used."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
