"""Operators check the matrices and vectors they get."""

import pytest
import torch

from neumann.spectrum import FunctionOperator, MatrixOperator
from tests.support.known_spectra import rotated_matrix


def test_operators_check_their_input():
    with pytest.raises(ValueError, match="matrix must be square"):
        MatrixOperator(torch.ones(2, 3))
    with pytest.raises(ValueError, match="float32 or float64"):
        MatrixOperator(torch.eye(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="at least 1 row"):
        FunctionOperator(lambda v: v, 0)
    operator = MatrixOperator(rotated_matrix(torch.arange(4, dtype=torch.float64)))
    with pytest.raises(ValueError, match="a vector for this operator"):
        operator @ torch.ones(5, dtype=torch.float64)
    with pytest.raises(ValueError, match="a vector for this operator"):
        operator @ torch.ones(4)
    with pytest.raises(ValueError, match="a vector for this operator"):
        operator @ torch.ones(5, 2, dtype=torch.float64)
    assert torch.allclose(operator.dense(), operator.matrix)
    assert (operator @ torch.ones(4, 0, dtype=torch.float64)).shape == (4, 0)
    with pytest.raises(ValueError, match="a vector for this operator"):
        FunctionOperator(lambda v: v[:2], 3) @ torch.ones(3)
