"""The Triton kernel on every dtype and layout, and how it rounds."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from neumann.optim.phases import Timetable
from tests.support.triton_runs import (
    device,
    group_of,
    make_backend,
    same,
    scalar,
    shared_of,
    take_step,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def expected(w, g, m, d, lr, mu, gamma, force, l2):
    """The iterate phase in the dtype of the arithmetic, rounded once by torch."""
    wide = torch.float64 if torch.float64 in (w.dtype, m.dtype) else torch.float32
    w_, g_, m_, d_ = (x.to(wide) for x in (w, g, m, d))
    direction = g_ + l2 * w_ + force * d_
    m_new = mu * m_ - lr * direction
    change = mu * m_new - lr * direction
    return (w_ + change).to(w.dtype), m_new.to(m.dtype), (gamma * (d_ + change)).to(d.dtype)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_dtypes(weight_dtype):
    """One step for every combination of gradient and state, rounded to nearest."""
    size = 96
    generator = torch.Generator().manual_seed(1)

    def draw(dtype):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device(), dtype)

    states = {weight_dtype, torch.float32, torch.bfloat16}
    combinations = [(g, s) for g in DTYPES for s in sorted(states, key=str)]
    weights = [draw(weight_dtype) for _ in combinations]
    gradients = [draw(g) for g, _ in combinations]
    iterates = [draw(s) for _, s in combinations]
    offsets = [draw(s) for _, s in combinations]
    before = [[x.clone() for x in xs] for xs in (weights, gradients, iterates, offsets)]
    group = group_of(weights, gradients, iterates=iterates, offsets=offsets, weight_decay=0.01)
    clock, squared = scalar(50, torch.int64), scalar(4.0)
    backend = make_backend(block=64)
    take_step(backend, [group], shared_of(), clock, squared)

    force = 0.05 * 2 - 0.05 / max(2**3, 0.99 * 0.1 * 0.05 / (0.01 * 0.1))
    wrong = total = 0
    for index, (w, g, m, d) in enumerate(zip(*before, strict=True)):
        exact = expected(w, g, m, d, 0.1, 0.9, 0.99, force, 0.01)
        for ours, theirs in zip(
            (weights[index], iterates[index], offsets[index]), exact, strict=True
        ):
            assert ours.dtype == theirs.dtype
            eps = torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps)
            if ours.dtype in (torch.bfloat16, torch.float16):
                wrong += int((ours != theirs).sum())
                total += size
    # Half the numbers would differ in their last place if they were truncated.
    assert wrong <= 0.01 * total
    backend.finish_distance(squared)
    norm = sum(float(d.double().square().sum()) for d in offsets)
    assert float(squared) == pytest.approx(norm, rel=1e-6)


def test_rounding_to_bfloat16_keeps_nan_infinity_and_ties():
    """Weights follow w ← w − ηg in the warm-up; each gradient asks for one special sum."""
    special = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, float("inf"), float("nan"), 3.4e38, 1e-40, 0.0]
    target = torch.tensor(special)
    target.view(torch.int32)[4] = 0x7FFFFFFF  # the NaN that rounding up would make a zero
    target = target.to(device())
    weight = torch.zeros(8, dtype=torch.bfloat16, device=device())
    group = group_of([weight], [-target], lr=1.0)
    backend = make_backend()
    take_step(
        backend, [group], shared_of(Timetable(9, 0, 2.0)), scalar(dtype=torch.int64), scalar()
    )
    exact = target.to(torch.bfloat16)
    assert torch.equal(weight.isnan(), exact.isnan())
    assert torch.equal(weight.nan_to_num(nan=5.0), exact.nan_to_num(nan=5.0))


def _off_by_one(x):
    buffer = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


def _sparse(x):
    buffer = torch.zeros(*x.shape, 2, dtype=x.dtype, device=x.device)
    return buffer[..., 1].copy_(x)


def _transposed(x):
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def _channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


PLAIN = torch.clone
# Of weight, gradient, iterate and offset.
LAYOUTS = {
    "all channels last": (_channels_last,) * 4,
    "all transposed": (_transposed,) * 4,
    "gradient transposed": (PLAIN, _transposed, PLAIN, PLAIN),
    "gradient sparse": (PLAIN, _sparse, PLAIN, PLAIN),
    "weight transposed": (_transposed, PLAIN, PLAIN, PLAIN),
    "state differs": (_channels_last, PLAIN, _transposed, PLAIN),
    "weight sparse": (_sparse, PLAIN, PLAIN, PLAIN),
    "all sparse": (_sparse,) * 4,
    "unaligned weight": (_off_by_one, PLAIN, PLAIN, PLAIN),
    "unaligned gradient": (PLAIN, _off_by_one, PLAIN, PLAIN),
    "unaligned state": (PLAIN, PLAIN, _off_by_one, _off_by_one),
    "all unaligned": (_off_by_one,) * 4,
    "lazily negated gradient": (PLAIN, lambda x: torch._neg_view(-x), PLAIN, PLAIN),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_layouts(dtype):
    """Whatever the layout, the bits are those of contiguous tensors."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(2, 3, 2, 4, generator=generator, dtype=dtype) for _ in range(4)]
    layouts = dict(LAYOUTS)
    if dtype.is_complex:
        layouts = {
            name: layouts[name] for name in ("all transposed", "state differs", "weight sparse")
        }
        layouts["conjugate gradient"] = (
            PLAIN,
            lambda x: x.conj().resolve_conj().conj(),
            PLAIN,
            PLAIN,
        )
    forms = [(PLAIN,) * 4, *layouts.values()]
    tensors = [[form(x.to(device())) for form, x in zip(row, drawn, strict=True)] for row in forms]
    weights, gradients, iterates, offsets = (list(column) for column in zip(*tensors, strict=True))
    group = group_of(weights, gradients, iterates=iterates, offsets=offsets)
    backend, clock, squared = make_backend(block=64), scalar(50, torch.int64), scalar(1.0)
    for _ in range(2):
        take_step(backend, [group], shared_of(), clock, squared)
    for kind, column in (("weight", weights), ("iterate", iterates), ("offset", offsets)):
        for name, tensor in zip(layouts, column[1:], strict=True):
            # A compiler may fuse a product and a sum in one path and not in the other.
            near = torch.allclose(tensor, column[0], rtol=1e-6, atol=1e-7)
            same = near if tensor.is_cuda else torch.equal(tensor, column[0])
            assert same, f"{kind}, {name}"
    assert not torch.equal(weights[0].cpu(), drawn[0])
    for gradient in gradients:
        assert torch.equal(gradient.cpu(), drawn[1])  # it belongs to the caller


def test_complex_is_pairs_of_reals():
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(11, generator=generator, dtype=torch.complex128) for _ in range(4)]
    results = []
    for view in (torch.clone, lambda x: torch.view_as_real(x.clone())):
        w, g, m, d = (view(x.to(device())) for x in drawn)
        group = group_of([w], [g], iterates=[m], offsets=[d], weight_decay=0.1)
        squared = scalar(1.0)
        backend = make_backend()
        take_step(backend, [group], shared_of(), scalar(50, torch.int64), squared)
        backend.finish_distance(squared)
        reals = [torch.view_as_real(x) if x.is_complex() else x for x in (w, m, d)]
        results.append([*reals, squared])
    assert same(*results)


def test_scalars_and_empty_tensors():
    weights = [torch.ones(()), torch.ones(0, 3), torch.ones(2)]
    weights = [w.to(device()) for w in weights]
    group = group_of(weights, [torch.ones_like(w) for w in weights], lr=0.5)
    backend, clock = make_backend(), scalar(dtype=torch.int64)
    take_step(backend, [group], shared_of(Timetable(9, 0, 2.0)), clock, scalar())
    assert [w.tolist() for w in weights] == [0.5, [], [0.5, 0.5]]


# ---------------------------------------------------------------------- bfloat16 state


def test_stochastic_rounding_is_unbiased_and_reproducible():
    """m and δ in bfloat16 of numbers three tenths of the way up, over many elements and steps."""
    size, low, step = 2048, 1.0, 2**-7  # neighbors in bfloat16: 1 and 1 + 2⁻⁷
    target = low + 0.3 * step

    def rounded(clock, rounding="stochastic"):
        weight = torch.zeros(size, device=device())
        gradient = torch.full_like(weight, -target)
        state = [torch.zeros(size, dtype=torch.bfloat16, device=device()) for _ in range(2)]
        group = group_of([weight], [gradient], lr=1.0, iterates=state[:1], offsets=state[1:])
        backend = make_backend(block=512, rounding=rounding)
        # An iterate step from zero without momentum: m = −g, and δ = w = γ(μm − g) = −γg.
        group.options["momentum"] = 0.0
        shared = shared_of(average=1 - 2**-40, cubic=0.0, repulsive=0.0)
        take_step(backend, [group], shared, scalar(clock, torch.int64), scalar())
        assert float(weight[0]) == np.float32(target)
        return state

    iterate, offset = rounded(50)
    for state in (iterate, offset):
        assert set(state.tolist()) == {low, low + step}
        # Five standard deviations of the mean of 2048 such draws.
        assert abs(float(state.double().mean()) - target) < 5 * step * (0.21 / size) ** 0.5
    assert not torch.equal(iterate, offset)
    again = rounded(50)
    assert same([iterate, offset], again)
    later = rounded(51)[0]
    both = float(((iterate > low) & (later > low)).double().mean())
    assert abs(both - 0.09) < 5 * (0.09 * 0.91 / size) ** 0.5  # independent from step to step
    blocks = (iterate > low).view(4, 512)
    assert not any(torch.equal(blocks[0], block) for block in blocks[1:])
    nearest = rounded(50, "nearest")
    assert all(set(state.tolist()) == {low} for state in nearest)


def test_stochastic_rounding_leaves_what_bfloat16_can_hold():
    """In the warm-up m and δ are written back as they were, infinity included; NaN stays NaN."""
    values = torch.tensor([1.0, -3.5, torch.inf, -torch.inf, torch.nan, 0.0, 1e-39, 2.0**-130])
    state = [values.to(device(), torch.bfloat16) for _ in range(2)]
    before = [x.clone() for x in state]
    weight = torch.zeros(8, device=device())
    group = group_of([weight], [torch.zeros_like(weight)], iterates=state[:1], offsets=state[1:])
    backend = make_backend(rounding="stochastic")
    take_step(
        backend, [group], shared_of(Timetable(99, 0, 2.0)), scalar(dtype=torch.int64), scalar()
    )
    for ours, theirs in zip(state, before, strict=True):
        finite = ~theirs.isnan()
        assert torch.equal(ours[finite].view(torch.int16), theirs[finite].view(torch.int16))
        assert torch.equal(ours.isnan(), theirs.isnan())
