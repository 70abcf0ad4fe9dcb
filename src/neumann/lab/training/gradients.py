"""The gradients of a step: forward and backward pass over its micro-batches.

On a GPU, launching the kernels of a small network takes longer than running them. So after a few
ordinary steps `CapturedGradients` captures both passes as a CUDA graph and replays it. The
optimizer is not in the graph: it may be any, with a learning rate that changes every step.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Pieces = list[tuple[Tensor, Tensor]]  # the micro-batches of a step
Loss = Callable[[Any, Tensor], Tensor]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
ORDINARY_STEPS = 3  # before capturing; in these, compilers and libraries choose their kernels


@dataclass(eq=False)
class Gradients:
    """Computes the mean loss over the micro-batches, which have equal sizes, and its gradients."""

    network: nn.Module
    optimizer: Optimizer
    loss: Loss
    autocast: Context
    compiled: bool

    def __post_init__(self) -> None:
        # A run has one batch size, though a process may train several runs. Kernels for any size
        # would be slower, and which run gets them would depend on the runs before it.
        network = self.network
        self._forward = torch.compile(network, dynamic=False) if self.compiled else network
        self.prepared = not self.compiled  # whether compilation is over

    def __call__(self, pieces: Pieces) -> Tensor:
        """Replace the gradients in the parameters and return the loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (inputs, labels) in enumerate(pieces, start=1):
            with self._synchronize_if(last=number == len(pieces)):
                with self.autocast():
                    loss = self.loss(self._forward(inputs), labels) / len(pieces)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
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


class CapturedGradients:
    """Does the same with a CUDA graph. Every step has one micro-batch, always of the same shape."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._ordinary = 0  # steps taken without the graph
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = self._labels = self._loss = torch.empty(0)

    @property
    def prepared(self) -> bool:
        return self._graph is not None

    def __call__(self, pieces: Pieces) -> Tensor:
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
        self._gradients.release()

    def _run_on_stream(self, pieces: Pieces) -> Tensor:
        """Run an ordinary step on the stream that is used for capturing later."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._gradients(pieces)
        current.wait_stream(self._stream)
        return loss

    def _capture(self, inputs: Tensor, labels: Tensor) -> torch.cuda.CUDAGraph:
        # From now on the graph reads these tensors and writes the gradients it allocates here.
        self._inputs, self._labels = torch.empty_like(inputs), torch.empty_like(labels)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._gradients([(self._inputs, self._labels)])
        return graph
