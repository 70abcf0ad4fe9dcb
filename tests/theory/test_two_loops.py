"""Claim of section 3.2: the two loops flatten into Algorithm 2 "with no change in the iteration".

What holds, in float64: let x = w − μm. Between two resets Algorithm 2 is the inner loop at x with a
new mini-batch for every term, in which *x moves by every term*:

    m ← μm − η∇ĝ(x + μm)        x ← x + m

What does not: Algorithm 1 with the convexified update holds x still during the inner loop and moves
it once, by the last m. And a reset takes its gradient at w, which is displaced already.
"""

import pytest
import torch
from torch import Tensor

from neumann import Neumann

ETA, MU, INNER = 0.1, 0.5, 6  # μ(t) = min(0.5, …) is constant from t = 1 on


def mini_batches(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return quadratics ½wᵀAw − bᵀw whose A has eigenvalues of both signs."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        root = torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5
        found.append(((root + root.T) / 2, torch.randn(size, generator=generator).double()))
    return found


def flattened(start: Tensor, batches: list[tuple[Tensor, Tensor]], **forces: float) -> list[Tensor]:
    """Take a step of SGD, then run Algorithm 2 with a reset every INNER steps; list all w − μm."""
    parameter = torch.nn.Parameter(start.clone())
    options = {"warmup_steps": 1, "reset_steps": INNER, "reset_growth": 1, "bounded": False}
    optimizer = Neumann([parameter], lr=ETA, momentum=MU, **options, **forces)
    points = []
    for matrix, b in batches:
        parameter.grad = matrix @ parameter.detach() - b
        optimizer.step()
        points.append(optimizer.eval_params()[0].clone())
    return points


@pytest.mark.parametrize(("cubic", "repulsive"), [(0.0, 0.0), (0.3, 1e-4)])
def test_algorithm_2_is_the_inner_loop_whose_weights_move_with_every_term(cubic, repulsive):
    (matrix, b), *batches = mini_batches(1 + 4 * INNER)
    start = torch.ones(8, dtype=torch.float64)
    found = flattened(start, [(matrix, b), *batches], cubic=cubic, repulsive=repulsive)
    displaced, average = start - ETA * (matrix @ start - b), start
    expected = [displaced]
    for outer in range(4):
        inner = batches[outer * INNER : (outer + 1) * INNER]
        matrix, b = inner[0]
        m = -ETA * (matrix @ displaced - b)
        x = displaced - MU * m
        expected.append(x)
        for matrix, b in inner[1:]:
            displaced = x + MU * m
            offset = displaced - average
            r = offset.norm()
            force = (cubic * r**2 - repulsive / r**2) / r
            m = MU * m - ETA * (matrix @ displaced - b + force * offset)
            x = x + m
            displaced = x + MU * m
            average = displaced + 0.99 * (average - displaced)
            expected.append(x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_weights_that_wait_for_the_end_of_the_inner_loop_move_less():
    """With a constant gradient b: two loops move by the last term, Algorithm 2 by all of them."""
    b = torch.tensor([1.0, -2.0], dtype=torch.float64)
    start, linear = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    batches = [(linear, b)] * (1 + INNER)
    start, after_reset, *_, last = flattened(start, batches, cubic=0.0, repulsive=0.0)
    terms = [ETA * b * sum(MU**i for i in range(k + 1)) for k in range(INNER)]
    torch.testing.assert_close(after_reset, start - MU * terms[0])
    torch.testing.assert_close(last, after_reset + sum(terms[1:]))
    assert (last - start).norm() > 4 * terms[-1].norm()
