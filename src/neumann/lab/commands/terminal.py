"""Tables and sentences on standard output.

In a terminal they fit its width: a table that is too wide leaves out columns and says so. In a file
or a pipe, lines are as long as they need to be.
"""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from neumann.lab.report.formatting import format_list

WIDEST = 10_000  # characters of a line


def open_console() -> Console:
    """Standard output, which shows text as it is: without markup, colors or emoji."""
    return Console(highlight=False, markup=False, emoji=False)


def make_table(*titles: str | Text, left: int = 1) -> Table:
    """An empty table without lines; columns after the first `left` are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < left else "right", no_wrap=True)
    return table


def print_table(table: Table, sentences: Sequence[str] = (), spare: Sequence[int] = ()) -> None:
    """Print a table and then sentences.

    `spare` are columns that a narrow terminal may leave out, the least important first.
    """
    console = open_console()
    if console.is_terminal:
        table, left_out = fit_table(table, spare, console)
        if left_out:
            sentences = [f"no room for {format_list(left_out)}: see the report", *sentences]
    else:
        console.width = max(console.width, measure_table(table, console))
    console.print(table)
    print_sentences(sentences)


def print_names(lines: Sequence[str]) -> None:
    """Print lines that the terminal breaks where it must, so that they can be copied whole."""
    for line in lines:
        open_console().print(line, soft_wrap=True)


def print_sentences(sentences: Sequence[str]) -> None:
    """Print lines, which break between words in a terminal."""
    console = open_console()
    for sentence in sentences:
        width = console.width if console.is_terminal else WIDEST
        # Flags such as --lr stay whole.
        lines = textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)
        console.print("\n".join(lines), soft_wrap=True)


def fit_table(table: Table, spare: Sequence[int], console: Console) -> tuple[Table, list[str]]:
    """Leave out as few columns as possible. Returns the titles of those, too.

    If the others still need more room, words break in the columns that are left-aligned.
    """
    left_out: list[int] = []
    fitting = table
    while measure_table(fitting, console) > console.width and len(left_out) < len(spare):
        left_out = list(spare[: len(left_out) + 1])
        fitting = _leave_out(table, left_out)
    if measure_table(fitting, console) > console.width:
        for column in fitting.columns:
            column.no_wrap, column.overflow = column.justify == "right", "fold"
    return fitting, [_get_title(table, index) for index in sorted(left_out)]


def _get_title(table: Table, index: int) -> str:
    """The title of a column in one line, without its unit."""
    return " ".join(str(table.columns[index].header).split()).partition(",")[0]


def _leave_out(table: Table, left_out: Sequence[int]) -> Table:
    kept = [column for index, column in enumerate(table.columns) if index not in left_out]
    smaller = Table(box=None, pad_edge=False, show_header=table.show_header)
    for column in kept:
        smaller.add_column(column.header, justify=column.justify, no_wrap=True)
    for cells in zip(*(column.cells for column in kept), strict=True):
        smaller.add_row(*cells)
    return smaller


def measure_table(table: Table, console: Console) -> int:
    """The width of the table if no cell breaks."""
    wide = console.options.update_width(WIDEST)
    return console.measure(table, options=wide).maximum
