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
from parts import PARTS

SOURCE = Path(neumann.__file__).parent

# part, file, what is there, what the mutant has instead
MUTANTS = [
    ("warmup", "phases.py", "if t <= 0:", "if t < 0:"),
    ("warmup", "phases.py", "keep=1.0, gain=0.0", "keep=1.0, gain=lr"),
    ("warmup", "phases.py", "push=lr, decay=lr * decoupled_decay, follow=1.0", "push=lr, decay=lr * decoupled_decay, follow=average"),
    ("reset", "phases.py", "Phase.RESET if self.next_reset(t) == t else", "Phase.ITERATE if t > 1 else"),
    ("reset", "phases.py", "keep=0.0, gain=lr", "keep=momentum, gain=lr"),
    ("reset", "phases.py", "carry=0.0, push=0.0", "carry=0.0, push=lr"),
    ("growth", "phases.py", "self.reset_growth**index", "1.0**index"),
    ("growth", "phases.py", "+ self._interval(len(self._resets) - 1)", "+ self._interval(len(self._resets))"),
    ("momentum", "phases.py", "min(peak, 1 - 1 / (1 + t)) if t > 0 else 0.0", "peak"),
    ("momentum", "phases.py", "1 - 1 / (1 + t)", "1 - 1 / (2 + t)"),
    ("momentum", "phases.py", "carry=momentum", "carry=1.0"),
    ("cubic", "distance.py", "attraction = cubic * distance", "attraction = 0.0 * distance"),
    ("cubic", "distance.py", "attraction = cubic * distance", "attraction = cubic * distance**2"),
    ("repulsive", "distance.py", "return attraction - repulsion(", "return attraction + repulsion("),
    ("repulsive", "distance.py", "repulsive / safe**3", "repulsive / safe**2"),
    ("repulsive", "distance.py", "if repulsive == 0:", "if True:"),
    ("bound", "distance.py", "if bounded:", "if False:"),
    ("bound", "distance.py", "** (1 / 3)", "** (1 / 2)"),
    ("bound", "distance.py", "(1 - momentum)", "1.0"),
    ("average", "phases.py", "follow=average,", "follow=1.0,"),
    ("average", "update.py", "torch._foreach_mul_(offset, row.follow)", "pass"),
    ("correction", "evaluation.py", "return evaluation_weights(w, local(state[ITERATE]), state[MOMENTUM])", "return w.clone()"),
    ("correction", "evaluation.py", "w.copy_(evaluation_weights(w, m, state[MOMENTUM]))", "pass"),
    ("correction", "update.py", "- momentum * iterate.to(wide)", "+ momentum * iterate.to(wide)"),
    ("correction", "execution.py", "work.momentum.fill_(momentum)", "work.momentum.fill_(0.9)"),
    ("decay", "execution.py", "l2 = 0.0 if decoupled else decay", "l2 = 0.0"),
    ("decay", "update.py", "gradients, weights, alpha=weight_decay)", "gradients, weights, alpha=-weight_decay)"),
    ("decoupled_decay", "update.py", "(row.push, d), (row.decay, w)", "(row.push, d), (0.0, w)"),
    ("decoupled_decay", "execution.py", "shared.average, decay if decoupled else 0.0", "shared.average, 0.0"),
    ("decoupled_decay", "execution.py", "l2 = 0.0 if decoupled else decay", "l2 = decay"),
    ("distance", "execution.py", "if work.part == part:", "if work.part == part and not offsets:"),
    ("distance", "update.py", "d = list(torch._foreach_mul(offset, force.to(d[0])))", "d = list(torch._foreach_mul(offset, 0.0))"),
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


def test_an_unbroken_copy_passes(tmp_path):
    with mutant(tmp_path, "phases.py", "if t <= 0:", "if t <= 0:") as copy:
        for check in PARTS.values():
            check(copy, foreach=True)
