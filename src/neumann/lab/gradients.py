"""The gradients of a step: forward and backward pass over its pieces, left in the parameters.

On a GPU the host needs longer to launch the kernels of a small network than the GPU to run them.
So after a few ordinary steps the two passes are captured as a CUDA graph, and a step replays it.
The optimizer is not in the graph: it may be any, with a learning rate that changes every step.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Pieces = list[tuple[Tensor, Tensor]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
ORDINARY_STEPS = 3  # before a graph is captured: compilation and libraries choose in them


class Gradients:
    """Mean loss over a step's pieces, which are equal in size, and its gradients."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        autocast: Context,
        *,
        compiled: bool = False,
    ) -> None:
        self._network = network
        # A process may train at several batch sizes, but a run has one: kernels for any would be
        # slower, and which run gets them would depend on the runs before it.
        self._forward = torch.compile(network, dynamic=False) if compiled else network
        self._optimizer = optimizer
        self._loss = loss
        self._autocast = autocast
        self.prepared = not compiled  # whether nothing is left to compile

    def __call__(self, pieces: Pieces) -> Tensor:
        """The loss, on the device; gradients of the step before are dropped."""
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (inputs, labels) in enumerate(pieces, start=1):
            with self._reduced(last=number == len(pieces)):
                with self._autocast():
                    loss = self._loss(self._forward(inputs), labels) / len(pieces)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.prepared = True
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def release(self) -> None:
        """Let go of the gradients: the training is over."""
        self._optimizer.zero_grad(set_to_none=True)

    def _reduced(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Processes add up their gradients with the last piece alone."""
        network: Any = self._network
        if isinstance(network, DistributedDataParallel) and not last:
            return network.no_sync()
        if hasattr(network, "set_requires_gradient_sync"):  # FSDP2
            network.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class CapturedGradients:
    """The same as one CUDA graph; every step has one piece, always of the same shape."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._taken = 0
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs = self._labels = self._loss = torch.empty(0)

    @property
    def prepared(self) -> bool:
        """Whether the graph stands."""
        return self._graph is not None

    def __call__(self, pieces: Pieces) -> Tensor:
        """The loss, on the device, overwritten by the next step."""
        if self._taken < ORDINARY_STEPS:
            self._taken += 1
            return self._beside(pieces)
        ((inputs, labels),) = pieces
        if self._graph is None:
            self._capture(inputs, labels)
        assert self._graph is not None
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss

    def release(self) -> None:
        """Let go of the graph and its memory, which would wait for the garbage collector."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
            self._graph = None
        self._inputs = self._labels = self._loss = torch.empty(0)
        self._gradients.release()

    def _beside(self, pieces: Pieces) -> Tensor:
        """On a stream of its own, as what is captured later will be."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._gradients(pieces)
        current.wait_stream(self._stream)
        return loss

    def _capture(self, inputs: Tensor, labels: Tensor) -> None:
        # The graph reads these and writes the gradients where it has made them now, for ever.
        self._inputs, self._labels = torch.empty_like(inputs), torch.empty_like(labels)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._gradients([(self._inputs, self._labels)])
        self._graph = graph
