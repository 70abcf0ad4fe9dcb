"""A model that a measurement may use and not change.

Inside `held(model, …)` BatchNorm layers are in the mode asked for, all other modules in the mode
they had, and nothing that happens there remains: modes, buffers, gradients, flags of parameters and
random number generators come back at the end, also after an exception.

BatchNorm in mode "batch" normalises with the statistics of the batch, as in training, and does not
touch its running statistics; in mode "running" it uses those, as in evaluation. These are different
functions of the weights, with different Hessians: the paper's is "batch".

Dropout is active if the model is in training mode. Its masks are then drawn from `seed` anew before
each pass (`reseed`), so that all products see the same masks and belong to one fixed matrix.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

BatchNorm = Literal["batch", "running"]


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


def randomness(model: nn.Module, seed: int) -> str | None:
    """What a result says about random layers."""
    drops = any(
        isinstance(module, _DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    ) or any(
        isinstance(module, nn.RNNBase | nn.MultiheadAttention)
        and module.training
        and module.dropout > 0
        for module in model.modules()
    )
    return f"dropout fixed by seed {seed}" if drops else None


def reseed(seed: int, device: torch.device) -> None:
    """Start the generators that a forward pass may draw from; only inside `held`."""
    # Not torch.manual_seed, which starts those of all GPUs, and only the model's come back.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)


@contextmanager
def held(model: nn.Module, batchnorm: BatchNorm) -> Iterator[None]:
    """BatchNorm in the given mode; at the end the model and the generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    layers = batchnorm_layers(model)
    tracking = [(layer, layer.track_running_stats) for layer in layers]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    with generators_kept(model):
        try:
            for layer in layers:
                layer.training = batchnorm == "batch"
                if batchnorm == "batch":
                    # Without tracking, the running statistics are neither used nor updated.
                    layer.track_running_stats = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for layer, tracks in tracking:
                layer.track_running_stats = tracks
            with torch.no_grad():
                for owner, name, buffer, before in buffers:
                    owner._buffers[name] = buffer  # a module may have put another in its place
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
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
