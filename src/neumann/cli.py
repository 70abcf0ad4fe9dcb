"""The command `neumann`: a thin door to the lab.

Exit codes: 0 done; 2 wrong usage or a file that cannot be used, in one line, with nothing written;
3 the training diverged; 130 or 143 stopped by SIGINT or SIGTERM, saved, and resumable.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE, DIVERGED = 2, 3

HELP = """\
usage: neumann COMMAND [flags]

  train     train one network with one optimizer

neumann COMMAND --help lists the flags of a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else USAGE
    try:
        from neumann.lab.errors import UsageError
        from neumann.lab.files import StorageError
        from neumann.lab.interruption import Interrupted
        from neumann.lab.training import Diverged
    except ImportError as error:
        return _fail(
            f"the lab needs more than torch: `pip install neumann-optimizer[lab]` ({error})"
        )
    try:
        if words[0] == "train":
            return _train(words[1:])
        raise UsageError(f"unknown command {words[0]!r}; known are train")
    except (UsageError, StorageError) as error:
        return _fail(str(error))
    except Diverged as error:
        return _fail(str(error), DIVERGED)
    except Interrupted as stopped:
        return _fail(str(stopped), stopped.exit_code)


def _train(words: list[str]) -> int:
    import tyro

    from neumann.lab import config as configs
    from neumann.lab.processes import Process
    from neumann.lab.progress import shown
    from neumann.lab.training import Training

    defaults = configs.TrainConfig()
    if "--config" in words:
        at = words.index("--config")
        if at + 1 == len(words):
            return _fail("--config needs a file")
        defaults = configs.from_file(Path(words[at + 1]))
        del words[at : at + 2]
    config = tyro.cli(
        configs.TrainConfig, args=words, default=defaults, prog="neumann train"
    ).resolve()
    process = Process()
    training = Training(config, process)
    folder = config.output or configs.fresh_folder(config)
    with shown(training, process) as observe:
        summary = training.run(folder, observe)
    print(f"accuracy {summary.accuracy:.2f} % after {summary.steps} steps: {folder}")
    return 0


def _fail(message: str, code: int = USAGE) -> int:
    print(f"neumann: {message}", file=sys.stderr)
    return code
