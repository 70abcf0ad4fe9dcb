"""What this installation's Triton can do with a kernel. Importing this needs torch alone."""

from functools import cache
from typing import Any


def is_interpreted(kernel: Any) -> bool:
    """Whether TRITON_INTERPRET=1 was set when Triton was imported."""
    from triton.runtime import JITFunction

    return not isinstance(kernel, JITFunction)


def launches_compiled(kernel: Any) -> bool:
    """Whether what Triton compiled can be launched directly, with all arguments and constants.

    It spares the host most of a launch. Before Triton 3.3 a compiled kernel takes no constants.
    """
    return not is_interpreted(kernel) and _find_version() >= (3, 3)


@cache
def _find_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
