"""Several optimizers of one model, each with parameters of its own, that are used as one."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class JoinedOptimizer(Optimizer):
    """Steps its parts in turn. Groups and state are theirs, one part's after the other's.

    The parts share the dicts of the groups, so a schedule may set `lr` in them, and they share one
    `state`, so that a checkpoint is that of any other optimizer. No groups can be added later.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        # torch copies the groups, and refuses parameters that two parts have.
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = tuple(parts)
        self.param_groups = groups
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let the parts use the groups and the state of the whole."""
        groups = iter(self.param_groups)
        for part in self.parts:
            own = list(islice(groups, len(part.param_groups)))
            part.__setstate__({"state": self.state, "param_groups": own})
