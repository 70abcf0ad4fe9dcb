"""What the tests of reports share."""

import pytest

from neumann.lab.report import drawing, result_picture
from neumann.lab.training import records
from tests.support.browser import start_browser


@pytest.fixture(autouse=True, scope="module")
def known_environment():
    """Look the environment up once: it runs git, and there are hundreds of runs."""
    found = records.describe_environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "describe_environment", lambda: found)
        yield


@pytest.fixture
def quick(monkeypatch):
    """Leave the pictures out; other tests draw them."""

    def draw(plot):
        return drawing.Picture("<svg></svg>", b"png")

    monkeypatch.setattr(drawing, "draw", draw)
    monkeypatch.setattr(result_picture, "draw_result", lambda chart: b"png")


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
