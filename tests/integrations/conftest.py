"""A fixture that imports an example script by name."""

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)  # it may leave files here
    return importlib.import_module
