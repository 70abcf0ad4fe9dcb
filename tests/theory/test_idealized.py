"""Algorithm 1 against closed forms on quadratics, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from neumann.spectrum import coefficients
from neumann.theory import series
from neumann.theory.idealized import IdealizedNeumann


def quadratic(size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return A with eigenvalues 0.5 … 4, b, and a starting point."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(
        torch.randn(size, size, dtype=torch.float64, generator=generator), mode="complete"
    )
    eigenvalues = torch.linspace(0.5, 4.0, size, dtype=torch.float64)
    matrix = basis @ torch.diag(eigenvalues) @ basis.T
    b, w = torch.randn(2, size, dtype=torch.float64, generator=generator)
    return (matrix + matrix.T) / 2, b, w


def closure_for(
    parameter: Tensor, matrix: Tensor, b: Tensor, calls: list[Tensor] | None = None
) -> Callable[[], Tensor]:
    """f(w) = ½wᵀAw − bᵀw; ``calls`` collects the points at which it is evaluated."""

    def closure() -> Tensor:
        if calls is not None:
            calls.append(parameter.detach().clone())
        parameter.grad = None
        loss = 0.5 * parameter @ matrix @ parameter - b @ parameter
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("inner_steps", range(9))
def test_inner_iterates_are_the_partial_sums_of_the_series(inner_steps):
    matrix, b, w = quadratic()
    parameter = w.clone().requires_grad_()
    optimizer = IdealizedNeumann([parameter], inner_lr=0.25, outer_lr=0.25, inner_steps=inner_steps)
    optimizer.step(closure_for(parameter, matrix, b))

    sums = series.solve(
        lambda v: matrix @ v,
        b - matrix @ w,
        scale=0.25,
        tolerance=0.0,
        max_terms=inner_steps + 1,
    )
    torch.testing.assert_close(parameter.detach(), w + sums.solution, rtol=0, atol=1e-12)
    assert sums.terms == inner_steps + 1


def test_many_inner_steps_give_the_newton_step():
    matrix, b, w = quadratic()
    parameter = w.clone().requires_grad_()
    optimizer = IdealizedNeumann([parameter], inner_lr=0.25, outer_lr=0.25, inner_steps=400)
    optimizer.step(closure_for(parameter, matrix, b))
    minimum = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(parameter.detach(), minimum, rtol=0, atol=1e-12)


def test_inner_and_outer_learning_rates():
    matrix, b, w = quadratic()
    parameter = w.clone().requires_grad_()
    calls: list[Tensor] = []
    optimizer = IdealizedNeumann([parameter], inner_lr=0.1, outer_lr=0.7, inner_steps=2)
    loss = optimizer.step(closure_for(parameter, matrix, b, calls))

    gradient = matrix @ w - b
    first = -gradient
    second = first - (matrix @ (w + 0.1 * first) - b)
    third = second - (matrix @ (w + 0.1 * second) - b)
    torch.testing.assert_close(parameter.detach(), w + 0.7 * third, rtol=0, atol=1e-13)
    assert len(calls) == 3
    assert torch.equal(calls[0], w)
    torch.testing.assert_close(calls[1], w + 0.1 * first, rtol=0, atol=1e-14)
    torch.testing.assert_close(calls[2], w + 0.1 * second, rtol=0, atol=1e-14)
    torch.testing.assert_close(loss.detach(), 0.5 * w @ matrix @ w - b @ w, rtol=0, atol=1e-14)


@pytest.mark.parametrize("inner_steps", [0, 1, 4, 400])
def test_the_convexified_form_inverts_a_positive_definite_matrix(inner_steps):
    """Against a dense B̂ = (1−μ)·I + μ·η·H of an indefinite H: its series, and its inverse."""
    matrix, b, w = quadratic()
    matrix = matrix - 1.5 * torch.eye(len(w), dtype=torch.float64)  # eigenvalues −1 … 2.5
    found = coefficients(-1.01, 2.51)
    parameter = w.clone().requires_grad_()
    optimizer = IdealizedNeumann(
        [parameter], found.lr, lr=0.7, inner_steps=inner_steps, momentum=found.momentum
    )
    optimizer.step(closure_for(parameter, matrix, b))

    identity = torch.eye(len(w), dtype=torch.float64)
    convex = (1 - found.momentum) * identity + found.momentum * found.lr * matrix
    assert torch.linalg.eigvalsh(matrix)[0] < -0.9
    assert torch.linalg.eigvalsh(convex)[0] > 0
    powers = [torch.linalg.matrix_power(identity - convex, i) for i in range(inner_steps + 1)]
    direction = sum(powers) @ (b - matrix @ w)
    torch.testing.assert_close(parameter.detach(), w + 0.7 * direction, rtol=0, atol=1e-11)
    if inner_steps == 400:
        newton = torch.linalg.solve(convex, b - matrix @ w)
        share = (1 - torch.linalg.eigvalsh(convex)[0]) ** 401  # of the error that is left
        assert (direction - newton).norm() <= 1.01 * share * newton.norm()


def test_without_an_inner_rate_of_its_own_it_follows_lr():
    matrix, b, w = quadratic()
    following, fixed = w.clone().requires_grad_(), w.clone().requires_grad_()
    optimizer = IdealizedNeumann([following], lr=0.5, inner_steps=3)
    optimizer.param_groups[0]["lr"] = 0.2  # as a schedule does
    optimizer.step(closure_for(following, matrix, b))
    IdealizedNeumann([fixed], 0.2, 0.2, 3).step(closure_for(fixed, matrix, b))
    assert torch.equal(following, fixed)


@pytest.mark.parametrize("momentum", [1.0, 0.8])
def test_weight_decay_is_a_penalty_in_the_loss(momentum):
    matrix, b, w = quadratic()
    decayed, penalized = w.clone().requires_grad_(), w.clone().requires_grad_()
    options = {"lr": 0.2, "inner_steps": 3, "momentum": momentum}
    IdealizedNeumann([decayed], weight_decay=0.3, **options).step(closure_for(decayed, matrix, b))
    larger = matrix + 0.3 * torch.eye(len(w), dtype=torch.float64)
    IdealizedNeumann([penalized], **options).step(closure_for(penalized, larger, b))
    torch.testing.assert_close(decayed, penalized, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rates", [{}, {"lr": 0.1, "outer_lr": 0.1}])
def test_one_outer_rate_is_needed(rates):
    with pytest.raises(TypeError, match="needs either lr or outer_lr"):
        IdealizedNeumann([torch.zeros(1, requires_grad=True)], **rates)


def test_without_inner_steps_it_is_gradient_descent():
    matrix, b, w = quadratic()
    parameter, reference = w.clone().requires_grad_(), w.clone().requires_grad_()
    optimizer = IdealizedNeumann([parameter], inner_lr=9.0, outer_lr=0.3, inner_steps=0)
    sgd = torch.optim.SGD([reference], lr=0.3)
    for _ in range(5):
        optimizer.step(closure_for(parameter, matrix, b))
        sgd.step(closure_for(reference, matrix, b))
    torch.testing.assert_close(parameter, reference, rtol=0, atol=1e-14)


def test_groups_have_their_own_learning_rates():
    """On a separable loss each group must move as it would alone."""
    matrix, b, w = quadratic()
    other_matrix, other_b, other_w = quadratic(size=4, seed=1)
    pair = w.clone().requires_grad_(), other_w.clone().requires_grad_()
    groups = [
        {"params": [pair[0]], "inner_lr": 0.2, "outer_lr": 0.4},
        {"params": [pair[1]]},
    ]
    together = IdealizedNeumann(groups, inner_lr=0.1, outer_lr=0.5, inner_steps=3)
    first, second = closure_for(pair[0], matrix, b), closure_for(pair[1], other_matrix, other_b)
    together.step(lambda: first() + second())

    alone = w.clone().requires_grad_()
    IdealizedNeumann([alone], 0.2, 0.4, 3).step(closure_for(alone, matrix, b))
    other_alone = other_w.clone().requires_grad_()
    IdealizedNeumann([other_alone], 0.1, 0.5, 3).step(
        closure_for(other_alone, other_matrix, other_b)
    )
    assert torch.equal(pair[0], alone)
    assert torch.equal(pair[1], other_alone)


@pytest.mark.parametrize("failing_call", [1, 2, 4])
def test_the_weights_are_restored_if_the_closure_raises(failing_call):
    matrix, b, w = quadratic()
    parameter = w.clone().requires_grad_()
    calls: list[Tensor] = []
    evaluate = closure_for(parameter, matrix, b, calls)

    def closure() -> Tensor:
        if len(calls) == failing_call - 1:
            raise RuntimeError("the data loader is gone")
        return evaluate()

    optimizer = IdealizedNeumann([parameter], inner_lr=0.3, outer_lr=0.3, inner_steps=5)
    with pytest.raises(RuntimeError, match="the data loader is gone"):
        optimizer.step(closure)
    assert len(calls) == failing_call - 1
    assert torch.equal(parameter, w)


def test_parameters_without_a_gradient_are_left_alone():
    matrix, b, w = quadratic()
    parameter = w.clone().requires_grad_()
    unused = torch.full((3,), 2.0, requires_grad=True)
    optimizer = IdealizedNeumann([unused, parameter], 0.25, 0.25, 2)
    optimizer.step(closure_for(parameter, matrix, b))
    assert torch.equal(unused, torch.full((3,), 2.0))
    assert not torch.equal(parameter, w)


def test_a_gradient_missing_at_a_displaced_point_counts_as_zero():
    parameter = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)

    def closure() -> Tensor:
        parameter.grad = None
        loss = (parameter * 3).sum()
        if parameter.item() == 1.0:
            loss.backward()
        return loss

    IdealizedNeumann([parameter], inner_lr=0.5, outer_lr=0.5, inner_steps=4).step(closure)
    assert parameter.item() == 1.0 - 0.5 * 3


def test_complex_parameters_move_like_their_real_and_imaginary_parts():
    target = torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128)
    weights = torch.zeros(2, dtype=torch.complex128, requires_grad=True)
    parts = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)

    def closure_on(parameter: Tensor, as_complex: Callable[[Tensor], Tensor]):
        def closure() -> Tensor:
            parameter.grad = None
            loss = (as_complex(parameter) - target).abs().pow(4).sum()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        IdealizedNeumann([weights], 0.01, 0.02, 3).step(closure_on(weights, lambda p: p))
        IdealizedNeumann([parts], 0.01, 0.02, 3).step(closure_on(parts, torch.view_as_complex))
    torch.testing.assert_close(torch.view_as_real(weights.detach()), parts.detach())
    assert weights.detach().abs().min() > 0.01


@pytest.mark.parametrize("named", [False, True])
def test_sparse_gradients_are_refused_by_name(named):
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    parameters = list(table.named_parameters()) if named else list(table.parameters())
    optimizer = IdealizedNeumann(parameters, 0.1, 0.1, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = table(torch.tensor([1])).sum()
        loss.backward()
        return loss

    label = "parameter 'weight'" if named else "parameter 0 of group 0"
    with pytest.raises(ValueError, match=f"{label} has a gradient of layout torch.sparse_coo"):
        optimizer.step(closure)
    assert torch.equal(table.weight, before)


def test_negative_curvature_grows_with_the_number_of_inner_steps():
    """The documented failure: on f = −½w² with η = 1 the iterate is 2^{K+1} − 1 times w."""
    parameter = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimizer = IdealizedNeumann([parameter], inner_lr=1.0, outer_lr=1.0, inner_steps=9)
    matrix, b = -torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    optimizer.step(closure_for(parameter, matrix, b))
    assert parameter.item() == 2.0**10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner_lr", -0.1),
        ("inner_lr", float("nan")),
        ("inner_lr", float("inf")),
        ("inner_lr", "abc"),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("momentum", 0.0),
        ("momentum", 1.01),
        ("weight_decay", -1.0),
        ("inner_steps", -1),
        ("inner_steps", 2.0),
        ("inner_steps", True),
    ],
)
def test_bad_arguments_are_named_with_their_value(name, value):
    parameter = torch.zeros(1, requires_grad=True)
    arguments = {"inner_lr": 0.1, "lr": 0.1, "inner_steps": 2}
    with pytest.raises(ValueError, match=f"{name} .*got {value!r}"):
        IdealizedNeumann([parameter], **{**arguments, name: value})
    optimizer = IdealizedNeumann([parameter], **arguments)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} .*got {value!r}"):
        optimizer.step(lambda: pytest.fail("the closure ran despite a bad argument"))


def test_groups_must_agree_on_inner_steps():
    groups = [
        {"params": [torch.zeros(1, requires_grad=True)]},
        {"params": [torch.zeros(1, requires_grad=True)], "inner_steps": 3},
    ]
    with pytest.raises(ValueError, match=r"inner_steps must be the same .* got \[2, 3\]"):
        IdealizedNeumann(groups, 0.1, 0.1, 2)
    optimizer = IdealizedNeumann(groups[:1], 0.1, 0.1, 2)
    with pytest.raises(ValueError, match=r"inner_steps must be the same .* got \[2, 3\]"):
        optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 1


def test_the_closure_is_required():
    parameter = torch.ones(1, requires_grad=True)
    with pytest.raises(TypeError, match="needs a closure"):
        IdealizedNeumann([parameter], 0.1, 0.1, 2).step()
    assert parameter.item() == 1.0
