"""Training weights w and evaluation weights w − μm: which of them the parameters hold.

The optimizer moves the displaced weights w; what it has found so far is w − μm, with the μ of the
last completed step (in the warm-up m = 0, and the two are one). Subtracting μm and adding it again
would lose last bits, so evaluation mode keeps a copy of w, which goes into checkpoints too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from neumann.optim.checkpoint import CLOCK, ITERATE, MOMENTUM, OFFSET, WEIGHTS
from neumann.optim.shards import as_part_of, local
from neumann.optim.state import State
from neumann.optim.update import evaluation_weights


class TwoWeights(State):
    """The part of Neumann that switches its parameters between w and w − μm."""

    _checkpointing = False  # inside a block of that name

    @property
    def training(self) -> bool:
        """Whether the parameters hold w (training) or w − μm (evaluation).

        The group says so, and a copy of w that is kept somewhere: ZeroRedundancyOptimizer writes
        its own idea of the groups over ours.
        """
        _, state = next(iter(self._states()), (None, {}))
        return bool(self.param_groups[0]["training"]) and WEIGHTS not in state

    @torch.no_grad()
    def train(self, mode: bool = True) -> Self:
        """Put the training weights w back into the parameters, bit for bit; idempotent."""
        if mode == self.training:
            return self
        self._tie()
        states = list(self._states())
        if mode:
            self._restore(states)
        else:
            try:
                for p, state in states:
                    state[WEIGHTS] = p.detach().clone()
                    w, m = local(p), local(state[ITERATE])
                    w.copy_(evaluation_weights(w, m, state[MOMENTUM]))
            except BaseException:  # out of memory, an interrupt: no mixture of the two
                self._restore(states)
                raise
        for group in self.param_groups:
            group["training"] = mode
        if self._shards is not None:
            self._shards.reshard_models()
        return self

    def _restore(self, states: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Put w back. A parameter that came without a copy has m = 0, and holds w already."""
        for p, state in states:
            if WEIGHTS in state:
                local(p).copy_(local(state.pop(WEIGHTS)))
        self._watch.leave()

    def eval(self) -> Self:
        """Put the evaluation weights w − μm into the parameters; w is kept until :meth:`train`."""
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[Self]:
        """Evaluation weights for the length of a block; the mode before it comes back after it."""
        before = self.training
        self.eval()
        try:
            yield self
        finally:
            self.train(before)

    @contextmanager
    def checkpointing(self) -> Iterator[Self]:
        """Say that a state dict of the model taken in this block is meant to resume the run.

        Changes nothing but that :func:`neumann.guard` keeps silent.
        """
        before, self._checkpointing = self._checkpointing, True
        try:
            yield self
        finally:
            self._checkpointing = before

    def _holds_displaced_weights(self) -> bool:
        """Whether the parameters hold w where w − μm differs from it, unless that is meant."""
        displaced = int(self._scalars[CLOCK]) > self.param_groups[0]["warmup_steps"]
        return displaced and self.training and not self._checkpointing

    def eval_params(self) -> dict[str, Tensor] | list[Tensor]:
        """Copies of the evaluation weights w − μm, by name if the parameters were given with names.

        The model is not touched; fit for :func:`torch.func.functional_call`. Of sharded parameters
        they are sharded alike.
        """

        def evaluation(w: Tensor, state: dict[str, Any]) -> Tensor:
            return evaluation_weights(w, local(state[ITERATE]), state[MOMENTUM])

        return self._derived(evaluation)

    def average_params(self) -> dict[str, Tensor] | list[Tensor]:
        """Copies of the moving average v of the weights, as :meth:`eval_params` returns its own."""
        if not (self.param_groups[0]["cubic"] or self.param_groups[0]["repulsive"]):
            raise RuntimeError(
                "the average is kept only where a force needs it, and cubic and repulsive are 0"
            )

        def average(w: Tensor, state: dict[str, Any]) -> Tensor:
            if OFFSET not in state:
                return w.clone()
            return evaluation_weights(w, local(state[OFFSET]), 1.0)

        return self._derived(average)

    @torch.no_grad()
    def _derived(
        self, derive: Callable[[Tensor, dict[str, Any]], Tensor]
    ) -> dict[str, Tensor] | list[Tensor]:
        """`derive` of each parameter's training weights and state; plain copies where frozen."""
        self._tie()
        derived = []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                w = local(p.detach() if state is None else state.get(WEIGHTS, p.detach()))
                derived.append(as_part_of(w.clone() if state is None else derive(w, state), p))
        if not all("param_names" in group for group in self.param_groups):
            return derived
        names = [name for group in self.param_groups for name in group["param_names"]]
        return dict(zip(names, derived, strict=True))
