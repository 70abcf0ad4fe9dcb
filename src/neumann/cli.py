"""The command `neumann`: a thin door to the lab.

Exit codes: 0 done; 2 wrong usage or a file that cannot be used, in one line, with nothing written;
3 the training diverged; 130 or 143 stopped by SIGINT or SIGTERM, saved, and resumable.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from neumann.lab.config import Settings

USAGE, DIVERGED = 2, 3

_Config = TypeVar("_Config", bound="Settings")

HELP = """\
usage: neumann COMMAND [flags]

  train     train one network with one optimizer
  compare   train several optimizers over the same seeds and say how they differ

neumann COMMAND --help lists the flags of a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else USAGE
    try:
        from neumann.lab.errors import UsageError, unknown
        from neumann.lab.files import StorageError
        from neumann.lab.interruption import Interrupted
        from neumann.lab.training import Diverged
    except ImportError as error:
        return _fail(
            f"the lab needs more than torch: `pip install neumann-optimizer[lab]` ({error})"
        )
    try:
        commands = {"train": _train, "compare": _compare}
        if words[0] not in commands:
            raise unknown("command", words[0], commands)
        return commands[words[0]](words[1:])
    except (UsageError, StorageError) as error:
        return _fail(str(error))
    except Diverged as error:
        return _fail(str(error), DIVERGED)
    except Interrupted as stopped:
        return _fail(str(stopped), stopped.exit_code)


def _train(words: list[str]) -> int:
    from neumann.lab import config as configs
    from neumann.lab.processes import Process
    from neumann.lab.progress import shown
    from neumann.lab.training import Training

    config = _parsed(configs.TrainConfig, words, "train").resolve()
    process = Process()
    training = Training(config, process)
    folder = config.output or configs.fresh_folder(config)
    with shown(training, process) as observe:
        summary = training.run(folder, observe)
    print(f"accuracy {summary.accuracy:.2f} % after {summary.steps} steps: {folder}")
    return 0


def _compare(words: list[str]) -> int:
    from rich.console import Console

    from neumann.lab import config as configs
    from neumann.lab.compare import compare
    from neumann.lab.progress import counted
    from neumann.lab.tables import table

    config = _parsed(configs.CompareConfig, words, "compare")
    config.check()
    folder = config.output or configs.fresh_folder(config)
    with counted(len(config.arms) * config.seeds) as done:
        comparison = compare(config, folder, done=done)
    console = Console()
    console.print(table(comparison))
    for sentence in comparison.verdicts():
        console.print(sentence, highlight=False, soft_wrap=True)
    console.print(f"records: {folder}", highlight=False, soft_wrap=True)
    return 0


def _parsed(kind: type[_Config], words: list[str], command: str) -> _Config:
    """The command's settings: its defaults, those of a --config file, and flags, in this order."""
    import tyro

    from neumann.lab import config as configs
    from neumann.lab.errors import UsageError

    defaults = kind()
    if "--config" in words:
        at = words.index("--config")
        if at + 1 == len(words):
            raise UsageError("--config needs a file")
        defaults = configs.from_file(Path(words[at + 1]), kind)
        words = [*words[:at], *words[at + 2 :]]
    return tyro.cli(kind, args=words, default=defaults, prog=f"neumann {command}")


def _fail(message: str, code: int = USAGE) -> int:
    print(f"neumann: {message}", file=sys.stderr)
    return code
