"""Short names of arms in the terminal, as on the page of the report, and what they stand for.

The arms of a sweep have the same name in the search and in the comparison of the winners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from neumann.lab.contenders import Contender, get_name
from neumann.lab.report.arm_names import shorten_names
from neumann.lab.studies.lr_sweep import ArmSearch
from neumann.lab.studies.results import Comparison


def name_searched(found: Sequence[ArmSearch]) -> dict[str, str]:
    """The short names of a sweep's arms, by their names without a learning rate."""
    return shorten_names([arm.name for arm in found])


def name_rows(comparison: Comparison, found: Sequence[ArmSearch] = ()) -> Comparison:
    """Give the arms their short names; `found` are all arms of the sweep whose winners they are."""
    if found:
        of_search = name_searched(found)
        names = {row.text: of_search[_find_search(row.text, found).name] for row in comparison.rows}
    else:
        names = shorten_names([row.text for row in comparison.rows])
    rows = tuple(replace(row, arm=names[row.text]) for row in comparison.rows)
    return replace(comparison, rows=rows)


def _find_search(winner: str, found: Sequence[ArmSearch]) -> ArmSearch:
    """The searched arm that is this one at its learning rate."""
    wanted = Contender.parse(winner)
    lr = wanted.arm.lr()
    wanted = wanted.with_lr(lr)  # its numbers are written as those of the others
    return next(each for each in found if Contender.parse(each.arm).with_lr(lr) == wanted)


def list_full_names(comparison: Comparison) -> list[str]:
    """A line for each arm whose short name leaves something out."""
    return _list_longer({row.text: row.arm for row in comparison.rows})


def list_searched(found: Sequence[ArmSearch]) -> list[str]:
    return _list_longer(name_searched(found))


def _list_longer(names: Mapping[str, str]) -> list[str]:
    # An arm with a name of its own is known by it.
    return [f"{short} = {text}" for text, short in names.items() if short != get_name(text)]
