"""What the tests of reports share."""

import pytest

from neumann.lab import records


@pytest.fixture(autouse=True, scope="module")
def known_environment():
    """Looked up once: it asks git, and there are hundreds of runs."""
    found = records.environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "environment", lambda: found)
        yield
