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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neumann import Neumann
from tests.oracle import Group, Oracle, Real
from tests.soak.program import Program, check
from tests.soak.same_bits import same_bits

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"foreach": False},
    "lists": {"foreach": True},
    "unfused": {"fused": False},
    "numba": {"fused": True},
    "default": {},
}
SHAPES = [(), (1,), (3,), (7,), (16,), (4, 5), (2, 3, 2), (0,), (33,)]
LONG = (9001,)  # longer than a block of the kernel
# How far a run may be from the oracle, relative to its weights.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-3}
DIAGONAL_TOLERANCE = 1e-4  # its bias correction is computed in float32
DECAY, EPS, SCALE = 0.99, 1e-8, 0.2  # of the diagonal preconditioner


class Operations(Program):
    name = "operations"
    counted = ("sequences", "operations", "steps", "skipped steps", "copies", "loads")
    weight = 4.0

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
class Beside:
    """What the oracle has to be told, and P, which it does not know."""

    oracle: Oracle
    had_forces: bool
    skipped: int = 0
    moments: list[list[Any]] = field(default_factory=list)  # by group: (v, n) by parameter


@dataclass
class Snapshot:
    weights: list[list[Tensor]]
    state: dict[str, Any]
    beside: Beside
    kinds: list[dict[str, Any]]  # of the groups


class Sequence:
    """One optimizer, its oracle, and its twins."""

    def __init__(self, chance: random.Random, counts: Counter[str]) -> None:
        self.chance, self.counts = chance, counts
        self.generator = torch.Generator().manual_seed(chance.getrandbits(40))
        self.dtype = chance.choices(
            [torch.float64, torch.float32, torch.bfloat16, torch.complex128], [12, 3, 2, 2]
        )[0]
        self.backend = chance.choice(list(BACKENDS))
        self.precondition = chance.choices([None, "diagonal", "spectral"], [8, 2, 1])[0]
        self.named = chance.random() < 0.3
        self.common = self._draw_common()
        self.kinds = [self._draw_kind() for _ in range(chance.choice((1, 1, 2, 3)))]
        while not any(spec["shapes"] for spec in self.kinds):
            self.kinds[0] = self._draw_kind()
        self.created = 0
        self.optimizer = self._build(self.kinds)
        self.beside = self._make_oracle()
        self.twins: list[Twin] = []
        self.saved: list[Snapshot] = []
        self.log: list[str] = []
        self.compare()

    # ------------------------------------------------------------------ building

    def _draw_common(self) -> dict[str, Any]:
        chance = self.chance
        bounded = chance.random() < 0.8
        # Without its bound the repulsion amplifies rounding without limit.
        repulsive = chance.choice((0.0, 1e-5, 1e-3, 0.02)) if bounded else 1e-9
        return {
            "warmup_steps": chance.choice((0, 0, 1, 3, 8)),
            "reset_steps": chance.choice((0, 2, 3, 5, 9)),
            "reset_growth": chance.choice((1.0, 1.5, 2.0)),
            "cubic": chance.choice((0.0, 1e-7, 0.01)),
            "repulsive": chance.choice((0.0, repulsive)),
            "average": chance.choice((0.99, 0.9, 0.5, 0.0)),
            "bounded": bounded,
            "variables": chance.choice(("tensors", "tensors", "elements", 7)),
            "skip_nonfinite": chance.random() < 0.3,
            "state_dtype": self._draw_state_dtype(),
            **BACKENDS[self.backend],
        }

    def _draw_state_dtype(self) -> torch.dtype | None:
        if self.dtype is torch.float64 or self.dtype.is_complex:
            return None
        return self.chance.choice((None, torch.float32, torch.bfloat16, torch.float64))

    def _draw_own(self) -> dict[str, Any]:
        chance = self.chance
        return {
            "lr": chance.choice((0.3, 0.1, 0.03, 0.01)),
            "momentum": chance.choice((0.9, 0.9, 0.6, 0.0, 0.97)),
            "weight_decay": chance.choice((0.0, 0.0, 0.01, 0.1)),
            "decoupled_weight_decay": chance.random() < 0.5,
            "maximize": chance.random() < 0.2,
            "precondition": self.precondition if chance.random() < 0.7 else None,
        }

    def _draw_kind(self) -> dict[str, Any]:
        """The shapes and options of a group; some of its parameters start frozen."""
        chance = self.chance
        shapes = [chance.choice(SHAPES) for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.05:
            shapes.append(LONG)
        frozen = [chance.random() < 0.15 for _ in shapes]
        transposed = [len(shape) == 2 and chance.random() < 0.3 for shape in shapes]
        return {
            "shapes": shapes,
            "frozen": frozen,
            "transposed": transposed,
            "own": self._draw_own(),
        }

    def _make_parameters(self, kind: dict[str, Any]) -> list[nn.Parameter]:
        made = []
        for shape, frozen, transposed in zip(
            kind["shapes"], kind["frozen"], kind["transposed"], strict=True
        ):
            w = torch.randn(shape, generator=self.generator, dtype=torch.float64) * 2
            if self.dtype.is_complex:
                w = torch.complex(w, torch.randn(shape, generator=self.generator).double())
            w = w.to(self.dtype)
            w = w.t().contiguous().t() if transposed else w
            made.append(nn.Parameter(w, requires_grad=not frozen))
        return made

    def _make_group(self, kind: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        parameters: list[Any] = self._make_parameters(kind)
        if self.named:
            parameters = [(f"p{self.created + i}", p) for i, p in enumerate(parameters)]
            self.created += len(parameters)
        return {"params": parameters, **own}

    def _build(self, kinds: list[dict[str, Any]], **changed: Any) -> Neumann:
        self.created = 0
        groups = [self._make_group(kind, kind["own"]) for kind in kinds]
        return Neumann(groups, lr=0.1, **{**self.common, **changed})

    def _make_oracle(self) -> Beside:
        common = self.common
        oracle = Oracle(
            [self._oracle_group(g) for g in range(len(self.kinds))],
            warmup=common["warmup_steps"],
            interval=common["reset_steps"],
            growth=common["reset_growth"],
            alpha=common["cubic"],
            beta=common["repulsive"],
            gamma=common["average"],
            bounded=common["bounded"],
        )
        moments = [self._make_moments(g) for g in range(len(self.kinds))]
        return Beside(oracle, bool(common["cubic"] or common["repulsive"]), 0, moments)

    def _oracle_group(self, index: int) -> Group:
        group = self.optimizer.param_groups[index]
        plain = group["precondition"] is None
        return Group(
            [to_numpy(p) for p in group["params"]],
            lr=group["lr"],
            momentum=group["momentum"],
            # What comes before P is computed here, what comes after it by the oracle.
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"] and plain,
        )

    def _make_moments(self, index: int) -> list[Any]:
        weights = self.optimizer.param_groups[index]["params"]
        return [(np.zeros_like(to_numpy(p), dtype=Real), 0) for p in weights]

    # ------------------------------------------------------------------ operations

    @property
    def exact(self) -> bool:
        """Whether the oracle can follow."""
        narrow = self.dtype is torch.bfloat16 or self.common["state_dtype"] is torch.bfloat16
        return not narrow and self.precondition != "spectral"

    @property
    def tolerance(self) -> float:
        base = TOLERANCES[torch.float32 if self.dtype is torch.float32 else torch.float64]
        return max(base, DIAGONAL_TOLERANCE if self.precondition == "diagonal" else 0.0)

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
        self.twins = [twin for twin in self.twins if twin.left > 0]

    def describe(self) -> str:
        shapes = [kind["shapes"] for kind in self.kinds]
        return f"{self.dtype}, {self.common}, shapes {shapes}"

    def step(self) -> None:
        gradients = [
            [self._draw_gradient(p) for p in group["params"]]
            for group in self.optimizer.param_groups
        ]
        bad = self.common["skip_nonfinite"] and self.chance.random() < 0.15
        given = [g for row in gradients for g in row if g is not None and g.numel()]
        bad = bad and bool(given)
        if bad:
            value = self.chance.choice((math.inf, -math.inf, math.nan))
            self.chance.choice(given).reshape(-1)[0] = value
        self._step_with(gradients, skipped=bad)

    def step_without_gradients(self) -> None:
        for optimizer in self.all_optimizers():
            optimizer.zero_grad()
        self._step_with([[None] * len(g["params"]) for g in self.optimizer.param_groups], False)

    def _draw_gradient(self, p: Tensor) -> Tensor | None:
        # torch's optimizers use the gradient of a frozen parameter if one was left behind.
        if self.chance.random() < (0.9 if not p.requires_grad else 0.12):
            return None
        g = torch.randn(p.shape, generator=self.generator, dtype=torch.float64)
        if p.is_complex():
            g = torch.complex(g, torch.randn(p.shape, generator=self.generator).double())
        # A quadratic's gradient plus noise: weights stay of order one.
        sign = 1.0
        for group in self.optimizer.param_groups:
            if any(p is q for q in group["params"]) and group["maximize"]:
                sign = -1.0
        training = self.optimizer.state.get(p, {}).get("weights", p).detach()
        return (0.3 * sign * training.to(g.dtype) + g).to(p.dtype)

    def _step_with(self, gradients: list[list[Tensor | None]], skipped: bool) -> None:
        closure = self.chance.random() < 0.1
        if not self.optimizer.training:
            for optimizer in self.all_optimizers():
                self._give(optimizer, gradients)
                before = snapshot_bits(optimizer)
                refused = False
                try:
                    optimizer.step()
                except RuntimeError:
                    refused = True
                check(refused, "step() in evaluation mode did not raise")
                check(same_bits(snapshot_bits(optimizer), before), "a refused step changed bits")
            return
        before = snapshot_bits(self.optimizer) if skipped else None
        for optimizer in self.all_optimizers():
            self._give(optimizer, gradients)
            if closure:
                check(optimizer.step(lambda: 0.5) == 0.5, "step(closure) did not return its loss")
            else:
                optimizer.step()
        if skipped:
            self.counts["skipped steps"] += 1
            self.beside.skipped += 1
            after = snapshot_bits(self.optimizer)
            for state in (*before["state"].values(), *after["state"].values()):
                state.pop("skipped", None)
            difference = describe_difference(after, before)
            check(difference is None, f"a skipped step changed {difference}")
            return
        self.counts["steps"] += 1
        if self.exact:
            self._step_oracle(gradients)

    def _give(self, optimizer: Neumann, gradients: list[list[Tensor | None]]) -> None:
        for group, row in zip(optimizer.param_groups, gradients, strict=True):
            for p, g in zip(group["params"], row, strict=True):
                p.grad = None if g is None else g.clone(memory_format=torch.preserve_format)

    def _step_oracle(self, gradients: list[list[Tensor | None]]) -> None:
        beside, oracle = self.beside, self.beside.oracle
        forces = bool(oracle.alpha or oracle.beta)
        if forces and not beside.had_forces:  # the average starts here
            for group in oracle.groups:
                group.average = [w.copy() for w in group.weights]
        beside.had_forces = forces
        oracle.variables = self._count_variables()
        given = []
        for index, (group, ours) in enumerate(
            zip(oracle.groups, self.optimizer.param_groups, strict=True)
        ):
            row = [None if g is None else to_numpy(g) for g in gradients[index]]
            if ours["precondition"] == "diagonal":
                row = [self._direction(index, i, g, group, ours) for i, g in enumerate(row)]
            given.append(row)
        decays = [group.weight_decay for group in oracle.groups]
        for group, ours in zip(oracle.groups, self.optimizer.param_groups, strict=True):
            if ours["precondition"] is not None and not group.decoupled:
                group.weight_decay = 0.0  # P has seen it
        oracle.step(given)
        for group, decay in zip(oracle.groups, decays, strict=True):
            group.weight_decay = decay

    def _direction(
        self, index: int, i: int, g: Any, group: Group, ours: dict[str, Any]
    ) -> np.ndarray | None:
        """The diagonal P in NumPy: g / (√v̂ + ε)."""
        if g is None:
            return None
        g = np.array(g, dtype=Real) * (-1 if ours["maximize"] else 1)
        if not group.decoupled:
            g = g + Real(group.weight_decay) * group.weights[i]
        v, n = self.beside.moments[index][i]
        v, n = DECAY * v + (1 - Real(DECAY)) * g**2, n + 1
        self.beside.moments[index][i] = (v, n)
        return SCALE * g / (np.sqrt(v / (1 - Real(DECAY) ** n)) + EPS)

    def _count_variables(self) -> int:
        variables = self.common["variables"]
        if not isinstance(variables, str):
            return variables
        counted = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        return len(counted) if variables == "tensors" else sum(p.numel() for p in counted)

    def switch(self) -> None:
        mode = self.chance.random() < 0.6
        for optimizer in self.all_optimizers():
            before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
            was = optimizer.training
            optimizer.train(mode)
            optimizer.train(was)
            after = [p.detach() for g in optimizer.param_groups for p in g["params"]]
            check(same_bits(after, before), "there and back changed weights")
            optimizer.train(mode)
            check(optimizer.training is mode, f"training is not {mode}")

    def evaluate_inside_block(self) -> None:
        for optimizer in self.all_optimizers():
            before, was = snapshot_bits(optimizer), optimizer.training
            expected = as_list(optimizer.eval_params())
            with optimizer.evaluating():
                shown = [p.detach() for g in optimizer.param_groups for p in g["params"]]
                check(same_bits(shown, expected), "eval_params differ from eval()")
            check(optimizer.training is was, "evaluating() left another mode")
            check(same_bits(snapshot_bits(optimizer), before), "evaluating() changed bits")

    def change_option(self) -> None:
        index = self.chance.randrange(len(self.kinds))
        name = self.chance.choice(("lr", "momentum", "weight_decay"))
        value = 0.0 if name == "lr" and self.chance.random() < 0.1 else self._draw_own()[name]
        tensor = name == "lr" and self.chance.random() < 0.2
        for optimizer in self.all_optimizers():
            given = torch.tensor(value, dtype=torch.float64) if tensor else value
            optimizer.param_groups[index][name] = given
        setattr(self.beside.oracle.groups[index], name, value)

    def change_forces(self) -> None:
        drawn = self._draw_common()
        names = ("cubic", "repulsive", "average", "bounded")
        changed = {name: drawn[name] for name in names}
        self.common |= changed
        for optimizer in self.all_optimizers():
            for group in optimizer.param_groups:
                group.update(changed)
        oracle = self.beside.oracle
        oracle.alpha, oracle.beta = changed["cubic"], changed["repulsive"]
        oracle.gamma, oracle.bounded = changed["average"], changed["bounded"]

    def freeze(self) -> None:
        """Freeze some parameters, and thaw others."""
        for index, kind in enumerate(self.kinds):
            for i in range(len(kind["shapes"])):
                if self.chance.random() < 0.3:
                    frozen = self.chance.random() < 0.5
                    for optimizer in self.all_optimizers():
                        p = optimizer.param_groups[index]["params"][i]
                        p.requires_grad_(not frozen)
                        p.grad = None
                    kind["frozen"][i] = frozen

    def add_group(self) -> None:
        if len(self.kinds) >= 5:
            return
        kind = self._draw_kind()
        made = self._make_group(kind, {})
        for number, optimizer in enumerate(self.all_optimizers()):
            params = made["params"]
            if number:  # every optimizer has its own
                params = [
                    (p[0], copy.deepcopy(p[1])) if self.named else copy.deepcopy(p) for p in params
                ]
            optimizer.add_param_group({"params": params, **kind["own"]})
        self.kinds.append(kind)
        index = len(self.kinds) - 1
        self.beside.oracle.groups.append(self._oracle_group(index))
        self.beside.moments.append(self._make_moments(index))

    def reset_average(self) -> None:
        for optimizer in self.all_optimizers():
            optimizer.reset_average()
        for group in self.beside.oracle.groups:
            group.average = [w.copy() for w in group.weights]

    def shift_weights(self) -> None:
        """Somebody else writes a parameter: w moves, and the average with it."""
        if not self.optimizer.training:
            return
        index = self.chance.randrange(len(self.kinds))
        group = self.optimizer.param_groups[index]
        i = self.chance.randrange(len(group["params"]))
        before = to_numpy(group["params"][i])
        with torch.no_grad():
            group["params"][i].add_(0.25)
        for optimizer in self.all_optimizers()[1:]:
            with torch.no_grad():
                optimizer.param_groups[index]["params"][i].add_(0.25)
        moved = to_numpy(group["params"][i]) - before
        ours = self.beside.oracle.groups[index]
        ours.weights[i] = ours.weights[i] + moved
        ours.average[i] = ours.average[i] + moved

    # ------------------------------------------------------------------ copies

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
        if found is None or len(found.kinds) != len(self.kinds):
            return
        for optimizer in self.all_optimizers():
            self._adopt(optimizer, found)
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
            drawn = self._draw_common()
            names = ("warmup_steps", "reset_steps", "cubic", "repulsive", "average", "bounded")
            other = {name: drawn[name] for name in names}
            if drawn["reset_steps"] == 1 and self.common["reset_growth"] == 1:
                other.pop("reset_steps")
        fresh = self._build(found.kinds, **other)
        self._adopt(fresh, found)
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
        return (
            same_bits(now, found.weights)
            and same_bits(groups_of(self.optimizer.state_dict()), groups_of(found.state))
            and same_bits(self.optimizer.state_dict()["state"], found.state["state"])
        )

    def _draw_snapshot(self) -> Snapshot | None:
        return self.chance.choice(self.saved) if self.saved else None

    def _adopt(self, optimizer: Neumann, found: Snapshot) -> None:
        def copy_weights() -> None:
            with torch.no_grad():
                for index, (group, row) in enumerate(
                    zip(optimizer.param_groups, found.weights, strict=True)
                ):
                    for i, (p, w) in enumerate(zip(group["params"], row, strict=True)):
                        p.copy_(w)
                        p.requires_grad_(not found.kinds[index]["frozen"][i])

        if self.chance.random() < 0.5:
            copy_weights()
            optimizer.load_state_dict(copy.deepcopy(found.state))
        else:
            optimizer.load_state_dict(copy.deepcopy(found.state))
            copy_weights()
        self.counts["loads"] += 1

    def _return_to(self, found: Snapshot) -> None:
        self.beside, self.kinds = copy.deepcopy(found.beside), copy.deepcopy(found.kinds)
        oracle = self.beside.oracle
        self.common |= {
            "cubic": oracle.alpha,
            "repulsive": oracle.beta,
            "average": oracle.gamma,
            "bounded": oracle.bounded,
        }

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

    # ------------------------------------------------------------------ comparisons

    def compare(self) -> None:
        self._compare_twins()
        if self.exact:
            self._compare_with_oracle()

    def _compare_twins(self) -> None:
        ours = snapshot_bits(self.optimizer)
        for twin in self.twins:
            difference = describe_difference(snapshot_bits(twin.optimizer), ours)
            check(difference is None, f"after {twin.origin} the two differ in {difference}")

    def _compare_with_oracle(self) -> None:
        oracle, optimizer = self.beside.oracle, self.optimizer
        evaluation = [w for row in oracle.evaluation() for w in row]
        self._close("evaluation weights", as_list(optimizer.eval_params()), evaluation)
        shown = [p for group in optimizer.param_groups for p in group["params"]]
        weights = [w for group in oracle.groups for w in group.weights]
        self._close("weights", shown, weights if optimizer.training else evaluation)
        found = optimizer.diagnostics()
        check(found.step == oracle.steps, f"the clock is {found.step}, not {oracle.steps}")
        check(found.skipped == self.beside.skipped, f"{found.skipped} steps were skipped")
        t = oracle.steps - oracle.warmup
        expected = None if oracle.next_reset < 0 else oracle.next_reset - t
        check(found.steps_to_reset == expected, f"{found.steps_to_reset} steps to a reset")
        if (oracle.alpha or oracle.beta) and self.beside.had_forces:
            average = [v for group in oracle.groups for v in group.average]
            self._close("average", as_list(optimizer.average_params()), average)
            exact = float(oracle.distance())
            gap = abs(found.distance - exact)
            size = max(exact, 1e-3)
            close = gap <= 10 * self.tolerance * size
            check(close, f"r is {found.distance!r}, not {exact!r}")

    def _close(self, what: str, ours: list[Tensor], exact: list[np.ndarray]) -> None:
        for index, (a, b) in enumerate(zip(ours, exact, strict=True)):
            size = max(float(np.linalg.norm(b)), 0.1 * math.sqrt(max(b.size, 1)))
            gap = float(np.linalg.norm(to_numpy(a).astype(Real) - b)) / size
            check(
                gap <= self.tolerance,
                f"{what} of parameter {index} are off by {gap:.2g} ({self.backend})",
            )


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy in float64; complex numbers become pairs."""
    tensor = tensor.detach().resolve_conj()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().numpy().copy()


def as_list(found: Any) -> list[Tensor]:
    return list(found.values()) if isinstance(found, dict) else list(found)


def groups_of(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(group) for group in state_dict["param_groups"]]


def snapshot_bits(optimizer: Neumann) -> dict[str, Any]:
    """Weights, state and options, copied."""
    state = optimizer.state_dict()
    return {
        "weights": [p.detach().clone() for g in optimizer.param_groups for p in g["params"]],
        "state": {i: {k: _copied(v) for k, v in s.items()} for i, s in state["state"].items()},
        "groups": groups_of(state),
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def describe_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    if not same_bits(ours["weights"], theirs["weights"]):
        return "their weights"
    if not same_bits(ours["groups"], theirs["groups"]):
        return "their options"
    for index in theirs["state"].keys() | ours["state"].keys():
        a, b = ours["state"].get(index, {}), theirs["state"].get(index, {})
        if not a or not b:  # a parameter that was thawed gets its state sooner or later, as zeros
            if not _is_new({**a, **b}):
                return f"the state of parameter {index}"
            continue
        for key in sorted(a.keys() | b.keys()):
            if not same_bits(a.get(key), b.get(key)):
                return f"{key} of parameter {index}"
    return None


def _is_new(state: dict[str, Any]) -> bool:
    """Whether the parameter has not moved since its state was created."""
    return all(not bool(state[key].any()) for key in ("iterate", "offset") if key in state)
