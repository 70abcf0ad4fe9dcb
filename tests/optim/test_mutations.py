"""Break the optimizer, one line at a time: the check made for that part must notice.

A mutant is a copy of the package with one piece of source replaced. If the piece is no longer in
the source exactly once, the mutant is out of date and the test says so.
"""
# ruff: noqa: E501

import importlib
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import neumann
from tests.support.algorithm_checks import PARTS

SOURCE = Path(neumann.__file__).parent

# part, file, what is there, what the mutant has instead
MUTANTS = [
    ("warmup", "phases.py", "max(step - self.warmup_steps, 0)", "max(step + 1 - self.warmup_steps, 0)"),
    ("warmup", "phases.py", "gain=_choose(warming, 0.0, lr)", "gain=lr"),
    ("warmup", "phases.py", "follow=_choose(warming, 1.0,", "follow=_choose(False, 1.0,"),
    ("reset", "phases.py", "Phase.RESET if self.is_reset(now) else", "Phase.ITERATE if now > 1 else"),
    ("reset", "phases.py", "keep=_choose(warming, 1.0, carry)", "keep=_choose(warming, 1.0, momentum)"),
    ("reset", "phases.py", "push=_choose(resetting, 0.0, lr)", "push=lr"),
    ("growth", "phases.py", "reset_growth**index", "1.0**index"),
    ("growth", "phases.py", "reset_growth, len(times) - 1)", "reset_growth, len(times))"),
    ("momentum", "phases.py", "min(peak, ramp)", "peak"),
    ("momentum", "phases.py", "1 - 1 / (1 + t)", "1 - 1 / (2 + t)"),
    ("momentum", "phases.py", "_choose(resetting, 0.0, momentum)", "_choose(resetting, 0.0, 1.0)"),
    ("cubic", "distance.py", "attraction = options.cubic * distance", "attraction = 0.0 * distance"),
    ("cubic", "distance.py", "attraction = options.cubic * distance", "attraction = options.cubic * distance**2"),
    ("repulsive", "distance.py", "return attraction - repulsion(", "return attraction + repulsion("),
    ("repulsive", "distance.py", "options.repulsive / safe**3", "options.repulsive / safe**2"),
    ("repulsive", "distance.py", "if options.repulsive == 0:", "if True:"),
    ("bound", "distance.py", "if options.bounded:", "if False:"),
    ("bound", "distance.py", "** (1 / 3)", "** (1 / 2)"),
    ("bound", "distance.py", "(1 - momentum)", "1.0"),
    ("average", "phases.py", "_choose(resetting, 1.0, average)", "_choose(resetting, 1.0, 1.0)"),
    ("average", "backends/lists.py", "torch._foreach_mul_(offset, coefficients.follow)", "pass"),
    ("correction", "modes.py", "return _subtract_product(w, state[MOMENTUM], local_part(state[ITERATE]))", "return w.clone()"),
    ("correction", "modes.py", "local_part(p).copy_(compute_evaluation(local_part(state[WEIGHTS]), state))", "pass"),
    ("correction", "modes.py", "- factor * state.to(wide)", "+ factor * state.to(wide)"),
    ("correction", "backends/host.py", "group.momentum.fill_(momentum)", "group.momentum.fill_(0.9)"),
    ("decay", "backends/host.py", '0.0 if decoupled else own["weight_decay"]', "0.0"),
    ("decay", "backends/lists.py", "d = _add_product(d, w, coefficients.weight_decay)", "d = _add_product(d, w, -coefficients.weight_decay)"),
    ("decoupled_decay", "backends/lists.py", "(coefficients.shrink, w)", "(0.0, w)"),
    ("decoupled_decay", "backends/host.py", 'own["weight_decay"] if decoupled else 0.0', "0.0"),
    ("decoupled_decay", "backends/host.py", '0.0 if decoupled else own["weight_decay"]', 'own["weight_decay"]'),
    ("distance", "backends/host.py", "if group.sum_number == number:", "if group.sum_number == number and not offsets:"),
    ("distance", "backends/lists.py", "d = _add_product(d, offset, coefficients.force)", "d = _add_product(d, offset, 0.0)"),
]  # fmt: skip


@contextmanager
def mutant(folder: Path, file: str, old: str, new: str):
    """The Neumann class of a broken copy of the package; the real one is back afterwards."""
    shutil.copytree(SOURCE, folder / "neumann", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "neumann" / "optim" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new))
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("neumann").Neumann
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(saved)


def _ours(name: str) -> bool:
    return name == "neumann" or name.startswith("neumann.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "file", "old", "new"), MUTANTS, ids=[f"{m[0]}: {m[2]} → {m[3]}" for m in MUTANTS]
)
def test_the_check_notices(part, file, old, new, tmp_path):
    with mutant(tmp_path, file, old, new) as broken:
        assert broken is not neumann.Neumann
        with pytest.raises(AssertionError):
            PARTS[part](broken, foreach=True)


def test_every_part_has_a_mutant():
    assert {mutant[0] for mutant in MUTANTS} == set(PARTS)


@pytest.mark.slow
def test_an_unbroken_copy_passes(tmp_path):
    with mutant(tmp_path, "phases.py", "min(peak, ramp)", "min(peak, ramp)") as copy:
        for check in PARTS.values():
            check(copy, foreach=True)
