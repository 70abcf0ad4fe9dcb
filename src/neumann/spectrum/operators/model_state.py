"""Use a model for a measurement without changing it.

Inside `preserve_model(model, …)` BatchNorm layers are in the requested mode and all other modules
in the mode they had. At the end everything is restored, also after an exception: modes, buffers,
gradients, `requires_grad` flags and random number generators. Hooks on parameters are removed
meanwhile: they change gradients on their way to an optimizer, but not the loss.

All products must belong to one fixed matrix, so `Passes` starts every pass from the same random
numbers and buffers. A pass that draws from its own generator stays random.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from neumann.spectrum.operators.symmetric import NonFiniteProduct
from neumann.validation import require

BatchNorm = Literal["batch", "running"]  # use the statistics of the batch, or the running ones


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner = getattr(inner, "_orig_mod", inner)
    return model if inner is model else unwrap(inner)


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("torch.inference_mode() disables derivatives; use torch.no_grad()")


@contextmanager
def preserve_weights(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield copies of the weights, and restore the weights from them at the end."""
    before = [p.detach().clone() for p in parameters]
    try:
        yield before
    finally:
        with torch.no_grad():
            for p, w in zip(parameters, before, strict=True):
                p.copy_(w)


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Compute convolutions and matrix products in full float32; TF32 rounds to 10 bits."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def check_batchnorm(model: nn.Module, batchnorm: str) -> None:
    require(batchnorm in get_args(BatchNorm), "batchnorm", batchnorm, '"batch" or "running"')
    for name, module in model.named_modules():
        untracked = isinstance(module, _BatchNorm) and module.running_mean is None
        if batchnorm == "running" and untracked:
            raise ValueError(
                f'batchnorm="running" needs running statistics, and {name or "the model"} keeps '
                'none; pass batchnorm="batch"'
            )


def describe_randomness(model: nn.Module, seed: int) -> str | None:
    """Say what makes the model random, as far as its layers show it."""
    active = any(map(_has_active_dropout, model.modules()))
    return f"dropout fixed by seed {seed}" if active else None


def _has_active_dropout(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.training and module.dropout > 0
    return False


@contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Put layers with dropout into evaluation mode, and leave all others alone."""
    active = [module for module in model.modules() if _has_active_dropout(module)]
    for module in active:
        module.training = False
    try:
        yield
    finally:
        for module in active:
            module.training = True


def reseed(seed: int, device: torch.device) -> None:
    """Seed the generators that a forward pass may use; only inside `preserve_model`."""
    # Not torch.manual_seed: it seeds every GPU, and only those of the model are restored.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)


def generator_states(device: torch.device) -> list[Any]:
    """Return the states of the generators that `reseed` seeds, to see whether a pass used them."""
    states: list[Any] = [torch.default_generator.get_state().tolist(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    numpy = sys.modules.get("numpy")
    if numpy:
        name, keys, *rest = numpy.random.get_state()
        states.append([name, keys.tolist(), *rest])
    return states


@contextmanager
def preserve_generators(model: nn.Module) -> Iterator[None]:
    """Restore the generators of torch, Python and, if it is loaded, NumPy at the end."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


class Buffers:
    """A copy of a model's buffers, to restore them from."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._versions = [_version(buffer) for _, _, buffer, _ in self._saved]

    def restore(self) -> None:
        """Undo writes and replacements. Cheap, because torch counts the writes to a tensor."""
        for index, (owner, name, buffer, before) in enumerate(self._saved):
            owner._buffers[name] = buffer  # a module may have assigned a new tensor
            if _version(buffer) != self._versions[index]:
                with torch.no_grad():
                    buffer.copy_(before)
                self._versions[index] = _version(buffer)

    def restore_all(self) -> None:
        """Undo also writes that torch did not count."""
        self.restore()
        with torch.no_grad():
            for _, _, buffer, before in self._saved:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _version(buffer: Tensor) -> int:
    # A tensor made in inference mode has no count, and cannot be written outside that mode.
    return 0 if buffer.is_inference() else buffer._version


@contextmanager
def preserve_model(model: nn.Module, batchnorm: BatchNorm) -> Iterator[Buffers]:
    """Put BatchNorm into the given mode; restore the model and the generators at the end."""
    modes = [(module, module.training) for module in model.modules()]
    layers = batchnorm_layers(model)
    tracking = [(layer, layer.track_running_stats) for layer in layers]
    buffers = Buffers(model)
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    hooks = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    with preserve_generators(model):
        try:
            for layer in layers:
                layer.training = batchnorm == "batch"
                if batchnorm == "batch":
                    # Without tracking, the running statistics are neither used nor updated.
                    layer.track_running_stats = False
            for p, _ in hooks:
                p._backward_hooks = None
            yield buffers
        finally:
            for p, before in hooks:
                p._backward_hooks = before
            for module, mode in modes:
                module.training = mode
            for layer, tracks in tracking:
                layer.track_running_stats = tracks
            buffers.restore_all()
            for p, flag, gradient in flags:
                p.requires_grad_(flag)
                p.grad = gradient


class Passes:
    """The passes through a model in one session, all from the same state; in `preserve_model`.

    While `checking`, during the first product, it also records whether a pass used random numbers
    and whether its loss is finite. The latter stays on the device until `check_finite`.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        self.device = device
        self.checking = True
        self.used_randomness = False
        self._buffers = buffers
        self._finite = torch.tensor(True, device=device)  # whether all losses so far are
        self._generators: list[Any] = []

    def start(self, seed: int) -> None:
        """Reset generators and buffers before a pass."""
        reseed(seed, self.device)
        self._buffers.restore()
        if self.checking:
            self._generators = generator_states(self.device)

    def finish(self, loss: Tensor) -> Tensor:
        """Return the loss of a pass; raise ValueError if it does not depend on the weights."""
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter: something is detached, runs "
                "under no_grad or in reentrant checkpoints, or has no derivative (an argmax)"
            )
        if self.checking:
            self._finite = torch.isfinite(loss.detach()) & self._finite
            self.used_randomness |= generator_states(self.device) != self._generators
        return loss

    def check_finite(self, matrix: str) -> None:
        """Raise NonFiniteProduct if a loss was not finite; waits for the device."""
        if not self._finite:
            raise NonFiniteProduct(
                "the loss is not finite: it is NaN or infinity on these data at these weights, "
                f"so there is no {matrix}"
            )
