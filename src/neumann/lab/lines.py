"""Where a line of a run goes: into the records, to whoever watches, and to TensorBoard."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from neumann.lab.records import Records
from neumann.lab.tensorboard import TensorBoard


@contextmanager
def written(
    records: Records, observe: Callable[[dict[str, Any]], None], step: int | None
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What takes a line everywhere; to TensorBoard from a step on, if one is given."""

    def write(line: dict[str, Any]) -> None:
        records.append(**line)
        observe(line)

    if step is None:
        yield write
        return
    with closing(TensorBoard(records.folder, step)) as board:

        def write_all(line: dict[str, Any]) -> None:
            write(line)
            board.write(line)

        yield write_all
