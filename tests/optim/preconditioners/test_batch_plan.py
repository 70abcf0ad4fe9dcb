"""The plan of a step: the bits of the same step without a plan, from fewer operations."""

import weakref

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from neumann.optim.preconditioners import Spectral, batch_plan, orthogonalization, spectral
from neumann.optim.preconditioners.batch_plan import find_plan
from neumann.optim.preconditioners.matrix_view import MatrixView
from tests.support.operations import count_operations


def make(*shape, stride=None, seed=[0]):  # noqa: B006
    seed[0] += 1
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed[0]))
    return values if stride is None else torch.empty_strided(shape, stride).copy_(values)


def channels_last(*shape):
    return make(*shape).to(memory_format=torch.channels_last)


# Lists of gradients that one P sees, with its view.
WHOLES = {
    "equal": [make(8, 20) for _ in range(3)],
    "tall and lying": [make(8, 20), make(20, 8), make(8, 20), make(20, 8)],
    "transposed": [make(8, 20, stride=(1, 8)), make(8, 20)],
    "convolutions": [make(8, 4, 3, 3), make(8, 4, 3, 3), make(64, 2, 3, 3), make(8, 9, 1, 1)],
    "channels last": [
        channels_last(8, 4, 3, 3),
        channels_last(64, 2, 3, 3),
        channels_last(8, 9, 1, 1),
        make(8, 9, 1, 1, stride=(9, 1, 1, 1)),
    ],
    "inside a larger tensor": [make(30)[3:27].view(4, 6), make(4, 6)],
    "many shapes": [make(9, 20), make(20, 8), make(8, 12), make(5, 5), make(7, 3), make(9, 20)],
}
VIEWS = {
    "parts": (MatrixView(parts=3), [make(12, 6), make(12, 6), make(24, 6), make(6, 12)]),
    "different parts": (MatrixView(parts=(8, 2, 2)), [make(12, 5), make(12, 5), make(12, 20)]),
    "stored as in × out": (MatrixView(transposed=True, parts=3), [make(4, 12), make(4, 12)]),
    "experts": (MatrixView(stacked=True), [make(5, 4, 6), make(5, 6, 4)]),
    "heads": (MatrixView(parts=3, heads=2), [make(24, 8), make(24, 8)]),
    "groups": (MatrixView(groups=2), [make(8, 3, 3, 3), make(8, 3, 3, 3)]),
    "experts with parts": (MatrixView(stacked=True, parts=2), [make(3, 8, 6), make(3, 8, 6)]),
}
LISTS = {
    **{name: (MatrixView(), gradients) for name, gradients in WHOLES.items()},
    **VIEWS,
}
UNPLANNED = {  # no strides describe their matrices
    "odd strides": (MatrixView(), [make(4, 6, 3, 3, stride=(1, 4, 72, 24)), make(4, 54)]),
    "gaps": (MatrixView(), [make(4, 12)[:, ::2], make(4, 6)]),
    "transposed convolution": (MatrixView(transposed=True), [make(4, 6, 2, 2)]),
}


@pytest.mark.parametrize("launching", [0.0, 1e9])
@pytest.mark.parametrize("name", LISTS)
def test_a_plan_gives_the_bits_and_the_layout_of_a_step_without_one(name, launching, monkeypatch):
    """Also with all matrices in one padded batch, as on a GPU."""
    monkeypatch.setattr(orthogonalization, "launch_cost", lambda matrix: launching)
    view, gradients = LISTS[name]
    preconditioner = Spectral(view=view, before=None, scaling="norm")
    before = [gradient.clone() for gradient in gradients]
    planned = preconditioner.apply(gradients, [{} for _ in gradients])
    assert batch_plan.orthogonalize_planned(gradients, view, 0.2, "norm") is not None
    monkeypatch.setattr(spectral, "orthogonalize_planned", lambda *given: None)
    plain = preconditioner.apply(gradients, [{} for _ in gradients])
    for ours, theirs, gradient, old in zip(planned, plain, gradients, before, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.shape == gradient.shape
        assert ours.stride() == gradient.stride()
        assert torch.equal(gradient, old)


@pytest.mark.parametrize("name", UNPLANNED)
def test_layouts_without_a_plan_work_as_before(name):
    view, gradients = UNPLANNED[name]
    assert batch_plan.orthogonalize_planned(gradients, view, 0.2, "rms") is None
    found = Spectral(view=view, before=None).apply(gradients, [{} for _ in gradients])
    plain = Spectral(view=view, before=None).apply(
        [g.contiguous() for g in gradients], [{} for _ in gradients]
    )
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_the_second_step_makes_no_plan():
    gradients = [make(8, 20), make(20, 8), make(8, 4, 3, 3)]
    Spectral().apply(gradients, [{} for _ in gradients])
    made = find_plan.cache_info().misses
    Spectral().apply([g.clone() for g in gradients], [{} for _ in gradients])
    assert find_plan.cache_info().misses == made
    Spectral().apply(gradients[:2], [{}, {}])
    assert find_plan.cache_info().misses == made + 1


def test_fused_projections_cost_no_copy_beyond_the_batch():
    """One cat gathers the three parts of all tensors, and the directions are views of the batch."""
    gradients = [make(12, 6) for _ in range(4)]
    preconditioner = Spectral(view=MatrixView(parts=3), before=None)
    counted = count_operations(lambda: preconditioner.apply(gradients, [{} for _ in gradients]))
    assert counted["aten::cat"] == 1
    assert counted["aten::copy_"] == 0
    assert counted["aten::bmm"] == orthogonalization.ITERATIONS


def test_padded_batches_are_gathered_and_scattered_by_layout(monkeypatch):
    """Not by tensor: 20 tensors of two layouts, of which one fills its part of the batch."""
    monkeypatch.setattr(orthogonalization, "launch_cost", lambda matrix: 1e9)
    gradients = [make(8, 12) for _ in range(10)] + [make(10, 7) for _ in range(10)]
    preconditioner = Spectral(before=None)
    counted = count_operations(lambda: preconditioner.apply(gradients, [{} for _ in gradients]))
    assert counted["aten::cat"] == 2
    assert counted["aten::copy_"] == 1
    assert counted["aten::bmm"] == orthogonalization.ITERATIONS


def test_large_batches_are_cut(monkeypatch):
    """So that they need no more memory at a time; the directions are the same."""
    gradients = [make(8, 20) for _ in range(5)] + [make(20, 8), make(6, 4)]
    preconditioner = Spectral(before=None, scale=0.3)  # no plan is kept for this one
    monkeypatch.setattr(batch_plan, "MAX_BATCH_ELEMENTS", 3 * 160)
    sizes = []
    normalize = orthogonalization.normalize

    def watch(wide, **options):
        sizes.append(wide.shape)
        return normalize(wide, **options)

    monkeypatch.setattr(orthogonalization, "normalize", watch)
    found = preconditioner.apply(gradients, [{} for _ in gradients])
    assert sizes == [(3, 8, 20), (3, 8, 20), (1, 4, 6)]
    monkeypatch.setattr(spectral, "orthogonalize_planned", lambda *given: None)
    plain = preconditioner.apply(gradients, [{} for _ in gradients])
    assert all(map(torch.equal, found, plain))
    find_plan.cache_clear()


@pytest.mark.parametrize("within_compiled_code", [False, True])
def test_a_gathered_batch_is_freed_before_the_iteration(monkeypatch, within_compiled_code):
    """It takes as much memory as what the iteration needs in bfloat16; here that is float32.

    While torch.compile evaluates frames, callers keep what they pass alive until a call returns.
    """
    gathered = []
    gather, iterate = batch_plan._gather, orthogonalization.iterate

    def remember(*given):
        stack = gather(*given)
        gathered.append(weakref.ref(stack))
        return stack

    def check(x):
        assert gathered.pop()() is None
        return iterate(x)

    monkeypatch.setattr(batch_plan, "_gather", remember)
    monkeypatch.setattr(orthogonalization, "iterate", check)
    gradients = [make(4, 6).double(), make(6, 8).double()]
    before = set_eval_frame(False) if within_compiled_code else None
    try:
        found = Spectral(before=None).apply(gradients, [{} for _ in gradients])
    finally:
        if within_compiled_code:
            set_eval_frame(before)
    assert len(found) == 2
    assert not gathered


def test_nothing_to_do():
    assert batch_plan.orthogonalize_planned([], MatrixView(), 0.2, "rms") == []
    assert Spectral(before=None).apply([], []) == []
