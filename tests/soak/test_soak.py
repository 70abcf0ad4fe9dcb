"""The first cases of every program of the soak; `make soak` runs on from there."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.soak import schedule
from tests.soak.__main__ import NAMES, parse_arguments
from tests.soak.program import Broken, Program, run_case, run_cases
from tests.soak.programs import PROGRAMS
from tests.support.programs import run

# The first cases of a program, or some of them. The kills have a test of their own.
CASES = {
    "interrupts": (0, 9, 33),
    "html": range(18),
    "damage": range(24),
    "spectra": range(3),
    "operations": range(12),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_first_cases(name, tmp_path):
    program = PROGRAMS[name](0, tmp_path)
    try:
        counts, failures = run_cases(program, iter(CASES[name]), lambda: True)
    finally:
        program.close()
    assert not failures, failures[0].trace
    assert counts["cases"] == len(CASES[name])
    assert program.judge(counts) is None
    assert counts[program.counted[0]] > 0


@pytest.mark.slow
def test_kills_from_the_command_line(tmp_path):
    """In a process of its own: one that has threads cannot be forked."""
    out = tmp_path / "soak.json"
    words = ["--only", "kills", "--seconds", "0", "--cases", "1", "--workers", "1"]
    done = run("-m", "tests.soak", *words, "--out", str(out), cwd=schedule.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["programs"]["kills"]["counts"]["kills"] > 0
    assert content["programs"]["kills"]["counts"]["runs"] == 1
    assert content["failures"] == []
    assert {"command", "seconds", "seed", "commit", "versions", "hardware"} <= content.keys()


class Fragile(Program):
    name = "fragile"
    counted = ("tries",)

    def count_cases(self):
        return 5

    def run(self, case, counts):
        counts["tries"] += 1
        if case == 3:
            raise Broken("three\nand more")


def test_a_failure_says_how_to_repeat_it(tmp_path):
    program = Fragile(7, tmp_path)
    failure = run_case(program, 3, Counter())
    assert failure.message == "Broken: three"
    assert failure.repeat == "python -m tests.soak --only fragile --seed 7 --case 3"
    counts, failures = run_cases(program, iter(range(100)), lambda: True)
    assert counts == {"tries": 5, "cases": 4}
    assert [found.case for found in failures] == [3]


def test_a_case_depends_on_its_seed_and_number_alone(tmp_path):
    numbers = {Fragile(seed, tmp_path).chance(case).random() for seed in (0, 1) for case in (0, 1)}
    assert len(numbers) == 4
    assert Fragile(0, tmp_path).chance(1).random() in numbers


def test_every_program_can_be_chosen():
    assert tuple(PROGRAMS) == NAMES
    assert all(PROGRAMS[name].counted for name in NAMES)
    with pytest.raises(SystemExit):
        parse_arguments(["--case", "1"])


def test_the_published_hour():
    """What docs/trust.md says is what results/soak.json holds: one hour, all bars, no failure."""
    root = Path(__file__).parents[2]
    found = json.loads((root / "results/soak.json").read_text())
    assert found["failures"] == []
    assert found["seconds"] >= 3590
    assert found["programs"]["interrupts"]["complete"]
    page = (root / "docs/trust.md").read_text()
    for program, name, least in (
        ("kills", "kills", 500),
        ("damage", "damaged files", 1_000),
        ("operations", "sequences", 5_000),
        ("spectra", "ends", 10_000),
        ("interrupts", "positions", 1),
    ):
        count = found["programs"][program]["counts"][name]
        assert count >= least
        assert f"{count:,}" in page
