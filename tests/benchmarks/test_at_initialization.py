"""The count of large eigenvalues, against a spectrum that is known."""

import pytest
import torch

from benchmarks.spectrum.at_initialization import describe, say
from neumann.spectrum import MatrixOperator, density


def test_counts_of_a_known_spectrum():
    """Of 200 eigenvalues 3 are about −2, 10 about 4, one 5; the others are near 0."""
    eigenvalues = torch.cat(
        [
            torch.linspace(-2.1, -2.0, 3),
            torch.linspace(-0.02, 0.02, 186),
            torch.linspace(3.9, 4.1, 10),
            torch.tensor([5.0]),
        ]
    ).double()
    found = density(MatrixOperator(torch.diag(eigenvalues)), probes=40, steps=20)
    line = describe(found)
    assert (line["smallest"], line["largest"]) == pytest.approx((-2.1, 5.0))
    counts = {each["share"]: each for each in line["beyond"]}
    for share, below, above in ((0.3, 3, 11), (0.1, 3, 11), (1.0, 0, 1)):
        assert counts[share]["below"]["count"] == pytest.approx(below, abs=0.9)
        assert counts[share]["above"]["count"] == pytest.approx(above, abs=2)
    squares = eigenvalues.square()
    share = float(squares[eigenvalues < 0].sum() / squares.sum())
    assert line["negative_squares"] == pytest.approx(share, abs=0.04)
    assert "λ -2.1 to 5; of 200 eigenvalues" in say({"seed": 0, "step": 0, **line})
