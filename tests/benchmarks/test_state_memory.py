"""The bytes of state per weight that docs/cost.md shows."""

from pathlib import Path

import pytest
import torch

from benchmarks.step.networks import build_network
from benchmarks.step.state_memory import FORMS, make_table, measure_state

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_page_shows_the_table():
    pytest.importorskip("torchvision")
    rows = make_table(["resnet50"], CPU).splitlines()
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    assert len(rows) == 4
    assert all(row in page for row in rows)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_halves_m_and_the_momentum(form):
    model = build_network("tiny", CPU)
    wide, narrow = (measure_state(model, form, dtype, CPU) for dtype in ("float32", "bfloat16"))
    # 4 bytes less for a matrix, and for the rest, whose mean of squares stays in float32.
    assert wide - narrow == pytest.approx(4, abs=0.01)
    assert 4 < narrow < 8
