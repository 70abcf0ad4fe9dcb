"""Calling a function of the user, named as MODULE:FUNCTION on the command line.

The module may also lie in the working folder. An exception in it becomes a UsageError that says
what was raised and in which line, because only the user can fix it.
"""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch

import neumann
from neumann.lab.errors import UsageError, require, shorten, unknown

_LIBRARIES = [Path(package.__path__[0]) for package in (neumann, torch)]


def call_user_function(entry: str, option: str) -> Any:
    """Return what MODULE:FUNCTION returns. `option` named it and is named in error messages."""
    name, _, attribute = entry.partition(":")
    require(bool(name and attribute), f"{option} must be MODULE:FUNCTION, got {entry!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
        function = getattr(module, attribute, None)
        if callable(function):
            return function()
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise UsageError(f"{option} {entry}: {describe_user_error(error)}") from error
        near = sorted(path.stem for path in Path.cwd().glob("*.py"))
        require(bool(near), f"{option}: there is no module {name}, here or installed")
        raise unknown(f"module of {option}", name, near) from error
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == name)
    ]
    raise unknown(f"function of {name}", attribute, functions)


def describe_user_error(error: Exception) -> str:
    """Say what was raised, and in which line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if _is_user_file(f.filename)), frames[-1])
    return f"{type(error).__name__}: {shorten(error)} ({Path(last.filename).name}:{last.lineno})"


def raised_in_user_code(error: Exception) -> bool:
    return any(_is_user_file(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _is_user_file(file: str) -> bool:
    """Whether the file is not of this package, torch or Python itself."""
    path = Path(file)
    if file.startswith("<") or any(path.is_relative_to(folder) for folder in _LIBRARIES):
        return False
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return installed or not path.is_relative_to(sysconfig.get_path("stdlib"))
