"""Exact products with the Hessian of a loss.

    Hv = ∇(∇loss(w)·v)              double backward
    Hv = d/dε ∇loss(w + εv)         forward over reverse

Both are exact up to rounding. A double backward whose graph of the gradient is kept between
products ("retained") repeats neither the forward nor the first backward pass, and holds at its peak
what any double backward holds; it is the fastest wherever all data go through the model at once,
and what "auto" takes then. Otherwise "auto" takes the plain double backward, and forward over
reverse for what cannot be differentiated backwards twice. Kept graphs end with the session.

How it fails: an operation with neither a second backward nor a forward derivative is an error that
names `Differences`. Attention runs as plain matrix products and recurrent layers run without cuDNN
inside products, because their fast kernels are of that kind. At weights where the loss has a kink
(ReLU at 0) the products are those of autograd's choice of side. A custom function whose backward
computes outside of autograd without saying so (`once_differentiable`) hides its curvature without
an error: compare with `Differences` in doubt.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from neumann.spectrum.batches import real_tensors, with_tensors
from neumann.spectrum.curvature import CurvatureOperator
from neumann.spectrum.objective import Loss

Method = Literal["auto", "retained", "double-backward", "forward-over-reverse"]
METHODS = ("auto", "retained", "double-backward", "forward-over-reverse")


def second_order(model: nn.Module) -> AbstractContextManager[object]:
    """Only kernels that can be differentiated again."""
    stack = ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
    return stack


class Hessian(CurvatureOperator):
    """The Hessian of the mean loss, by automatic differentiation.

    Args:
        method: "auto", "retained", "double-backward" or "forward-over-reverse", see the module.

    All others as for :class:`CurvatureOperator`.
    """

    matrix = "hessian"

    def __init__(
        self, model: nn.Module, loss: Loss, *, method: Method = "auto", **options: Any
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        super().__init__(model, loss, **options)
        self._may_change = method == "auto"
        if method == "auto":
            method = "retained" if len(self.pieces) == 1 else "double-backward"
        self.method = method
        self._gradients: dict[int, Sequence[Tensor]] = {}
        self._twice_differentiable = False  # as far as a look at the graph can tell

    def _environment(self) -> AbstractContextManager[object]:
        return second_order(self.model)

    def _release(self) -> None:
        self._gradients.clear()

    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        if self.method == "forward-over-reverse":
            if self._passes.watching:
                with torch.enable_grad():
                    self._loss(index)  # functional derivatives do not tell what it depends on
            return self._forward_over_reverse(index, vector)
        loss = None
        if index not in self._gradients:
            with torch.enable_grad():
                loss = self._loss(index)
        try:
            answer = self._double_backward(index, loss, vector)
            self._may_change = False  # a later failure has another reason
            return answer
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._may_change:
                raise
            self._release()
            try:
                answer = self._forward_over_reverse(index, vector)
            except RuntimeError as second:
                raise RuntimeError(
                    "the loss can be differentiated neither backwards twice "
                    f"({_first_line(error)}) nor forward over reverse ({_first_line(second)}); "
                    "Differences needs its gradients alone"
                ) from error
            self.method = "forward-over-reverse"
            return answer

    def _double_backward(self, index: int, loss: Tensor | None, vector: Tensor) -> Tensor:
        retain = self.method == "retained"
        gradients = self._gradients.get(index)
        if gradients is None:
            assert loss is not None
            gradients = [
                g
                if g is not None
                else torch.zeros_like(p)  # a parameter that the loss does not reach
                for g, p in zip(
                    differentiable_gradients(loss, self.parameters), self.parameters, strict=True
                )
            ]
            if not self._twice_differentiable:
                refuse_dead_ends(gradients)
                self._twice_differentiable = True
            if retain:
                self._gradients[index] = gradients
        pairs = [
            (g, v)
            for g, v in zip(gradients, self.layout.split(vector), strict=True)
            if g.requires_grad
        ]
        if not pairs:  # none of these parameters is in the loss
            return torch.zeros_like(vector)
        outputs, directions = zip(*pairs, strict=True)
        second = torch.autograd.grad(
            outputs, self.parameters, directions, retain_graph=retain, allow_unused=True
        )
        return self.layout.join(second)

    def _forward_over_reverse(self, index: int, vector: Tensor) -> Tensor:
        batch = self._data(index)
        names = [f"model.{name}" for name in self.layout.names]
        weights = dict(zip(names, (p.detach() for p in self.parameters), strict=True))
        tangents = dict(zip(names, self.layout.split(vector), strict=True))
        # Without tangents of their own, if only zeros, mse_loss fails: pytorch issue 123996.
        inputs = real_tensors(batch)
        still = [torch.zeros_like(tensor) for tensor in inputs]

        def loss(changed: dict[str, Tensor], tensors: list[Tensor]) -> Any:
            # Copies, since a layer that writes to its buffers may not write to what is outside.
            buffers = {name: b.clone() for name, b in self.composed.named_buffers()}
            arguments = (with_tensors(batch, tensors),)
            return functional_call(self.composed, {**buffers, **changed}, arguments)

        with warnings.catch_warnings():
            # What torch itself loads for some forward derivatives is deprecated by torch.
            warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
            _, answer = jvp(grad(loss), (weights, inputs), (tangents, still))
        return self.layout.join([answer[name] for name in names])


def differentiable_gradients(value: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a scalar, with a graph; None where it does not depend on an input.

    The one that the backward pass starts from takes part in the graph, so that a function whose
    derivative cannot be differentiated again leaves its mark in it even at the very end.
    """
    one = torch.ones_like(value, requires_grad=True)
    return torch.autograd.grad(value, inputs, one, create_graph=True, allow_unused=True)


def refuse_dead_ends(gradients: Sequence[Tensor]) -> None:
    """Raise for a graph with a function that may not be differentiated again.

    Such a function ends the graph in a node that raises when it is reached; but a gradient with
    respect to given inputs walks only towards them, and would leave it out without a word.
    """
    waiting = [g.grad_fn for g in gradients if g.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().rpartition("::")[2] == "Error":
            raise RuntimeError(
                "the model or the loss uses a function that is marked once_differentiable"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
