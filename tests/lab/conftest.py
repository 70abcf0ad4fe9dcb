"""Fixtures for tests of the lab."""

import pytest


@pytest.fixture
def no_report(monkeypatch):
    """Do not draw the report's plots, which takes seconds."""
    monkeypatch.setattr("neumann.lab.report.write_report", lambda folder: folder / "report.html")
