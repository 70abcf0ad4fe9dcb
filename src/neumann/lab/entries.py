"""What a function of the user's gives, named as MODULE:FUNCTION on a command line.

The module is looked for in the working folder too. Whatever goes wrong in it is a UsageError that
says what was raised and where: the user's code is theirs to mend.
"""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import neumann
from neumann.lab.errors import UsageError, shorten, unknown

_LIBRARIES = [Path(package.__path__[0]) for package in (neumann, torch)]


def made_by(entry: str, option: str) -> Any:
    """What MODULE:FUNCTION returns, which may be a class; `option` is where it was named."""
    function = _function(entry, option)
    try:
        return function()
    except Exception as error:
        raise UsageError(f"{option} {entry}: {told(error)}") from error


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
        raise UsageError(f"{option} {entry}: {told(error)}") from error
    except Exception as error:
        raise UsageError(f"{option} {entry}: {told(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == name)
        ]
        raise unknown(f"function of {name}", attribute, functions)
    function: Callable[[], Any] = found
    return function


def told(error: Exception) -> str:
    """What was raised, and the line of the user's code that was the last to run."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if _is_users(f.filename)), frames[-1])
    return f"{type(error).__name__}: {shorten(error)} ({Path(last.filename).name}:{last.lineno})"


def in_users_code(error: Exception) -> bool:
    """Whether it was raised by the user's code, or by what that called."""
    return any(_is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _is_users(file: str) -> bool:
    """Whether code is neither ours nor torch's nor Python's own."""
    path = Path(file)
    if file.startswith("<") or any(path.is_relative_to(folder) for folder in _LIBRARIES):
        return False
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return installed or not path.is_relative_to(sysconfig.get_path("stdlib"))
