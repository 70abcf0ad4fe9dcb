"""How to install an extra. The package is not on PyPI yet, so it is installed from a clone."""


def describe_install(extra: str) -> str:
    """What to do, for the end of a message."""
    return f'run `pip install ".[{extra}]"` in a clone of Neumann'
