"""One pass of the CPU kernel, held against the readable update, in float64."""

import pytest
import torch

from neumann.optim.backends.cpu import numba_pass
from neumann.optim.phases import Phase, choose_coefficients
from neumann.optim.precision import prepare_update
from neumann.optim.tensors import Tensors
from neumann.optim.update import update_single

SIZES = (0, 1, 3, 7, 16, 1000, 8191, 8192, 8193, 70_000)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
FORCE = -0.37

# The relative error of a tensor, in its norm, after one step: half a unit in the last place for
# what is rounded once, a few units for float32 and float64, in which the arithmetic happens.
TOLERANCE = {F16: 2**-11, BF16: 2**-8, F32: 1e-6, F64: 1e-14, C64: 1e-6, C128: 1e-14}

COEFFICIENTS = {
    **{f"{phase}": choose_coefficients(phase, 0.1, 0.9, 0.99, 0.0) for phase in Phase},
    "zero lr": choose_coefficients(Phase.ITERATE, 0.0, 0.9, 0.99, 0.0),
    "zero momentum": choose_coefficients(Phase.ITERATE, 0.1, 0.0, 0.99, 0.0),
    "zero lr and momentum": choose_coefficients(Phase.ITERATE, 0.0, 0.0, 0.99, 0.0),
    "zero lr at a reset": choose_coefficients(Phase.RESET, 0.0, 0.9, 0.99, 0.0),
}


def tensors_of(shapes=SIZES, weight=F32, gradient=None, state=None, offsets=True):
    """Random tensors; the offset is a hundredth of a weight, as it would be."""

    def make(dtype, scale=1.0):
        return [(scale * torch.randn(shape, dtype=F64)).to(dtype) for shape in shapes]

    state = state or weight
    return Tensors(
        make(weight), make(gradient or weight), make(state), make(state, 0.01) if offsets else None
    )


def with_options(coefficients, force=0.0, weight_decay=0.0, maximize=False, grad_scale=1.0):
    """The coefficients with a force, L2 weight decay and the scale of the gradient."""
    scale = -grad_scale if maximize else grad_scale
    return coefficients._replace(force=force, weight_decay=weight_decay, scale=scale)


def run_pass(
    tensors, coefficients, force=0.0, *, runner=None, rounding="nearest", seed=0, **options
):
    """One pass of the kernel, by a pass of its own unless one is given."""
    chosen = runner or numba_pass.Pass()
    chosen_options = with_options(coefficients, force, **options)
    return chosen.prepare(tensors, chosen_options, rounding=rounding, seed=seed)()


def exact(tensors, coefficients, force=0.0, **options):
    """The same update by `update_single`, in float64."""

    def widened(tensors):
        return [t.detach().to(C128 if t.is_complex() else F64, copy=True) for t in tensors]

    wide = Tensors(
        widened(tensors.weights),
        widened(tensors.gradients),
        widened(tensors.iterates),
        None if tensors.offsets is None else widened(tensors.offsets),
    )
    prepare_update(wide, with_options(coefficients, force, **options), update_single)()
    return wide


def lists_of(tensors):
    return {
        "weights": tensors.weights,
        "iterates": tensors.iterates,
        "offsets": tensors.offsets or [],
    }


def bits(tensors):
    """Every number of every tensor, NaN included, as comparable bytes."""
    every = [t for of in lists_of(tensors).values() for t in of]
    return [
        torch.view_as_real(t.resolve_conj()).contiguous().view(torch.uint8).numpy().tobytes()
        if t.is_complex()
        else t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for t in every
    ]


def copy_of(tensors):
    def copied(tensors):
        return [t.detach().clone() for t in tensors]

    return Tensors(
        copied(tensors.weights),
        copied(tensors.gradients),
        copied(tensors.iterates),
        None if tensors.offsets is None else copied(tensors.offsets),
    )


def squares_of(tensors):
    offsets = [t.detach().to(C128 if t.is_complex() else F64) for t in tensors.offsets or []]
    return sum(float(t.abs().square().sum()) for t in offsets)


def check(tensors, coefficients, force=FORCE, runner=None, **options):
    """Run a pass and hold all that it did against the exact update."""
    expected = exact(tensors, coefficients, force, **options)
    gradients = [(g, g.clone(), g._version) for g in tensors.gradients]
    squared = run_pass(tensors, coefficients, force, runner=runner, **options)
    for name, ours in lists_of(tensors).items():
        for tensor, truth in zip(ours, lists_of(expected)[name], strict=True):
            difference = float((tensor.detach().to(truth.dtype) - truth).norm())
            bound = TOLERANCE[tensor.dtype] * float(truth.norm())
            assert difference <= bound, (name, tuple(tensor.shape), tensor.dtype)
    assert squared == pytest.approx(squares_of(tensors), rel=1e-12)
    for gradient, before, version in gradients:
        assert torch.equal(gradient, before)
        assert gradient._version == version


def laid_out(values, layout):
    """The values in another layout, with memory around them that must not change."""
    if layout == "contiguous":
        return values.clone()
    if layout == "transposed":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels last":
        return values.to(memory_format=torch.channels_last)
    if layout == "sliced":
        big = torch.full([2 * size + 3 for size in values.shape], 77.0, dtype=values.dtype)
        view = big[tuple(slice(1, 1 + 2 * size, 2) for size in values.shape)]
    elif layout == "columns":
        big = torch.full([*values.shape[:-1], values.shape[-1] + 5], 77.0, dtype=values.dtype)
        view = big[..., 2 : 2 + values.shape[-1]]
    else:
        raise AssertionError(layout)
    return view.copy_(values)


LAYOUTS = ("contiguous", "transposed", "channels last", "sliced", "columns")
