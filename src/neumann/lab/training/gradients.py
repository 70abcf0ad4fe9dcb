"""The gradients of a step: the forward and the backward pass over its micro-batches, and clipping.

On a GPU, launching the kernels of a small network takes longer than running them. So
`CapturedGradientComputer` records both passes as a CUDA graph after a few ordinary steps, and
replays it from then on. The optimizer's step stays outside the graph: any optimizer works, and its
learning rate may change every step.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from neumann.capture_stream import find_capture_stream

Pieces = list[tuple[Tensor, Tensor]]  # the micro-batches of a step
Loss = Callable[[Any, Tensor], Tensor]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
ORDINARY_STEPS = 3  # before capturing; in these, compilers and libraries choose their kernels


@dataclass(eq=False)
class GradientComputer:
    """Computes the mean loss of a step and its gradients. All micro-batches have the same size."""

    network: nn.Module
    optimizer: Optimizer
    loss: Loss
    autocast: Context
    compiled: bool
    # largest norm of the gradient of the whole batch, over all parameters and processes
    max_norm: float | None = None

    def __post_init__(self) -> None:
        # dynamic=False: a run has one batch size. If a process trains several runs, torch would
        # otherwise compile slower kernels for any size from the second batch size on.
        network = self.network
        self._forward = torch.compile(network, dynamic=False) if self.compiled else network
        self.prepared = not self.compiled  # whether compilation is over

    def compute(self, pieces: Pieces) -> Tensor:
        """Replace the gradients of the parameters and return the loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (inputs, labels) in enumerate(pieces, start=1):
            with self._synchronize_if(last=number == len(pieces)):
                with self.autocast():
                    loss = self.loss(self._forward(inputs), labels) / len(pieces)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self.max_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.max_norm)
        self.prepared = True
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def release(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _synchronize_if(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Let the processes sum their gradients only with the last micro-batch."""
        network: Any = self.network
        if isinstance(network, DistributedDataParallel) and not last:
            return network.no_sync()
        if hasattr(network, "set_requires_gradient_sync"):  # FSDP2
            network.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class CapturedGradientComputer:
    """Does the same with a CUDA graph. Every step must have one micro-batch of the same shape."""

    def __init__(self, computer: GradientComputer) -> None:
        self._computer = computer
        self._ordinary = 0  # steps taken without the graph
        self._stream = find_capture_stream(torch.cuda.current_device())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = self._labels = self._loss = torch.empty(0)

    @property
    def prepared(self) -> bool:
        return self._graph is not None

    def compute(self, pieces: Pieces) -> Tensor:
        """Return the loss, on the device; the next step overwrites it."""
        if self._ordinary < ORDINARY_STEPS:
            self._ordinary += 1
            return self._run_on_stream(pieces)
        ((inputs, labels),) = pieces
        self._graph = self._graph or self._capture(inputs, labels)
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss

    def release(self) -> None:
        """Free the graph and its memory now instead of at the next garbage collection."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
            self._graph = None
        self._inputs = self._labels = self._loss = torch.empty(0)
        self._computer.release()

    def _run_on_stream(self, pieces: Pieces) -> Tensor:
        """Run an ordinary step on the stream that will capture the graph."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._computer.compute(pieces)
        current.wait_stream(self._stream)
        return loss

    def _capture(self, inputs: Tensor, labels: Tensor) -> torch.cuda.CUDAGraph:
        # Every replay reads these tensors and writes the gradients that are allocated here.
        self._inputs, self._labels = torch.empty_like(inputs), torch.empty_like(labels)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._computer.compute([(self._inputs, self._labels)])
        return graph
