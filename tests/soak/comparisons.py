"""Whether an optimizer agrees with the oracle, and with another optimizer to the last bit.

`Beside` is the oracle next to an optimizer: it is told of every step, and knows the diagonal
preconditioner, which the oracle does not.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neumann import Neumann
from tests.oracle import Group, Oracle, Real
from tests.soak.program import check
from tests.soak.random_optimizers import Recipe
from tests.soak.same_bits import same_bits

# How far a run may be from the oracle, relative to its weights.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-3}
DIAGONAL_TOLERANCE = 1e-4  # its bias correction is computed in float32
DECAY, EPS, SCALE = 0.99, 1e-8, 0.2  # of the diagonal preconditioner

Gradients = list[list[Tensor | None]]


def can_follow(recipe: Recipe) -> bool:
    """Whether the oracle can: it knows no bfloat16 and no spectral preconditioner."""
    narrow = torch.bfloat16 in (recipe.dtype, recipe.common["state_dtype"])
    return not narrow and recipe.precondition != "spectral"


def choose_tolerance(recipe: Recipe) -> float:
    base = TOLERANCES[torch.float32 if recipe.dtype is torch.float32 else torch.float64]
    return max(base, DIAGONAL_TOLERANCE if recipe.precondition == "diagonal" else 0.0)


class Beside:
    """The oracle beside an optimizer. A deep copy is what a checkpoint of the two has."""

    def __init__(self, optimizer: Neumann, common: dict[str, Any]) -> None:
        self.oracle = Oracle(
            [],
            warmup=common["warmup_steps"],
            interval=common["reset_steps"],
            growth=common["reset_growth"],
        )
        self.set_forces(common)
        self.had_forces = self.has_forces
        self.skipped = 0
        self._variables = common["variables"]
        self._moments: list[list[tuple[np.ndarray, int]]] = []  # by group: (v, n) by parameter
        for group in optimizer.param_groups:
            self.add_group(group)

    @property
    def has_forces(self) -> bool:
        return bool(self.oracle.alpha or self.oracle.beta)

    def set_forces(self, common: dict[str, Any]) -> None:
        oracle = self.oracle
        oracle.alpha, oracle.beta = common["cubic"], common["repulsive"]
        oracle.gamma, oracle.bounded = common["average"], common["bounded"]

    def read_forces(self) -> dict[str, Any]:
        oracle = self.oracle
        return {
            "cubic": oracle.alpha,
            "repulsive": oracle.beta,
            "average": oracle.gamma,
            "bounded": oracle.bounded,
        }

    def add_group(self, group: dict[str, Any]) -> None:
        weights = [to_numpy(p) for p in group["params"]]
        made = Group(
            weights,
            lr=group["lr"],
            momentum=group["momentum"],
            # What comes before P is computed here, what comes after it by the oracle.
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"] and group["precondition"] is None,
        )
        self.oracle.groups.append(made)
        self._moments.append([(np.zeros_like(w, dtype=Real), 0) for w in weights])

    def restart_average(self) -> None:
        for group in self.oracle.groups:
            group.average = [w.copy() for w in group.weights]

    def shift(self, index: int, i: int, moved: np.ndarray) -> None:
        """Somebody else moved a parameter: its average moves with it."""
        group = self.oracle.groups[index]
        group.weights[i] = group.weights[i] + moved
        group.average[i] = group.average[i] + moved

    def step(self, optimizer: Neumann, gradients: Gradients) -> None:
        oracle = self.oracle
        if self.has_forces and not self.had_forces:  # the average starts here
            self.restart_average()
        self.had_forces = self.has_forces
        oracle.variables = self._count_variables(optimizer)
        given = []
        for index, ours in enumerate(optimizer.param_groups):
            row = [None if g is None else to_numpy(g) for g in gradients[index]]
            if ours["precondition"] == "diagonal":
                row = [self._direction(index, i, g, ours["maximize"]) for i, g in enumerate(row)]
            given.append(row)
        decays = [group.weight_decay for group in oracle.groups]
        for group, ours in zip(oracle.groups, optimizer.param_groups, strict=True):
            if ours["precondition"] is not None and not group.decoupled:
                group.weight_decay = 0.0  # P has seen it
        oracle.step(given)
        for group, decay in zip(oracle.groups, decays, strict=True):
            group.weight_decay = decay
        for group, ours, row in zip(oracle.groups, optimizer.param_groups, given, strict=True):
            for i, (p, g) in enumerate(zip(ours["params"], row, strict=True)):
                if g is None and not p.requires_grad:  # its series has ended
                    group.iterate[i] = np.zeros_like(group.iterate[i])

    def _direction(
        self, index: int, i: int, g: np.ndarray | None, maximize: bool
    ) -> np.ndarray | None:
        """The diagonal P in NumPy: g / (√v̂ + ε)."""
        if g is None:
            return None
        group = self.oracle.groups[index]
        g = np.array(g, dtype=Real) * (-1 if maximize else 1)
        if not group.decoupled:
            g = g + Real(group.weight_decay) * group.weights[i]
        v, n = self._moments[index][i]
        v, n = DECAY * v + (1 - Real(DECAY)) * g**2, n + 1
        self._moments[index][i] = (v, n)
        return SCALE * g / (np.sqrt(v / (1 - Real(DECAY) ** n)) + EPS)

    def _count_variables(self, optimizer: Neumann) -> int:
        if not isinstance(self._variables, str):
            return int(self._variables)
        counted = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        return len(counted) if self._variables == "tensors" else sum(p.numel() for p in counted)

    def check_agreement(self, optimizer: Neumann, tolerance: float) -> None:
        """Compare weights, evaluation weights, average, distance and clock."""
        oracle = self.oracle
        evaluation = [w for row in oracle.evaluation() for w in row]
        check_close("evaluation weights", as_list(optimizer.eval_params()), evaluation, tolerance)
        weights = [w for group in oracle.groups for w in group.weights]
        expected = weights if optimizer.training else evaluation
        check_close("weights", parameters(optimizer), expected, tolerance)
        found = optimizer.diagnostics()
        check(found.step == oracle.steps, f"the clock is {found.step}, not {oracle.steps}")
        check(found.skipped == self.skipped, f"{found.skipped} steps were skipped")
        t = oracle.steps - oracle.warmup
        left = None if oracle.next_reset < 0 else oracle.next_reset - t
        check(found.steps_to_reset == left, f"{found.steps_to_reset} steps to a reset")
        if self.has_forces and self.had_forces:
            average = [v for group in oracle.groups for v in group.average]
            check_close("average", as_list(optimizer.average_params()), average, tolerance)
            exact = float(oracle.distance())
            close = abs(found.distance - exact) <= 10 * tolerance * max(exact, 1e-3)
            check(close, f"r is {found.distance!r}, not {exact!r}")


def check_close(
    what: str, ours: Sequence[Tensor], exact: Sequence[np.ndarray], tolerance: float
) -> None:
    for index, (a, b) in enumerate(zip(ours, exact, strict=True)):
        # Long double is slow where the machine has none, and the tolerances are far above float64.
        truth = b.astype(np.float64).ravel()
        gap = to_numpy(a).ravel() - truth
        size = max(math.sqrt(truth @ truth), 0.1 * math.sqrt(max(truth.size, 1)))
        off = math.sqrt(gap @ gap) / size
        check(off <= tolerance, f"{what} of parameter {index} are off by {off:.2g}")


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy in float64; complex numbers become pairs."""
    tensor = tensor.detach().resolve_conj()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().numpy().copy()


def as_list(found: Any) -> list[Tensor]:
    return list(found.values()) if isinstance(found, dict) else list(found)


def parameters(optimizer: Neumann) -> list[Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def groups_of(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(group) for group in state_dict["param_groups"]]


def view_bits(optimizer: Neumann) -> dict[str, Any]:
    """Weights, state and options as they are now; the next operation changes them."""
    state = optimizer.state_dict()
    return {
        "weights": parameters(optimizer),
        "state": {i: dict(entry) for i, entry in state["state"].items()},
        "groups": groups_of(state),
    }


def copy_bits(optimizer: Neumann) -> dict[str, Any]:
    """The same, copied."""
    found = view_bits(optimizer)
    found["weights"] = [w.clone() for w in found["weights"]]
    for entry in found["state"].values():
        entry.update({k: v.clone() for k, v in entry.items() if isinstance(v, Tensor)})
    return found


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


def have_same_entries(one: Neumann, other: Neumann) -> bool:
    """Whether the same frozen parameters have state, even if it is zero.

    One that was thawed for a moment has it only if the optimizer was loaded then. More numbers in
    the sum of r² may change its last bit.
    """
    ours, theirs = (
        [p in optimizer.state for g in optimizer.param_groups for p in g["params"]]
        for optimizer in (one, other)
    )
    frozen = [not p.requires_grad for g in one.param_groups for p in g["params"]]
    return all(a == b for a, b, still in zip(ours, theirs, frozen, strict=True) if still)


def describe_change_by_skipping(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """What a skipped step changed. It may count itself, and create averages: they start at w."""
    for index, state in after["state"].items():
        old = before["state"].get(index, {})
        old.pop("skipped", None)
        state.pop("skipped", None)
        if old and "offset" in state and "offset" not in old and not bool(state["offset"].any()):
            state.pop("offset")
    return describe_difference(after, before)


def _is_new(state: dict[str, Any]) -> bool:
    """Whether the parameter has not moved since its state was created."""
    return all(not bool(state[key].any()) for key in ("iterate", "offset") if key in state)
