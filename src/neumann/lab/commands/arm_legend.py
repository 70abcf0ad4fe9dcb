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
        texts = [row.text for row in comparison.rows]
        # The name of an arm may itself end like that of one at a learning rate, "a at 0.1".
        keys = {text: (get_name(text), Contender.parse(text).name_without_lr) for text in texts}
        names = {
            text: next((of_search[key] for key in found_keys if key in of_search), found_keys[0])
            for text, found_keys in keys.items()
        }
    else:
        names = shorten_names([row.text for row in comparison.rows])
    rows = tuple(replace(row, arm=names[row.text]) for row in comparison.rows)
    return replace(comparison, rows=rows)


def list_full_names(comparison: Comparison) -> list[str]:
    """A line for each arm whose short name leaves something out."""
    return _list_longer({row.text: row.arm for row in comparison.rows})


def list_searched(found: Sequence[ArmSearch]) -> list[str]:
    return _list_longer(name_searched(found))


def _list_longer(names: Mapping[str, str]) -> list[str]:
    # An arm with a name of its own is known by it.
    return [f"{short} = {text}" for text, short in names.items() if short != get_name(text)]
