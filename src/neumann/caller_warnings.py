"""Warnings that point at the line of the user's program that led to them."""

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

_OURS = (Path(__file__).parent / name for name in ("optim", "integrations", "spectrum"))
_FOLDERS = (*_OURS, Path(torch.__file__).parent)
_INSIDE = (*(f"{folder}{os.sep}" for folder in _FOLDERS), contextlib.__file__)


def warn_caller(message: str) -> None:
    """Warn at the nearest line outside the library and torch; the lab counts as outside."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
