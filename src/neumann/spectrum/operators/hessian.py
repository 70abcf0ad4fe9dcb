"""Exact products with the Hessian of a loss.

    Hv = ∇(∇loss(w)·v)              double backward
    Hv = d/dε ∇loss(w + εv)         forward over reverse

"retained" is a double backward that keeps the graph of the gradient between products. It is the
fastest method when all data go through the model at once. "auto" chooses it then, otherwise the
plain double backward, and forward over reverse for models that cannot be differentiated backward
twice; if they have no forward derivative either, use `Differences`.

How it fails: a custom function whose backward leaves autograd without declaring it
(`once_differentiable`) hides its curvature without an error. Compare with `Differences`.
"""

import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from neumann.spectrum.operators.autograd import AutogradOperator, differentiable_gradients
from neumann.spectrum.operators.batches import floating_tensors, replace_floating_tensors
from neumann.spectrum.operators.objective import Loss
from neumann.validation import require

Method = Literal["auto", "retained", "double-backward", "forward-over-reverse"]


class Hessian(AutogradOperator):
    """The Hessian of the mean loss, by automatic differentiation.

    Args:
        method: "auto", "retained", "double-backward" or "forward-over-reverse"; see the module.

    All other arguments are those of :class:`CurvatureOperator`.
    """

    matrix = "hessian"

    def __init__(
        self, model: nn.Module, loss: Loss, *, method: Method = "auto", **options: Any
    ) -> None:
        methods = get_args(Method)
        require(method in methods, "method", method, f"one of {', '.join(methods)}")
        super().__init__(model, loss, **options)
        self._may_fall_back = method == "auto"
        if method == "auto":
            method = "retained" if len(self.pieces) == 1 else "double-backward"
        self.method = method

    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        if self.method == "forward-over-reverse":
            if self._passes.checking:
                with torch.enable_grad():
                    self._compute_loss(index)  # torch.func does not show what the loss depends on
            return self._forward_over_reverse(index, vector)
        loss = None
        if index not in self._graphs:
            with torch.enable_grad():
                loss = self._compute_loss(index)
        try:
            answer = self._double_backward(index, loss, vector)
            self._may_fall_back = False  # a later failure has another reason
            return answer
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._may_fall_back:
                raise
            self._release()
            try:
                answer = self._forward_over_reverse(index, vector)
            except RuntimeError as second:
                raise RuntimeError(
                    f"neither double backward ({_first_line(error)}) nor forward over reverse "
                    f"({_first_line(second)}) works for this loss; use Differences, which only "
                    "needs gradients"
                ) from error
            self.method = "forward-over-reverse"
            return answer

    def _double_backward(self, index: int, loss: Tensor | None, vector: Tensor) -> Tensor:
        retain = self.method == "retained"
        gradients: list[Tensor | None] | None = self._graphs.get(index)
        if gradients is None:
            assert loss is not None
            gradients = list(differentiable_gradients(loss, self.parameters))
            self._check_twice_differentiable([g for g in gradients if g is not None])
            if retain:
                self._graphs[index] = gradients
        pairs = [
            (g, v)
            for g, v in zip(gradients, self.layout.split(vector), strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:  # the loss reaches none of these parameters
            return torch.zeros_like(vector)
        outputs, directions = zip(*pairs, strict=True)
        second = torch.autograd.grad(
            outputs, self.parameters, directions, retain_graph=retain, allow_unused=True
        )
        return self.layout.join(second)

    def _forward_over_reverse(self, index: int, vector: Tensor) -> Tensor:
        batch = self._start_pass(index)
        names = [f"model.{name}" for name in self.layout.names]
        weights = dict(zip(names, (p.detach() for p in self.parameters), strict=True))
        tangents = dict(zip(names, self.layout.split(vector), strict=True))
        # The inputs need tangents too, even if only zeros: mse_loss fails without them (pytorch
        # issue 123996).
        inputs = floating_tensors(batch)
        zeros = [torch.zeros_like(tensor) for tensor in inputs]

        def loss(changed: dict[str, Tensor], tensors: list[Tensor]) -> Any:
            # Copies, because torch.func does not allow writes to buffers from outside.
            buffers = {name: b.clone() for name, b in self.loss_module.named_buffers()}
            arguments = (replace_floating_tensors(batch, tensors),)
            return functional_call(self.loss_module, {**buffers, **changed}, arguments)

        with warnings.catch_warnings():
            # Some of torch's forward derivatives load code that torch itself deprecates.
            warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
            _, answer = jvp(grad(loss), (weights, inputs), (tangents, zeros))
        return self.layout.join([answer[name] for name in names])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
