"""Random sequences of what one can do with an optimizer, against the oracle and against copies.

A sequence builds an optimizer from random options, dtypes and shapes, and then steps, freezes,
switches, saves, loads, copies, pickles, adds groups and changes options in random order. After each
operation the weights, the evaluation weights, the average, the distance and the clock are compared
with `tests/oracle.py`, which is told the same. Where a copy, a pickle or a load made a second
optimizer, both continue side by side for some operations and must agree to the last bit.

The oracle knows no bfloat16 and no spectral preconditioner: those sequences compare copies alone.
"""

import copy
import io
import math
import pickle
import random
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neumann import Neumann
from tests.soak.comparisons import (
    Beside,
    Gradients,
    as_list,
    can_follow,
    choose_tolerance,
    copy_bits,
    describe_change_by_skipping,
    describe_difference,
    groups_of,
    have_same_entries,
    parameters,
    to_numpy,
    view_bits,
)
from tests.soak.program import Program, check
from tests.soak.random_optimizers import Kind, Recipe
from tests.soak.same_bits import same_bits


class Operations(Program):
    name = "operations"
    counted = ("sequences", "operations", "steps", "skipped steps", "copies", "loads")
    weight = 5.0

    def run(self, case: int, counts: Counter[str]) -> None:
        chance = self.chance(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about weights that somebody else changed
            sequence = Sequence(chance, counts)
            for _ in range(chance.randint(10, 60)):
                sequence.advance()
        counts["sequences"] += 1


@dataclass
class Twin:
    """A second optimizer that has to stay equal to the first, and for how many operations."""

    optimizer: Neumann
    left: int
    origin: str


@dataclass
class Snapshot:
    weights: list[list[Tensor]]
    state: dict[str, Any]
    beside: Beside
    kinds: list[Kind]


class Sequence:
    """One optimizer, its oracle, and its twins."""

    def __init__(self, chance: random.Random, counts: Counter[str]) -> None:
        self.chance, self.counts = chance, counts
        self.recipe = Recipe(chance)
        self.kinds = [self.recipe.draw_kind() for _ in range(chance.choice((1, 1, 2, 3)))]
        # Where every parameter is frozen from the start there is no state, and it keeps the clock.
        self.kinds[0].frozen[0] = False
        self.optimizer = self.recipe.build(self.kinds)
        self.beside = Beside(self.optimizer, self.recipe.common)
        self.exact = can_follow(self.recipe)
        self.tolerance = choose_tolerance(self.recipe)
        self.twins: list[Twin] = []
        self.saved: list[Snapshot] = []
        self.log: list[str] = []
        self.compare()

    def all_optimizers(self) -> list[Neumann]:
        return [self.optimizer, *(twin.optimizer for twin in self.twins)]

    def advance(self) -> None:
        """One random operation, and all comparisons after it."""
        operations = {
            self.step: 30,
            self.step_without_gradients: 1,
            self.switch: 4,
            self.evaluate_inside_block: 2,
            self.change_option: 4,
            self.change_forces: 1,
            self.freeze: 3,
            self.add_group: 1,
            self.reset_average: 1,
            self.shift_weights: 1,
            self.save: 2,
            self.load: 2,
            self.load_into_fresh: 2,
            self.copy_deeply: 1,
            self.copy_by_pickle: 1,
        }
        operation = self.chance.choices(list(operations), list(operations.values()))[0]
        self.log.append(operation.__name__)
        try:
            operation()
            self.counts["operations"] += 1
            self.compare()
        except Exception as error:
            error.add_note(f"after {', '.join(self.log)}; {self.describe()}")
            raise
        for twin in self.twins:
            twin.left -= 1
        self.twins = [
            twin
            for twin in self.twins
            if twin.left > 0 and have_same_entries(twin.optimizer, self.optimizer)
        ]

    def compare(self) -> None:
        if self.twins:
            ours = view_bits(self.optimizer)
        for twin in self.twins:
            difference = describe_difference(view_bits(twin.optimizer), ours)
            check(difference is None, f"after {twin.origin} the two differ in {difference}")
        if self.exact:
            self.beside.check_agreement(self.optimizer, self.tolerance)

    def describe(self) -> str:
        recipe, shapes = self.recipe, [kind.shapes for kind in self.kinds]
        return f"{recipe.backend}, {recipe.dtype}, {recipe.common}, shapes {shapes}"

    # ------------------------------------------------------------------ steps and modes

    def step(self) -> None:
        gradients = self.recipe.draw_gradients(self.optimizer)
        given = [g for row in gradients for g in row if g is not None and g.numel()]
        bad = self.recipe.common["skip_nonfinite"] and self.chance.random() < 0.15 and bool(given)
        if bad:
            value = self.chance.choice((math.inf, -math.inf, math.nan))
            g = self.chance.choice(given)
            g[(0,) * g.dim()] = value  # reshape(-1) would copy a transposed one
        self._step_with(gradients, skipped=bad)

    def step_without_gradients(self) -> None:
        for optimizer in self.all_optimizers():
            optimizer.zero_grad()
        self._step_with([[None] * len(g["params"]) for g in self.optimizer.param_groups], False)

    def _step_with(self, gradients: Gradients, skipped: bool) -> None:
        if not self.optimizer.training:
            for optimizer in self.all_optimizers():
                give_gradients(optimizer, gradients)
                check_refusal(optimizer)
            return
        before = copy_bits(self.optimizer) if skipped else {}
        closure = self.chance.random() < 0.1
        for optimizer in self.all_optimizers():
            give_gradients(optimizer, gradients)
            if closure:
                check(optimizer.step(lambda: 0.5) == 0.5, "step(closure) did not return its loss")
            else:
                optimizer.step()
        if skipped:
            self.counts["skipped steps"] += 1
            self.beside.skipped += 1
            difference = describe_change_by_skipping(before, copy_bits(self.optimizer))
            check(difference is None, f"a skipped step changed {difference}")
            return
        self.counts["steps"] += 1
        if self.exact:
            self.beside.step(self.optimizer, gradients)

    def switch(self) -> None:
        mode = self.chance.random() < 0.6
        for optimizer in self.all_optimizers():
            before = [p.clone() for p in parameters(optimizer)]
            was = optimizer.training
            optimizer.train(mode)
            optimizer.train(was)
            check(same_bits(parameters(optimizer), before), "there and back changed weights")
            optimizer.train(mode)
            check(optimizer.training is mode, f"training is not {mode}")

    def evaluate_inside_block(self) -> None:
        for optimizer in self.all_optimizers():
            before, was = copy_bits(optimizer), optimizer.training
            expected = as_list(optimizer.eval_params())
            with optimizer.evaluating():
                shown = parameters(optimizer)
                check(same_bits(shown, expected), "eval_params differ from eval()")
            check(optimizer.training is was, "evaluating() left another mode")
            check(same_bits(view_bits(optimizer), before), "evaluating() changed bits")

    # ------------------------------------------------------------------ changes from outside

    def change_option(self) -> None:
        index = self.chance.randrange(len(self.kinds))
        name = self.chance.choice(("lr", "momentum", "weight_decay"))
        value = self.recipe.draw_own()[name]
        if name == "lr" and self.chance.random() < 0.1:
            value = 0.0
        tensor = name == "lr" and self.chance.random() < 0.2
        for optimizer in self.all_optimizers():
            given = torch.tensor(value, dtype=torch.float64) if tensor else value
            optimizer.param_groups[index][name] = given
        setattr(self.beside.oracle.groups[index], name, value)

    def change_forces(self) -> None:
        drawn = self.recipe.draw_common()
        names = ("cubic", "repulsive", "average", "bounded")
        changed = {name: drawn[name] for name in names}
        self.recipe.common |= changed
        for optimizer in self.all_optimizers():
            for group in optimizer.param_groups:
                group.update(changed)
        self.beside.set_forces(changed)

    def freeze(self) -> None:
        """Freeze some parameters, and thaw others."""
        for index, kind in enumerate(self.kinds):
            for i in range(len(kind.shapes)):
                if self.chance.random() < 0.3:
                    kind.frozen[i] = self.chance.random() < 0.5
                    for optimizer in self.all_optimizers():
                        p = optimizer.param_groups[index]["params"][i]
                        p.requires_grad_(not kind.frozen[i])
                        p.grad = None

    def add_group(self) -> None:
        if len(self.kinds) >= 5:
            return
        kind = self.recipe.draw_kind()
        made = self.recipe.make_parameters(kind)
        for optimizer in self.all_optimizers():  # each with parameters of its own
            own = made if optimizer is self.optimizer else copy.deepcopy(made)
            optimizer.add_param_group({"params": own, **kind.options})
        self.kinds.append(kind)
        self.beside.add_group(self.optimizer.param_groups[-1])

    def reset_average(self) -> None:
        for optimizer in self.all_optimizers():
            optimizer.reset_average()
        self.beside.restart_average()

    def shift_weights(self) -> None:
        """Somebody else writes a parameter: w moves, and the average with it."""
        if not self.optimizer.training:
            return
        index = self.chance.randrange(len(self.kinds))
        i = self.chance.randrange(len(self.kinds[index].shapes))
        shifted = self.optimizer.param_groups[index]["params"][i]
        before = to_numpy(shifted)
        for optimizer in self.all_optimizers():
            with torch.no_grad():
                optimizer.param_groups[index]["params"][i].add_(0.25)
        self.beside.shift(index, i, to_numpy(shifted) - before)

    # ------------------------------------------------------------------ checkpoints and copies

    def save(self) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        if self.chance.random() < 0.5:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        weights = [
            [p.detach().clone() for p in group["params"]] for group in self.optimizer.param_groups
        ]
        made = Snapshot(weights, state, copy.deepcopy(self.beside), copy.deepcopy(self.kinds))
        self.saved = [*self.saved[-2:], made]
        self.counts["copies"] += 1

    def load(self) -> None:
        """Back to an earlier moment, in the same optimizer."""
        found = self._draw_snapshot()
        if found is None or [k.shapes for k in found.kinds] != [k.shapes for k in self.kinds]:
            return
        self._adopt(found, *self.all_optimizers())
        self._return_to(found)

    def load_into_fresh(self) -> None:
        """Another optimizer, perhaps built with other options, takes the run over."""
        if self.chance.random() < 0.5:
            self.save()
            found: Snapshot | None = self.saved[-1]
        else:
            found = self._draw_snapshot()
        if found is None:
            return
        other = {}
        if self.chance.random() < 0.5:
            drawn = self.recipe.draw_common()
            names = ("warmup_steps", "reset_steps", "cubic", "repulsive", "average", "bounded")
            other = {name: drawn[name] for name in names}
        fresh = self.recipe.build(found.kinds, **other)
        self._adopt(found, fresh)
        is_now = found is self.saved[-1] and not other and self._is_now(found)
        before, self.optimizer = self.optimizer, fresh
        if is_now and len(self.twins) < 2:
            self._follow_beside(before, "load_state_dict")
        else:
            self.twins = []
        self._return_to(found)

    def _is_now(self, found: Snapshot) -> bool:
        """Whether nothing happened since the snapshot."""
        now = [[p.detach() for p in g["params"]] for g in self.optimizer.param_groups]
        state = self.optimizer.state_dict()
        return (
            [kind.frozen for kind in self.kinds] == [kind.frozen for kind in found.kinds]
            and same_bits(now, found.weights)
            and same_bits(groups_of(state), groups_of(found.state))
            and same_bits(state["state"], found.state["state"])
        )

    def _draw_snapshot(self) -> Snapshot | None:
        return self.chance.choice(self.saved) if self.saved else None

    def _adopt(self, found: Snapshot, *optimizers: Neumann) -> None:
        """Load weights and state, in either order."""
        weights_first = self.chance.random() < 0.5
        for optimizer in optimizers:
            if weights_first:
                copy_weights(optimizer, found)
            optimizer.load_state_dict(copy.deepcopy(found.state))
            if not weights_first:
                copy_weights(optimizer, found)
            self.counts["loads"] += 1

    def _return_to(self, found: Snapshot) -> None:
        self.beside, self.kinds = copy.deepcopy(found.beside), copy.deepcopy(found.kinds)
        self.recipe.common |= self.beside.read_forces()

    def copy_deeply(self) -> None:
        self._continue_as(copy.deepcopy(self.optimizer), "deepcopy")

    def copy_by_pickle(self) -> None:
        self._continue_as(pickle.loads(pickle.dumps(self.optimizer)), "pickle")

    def _continue_as(self, copied: Neumann, origin: str) -> None:
        before, self.optimizer = self.optimizer, copied
        self.counts["copies"] += 1
        self._follow_beside(before, origin)

    def _follow_beside(self, before: Neumann, origin: str) -> None:
        self.twins = [*self.twins[-1:], Twin(before, self.chance.randint(3, 12), origin)]


def give_gradients(optimizer: Neumann, gradients: Gradients) -> None:
    for group, row in zip(optimizer.param_groups, gradients, strict=True):
        for p, g in zip(group["params"], row, strict=True):
            p.grad = None if g is None else g.clone(memory_format=torch.preserve_format)


def check_refusal(optimizer: Neumann) -> None:
    """A step in evaluation mode raises, and changes nothing."""
    before = copy_bits(optimizer)
    refused = False
    try:
        optimizer.step()
    except RuntimeError:
        refused = True
    check(refused, "step() in evaluation mode did not raise")
    check(same_bits(view_bits(optimizer), before), "a refused step changed bits")


@torch.no_grad()
def copy_weights(optimizer: Neumann, found: Snapshot) -> None:
    for group, row, kind in zip(optimizer.param_groups, found.weights, found.kinds, strict=True):
        for p, w, frozen in zip(group["params"], row, kind.frozen, strict=True):
            p.copy_(w)
            p.requires_grad_(not frozen)
