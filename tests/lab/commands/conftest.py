"""Fixtures for tests of the command line."""

import pytest


@pytest.fixture
def terminal(monkeypatch):
    """Let rich take standard output for a terminal of a given width, without colors."""

    def make(width):
        for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "LINES": "25"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("COLUMNS", str(width))

    return make
