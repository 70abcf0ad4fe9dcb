"""λ_min and λ_max of a hundred small networks, against eigendecompositions of whole Hessians."""

import pytest
import torch
from small_networks import as_type, batch, cnn, dense_hessian, mlp, trained
from torch.nn.functional import cross_entropy

from neumann.spectrum import Hessian, extremes

CASES, AT_ONCE = 100, 10


def case(number):
    """A network of up to 2,000 parameters at random weights, some trained, and its data."""
    generator = torch.Generator().manual_seed(number)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    torch.manual_seed(number)
    norm, classes, examples = number % 2 == 0, pick(2, 6), pick(12, 40)
    if number % 5 == 4:
        model, shape = cnn(pick(3, 7), classes, norm=norm), (1, 6, 6)
    else:
        wide = number % 10 == 0
        inputs, hidden = (pick(30, 40), pick(30, 40)) if wide else (pick(3, 14), pick(4, 20))
        model = mlp(inputs, hidden, classes, norm=norm, layers=pick(1, 2) if not wide else 1)
        shape = (inputs,)
    pair = batch(examples, *shape, classes=classes, seed=number)
    model = trained(model.double(), pair, pick(0, 1) * pick(5, 40))
    return model, pair


@pytest.mark.parametrize("group", range(CASES // AT_ONCE))
def test_both_ends_lie_within_their_stated_errors(group):
    for number in range(group * AT_ONCE, (group + 1) * AT_ONCE):
        model, pair = case(number)
        size = sum(p.numel() for p in model.parameters())
        assert size <= 2000
        dtype = (torch.float64, torch.float32)[number // 2 % 2]
        model, pair = model.to(dtype), as_type(pair, dtype)  # before either looks at them
        exact = torch.linalg.eigvalsh(dense_hessian(model, pair))
        operator = Hessian(model, cross_entropy, batch=pair)
        found = extremes(operator, seed=number, max_products=size)
        assert found.converged, number
        for end, truth in ((found.smallest, exact[0]), (found.largest, exact[-1])):
            assert abs(end.value - float(truth)) <= end.error, (number, end, truth)
            assert end.error <= 1e-3 * float(exact.abs().max()), (number, end)


def test_the_error_of_few_steps_holds_too():
    """At any step the truth is within the stated error, however large that is."""
    for number in range(8):
        model, pair = case(number)
        exact = torch.linalg.eigvalsh(dense_hessian(model, pair))
        operator = Hessian(model, cross_entropy, batch=pair)
        with operator.session():
            for steps in (2, 4, 8, 16, 32):
                found = extremes(operator, tolerance=0.0, max_products=steps, seed=number)
                assert found.products <= steps
                for end, truth in ((found.smallest, exact[0]), (found.largest, exact[-1])):
                    assert abs(end.value - float(truth)) <= end.error
