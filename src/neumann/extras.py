"""How to install what an extra adds. The package is on no index yet, so it is from a clone."""


def describe_install(extra: str) -> str:
    """The command, for a message."""
    return f'`pip install ".[{extra}]"` in a clone of Neumann'
