"""The command `neumann`: a thin door to the lab and its report.

Exit codes: 0 done; 1 a process that trained died; 2 wrong usage or a file that cannot be used,
with nothing written; 3 the training diverged; 130 or 143 stopped by SIGINT or SIGTERM, saved, and
resumable. Errors are one line; only a fault of ours leaves a traceback.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neumann.lab.config import TrainConfig
    from neumann.lab.processes import Process
    from neumann.lab.studies import CompareConfig

CRASHED, USAGE, DIVERGED, BROKEN_PIPE = 1, 2, 3, 141

HELP = """\
usage: neumann COMMAND [flags]

  train     train one network with one optimizer
  compare   train several optimizers over the same seeds and say how they differ
  sweep     choose the learning rate of each on held-out data, then compare
  spectrum  the extreme curvature of a checkpoint's loss, or of your own model's, and its density
  report    make a page with pictures from the folder of any of these
  demo      compare five optimizers on scikit-learn's digits, in two minutes

neumann COMMAND --help lists the flags of a command; neumann --version says which this is."""

REPORT_HELP = """\
usage: neumann report FOLDER

Make one HTML page, and pictures, of what a run, a comparison or a sweep has recorded in its folder;
they are written into it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except BrokenPipeError:  # `| head` has seen enough
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail("stopped by SIGINT", 130)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else USAGE
    if words[0] == "--version":
        import neumann

        print(f"neumann {neumann.__version__}")
        return 0
    try:
        import neumann.lab.flags
        import neumann.lab.progress  # they need what may be missing
        from neumann.lab.errors import UsageError, unknown
        from neumann.lab.files import StorageError
        from neumann.lab.interruption import Interrupted, Terminated, terminable
        from neumann.lab.outcome import Diverged
        from neumann.lab.sweep import AllDivergedError
        from neumann.lab.workers import CrashedError
    except ImportError as error:
        return _fail(f"the lab needs more than torch: {_hint(error)}")
    commands = {
        "train": _train,
        "compare": _compare,
        "sweep": _sweep,
        "spectrum": _spectrum,
        "report": _report,
        "demo": _demo,
    }
    try:
        if words[0] not in commands:
            raise unknown("command", words[0], commands)
        with terminable():
            commands[words[0]](words[1:])
        return 0
    except (UsageError, StorageError) as error:
        return _fail(str(error))
    except (Diverged, AllDivergedError) as error:
        return _fail(str(error), DIVERGED)
    except CrashedError as error:
        return _fail(str(error), CRASHED)
    except Interrupted as stopped:
        return _fail(str(stopped), stopped.exit_code)
    except Terminated:
        return _fail("stopped by SIGTERM", 143)
    except SystemExit as left:  # after --help
        return left.code if isinstance(left.code, int) else USAGE


# ---------------------------------------------------------------------- the commands


def _train(words: list[str]) -> None:
    from neumann.lab.config import TrainConfig
    from neumann.lab.flags import parsed
    from neumann.lab.processes import expected_ranks, joined

    config = parsed(TrainConfig, words, "train").resolve(expected_ranks())
    with joined() as process:
        _train_together(config, process)


def _train_together(config: "TrainConfig", process: "Process") -> None:
    """A function of its own, so that the training is gone before the processes part."""
    from neumann.lab.naming import fresh_folder
    from neumann.lab.processes import gathered
    from neumann.lab.progress import shown
    from neumann.lab.training import Training

    training = Training(config, process)
    # All write to the folder that the first has found to be new.
    folder = gathered(config.output or fresh_folder(config.title), process)[0]
    with shown(training, process) as observe:
        summary = training.run(folder, observe)
    if process.leads:
        took = f"{summary.seconds:.1f} s of training"
        if summary.compile_seconds:
            took += f" and {summary.compile_seconds:.1f} s of compilation"
        print(f"accuracy {summary.accuracy:.2f} % after {summary.steps} steps, {took}: {folder}")


def _compare(words: list[str]) -> None:
    from neumann.lab.flags import parsed
    from neumann.lab.naming import fresh_folder
    from neumann.lab.studies import CompareConfig

    _alone("compare")
    config = parsed(CompareConfig, words, "compare")
    _show_comparison(config, config.output or fresh_folder(config.title))


def _demo(words: list[str]) -> None:
    import torch

    from neumann.lab.demo import DemoConfig
    from neumann.lab.flags import parsed

    _alone("demo")
    demo = parsed(DemoConfig, words, "demo")
    torch.set_num_threads(1)
    _show_comparison(demo.comparison(), demo.folder())


def _alone(command: str) -> None:
    """Refuse torchrun for what has its own way to train side by side."""
    from neumann.lab.errors import UsageError
    from neumann.lab.processes import expected_ranks

    if expected_ranks() > 1:
        raise UsageError(
            f"neumann {command} is one process: start it without torchrun; --jobs trains side by "
            "side"
        )


def _show_comparison(config: "CompareConfig", folder: Path) -> None:
    from neumann.lab.compare import compare
    from neumann.lab.progress import watched
    from neumann.lab.tables import print_table, table

    with watched(config.epochs) as watch:
        comparison = compare(config, folder, watch)
    print_table(table(comparison), [*comparison.verdicts(), *comparison.notes()])
    _print_places(folder)


def _sweep(words: list[str]) -> None:
    from neumann.lab import sweep
    from neumann.lab.flags import parsed
    from neumann.lab.naming import fresh_folder
    from neumann.lab.progress import watched
    from neumann.lab.studies import SweepConfig
    from neumann.lab.tables import print_table, search_notes, search_table, table

    _alone("sweep")
    config = parsed(SweepConfig, words, "sweep")
    folder = config.output or fresh_folder(config.title)
    with watched(config.search_epochs or config.epochs, "search") as watch:
        found = sweep.search(config, folder, watch)
    print_table(search_table(found), [*search_notes(found), ""])
    with watched(config.epochs, "final") as watch:
        comparison = sweep.final(config, folder, found, watch)
    print_table(table(comparison), [*comparison.verdicts(), *comparison.notes()])
    _print_places(folder)


def _spectrum(words: list[str]) -> None:
    from neumann.lab import spectrum_command, spectrum_table
    from neumann.lab.flags import parsed
    from neumann.lab.progress import counted
    from neumann.lab.tables import print_table

    config = parsed(spectrum_command.SpectrumConfig, words, "spectrum")
    record = spectrum_command.measured(config, counted)
    print_table(spectrum_table.ends_table(record), [""])
    print_table(spectrum_table.coefficients_table(record), ["", *spectrum_table.sentences(record)])
    spectrum_command.write(record, config.file)
    print(f"record: {config.file}", flush=True)
    if config.density:
        from neumann.report import write_density

        print(f"plot: {write_density(config.file)}")


def _report(words: list[str]) -> None:
    from neumann.lab.errors import UsageError

    if words and words[0] in ("-h", "--help"):
        print(REPORT_HELP)
        return
    if len(words) != 1 or words[0].startswith("-"):
        raise UsageError(f"usage: neumann report FOLDER; got {' '.join(words) or 'no folder'}")
    try:
        from neumann.report import write_report
    except ImportError as error:
        raise UsageError(f"the report needs more than torch: {_hint(error)}") from error
    print(write_report(Path(words[0])))


def _print_places(folder: Path) -> None:
    """Where the records are, and the report, which is written now."""
    from neumann.lab.errors import UsageError

    print(f"records: {folder}", flush=True)
    try:
        from neumann.report import write_report

        print(f"report: {write_report(folder)}")
    except (ImportError, UsageError) as error:
        print(f"neumann: no report: {_hint(error)}", file=sys.stderr)


def _hint(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"`pip install neumann-optimizer[lab]` ({error})"
    return str(error)


def _fail(message: str, code: int = USAGE) -> int:
    if os.environ.get("RANK", "0") == "0":  # the others of torchrun would say the same
        print(f"neumann: {message}", file=sys.stderr)
    return code
