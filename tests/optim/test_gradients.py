"""Gradients of every kind: dtypes, layouts, complex, missing, sparse, not finite."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.small_model import CLOCK, STRONG, equal, model_and_optimizer, train, weights


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_never_changed(implementation):
    model, optimizer = model_and_optimizer(
        weight_decay=0.1, maximize=True, **STRONG, **IMPLEMENTATIONS[implementation]
    )
    for step in range(12):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + step)
        optimizer.step()
        assert all(torch.all(p.grad == 0.5 + step) for p in model.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_complex_parameters_are_pairs_of_reals(implementation):
    options = {"lr": 0.1, **CLOCK, **STRONG, "weight_decay": 0.1, "variables": 1}
    start = torch.randn(6, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    whole, pair = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_real(start.clone()))
    ours = Neumann([whole], **options, **IMPLEMENTATIONS[implementation])
    theirs = Neumann([pair], **options, **IMPLEMENTATIONS[implementation])
    for step in range(30):
        noise = torch.randn(
            6, dtype=torch.complex128, generator=torch.Generator().manual_seed(step)
        )
        conjugated = (whole.detach() + noise).conj().resolve_conj().conj()
        assert conjugated.is_conj()
        whole.grad = conjugated
        pair.grad = torch.view_as_real(torch.view_as_complex(pair.detach()) + noise)
        ours.step()
        theirs.step()
    assert torch.allclose(torch.view_as_real(whole.detach()), pair, rtol=1e-12)
    assert ours.diagnostics().distance == pytest.approx(theirs.diagnostics().distance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scalars_empty_tensors_and_other_layouts(implementation):
    """A transposed or sliced gradient or parameter gives what a contiguous one gives."""
    options = {"lr": 0.1, **CLOCK, **STRONG, **IMPLEMENTATIONS[implementation]}
    scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
    start = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) - 5
    plain = nn.Parameter(start.clone())
    strided = nn.Parameter(start.t().contiguous().t())
    sliced = nn.Parameter(torch.stack([start, start], dim=-1)[..., 0])
    assert not strided.is_contiguous()
    assert not sliced.is_contiguous()
    optimizer = Neumann([scalar, empty, plain, strided, sliced], **options)
    for step in range(20):
        gradient = (start + step) / 10
        scalar.grad = torch.tensor(0.3, dtype=torch.float64)
        empty.grad = torch.empty(0, 3, dtype=torch.float64)
        plain.grad = gradient.t().contiguous().t()
        strided.grad = gradient.clone()
        sliced.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(plain, strided)
    assert torch.equal(plain, sliced)
    assert not torch.equal(plain, start)
    assert scalar != 2.0


@pytest.mark.filterwarnings("ignore:parameter 0 of group 0 was changed")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(implementation, dtype):
    """One rounding a step: the result is the float32 step, rounded.

    To nearest, but for bfloat16 state, which is rounded to either neighbor.
    """
    options = {"lr": 0.1, **CLOCK, **STRONG, **IMPLEMENTATIONS[implementation]}
    start = torch.linspace(-2, 2, 33).to(dtype)
    half, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours, theirs = Neumann([half], **options), Neumann([full], **options)
    for step in range(15):
        gradient = torch.randn(33, generator=torch.Generator().manual_seed(step)).to(dtype)
        with torch.no_grad():  # both start each step from the same bits
            full.copy_(half)
            for key in ("iterate", "offset"):
                theirs.state[full][key].copy_(ours.state[half][key])
            theirs._distance.measure()
        half.grad, full.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
        assert torch.equal(half, full.to(dtype))
        for key in ("iterate", "offset"):
            assert ours.state[half][key].dtype == dtype
            found, exact = ours.state[half][key].float(), theirs.state[full][key]
            if dtype == torch.float16:
                assert torch.equal(found, exact.to(dtype).float())
            else:
                assert torch.all((found - exact).abs() <= 2**-7 * exact.abs())
                assert torch.equal(found == exact, exact == exact.to(dtype).float())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gradient_of_another_dtype(implementation):
    """Weights cast after backward leave gradients of the old dtype behind."""
    p = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = Neumann([p], lr=0.1, **CLOCK, **IMPLEMENTATIONS[implementation])
    q = nn.Parameter(torch.ones(5, dtype=torch.float32))
    other = Neumann([q], lr=0.1, **CLOCK, **IMPLEMENTATIONS[implementation])
    for _ in range(10):
        p.grad = torch.full((5,), 0.25, dtype=torch.float64)
        q.grad = torch.full((5,), 0.25, dtype=torch.float32)
        optimizer.step()
        other.step()
    assert torch.allclose(p.float(), q)
    mixed = nn.Parameter(torch.ones(5, dtype=torch.float64))
    mixed.grad = torch.full((5,), 0.25, dtype=torch.float64)
    optimizer = Neumann([mixed], lr=0.1, **CLOCK, **IMPLEMENTATIONS[implementation])
    mixed.data = mixed.data.to(torch.bfloat16)  # the gradient stays float64
    assert mixed.grad.dtype == torch.float64
    optimizer.step()
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed.detach(), torch.full((5,), 1 - 0.1 * 0.25).bfloat16())


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(4, 3, sparse=True)
    dense = nn.Linear(3, 1)
    model = nn.Sequential(embedding, dense)
    optimizer = Neumann(model.named_parameters(), lr=0.1, **CLOCK)
    before = weights(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients, and 0\.weight has one"):
        optimizer.step()
    assert equal(before, weights(model))
    assert optimizer.diagnostics().step == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_missing_gradient_leaves_the_parameter_alone(implementation):
    model, optimizer = model_and_optimizer(**STRONG, **IMPLEMENTATIONS[implementation])
    train(model, optimizer, 5)
    still = model[0].weight
    before, distance = still.detach().clone(), optimizer.state[still]["offset"].norm()
    for _ in range(2):  # t = 3, 4: iterate
        for p in model.parameters():
            p.grad = None if p is still else torch.ones_like(p)
        optimizer.step()
    assert torch.equal(still, before)
    assert optimizer.state[still]["iterate"].abs().sum() > 0
    assert optimizer.diagnostics().distance > distance > 0  # its offset still counts
    optimizer.state[still]["iterate"][0, 0] = float("nan")
    optimizer.step()  # t = 5: reset
    assert torch.equal(optimizer.state[still]["iterate"], torch.zeros_like(still))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_does_not_survive_a_reset_in_the_iterate(implementation):
    model, optimizer = model_and_optimizer(**IMPLEMENTATIONS[implementation])
    train(model, optimizer, 7)
    for state in optimizer.state.values():
        state["iterate"].fill_(float("nan"))
    train(model, optimizer, 1, start=7)  # t = 5: reset
    assert optimizer.diagnostics().phase == "reset"
    assert all(torch.isfinite(p).all() for p in optimizer.eval_params().values())


def test_nonfinite_gradients_are_skipped_when_asked():
    model, optimizer = model_and_optimizer(skip_nonfinite=True, **STRONG)
    control, reference = model_and_optimizer(**STRONG)
    bad = [float("nan"), float("inf"), -float("inf")]
    for step in range(20):
        train(control, reference, 1, start=step)
        if step % 6 == 1:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            model[2].bias.grad[1] = bad[step % 3]
            before = copy.deepcopy(optimizer.state_dict()["state"])
            evaluation = optimizer.eval_params()
            optimizer.step()
            assert equal(evaluation.values(), optimizer.eval_params().values())
            for index, entry in optimizer.state_dict()["state"].items():
                for key, value in entry.items():
                    assert torch.equal(value, before[index][key] + (key == "skipped"))
        train(model, optimizer, 1, start=step)
    assert equal(weights(model), weights(control))
    found = optimizer.diagnostics()
    assert (found.step, found.skipped) == (20, 4)
    assert int(optimizer.state[model[0].weight]["skipped"]) == 4


def test_a_skipped_step_keeps_even_an_average_that_is_no_longer_needed():
    model, optimizer = model_and_optimizer(skip_nonfinite=True, **STRONG)
    train(model, optimizer, 8)
    optimizer.param_groups[0].update(cubic=0.0, repulsive=0.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all("offset" in state for state in optimizer.state.values())


def test_an_imaginary_part_may_overflow_too():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = Neumann([p], lr=0.1, **CLOCK, skip_nonfinite=True)
    p.grad = torch.tensor([0j, complex(0, float("inf"))])
    optimizer.step()
    assert optimizer.diagnostics().skipped == 1


def test_large_finite_gradients_are_not_skipped():
    p = nn.Parameter(torch.zeros(3))
    optimizer = Neumann([p], lr=1e-30, **CLOCK, skip_nonfinite=True)
    p.grad = torch.full((3,), 3e38)  # its sum of squares overflows
    optimizer.step()
    assert optimizer.diagnostics().skipped == 0


def test_nonfinite_gradients_pass_by_default():
    model, optimizer = model_and_optimizer()
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all(torch.isnan(p).all() for p in model.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_parameter_frozen_midway_stays_in_the_group(implementation):
    """A never-trained neighbor changes nothing: δ still counts in r, and a reset zeroes m."""

    def run(neighbors):
        torch.manual_seed(0)
        a, c = (nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(2))
        frozen = [nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)]
        params = [a, c, *(frozen if neighbors else [])]
        options = {**CLOCK, **STRONG, "variables": 2, **IMPLEMENTATIONS[implementation]}
        optimizer = Neumann(params, lr=0.1, **options)
        for step in range(24):
            a.requires_grad_(step < 12)
            a.grad = a.detach() + 0.1 * step if step < 12 else None
            c.grad = c.detach() - 0.2 * step
            optimizer.step()
        distance = optimizer.diagnostics().distance
        return [*optimizer.eval_params()[:2], optimizer.state[a]["iterate"]], distance

    (alone, r), (beside, other) = run(False), run(True)
    assert equal(alone, beside)
    assert r == other


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_distance_follows_a_frozen_parameter_whose_gradient_was_left_behind(implementation):
    """With every parameter frozen there are no variables, so no repulsion; w and δ still move."""
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    forces = {"cubic": 0.0, "repulsive": 0.01}
    optimizer = Neumann([p], lr=0.1, **CLOCK, **forces, **IMPLEMENTATIONS[implementation])
    for step in range(12):
        p.requires_grad_(step < 8)
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    offset = float(optimizer.state[p]["offset"].norm())
    assert optimizer.diagnostics().distance == pytest.approx(offset, rel=1e-12)
