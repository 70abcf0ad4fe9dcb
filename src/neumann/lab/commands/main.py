"""Run the command `neumann` and turn errors into exit codes.

    0          done
    1          a worker process died, or memory ran out
    2          wrong usage, or a file that cannot be read or written
    3          the training diverged
    130, 143   stopped by SIGINT or SIGTERM; saved, and can be resumed
    141        standard output was closed

Errors are one line. Only a bug in this package leaves a traceback.
"""

import os
import sys
from collections.abc import Sequence

from neumann.extras import describe_install
from neumann.lab.commands.summaries import SUMMARIES, format_help
from neumann.lab.errors import UsageError, is_out_of_memory, unknown

CRASHED, USAGE, DIVERGED, INTERRUPTED, TERMINATED, BROKEN_PIPE = 1, 2, 3, 130, 143, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()  # a closed pipe raises here
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail("stopped by SIGINT", INTERRUPTED)


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        import neumann

        print(f"neumann {neumann.__version__}")
        return 0
    if words[:1] == ["help"] and not all(word.startswith("-") for word in words[2:]):
        return _fail(f"help explains one command at a time, got {' '.join(words[1:])!r}")
    helps = ("help", "-h", "--help")
    if not words or (words[0] in helps and (words[0] != "help" or words[-1] in helps)):
        print(format_help())
        return 0 if words else USAGE
    if words[0] == "help":
        words = [*words[1:], "--help"]
    try:
        if _answer_without_torch(*words):
            return 0
        from neumann.lab.commands.parser import run_command
    except ImportError as error:  # a package of the extra `lab` is missing
        advice = f"the command neumann needs the extra `lab`: {describe_install('lab')}"
        return _fail(f"{advice} ({error})")
    except UsageError as error:
        return _fail(str(error))
    from neumann.lab.storage.atomic_files import StorageError
    from neumann.lab.studies.lr_sweep import AllDivergedError
    from neumann.lab.studies.workers import CrashedError
    from neumann.lab.training.records import Diverged
    from neumann.lab.training.signals import Interrupted, Terminated, raise_on_sigterm

    try:
        with raise_on_sigterm():
            run_command(words)
        return 0
    except SystemExit:  # the help was printed
        return 0
    except (UsageError, StorageError) as error:
        return _fail(str(error))
    except (Diverged, AllDivergedError) as error:
        return _fail(str(error), DIVERGED)
    except CrashedError as error:
        return _fail(str(error), CRASHED)
    except Interrupted as error:
        return _fail(str(error), error.exit_code)
    except Terminated:
        return _fail("stopped by SIGTERM", TERMINATED)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        advice = "choose a smaller --model, --batch-size or --micro-batch-size"
        return _fail(f"there is not enough memory: {advice}", CRASHED)


def _answer_without_torch(command: str, *words: str) -> bool:
    """Print the help if a command line asks for it, and refuse wrong flags.

    Importing torch takes seconds, so it comes later, when there is something to train.
    """
    if command not in SUMMARIES:
        raise unknown("command", command, SUMMARIES)
    from neumann.lab.commands.flag_check import check_words
    from neumann.lab.commands.flag_help import print_help
    from neumann.lab.commands.flags import CONFIG, HELP

    if {*HELP.names}.isdisjoint(words):
        check_words(command, words)
        return False
    if any(word.partition("=")[0] in CONFIG.names for word in words):
        return False  # the file changes the defaults that the help shows
    print_help(command)
    return True


def _fail(message: str, code: int = USAGE) -> int:
    if os.environ.get("RANK", "0") == "0":  # other ranks would print the same
        # Names from files may hold control characters, which a terminal would obey.
        text = "".join(c if c.isprintable() else "\ufffd" for c in message)
        print(f"neumann: {text}", file=sys.stderr)
    return code
