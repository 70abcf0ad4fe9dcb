"""Calling a function of the user, named as MODULE:FUNCTION, and refusing code that a file names.

What the command line names is the user's own choice. What a file names, which may be someone
else's, runs only if the user allows exactly that with --allow-code.

The module may also lie in the working folder, but installed ones come first. An exception in it
becomes a UsageError that says what was raised and in which line, because only the user can fix it.
"""

import importlib
import inspect
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import neumann
from neumann.lab.errors import UsageError, require, shorten, unknown

_LIBRARIES = [Path(package.__path__[0]) for package in (neumann, torch)]


def refuse_code(file: Path, named: Iterable[str], allowed: Collection[str]) -> None:
    """Raise a UsageError if a file names code that the user did not allow."""
    for code in named:
        advice = f"if you trust it, add --allow-code {shlex.quote(code)}"
        require(code in allowed, f"{file} names code to run, {code}; {advice}")


def call_user_function(entry: str, option: str) -> Any:
    """Return what MODULE:FUNCTION returns. `option` named it and is named in error messages."""
    name, _, attribute = entry.partition(":")
    require(bool(name and attribute), f"{option} must be MODULE:FUNCTION, got {entry!r}")
    try:
        module = _import_module(name)
        function = getattr(module, attribute, None)
        if callable(function):
            return function()
    except (Exception, SystemExit) as error:  # sys.exit in a user's code is a failure too
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise UsageError(f"{option} {entry}: {describe_user_error(error)}") from error
        _refuse_shadowed(name, option)
        near = sorted(path.stem for path in Path.cwd().glob("*.py"))
        require(bool(near), f"{option}: there is no module {name}, here or installed")
        raise unknown(f"module of {option}", name, near) from error
    _refuse_shadowed(name, option)
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == name)
    ]
    raise unknown(f"function of {name}", attribute, functions)


def _import_module(name: str) -> ModuleType:
    """Import a module, from the working folder only if there is no other of that name.

    The folder may be someone else's, with files named like packages that we import later. So it
    joins the path, at its end, only once the user has named a module in it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if here in sys.path or not f"{name}.".startswith(f"{error.name}."):
            raise
        sys.path.append(here)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _refuse_shadowed(name: str, option: str) -> None:
    """Raise a UsageError if Python found another module than the working folder's."""
    mine = Path.cwd() / f"{name.replace('.', os.sep)}.py"
    top = name.partition(".")[0]
    found = getattr(sys.modules.get(name) or sys.modules.get(top), "__file__", None)
    if found is not None and mine.is_file() and not mine.samefile(found):
        raise UsageError(
            f"{option}: Python imports another module {top}, {found}; rename {mine.name}"
        )


def describe_user_error(error: BaseException) -> str:
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
