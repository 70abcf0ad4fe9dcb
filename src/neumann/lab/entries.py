"""What a function of the user's gives, named as MODULE:FUNCTION on a command line.

The module is looked for in the working folder too. Whatever goes wrong in it is a UsageError that
says what was raised and where: the user's code is theirs to mend.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neumann.lab.errors import UsageError, shorten, unknown


def made_by(entry: str, option: str) -> Any:
    """What MODULE:FUNCTION returns, which may be a class; `option` is where it was named."""
    function = _function(entry, option)
    try:
        return function()
    except Exception as error:
        raise UsageError(f"{option} {entry}: {_told(error)}") from error


def _function(entry: str, option: str) -> Callable[[], Any]:
    name, colon, attribute = entry.partition(":")
    if not (name and colon and attribute):
        raise UsageError(f"{option} must be MODULE:FUNCTION, got {entry!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            near = sorted(path.stem for path in Path.cwd().glob("*.py"))
            if near:
                raise unknown(f"module of {option}", name, near) from error
            raise UsageError(f"{option}: there is no module {name}, here or installed") from error
        raise UsageError(f"{option} {entry}: {_told(error)}") from error
    except Exception as error:
        raise UsageError(f"{option} {entry}: {_told(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown(f"function of {name}", attribute, functions)
    function: Callable[[], Any] = found
    return function


def _told(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {shorten(error)} ({Path(last.filename).name}:{last.lineno})"
