"""Tables and verdicts use short names, and say once what they stand for."""

from pathlib import Path

import pytest

from neumann.lab.commands.arm_legend import list_full_names, name_rows
from neumann.lab.commands.tables import list_search_notes, print_comparison, print_search
from neumann.lab.contenders import get_name
from neumann.lab.metrics import ACCURACY
from neumann.lab.studies.lr_sweep import ArmSearch
from neumann.lab.studies.results import ArmResult, Comparison, FinishedRun
from neumann.lab.studies.statistics import Interval, mean_interval

ADAMW = "adamw:weight_decay=0.01,betas=(0.9, 0.95)"
LRS = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)


def compare(arms, target=95.0):
    rows = []
    for shift, (text, scores) in enumerate(arms.items()):
        runs = {
            seed: FinishedRun(Path(), ACCURACY, score, 10 + shift, 5.0, 1.0, {"top5": 99.0})
            for seed, score in enumerate(scores)
        }
        score, top5 = mean_interval(scores), mean_interval([99.0, 99.0])
        rows.append(ArmResult(get_name(text), text, runs, score, None, 1.0, None, {"top5": top5}))
    return Comparison(Path(), tuple(rows), 3, target, 0).compare_with(0)


def searched(arm, lrs=LRS, best=0.016):
    scores = tuple(Interval(90.0 + index, None, None, 1, 0) for index, _ in enumerate(lrs))
    return ArmSearch(arm, lrs, scores, best)


SWEEP = [
    searched("neumann-spectral", best=0.004),
    searched(ADAMW),
    searched(f"{ADAMW},eps=1e-6"),
]


def test_short_names_in_table_and_verdicts(capsys):
    arms = {"neumann-spectral:lr=0.12": (97.0, 98.0, 98.5), f"{ADAMW},lr=0.0215": (91.0, 94, 93)}
    print_comparison(name_rows(compare(arms)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["neumann-spectral", "adamw"]
    assert lines[4] == "neumann-spectral = neumann-spectral:lr=0.12"
    assert lines[5] == f"adamw = {ADAMW},lr=0.0215"
    assert "neumann-spectral is ahead of adamw by" in lines[6]
    assert "\n".join(lines).count("lr=") == 2


def test_names_of_the_user_need_no_explanation():
    arms = {"base=sgd:lr=0.1": (97.0, 98.0), "adamw": (91.0, 94.0)}
    named = name_rows(compare(arms))
    assert [row.arm for row in named.rows] == ["base", "adamw"]
    assert list_full_names(named) == []


def test_winners_have_the_names_of_the_search():
    """Also if an arm is left out since it diverged."""
    arms = {f"{ADAMW},eps=1e-6,lr=0.016": (97.0, 98.0), "neumann-spectral:lr=0.1": (97.0, 98.0)}
    named = name_rows(compare(arms), SWEEP)
    assert [row.arm for row in named.rows] == ["adamw (eps 1e-06)", "neumann-spectral"]


@pytest.mark.parametrize("target", [None, 95.0])
def test_a_comparison_fits_80_columns(target, terminal, capsys):
    terminal(80)
    arms = {"neumann-spectral:lr=0.12": (97.0, 98.0, 98.5), f"{ADAMW},lr=0.02": (70.0, 94, 93)}
    print_comparison(name_rows(compare(arms, target)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    missing = "no room for top-5, p and epochs: see the report"
    assert (missing in lines) == (target is not None)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_search_fits_a_terminal(width, terminal, capsys):
    terminal(width)
    print_search(SWEEP)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith("adamw")]
    assert max(map(len, lines)) <= width
    for score in ("90.00", "94.00*", "96.00*"):
        assert score in printed
    for name in ("neumann-spectral", "adamw", "adamw (eps 1e-06)"):
        assert any(line.partition("  ")[0] == name for line in printed.splitlines())
    assert f"adamw (eps 1e-06) = {ADAMW},eps=1e-06" in printed


def test_a_file_gets_the_whole_search(capsys):
    print_search(SWEEP)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["neumann-spectral", "lr", *(f"{lr:g}" for lr in LRS)]
    assert lines[4].split()[:3] == ["adamw", "(eps", "1e-06)"]


def test_advice_on_a_range_fits_the_command():
    found = [searched("sgd"), searched("muon:lr=0.00025:0.016:7")]
    assert [note.rpartition(": ")[2] for note in list_search_notes(found)[1:]] == [
        "widen --lr",
        "widen the range in its options",
    ]
    notes = list_search_notes(found, Path("studies/a.toml"))[1:]
    advice = "widen the range of lr in studies/a.toml, and use another --output"
    assert all(note.endswith(f": {advice}") for note in notes)
