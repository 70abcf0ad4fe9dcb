"""What a step works on: lists gathered from the groups, and what the processes agree on first.

Weights, gradients and state are gathered in whole lists, of sharded parameters the local parts. If
anybody looks for gradients that are not finite, the flag is found here; and where parameters are
spread over processes, these meet here, once a step, to learn r² and whether to skip.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed

from neumann.optim import options
from neumann.optim.checkpoint import DISTANCE, ITERATE, OFFSET, SKIPPED
from neumann.optim.evaluation import TwoWeights
from neumann.optim.execution import Implementation, Work
from neumann.optim.phases import Shared, Timetable
from neumann.optim.preconditioner_state import load
from neumann.optim.preconditioning import directions, left_to_update
from neumann.optim.shards import local, local_gradient
from neumann.optim.state import Gathered, has_forces, zeros
from neumann.optim.update import nonfinite

_timetable = lru_cache(maxsize=64)(Timetable)


class Gathering(TwoWeights):
    """The part of Neumann that collects what a step works on."""

    def _gather(self, index: int) -> Gathered:
        """A group's parameters, with gradient and state; frozen ones that have neither are left.

        In whole lists: with thousands of parameters a loop here is what a step costs.
        """
        parameters = self.param_groups[index]["params"]
        states: list[Any] = list(map(self.state.get, parameters))
        if not all(states):
            if any(p.requires_grad and p not in self.state for p in parameters):
                self._adopt_parameters()
            parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
            states = [self.state.get(p) or self._create_state(p, index) for p in parameters]
        weights, gradients = parameters, [p.grad for p in parameters]
        if self._shards is not None:
            weights = [local(p) for p in parameters]
            gradients = list(map(local_gradient, gradients, parameters))
        layouts = {g.layout for g in gradients if g is not None}
        if layouts - {torch.strided}:
            sparse = next(
                p for p in parameters if p.grad is not None and p.grad.layout != torch.strided
            )
            raise RuntimeError(
                f"Neumann does not support sparse gradients, and {self._names()[sparse]} has one: "
                "give that parameter to torch.optim.SparseAdam, or build its layer with "
                "sparse=False"
            )
        return Gathered(parameters, weights, gradients, states)

    def _works(self, gathered: list[Gathered]) -> list[Work]:
        """The step, in pieces of which each belongs to one group and is sharded in one way."""
        works = []
        for group, found, momentum in zip(self.param_groups, gathered, self._momenta, strict=True):
            whole = self._work(group, found, momentum)
            shards = self._shards
            works += [whole] if shards is None else shards.split(whole, found.parameters)
        return works

    def _work(self, group: dict[str, Any], found: Gathered, momentum: Tensor) -> Work:
        """A group's share of the step. Without forces there is no average to keep."""
        offsets = None
        if has_forces(group):
            if not all(OFFSET in state for state in found.states):
                for p, state in zip(found.parameters, found.states, strict=True):
                    if OFFSET not in state:  # forces were off until now: the average starts here
                        state[OFFSET] = zeros(p, group)
            offsets = [state[OFFSET] for state in found.states]
        elif any(OFFSET in state for state in found.states):
            for state in found.states:
                state.pop(OFFSET, None)
            self._forget_distance()
        iterates = [state[ITERATE] for state in found.states]
        if self._shards is not None:
            iterates = [local(m) for m in iterates]
            offsets = None if offsets is None else [local(offset) for offset in offsets]
        return Work(
            left_to_update(group), found.weights, found.gradients, iterates, offsets, momentum
        )

    def _follow_preconditioners(self, gathered: list[Gathered]) -> None:
        """Fit the state to a P that was chosen for a group since the last step."""
        for index, group in enumerate(self.param_groups):
            chosen, before = group["precondition"], self._made_for[index]
            if chosen is not before and chosen != before:
                options.check_preconditioner(group)
                for p, state in zip(
                    gathered[index].parameters, gathered[index].states, strict=True
                ):
                    load(state, p, group)
                self._made_for[index] = chosen

    def _precondition(
        self, gathered: list[Gathered], skip: Tensor | None
    ) -> tuple[list[Gathered], Tensor | None]:
        """Directions in the place of gradients where a group has a P; the gradients' scale is left
        for the update to divide by where none has.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)  # set by torch.amp.GradScaler
        if all(group["precondition"] is None for group in self.param_groups):
            return gathered, scale
        skip = skip if self._on_device or torch.compiler.is_compiling() else None
        preconditioned = []
        for group, found in zip(self.param_groups, gathered, strict=True):
            lists = found.parameters, found.weights, found.gradients, found.states
            turned = directions(*lists, group, scale, skip)
            preconditioned.append(Gathered(found.parameters, found.weights, turned, found.states))
        return preconditioned, None

    def _overflow(self, gathered: list[Gathered]) -> Tensor | None:
        """Not zero if the step must be skipped; None if nobody looks. Brings r² up to date."""
        found: Tensor | None = getattr(self, "found_inf", None)
        skipped = self._scalars[SKIPPED]
        looks = self.param_groups[0]["skip_nonfinite"]
        flag = None
        if looks:
            gradients = [g for found in gathered for g in found.gradients if g is not None]
            # Where the parameters are: not every process group takes tensors from elsewhere.
            flag = nonfinite(gradients, self._scalars[DISTANCE].device)
        if self._shards is not None:
            if found is not None:  # which a scaler may have found on this process alone
                flag = found.ne(0).to(torch.int64) if flag is None else flag + found.ne(0).to(flag)
            found = flag = self._meet(gathered, flag)
        elif flag is not None and distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        if flag is None or not looks:
            return found
        flag = flag.ne(0).to(skipped)
        skipped.add_(flag)
        return flag if found is None else found.to(flag) + flag

    def _meet(self, gathered: list[Gathered], flag: Tensor | None) -> Tensor | None:
        """Learn r² and the flag from all processes; the one time that a step talks to them."""
        shards, forces = self._shards, has_forces(self.param_groups[0])
        assert shards is not None
        if forces and not shards.are_known:
            self._execution.measure(self._works(gathered), shards.sums)
            shards.are_known = True
        self._execution.settle(shards.sums)
        if not forces and flag is None:
            return None
        met = shards.meet(self._count_here(), flag)
        self._scalars[DISTANCE].copy_(met.squared)
        self._variables = met.variables
        return met.flags

    def _timetable(self) -> Timetable:
        first = self.param_groups[0]
        make = Timetable if torch.compiler.is_compiling() else _timetable  # no cache in a trace
        return make(first["warmup_steps"], first["reset_steps"], first["reset_growth"])

    def _shared(self) -> Shared:
        first = self.param_groups[0]
        return Shared(
            timetable=self._timetable(),
            cubic=first["cubic"],
            repulsive=first["repulsive"] * self._count_variables() if first["repulsive"] else 0.0,
            average=first["average"],
            bounded=first["bounded"],
        )

    @property
    def _on_device(self) -> bool:
        return self._execution.implementation is Implementation.CUDA

    def _count_variables(self) -> int:
        """What β is multiplied by: over all processes, if they have met."""
        divided = self.process_group is not None and self._variables is not None
        variables = self.param_groups[0]["variables"]
        if isinstance(variables, str):
            return self._variables or 1 if divided else self._count_here()
        return int(variables)

    def _count_here(self) -> int:
        variables = self.param_groups[0]["variables"]
        counted = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return len(counted) if variables == "tensors" else sum(p.numel() for p in counted)
