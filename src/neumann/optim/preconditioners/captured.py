"""P in a CUDA graph: with `capturable=True` the host launches one graph in place of P's kernels.

A network with many shapes needs about a hundred launches for P, which take the host longer than the
kernels take the GPU. After a few steps whose tensors have the same form (addresses, shapes,
options) P is captured, and the graph is replayed as long as the form stays the same. It reads
copies of the gradients, because those move. When the form changes, P's kernels are launched one by
one again until the new form has lasted; each time it takes longer until the next capture.

Only preconditioners of this package are captured: one of your own may do what a graph does not
repeat. Nor is P captured where it communicates. If you capture the step, your graph holds P, and
this one is not used any more.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.caller_warnings import warn_caller
from neumann.capture_stream import find_capture_stream
from neumann.optim.interrupts import run_uninterrupted
from neumann.optim.preconditioners.apply import has_matrices, precondition, remove_applied
from neumann.optim.preconditioners.diagonal import Diagonal
from neumann.optim.preconditioners.memory import preconditioner_of, stages_of
from neumann.optim.preconditioners.momentum import Momentum, SlowMomentum
from neumann.optim.preconditioners.spectral import Spectral
from neumann.optim.tensors import Tensors

ORDINARY_STEPS = 3  # before the first capture; in these, kernels are compiled and state is created
KNOWN = (Spectral, Diagonal, Momentum, SlowMomentum)
Preconditioned = tuple[list[Tensors], Tensor | None]


class CapturedPreconditioner:
    """Applies P as `apply.precondition` does, in a graph where that is possible."""

    def __init__(self) -> None:
        self._form: Any = None
        self._steps = 0  # of this form
        self._wait = ORDINARY_STEPS  # steps of a form before it is captured
        self._fixed: FixedStep | None = None
        self._refused = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start without a graph."""
        return CapturedPreconditioner, ()

    def precondition(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> Preconditioned:
        """See `apply.precondition`. The parameters are on one GPU."""
        with _on_device(groups):
            if self._refused or not can_capture(groups):
                return precondition(groups, grad_scale, skip)
            if is_capturing():  # the user's graph will hold P from now on
                self._refused = True
                if self._fixed is not None and self._fixed.graph is None:
                    self._fixed = None  # with its copies of the gradients
                return precondition(groups, grad_scale, skip)
            form = describe(groups, grad_scale, skip)
            if form != self._form:
                self._form, self._steps, self._fixed = form, 0, None
            self._steps += 1
            if self._fixed is None:
                if self._steps < self._wait:
                    return precondition(groups, grad_scale, skip)
                # Its first step compiles what the graph needs.
                self._fixed = FixedStep(groups, grad_scale, skip)
            elif self._fixed.graph is None:
                self._capture(self._fixed)
            return self._fixed.take(groups, grad_scale, skip), None

    def _capture(self, fixed: "FixedStep") -> None:
        self._wait *= 2
        try:
            run_uninterrupted(fixed.capture)
        except Exception as error:  # whatever a capture raises
            self._refused = True
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            warn_caller(
                f"the preconditioner could not be captured in a CUDA graph ({reason}). Its kernels "
                "are launched one by one: the same steps, but more host time"
            )


class FixedStep:
    """P of some groups, with tensors of its own for all that moves between steps."""

    def __init__(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> None:
        self.graph: Callable[[], None] | None = None  # replays it
        self._groups = [
            group.replace_gradients(
                [None if g is None else torch.empty_like(g) for g in group.gradients]
            )
            for group in groups
        ]
        self._scale, self._skip = (
            None if given is None else torch.empty_like(given) for given in (grad_scale, skip)
        )
        self._directions: list[list[Tensor | None]] = []

    def capture(self) -> None:
        self._directions, self.graph = capture(self._compute)

    def take(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> list[Tensors]:
        """The groups with their directions, which the next step may overwrite."""
        self._fill(groups, grad_scale, skip)
        if self.graph is None:
            directions = self._compute()
        else:
            self.graph()
            directions = self._directions
        return [
            group.replace_gradients(
                found,
                None if group.options["precondition"] is None else remove_applied(group.options),
            )
            for group, found in zip(groups, directions, strict=True)
        ]

    def _compute(self) -> list[list[Tensor | None]]:
        found, _ = precondition(self._groups, self._scale, self._skip)
        return [group.gradients for group in found]

    def _fill(self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None) -> None:
        pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for mine, theirs in zip(self._groups, groups, strict=True):
            for own, given in zip(mine.gradients, theirs.gradients, strict=True):
                if own is not None and given is not None:
                    copies = pairs.setdefault(own.dtype, ([], []))  # torch copies these together
                    copies[0].append(own)
                    copies[1].append(given)
        for copies in pairs.values():
            torch._foreach_copy_(*copies)
        for scalar, value in ((self._scale, grad_scale), (self._skip, skip)):
            if scalar is not None and value is not None:
                scalar.copy_(value)


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
    scalars = [
        None if given is None else (given.dtype, given.shape, given.device)
        for given in (grad_scale, skip)
    ]
    return scalars, [_describe_group(group) for group in groups]


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


def _on_device(groups: Sequence[Tensors]) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of the parameters the current one, if it is a GPU."""
    weights = [group.weights[0] for group in groups if group.weights]
    if not weights or not weights[0].is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.device(weights[0].device)


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def capture(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """What the call returns, and what repeats it; nothing has been computed yet.

    Other threads may go on, and load data for example. A capture that fails leaves torch on the
    stream of the capture, so the current one is restored here.
    """
    graph = torch.cuda.CUDAGraph()
    stream = find_capture_stream(torch.cuda.current_device())
    recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    failure: Exception | None = None
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), recording:
            try:
                found = call()
            except Exception as error:
                failure = error
                raise
    except Exception as error:  # ending a capture that failed may raise an error of its own
        _restore_random_numbers(stream)
        raise (failure or error) from None
    return found, graph.replay


def _restore_random_numbers(stream: torch.cuda.Stream) -> None:
    """An empty capture: after one that failed, torch would refuse to draw random numbers.

    It takes the failed one to be still running (https://github.com/pytorch/pytorch/issues/171263).
    """
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        ):
            pass
