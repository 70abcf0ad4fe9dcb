"""Counts the operations that torch dispatches."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        self.found[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def count_operations(call: Callable[[], Any]) -> Counter[str]:
    """How often `call` dispatches each operation, such as "aten::copy_"."""
    with _Counting() as counting:
        call()
    return counting.found
