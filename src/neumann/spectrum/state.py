"""A model that a measurement may use and not change.

Inside `held(model, …)` BatchNorm layers are in the mode asked for, all other modules in the mode
they had, and nothing that happens there remains: modes, buffers, gradients, flags of parameters and
random number generators come back at the end, also after an exception. Hooks on parameters, which
change gradients on their way to an optimizer and not the loss, are away meanwhile.

BatchNorm in mode "batch" normalises with the statistics of the batch, as in training, and does not
touch its running statistics; in mode "running" it uses those, as in evaluation. These are different
functions of the weights, with different Hessians: the paper's is "batch".

Dropout is active if the model is in training mode. Its masks are then drawn from `seed` anew before
each pass (`reseed`), so that all products see the same masks and belong to one fixed matrix. For
the same reason each pass starts with the buffers of the first one (`Buffers.restore`): layers such
as spectral normalisation move theirs in training mode.

How it fails: a pass that draws from a generator of its own is not reseeded, and is random.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

BatchNorm = Literal["batch", "running"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP, whose hooks reduce gradients and not products, and of compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # compiled code has no second derivatives
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "curvature needs derivatives, and torch.inference_mode() allows none; leave it, or use "
            "torch.no_grad(), which does no harm"
        )


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def check_batchnorm(model: nn.Module, batchnorm: str) -> None:
    if batchnorm not in ("batch", "running"):
        raise ValueError(f'batchnorm must be "batch" or "running", got {batchnorm!r}')
    if batchnorm == "running":
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                raise ValueError(
                    f'batchnorm="running" needs running statistics, and {name or "the model"} '
                    'keeps none; pass batchnorm="batch"'
                )


def drops(module: nn.Module) -> bool:
    """Whether this is a layer with dropout that is active."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.training and module.dropout > 0
    return False


def randomness(model: nn.Module, seed: int) -> str | None:
    """What a result says about layers that are known to be random."""
    return f"dropout fixed by seed {seed}" if any(map(drops, model.modules())) else None


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Layers with dropout in evaluation mode, all others as they are."""
    active = [module for module in model.modules() if drops(module)]
    for module in active:
        module.training = False
    try:
        yield
    finally:
        for module in active:
            module.training = True


def reseed(seed: int, device: torch.device) -> None:
    """Start the generators that a forward pass may draw from; only inside `held`."""
    # Not torch.manual_seed, which starts those of all GPUs, and only the model's come back.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)


def generator_states(device: torch.device) -> list[Any]:
    """Where the generators of `reseed` are: the same lists, if nothing was drawn in between."""
    states: list[Any] = [torch.default_generator.get_state().tolist(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    numpy = sys.modules.get("numpy")
    if numpy:
        name, keys, *rest = numpy.random.get_state()
        states.append([name, keys.tolist(), *rest])
    return states


class Buffers:
    """The buffers of a model as they are now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._versions = [_version(buffer) for _, _, buffer, _ in self._kept]

    def restore(self) -> None:
        """Put back what was written or replaced since; torch counts writes, so it is cheap."""
        for index, (owner, name, buffer, before) in enumerate(self._kept):
            owner._buffers[name] = buffer  # a module may have put another in its place
            if _version(buffer) != self._versions[index]:
                with torch.no_grad():
                    buffer.copy_(before)
                self._versions[index] = _version(buffer)

    def restore_all(self) -> None:
        """Also what was written past torch's counting."""
        self.restore()
        with torch.no_grad():
            for _, _, buffer, before in self._kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _version(buffer: Tensor) -> int:
    # A tensor made in inference mode has no count, and cannot be written to out of that mode.
    return 0 if buffer.is_inference() else buffer._version


@contextmanager
def held(model: nn.Module, batchnorm: BatchNorm) -> Iterator[Buffers]:
    """BatchNorm in the given mode; at the end the model and the generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    layers = batchnorm_layers(model)
    tracking = [(layer, layer.track_running_stats) for layer in layers]
    buffers = Buffers(model)
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    hooks = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    with generators_kept(model):
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


@contextmanager
def generators_kept(model: nn.Module) -> Iterator[None]:
    """Torch's generators, Python's and, if NumPy is in use, its own come back at the end."""
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
