"""Plots of curvature: the right curves, errors as bands, and nothing where nothing was measured."""

import json
import math
import re

import pytest

from neumann.lab.errors import UsageError
from neumann.lab.report import write_density, write_report
from neumann.lab.report.curvature_plots import plot_curvature, plot_density
from neumann.lab.report.drawing import draw
from neumann.lab.report.plot import explain_marks
from neumann.lab.report.study_records import read_study
from neumann.lab.storage import strict_json
from tests.lab.report.test_page import read_page
from tests.support.fake_records import fake_comparison, fake_run

NAMES = ["curvature-largest", "curvature-smallest", "curvature-lr", "curvature-momentum"]
BATCHES = {"probe batch", "current batch"}


def plots_of(folder):
    return {plot.name: plot for plot in plot_curvature(read_study(folder), "epochs")}


def parts(plot):
    return {(curve.label, curve.part) for curve in plot.curves}


def rewrite(folder, change):
    """Change the lines of kind "spectrum" in the records."""
    path = folder / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        if line["kind"] == "spectrum":
            change(line)
    path.write_bytes(b"".join(map(strict_json.dumps, found)))
    return folder


def test_runs_that_did_not_measure_have_no_section(tmp_path, quick):
    assert plots_of(fake_run(tmp_path / "plain")) == {}
    page = read_page(write_report(tmp_path / "plain"))
    assert "curvature" not in page.ids
    assert not any(name.startswith("curvature") for name in page.plots)


def test_a_run_shows_both_ends_and_what_they_imply(tmp_path):
    found = plots_of(fake_run(tmp_path / "run", spectrum=10))
    assert list(found) == NAMES
    assert parts(found["curvature-largest"]) == {("sgd", part) for part in BATCHES}
    assert parts(found["curvature-smallest"]) == {
        ("sgd", part) for part in (*BATCHES, "not converged")
    }
    for name in NAMES[2:]:
        assert parts(found[name]) == {("sgd", part) for part in (*BATCHES, "scheduled")}
    probe = next(c for c in found["curvature-smallest"].curves if c.part == "probe batch")
    assert probe.x == tuple(step / 20 for step in range(0, 121, 10))
    assert probe.y[0] == pytest.approx(-1.5)
    hollow = [c for c in found["curvature-smallest"].curves if c.part == "not converged"]
    assert [c.x for c in hollow] == [(0, 1.5, 3, 4.5, 6)] * 2
    assert found["curvature-largest"].log_y
    assert not found["curvature-smallest"].log_y
    assert "means over the seeds" not in explain_marks(list(found.values()))


def test_bands_hold_the_errors(tmp_path):
    def sure(line):
        for batch in ("probe", "current"):
            line[batch] |= {"largest": 4.0, "largest_error": 0.5}
            line[batch] |= {"smallest": -1.0, "smallest_error": 0.25, "implied_momentum": 0.8}
            line[batch] |= {"implied_lr": 0.25}

    found = plots_of(rewrite(fake_run(tmp_path / "run", spectrum=60), sure))
    bands = {
        name: {(c.low[0], c.y[0], c.high[0]) for c in plot.curves if c.part in BATCHES}
        for name, plot in found.items()
    }
    assert bands == {
        "curvature-largest": {(3.5, 4.0, 4.5)},
        "curvature-smallest": {(-1.25, -1.0, -0.75)},
        "curvature-lr": {(1 / 4.5, 0.25, 0.25)},
        "curvature-momentum": {(4 / 5.25, 0.8, 4.5 / 5.5)},
    }


def test_an_error_that_would_flatten_the_curve_is_cut(tmp_path):
    def unsure(line):
        line["probe"] |= {"smallest": -1.0, "smallest_error": 1000.0}
        line["current"] |= {"smallest": -1.0, "smallest_error": math.inf}

    plot = plots_of(rewrite(fake_run(tmp_path / "run", spectrum=60), unsure))["curvature-smallest"]
    bands = {c.part: (c.low[0], c.high[0]) for c in plot.curves if c.part in BATCHES}
    assert bands["probe batch"] == bands["current batch"] == (-1.5, -0.5)
    assert "cut" in plot.caption
    draw(plot)


def test_what_failed_is_a_gap(tmp_path):
    failed = {"examples": 64, "failed": "not finite"}

    def fail(line):
        if line["step"]:
            line["probe"] = failed

    plot = plots_of(rewrite(fake_run(tmp_path / "run", spectrum=60), fail))["curvature-largest"]
    probe = next(c for c in plot.curves if c.part == "probe batch")
    assert [math.isfinite(y) for y in probe.y] == [True, False, False]
    everything = rewrite(tmp_path / "run", lambda line: line.update(probe=failed, current=failed))
    assert plots_of(everything) == {}


def test_a_learning_rate_that_goes_to_nothing_does_not_stretch_the_axis(tmp_path):
    def late(line):
        line["lr"] = 1e-9 if line["step"] == 120 else line["lr"]

    plot = plots_of(rewrite(fake_run(tmp_path / "run", spectrum=60), late))["curvature-lr"]
    assert plot.log_y
    assert plot.bottom > 1e-4
    assert "are not shown" in plot.caption


@pytest.mark.slow
def test_a_comparison_on_the_page(tmp_path):
    arms = {"neumann:warmup_epochs=1": {}, "sgd": {"spectrum": 0}, "adam": {"diverged": 50}}
    folder = fake_comparison(tmp_path / "c", arms, 2, spectrum=10)
    found = plots_of(folder)
    drawn = {("neumann", part) for part in BATCHES}
    assert parts(found["curvature-largest"]) == drawn | {("adam", "diverged")}
    assert [point.label for point in found["curvature-largest"].points] == ["adam", "adam"]
    assert "means over the seeds" in explain_marks(list(found.values()))
    page = read_page(write_report(folder))
    assert page.ids.count("curvature") == 1
    assert [name for name in page.plots if name.startswith("curvature")] == NAMES
    assert all((folder / "plots" / f"{name}.png").stat().st_size > 5000 for name in NAMES)
    # In the legend, a point that did not converge is a ring, in the gray of all parts.
    ring = r"<circle[^>]*fill: none; stroke: var\(--muted\)[^>]*></circle></svg><span>not converged"
    assert re.search(ring, (folder / "report.html").read_text())


RECORD = {
    "about": {"matrix": "hessian", "parameters": 1000, "examples": 64},
    "extremes": {"smallest": {"value": -1.0}, "largest": {"value": 9.0}},
    "density": {
        "points": [-2.0, 0.0, 4.0, 9.0],
        "density": [0.0, 3.0, 1e-300, 1e-3],
        "lower": [0.0, 2.0, 0.0, 0.0],
        "upper": [0.0, 4.0, 1e-299, 2e-3],
        "width": 0.1,
        "confidence": 0.95,
        "probes": 8,
    },
}


def test_a_density_is_drawn_down_to_less_than_one_eigenvalue():
    plot = plot_density(RECORD)
    (curve,) = plot.curves
    assert plot.log_y
    assert plot.bottom == pytest.approx(0.1 / (1000 * 0.1 * math.sqrt(2 * math.pi)))
    assert min(curve.low) > 0
    assert [point.x for point in plot.points] == [-1.0, 9.0]


def test_a_density_becomes_a_file_next_to_its_record(tmp_path):
    record = tmp_path / "spectrum.json"
    record.write_bytes(strict_json.dumps(RECORD))
    assert write_density(record) == tmp_path / "spectrum.png"
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    record.write_bytes(strict_json.dumps(RECORD | {"density": None}))
    with pytest.raises(UsageError, match="holds no density: neumann spectrum --density"):
        write_density(record)
