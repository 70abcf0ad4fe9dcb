"""The figures of the spectrum along training: one for each end, with names instead of a legend."""

import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.spectrum.along_training import plot

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results/spectrum-figure-h200.json"


@pytest.mark.slow
def test_each_end_has_a_figure_of_its_own(tmp_path, monkeypatch):
    drawn = {}

    def keep(figure, path, **options):
        drawn[path.name] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    plot(Path(shutil.copy(RESULT, tmp_path)))
    pictures = [f"{RESULT.stem}-{end}.png" for end in ("largest", "smallest")]
    assert list(drawn) == pictures
    for figure in drawn.values():
        (axes,) = figure.axes
        assert axes.get_legend() is None
        assert {text.get_text() for text in axes.texts} == {"10 Lanczos steps", "converged"}
    page = (ROOT / "docs/spectrum.md").read_text()
    assert all(f"(../results/{name})" in page for name in pictures)
    assert all((ROOT / "results" / name).is_file() for name in pictures)
