"""The CPU kernel against the update for reading, in float64 arithmetic on the same numbers."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from neumann.optim import update
from neumann.optim.kernels import cpu, cpu_kernel
from neumann.optim.phases import Phase, Row, row
from neumann.optim.update import Tensors

SIZES = (0, 1, 3, 7, 16, 1000, 8191, 8192, 8193, 70_000)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
FORCE = -0.37

# The relative error of a tensor, in its norm, after one step: half a unit in the last place for
# what is rounded once, a few units for float32 and float64, in which the arithmetic happens.
TOLERANCE = {F16: 2**-11, BF16: 2**-8, F32: 1e-6, F64: 1e-14, C64: 1e-6, C128: 1e-14}

ROWS = {
    **{f"{phase}": row(phase, 0.1, 0.9, 0.99, 0.0) for phase in Phase},
    "zero lr": row(Phase.ITERATE, 0.0, 0.9, 0.99, 0.0),
    "zero momentum": row(Phase.ITERATE, 0.1, 0.0, 0.99, 0.0),
    "zero lr and momentum": row(Phase.ITERATE, 0.0, 0.0, 0.99, 0.0),
    "zero lr at a reset": row(Phase.RESET, 0.0, 0.9, 0.99, 0.0),
}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def tensors_of(shapes=SIZES, weight=F32, gradient=None, state=None, offsets=True):
    """Random tensors; the offset is a hundredth of a weight, as it would be."""

    def make(dtype, scale=1.0):
        return [(scale * torch.randn(shape, dtype=F64)).to(dtype) for shape in shapes]

    state = state or weight
    return Tensors(
        make(weight), make(gradient or weight), make(state), make(state, 0.01) if offsets else None
    )


def exact(tensors, row, force, grad_scale=1.0, **options):
    """The same update by `update_single`, in float64."""

    def widened(tensors):
        return [t.detach().to(C128 if t.is_complex() else F64, copy=True) for t in tensors]

    wide = Tensors(
        widened(tensors.weights),
        [grad_scale * g for g in widened(tensors.gradients)],
        widened(tensors.iterates),
        None if tensors.offsets is None else widened(tensors.offsets),
    )
    c = None if tensors.offsets is None else torch.tensor(force, dtype=F64)
    if c is not None and c == 0:
        c = None  # as an absent force, it leaves no trace of an offset that is not finite
    update.apply(wide, row, c, update.update_single, **options)
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


def check(tensors, row, force=FORCE, runner=None, **options):
    """Run a pass and hold all that it did against the exact update."""
    expected = exact(tensors, row, force, **options)
    gradients = [(g, g.clone(), g._version) for g in tensors.gradients]
    squared = (runner or cpu.Pass()).run(tensors, row, force, **options)
    for name, ours in lists_of(tensors).items():
        for tensor, truth in zip(ours, lists_of(expected)[name], strict=True):
            difference = float((tensor.detach().to(truth.dtype) - truth).norm())
            bound = TOLERANCE[tensor.dtype] * float(truth.norm())
            assert difference <= bound, (name, tuple(tensor.shape), tensor.dtype)
    assert squared == pytest.approx(squares_of(tensors), rel=1e-12)
    for gradient, before, version in gradients:
        assert torch.equal(gradient, before)
        assert gradient._version == version


# ------------------------------------------------------------------ the arithmetic


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", ["no decay", "L2", "decoupled"])
@pytest.mark.parametrize("offsets", ["no offsets", "no force", "force"])
@pytest.mark.parametrize("phase", Phase)
def test_phases_and_decays(phase, offsets, decay, maximize):
    coefficients = row(phase, 0.1, 0.9, 0.99, 0.03 if decay == "decoupled" else 0.0)
    check(
        tensors_of(offsets=offsets != "no offsets"),
        coefficients,
        0.0 if offsets == "no force" else FORCE,
        weight_decay=0.03 if decay == "L2" else 0.0,
        maximize=maximize,
    )


@pytest.mark.parametrize("coefficients", ROWS.values(), ids=ROWS)
def test_rows_with_zeros(coefficients):
    check(tensors_of(), coefficients)


@pytest.mark.parametrize("phase", Phase)
def test_gradient_scale(phase):
    check(tensors_of(), row(phase, 0.1, 0.9, 0.99, 0.0), grad_scale=1 / 1024, weight_decay=0.5)


DTYPES = [
    (F64, F64, F64),
    (F32, F32, BF16),
    (BF16, BF16, BF16),
    (BF16, BF16, F32),
    (F16, F16, F16),
    (F16, F16, F32),
    (F16, F16, BF16),
    (F32, F32, F16),
    (F32, F32, F64),
    (F64, F64, F32),
    (F64, F64, BF16),
    (BF16, F32, BF16),
    (F32, BF16, F32),
    (F32, F16, F32),
    (F32, F64, F32),
    (C64, C64, C64),
    (C128, C128, C128),
    (C64, C64, C128),
]
# Each combination is compiled for each phase, a second each: the rarer ones only iterate.
DTYPES_AND_PHASES = [
    (*dtypes, phase)
    for number, dtypes in enumerate(DTYPES)
    for phase in (Phase if number < 3 else [Phase.ITERATE])
]


@pytest.mark.parametrize(("weight", "gradient", "state", "phase"), DTYPES_AND_PHASES)
def test_dtypes(weight, gradient, state, phase):
    tensors = tensors_of((0, 1, 7, 8193), weight, gradient, state)
    check(tensors, row(phase, 0.1, 0.9, 0.99, 0.0), weight_decay=0.03)


@pytest.mark.parametrize("weight", [F64, F32, BF16, F16])
@pytest.mark.parametrize("phase", Phase)
def test_stochastic_rounding_goes_to_a_neighbour(weight, phase):
    tensors = tensors_of((0, 1, 7, 8193), weight, state=BF16)
    coefficients = row(phase, 0.1, 0.9, 0.99, 0.0)
    expected = exact(tensors, coefficients, FORCE)
    squared = cpu.Pass().run(tensors, coefficients, FORCE, rounding="stochastic", seed=7)
    for name, ours in lists_of(tensors).items():
        for tensor, truth in zip(ours, lists_of(expected)[name], strict=True):
            bound = 2 * TOLERANCE[tensor.dtype] * truth.abs() + 1e-6
            assert bool(((tensor.to(F64) - truth).abs() <= bound).all())
    assert squared == pytest.approx(squares_of(tensors), rel=1e-12)


def test_all_dtypes_at_once():
    mixed = [tensors_of((5, 9000), dtype) for dtype in (F32, C64, BF16, F64, F16)]
    check(
        Tensors(
            [t for tensors in mixed for t in tensors.weights],
            [t for tensors in mixed for t in tensors.gradients],
            [t for tensors in mixed for t in tensors.iterates],
            [t for tensors in mixed for t in tensors.offsets],
        ),
        ROWS["iterate"],
    )


def test_many_tensors():
    check(tensors_of([(100 + index % 37,) for index in range(3000)]), ROWS["iterate"])


def test_no_tensors():
    assert cpu.Pass().run(Tensors(offsets=[]), ROWS["iterate"], 0.0) == 0.0


# ------------------------------------------------------------------ layouts


def _laid(values, layout):
    """The values in another layout, with memory around them that nobody may touch."""
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


@pytest.mark.parametrize("dtype", [F32, BF16, C64])
@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("weight", LAYOUTS)
def test_layouts(weight, gradient, dtype):
    plain = tensors_of([(6, 5, 3, 4), (1, 5, 1, 1), (16, 24, 5, 5)], dtype)
    for state in {weight, "contiguous"}:
        tensors = Tensors(
            [_laid(t, weight) for t in plain.weights],
            [_laid(t, gradient) for t in plain.gradients],
            [_laid(t, state) for t in plain.iterates],
            [_laid(t, weight) for t in plain.offsets],
        )
        strides = [t.stride() for t in tensors.weights]
        check(tensors, ROWS["iterate"])
        assert [t.stride() for t in tensors.weights] == strides
        for tensor in tensors.weights:
            if weight in ("sliced", "columns"):
                around = tensor._base.clone()
                around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(77)
                assert bool((around == 77).all())


def test_a_dense_layout_is_not_copied(monkeypatch):
    monkeypatch.setattr(cpu, "_run_staged", None)
    plain = tensors_of([(6, 5, 3, 4)])
    for layout in ("contiguous", "transposed", "channels last"):
        laid = [[_laid(t, layout) for t in of] for of in vars(plain).values()]
        check(Tensors(*laid), ROWS["iterate"])


def test_scalars_expanded_and_negated_gradients():
    z = torch.randn(2, 4, dtype=C64)
    gradients = [
        z[0, 0].conj().imag,
        torch.randn(()).expand(4),
        z[1].conj().imag,
        torch.tensor(3.0),
    ]
    assert gradients[0].is_neg()
    assert gradients[2].is_neg()
    tensors = tensors_of([(), (4,), (4,), ()])
    check(replace(tensors, gradients=gradients), ROWS["iterate"])


def test_conjugated_tensors():
    tensors = tensors_of([(7,), (3, 4)], C64)
    check(
        Tensors(
            [t.conj() for t in tensors.weights],
            [t.conj() for t in tensors.gradients],
            tensors.iterates,
            [t.conj() for t in tensors.offsets],
        ),
        ROWS["iterate"],
    )


# ------------------------------------------------------------------ not finite


def test_a_nan_does_not_survive_a_reset():
    for weight, state in ((F32, F32), (F32, BF16), (F16, F16)):
        tensors = tensors_of((1000,), weight, state=state)
        tensors.iterates[0].fill_(torch.nan)
        check(tensors, ROWS["reset"])


@pytest.mark.parametrize("offsets", [True, False])
def test_a_reset_moves_no_weight(offsets):
    tensors = tensors_of((1000, 3), offsets=offsets)
    for gradient in tensors.gradients:
        gradient.fill_(torch.inf)
    before = bits(tensors)
    cpu.Pass().run(tensors, ROWS["reset"], FORCE)
    after = bits(tensors)
    assert after[:2] == before[:2]
    assert after[4:] == before[4:]
    assert all(bool((m == -torch.inf).all()) for m in tensors.iterates)


def test_the_warmup_leaves_the_iterate_alone():
    tensors = tensors_of((1000,))
    tensors.iterates[0].fill_(torch.nan)
    before = bits(tensors)
    cpu.Pass().run(tensors, ROWS["warm-up"], 0.0)
    assert bits(tensors)[1] == before[1]
    assert bool(tensors.weights[0].isfinite().all())


def test_a_zero_coefficient_drops_its_term():
    tensors = tensors_of((100,))
    tensors.gradients[0].fill_(torch.inf)
    tensors.weights[0][3] = torch.inf
    cpu.Pass().run(tensors, ROWS["zero lr"], 0.0, weight_decay=0.0)
    assert bool(tensors.iterates[0].isfinite().all())  # neither 0·∞ of the gradient
    tensors = tensors_of((100,))
    tensors.weights[0][3], tensors.offsets[0][4] = torch.inf, torch.nan
    cpu.Pass().run(tensors, ROWS["iterate"], 0.0, weight_decay=0.0)
    assert bool(tensors.iterates[0].isfinite().all())  # nor 0·∞ of w, nor 0·NaN of δ


def test_a_force_beyond_float32():
    tensors = tensors_of((10,))
    cpu.Pass().run(tensors, ROWS["iterate"], -1e60)
    assert bool(tensors.weights[0].isinf().all())


# ------------------------------------------------------------------ the same bits


def _step(tensors, **options):
    tensors = copy_of(tensors)
    runner = cpu.Pass()
    squared = [
        runner.run(tensors, ROWS["iterate"], FORCE, seed=seed, **options) for seed in range(3)
    ]
    return squared, bits(tensors)


@pytest.mark.parametrize(
    ("weight", "state", "rounding"),
    [(F32, F32, "nearest"), (F32, BF16, "stochastic"), (F16, F16, "nearest")],
)
def test_bits_do_not_depend_on_threads(weight, state, rounding):
    tensors = tensors_of([(1_000_003,), (8193,), (5,), (300, 1000)], weight, state=state)
    tensors.gradients[3] = _laid(tensors.gradients[3], "transposed")  # copied before it is used
    torch.set_num_threads(1)
    expected = _step(tensors, rounding=rounding)
    for threads in (1, 2, 2, 5):
        torch.set_num_threads(threads)
        assert _step(tensors, rounding=rounding) == expected


def test_as_many_threads_as_torch_uses(monkeypatch):
    """Without helpers the test above would mean nothing."""
    original, workers = cpu_kernel.run, set()

    def run(*arguments):
        workers.add(threading.get_ident())
        original(*arguments)

    monkeypatch.setattr(cpu_kernel, "run", run)
    torch.set_num_threads(1)
    check(tensors_of((1_000_003,)), ROWS["iterate"])
    assert workers == {threading.get_ident()}
    torch.set_num_threads(2)
    for _ in range(50):  # a helper that comes too late finds nothing left to do
        check(tensors_of((1_000_003,)), ROWS["iterate"])
        if len(workers) == 2:
            break
    assert len(workers) == 2


def test_two_threads_at_once():
    torch.set_num_threads(2)
    inputs = [tensors_of((400_000, 1000), F32), tensors_of((300_000, 70_000), F32, state=BF16)]
    expected = [_step(tensors) for tensors in inputs]
    failures = []

    def work(index):
        try:
            for _ in range(15):
                assert _step(inputs[index]) == expected[index]
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# ------------------------------------------------------------------ rounding


def test_nearest_is_what_torch_does():
    """m ← −g, so that the state is the gradient rounded: any bit pattern, and every tie."""
    patterns = torch.randint(-(2**31), 2**31, (300_000,)).to(torch.int32)
    ties = (torch.arange(2**16) << 16 | 0x8000).to(torch.int32)
    special = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 1, 0])
    gradient = torch.cat([patterns, ties, special.to(torch.int32)]).view(F32)
    tensors = Tensors(
        [torch.zeros_like(gradient)],
        [gradient],
        [torch.zeros_like(gradient, dtype=BF16)],
        None,
    )
    cpu.Pass().run(tensors, Row(0.0, 1.0, 0.0, 0.0, 0.0, 1.0), 0.0)
    expected = (-gradient).to(BF16)
    finite = ~gradient.isnan()
    ours = tensors.iterates[0]
    assert torch.equal(ours.view(torch.int16)[finite], expected.view(torch.int16)[finite])
    assert bool(ours[~finite].isnan().all())
    assert bool((~finite).any())


def _rounded(value, seed, size=200_000, rounding="stochastic"):
    """m and δ after a step that computes −value and +value for all their elements."""
    tensors = Tensors(
        [torch.zeros(size)],
        [torch.full((size,), value)],
        [torch.zeros(size, dtype=BF16)],
        [torch.zeros(size, dtype=BF16)],
    )
    coefficients = Row(keep=0.0, gain=1.0, carry=-1.0, push=0.0, decay=0.0, follow=1.0)
    cpu.Pass().run(tensors, coefficients, 0.0, rounding=rounding, seed=seed)
    assert bool((tensors.weights[0] == torch.tensor(value)).all())
    return tensors.iterates[0].to(F64), tensors.offsets[0].to(F64)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(fraction):
    unit = 2.0**-7  # of bfloat16 between 1 and 2
    value = float(torch.tensor(1 + fraction * unit, dtype=F32))
    m, offset = _rounded(value, seed=3)
    for stored, truth in ((m, -value), (offset, value)):
        assert sorted(stored.abs().unique().tolist()) == [1, 1 + unit]
        assert abs(float(stored.mean()) - truth) < 0.01 * unit
    up = torch.stack([(m.abs() > 1).double(), (offset > 1).double()])
    neighbours = torch.stack([up[0, 1:], up[0, :-1]])
    blocks = torch.stack([up[0, 8192 : 2 * 8192], up[0, :8192]])
    seeds = torch.stack([up[0], (_rounded(value, seed=4)[0].abs() > 1).double()])
    for pair, most in ((up, 0.01), (neighbours, 0.01), (blocks, 0.05), (seeds, 0.01)):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < most


def test_stochastic_rounding_is_unbiased_over_seeds():
    draws = [_rounded(1 + 0.3 * 2.0**-7, seed, size=3)[0].abs() for seed in range(3000)]
    ups = (torch.stack(draws) > 1).double().mean(0)
    assert bool(((ups - 0.3).abs() < 0.05).all())


def test_stochastic_rounding_keeps_what_fits():
    for value in (1.0, -1.5, torch.inf, 0.0):
        m, offset = _rounded(value, seed=5, size=10_000)
        assert bool((m == -value).all())
        assert bool((offset == value).all())
    m, _ = _rounded(1.001, seed=5, size=10, rounding="nearest")
    assert bool((m == -1.0).all())


def test_stochastic_rounding_leaves_weights_to_nearest():
    tensors = tensors_of((70_000,), BF16)
    nearest, stochastic = copy_of(tensors), copy_of(tensors)
    cpu.Pass().run(nearest, ROWS["iterate"], FORCE)
    cpu.Pass().run(stochastic, ROWS["iterate"], FORCE, rounding="stochastic", seed=1)
    assert bits(nearest)[0] == bits(stochastic)[0]
    assert bits(nearest)[1] != bits(stochastic)[1]
    again, other = copy_of(tensors), copy_of(tensors)
    cpu.Pass().run(again, ROWS["iterate"], FORCE, rounding="stochastic", seed=1)
    cpu.Pass().run(other, ROWS["iterate"], FORCE, rounding="stochastic", seed=2)
    assert bits(again) == bits(stochastic)
    assert bits(other) != bits(stochastic)


def test_tensors_have_noise_of_their_own():
    one = torch.full((1000,), 1 + 0.5 * 2.0**-7)
    tensors = Tensors(
        [torch.zeros(1000), torch.zeros(1000)],
        [one, one],
        [torch.zeros(1000, dtype=BF16), torch.zeros(1000, dtype=BF16)],
    )
    cpu.Pass().run(tensors, ROWS["reset"], 0.0, rounding="stochastic")
    assert not torch.equal(*tensors.iterates)


def test_no_two_blocks_share_their_noise():
    entries = [(torch.zeros(20_000),) * 3, *[(torch.zeros(1),) * 3] * 3000]
    table = cpu._tables(range(len(entries)), entries)[0]
    positions = table._positions[table._owners] + table._starts
    assert len(positions) == 3003
    assert len(set(positions.tolist())) == len(positions)


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match=r"rounding='up'.*nearest, stochastic"):
        cpu.Pass().run(tensors_of((1,)), ROWS["iterate"], 0.0, rounding="up")


# ------------------------------------------------------------------ tables and bookkeeping


def test_versions_count_what_was_written():
    def versions(tensors):
        return [of[0]._version for of in lists_of(tensors).values()]

    written = {"warm-up": [1, 0, 1], "reset": [0, 1, 0], "iterate": [1, 1, 1]}
    for phase, expected in written.items():
        tensors = tensors_of((5, 9000))
        before = versions(tensors)
        cpu.Pass().run(tensors, ROWS[phase], FORCE)
        after = versions(tensors)
        grown = [int(new > old) for new, old in zip(after, before, strict=True)]
        assert grown == expected, phase


def test_parameters_that_require_gradients():
    for dtype in (F32, F16, C64):
        tensors = tensors_of((5, 9000), dtype)
        parameters = [torch.nn.Parameter(t) for t in tensors.weights]
        check(replace(tensors, weights=parameters), ROWS["iterate"])
        assert all(p.is_leaf and p._version > 0 for p in parameters)


@pytest.fixture
def builds(monkeypatch):
    """How often tables were made."""
    made = []
    original = cpu._tables
    monkeypatch.setattr(cpu, "_tables", lambda *a: made.append(len(a[0])) or original(*a))
    return made


def test_new_gradients_need_no_new_table(builds):
    tensors, runner = tensors_of((5, 9000)), cpu.Pass()
    for _ in range(3):
        fresh = replace(tensors, gradients=[torch.randn_like(w) for w in tensors.weights])
        check(fresh, ROWS["iterate"], runner=runner)
    assert builds == [2]


def test_changes_are_noticed(builds):
    tensors, runner = tensors_of([(4, 4), (30, 30)]), cpu.Pass()

    def step(tensors):
        builds.clear()
        check(tensors, ROWS["iterate"], runner=runner)
        assert builds, "a change went unnoticed"
        check(tensors, ROWS["iterate"], runner=runner)

    step(tensors)
    tensors.gradients[0] = torch.randn(4, 4).t()
    step(tensors)
    tensors.gradients[0] = torch.randn(4, 4, dtype=F64)
    step(tensors)
    tensors.weights[0].data = torch.randn(4, 4)
    step(tensors)
    tensors.weights[0] = tensors.weights[0].t()  # lies where the old one lay
    step(tensors)
    tensors.weights[1].data = tensors.weights[1].data[:10, :]
    tensors.gradients[1] = tensors.gradients[1][:10]
    tensors.iterates[1], tensors.offsets[1] = torch.randn(10, 30), torch.randn(10, 30)
    step(tensors)
    tensors.iterates[0] = torch.randn(4, 4, dtype=BF16)
    step(tensors)
    step(Tensors(*([of[1]] for of in vars(tensors).values())))
    step(tensors)
    step(replace(tensors, offsets=None))


def test_a_negated_gradient_is_noticed():
    tensors, runner = tensors_of([()]), cpu.Pass()
    check(tensors, ROWS["iterate"], runner=runner)
    tensors.gradients[0] = torch.tensor(1 + 2j).conj().imag  # no stride gives it away
    check(tensors, ROWS["iterate"], runner=runner)


def test_gradients_are_not_kept_alive():
    tensors, runner = tensors_of((9000,)), cpu.Pass()
    runner.run(tensors, ROWS["iterate"], FORCE)
    gradient = weakref.ref(tensors.gradients.pop())
    gc.collect()
    assert gradient() is None


def test_other_devices_are_refused():
    tensors = tensors_of((3,))
    elsewhere = replace(tensors, gradients=[torch.empty(3, device="meta")])
    with pytest.raises(ValueError, match="on meta"):
        cpu.Pass().run(elsewhere, ROWS["iterate"], 0.0)


# ------------------------------------------------------------------ numba and processes


def _python(script, **environment):
    """What a script prints, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


STEP = """
import torch
from neumann.optim import update
from neumann.optim.kernels import cpu
from neumann.optim.phases import Phase, row

def step():
    torch.manual_seed(0)
    tensors = update.Tensors(*([torch.randn(600_000)] for _ in range(4)))
    return cpu.Pass().run(tensors, row(Phase.ITERATE, 0.1, 0.9, 0.99, 0.0), 0.1)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    script = STEP + (
        "step()\n"
        "from neumann.optim.kernels.cpu_kernel import run\n"
        "print(sum(run.stats.cache_hits.values()), sum(run.stats.cache_misses.values()))\n"
    )
    assert _python(script, NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "1"]
    assert _python(script, NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_steps_too():
    script = STEP + (
        "import os, threading, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "torch.set_num_threads(2)\n"
        "def helped():\n"
        "    return any(t.name.startswith('neumann') for t in threading.enumerate())\n"
        "before = step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if not helped() and step() == before and helped() else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), step() == before, helped())\n"
    )
    assert _python(script) == ["0", "True", "True"]


def test_without_a_directory_to_cache_in():
    namespace = {}
    exec("def successor(number): return number + 1", namespace)  # a file that numba cannot find
    assert cpu_kernel.compiled(cache=True)(namespace["successor"])(1) == 2


def test_importing_costs_no_numba():
    script = "import sys; import neumann.optim.kernels.cpu; print('numba' in sys.modules)"
    assert _python(script) == ["False"]


def test_unavailable(monkeypatch):
    import numba

    assert cpu.unavailable() is None
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in cpu.unavailable()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "pip install neumann-optimizer[cpu]" in cpu.unavailable()


def test_tensors_are_what_the_tests_say():
    """The matrix above is only as good as its inputs."""
    plain = torch.randn(6, 5, 3, 4)
    laid = {layout: _laid(plain, layout) for layout in LAYOUTS}
    assert all(torch.equal(t, plain) for t in laid.values())
    assert [name for name, t in laid.items() if cpu._is_dense(t)] == list(LAYOUTS[:3])
    assert len({t.stride() for t in laid.values()}) == len(LAYOUTS)
    assert isinstance(plain, Tensor)
