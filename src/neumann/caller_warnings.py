"""Warnings that point at the line of the user's program that led to them."""

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_OURS = (Path(__file__).parent / name for name in ("optim", "integrations", "spectrum"))
_FOLDERS = (*_OURS, Path(torch.__file__).parent)
_INSIDE = (*(f"{folder}{os.sep}" for folder in _FOLDERS), contextlib.__file__)


def warn_caller(message: str) -> None:
    """Warn at the nearest line outside the library and torch; the lab counts as outside."""
    level, _ = _find_caller()
    warnings.warn(message, UserWarning, stacklevel=level)


def locate_caller() -> tuple[str, int]:
    """The file and the number of that line."""
    _, frame = _find_caller()
    return frame.f_code.co_filename, frame.f_lineno


def _find_caller() -> tuple[int, FrameType]:
    """The frame of that line, and its stack level as seen from who calls this function."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level, frame
