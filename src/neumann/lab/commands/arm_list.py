"""`--opt help` and `--arms help`: the optimizers of the lab, a line each."""

from collections.abc import Sequence
from importlib.util import find_spec

from rich.text import Text

from neumann.lab.commands.terminal import make_table, print_table
from neumann.lab.contenders import get_optimizer_name
from neumann.lab.errors import UsageError, find_near_names, unknown
from neumann.lab.optimizers.arm_recipes import RECIPES

HELP = "help"
NOTES = (
    "",
    "lr is the default learning rate. Constructor options follow a colon, as in",
    "neumann-spectral:weight_decay=auto,lr=0.03",
)


def check_optimizer_names(flag: str, arms: Sequence[str]) -> None:
    """Raise a UsageError for an unknown optimizer, and SystemExit for the arm `help`.

    The list is printed for `help`, and before the error if no optimizer has a similar name.
    """
    names = [get_optimizer_name(arm) for arm in arms]
    if HELP in names:
        print_arms()
        raise SystemExit
    for name in names:
        if name not in RECIPES and not find_near_names(name, list(RECIPES)):
            print_arms()
            raise UsageError(f"{flag}: unknown optimizer {name!r}; choose one of these")
        if name not in RECIPES:
            raise unknown("optimizer", name, RECIPES)


def print_arms() -> None:
    table = make_table("optimizer", "lr", "", left=1)
    table.columns[2].justify = "left"
    for name, recipe in RECIPES.items():
        missing = recipe.package is not None and find_spec(recipe.package) is None
        needs = f" (not installed: extra {recipe.extra})" if missing else ""
        table.add_row(*map(Text, (name, f"{recipe.lr:g}", recipe.about + needs)))
    print_table(table, NOTES)
