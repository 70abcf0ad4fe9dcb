"""Algorithm 2 of the paper in NumPy long double, as printed: with the average v, not with w − v.

The readings that the paper's text leaves open are switches. Slow and plain on purpose: every
implementation is held against this one, so it shares no code and no algebra with them.
"""

from dataclasses import dataclass, field

import numpy as np

Real = np.longdouble


@dataclass
class Group:
    """A parameter group: initial weights, and what may differ between groups."""

    weights: list[np.ndarray]
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False
    iterate: list[np.ndarray] = field(init=False)
    average: list[np.ndarray] = field(init=False)
    mu: Real = field(init=False, default=Real(0))

    def __post_init__(self) -> None:
        self.weights = [np.array(w, dtype=Real) for w in self.weights]
        self.iterate = [np.zeros_like(w) for w in self.weights]
        self.average = [w.copy() for w in self.weights]


@dataclass
class Oracle:
    groups: list[Group]
    warmup: int
    interval: int
    growth: float = 2.0
    alpha: float = 1e-7
    beta: float = 1e-5  # per variable
    gamma: float = 0.99
    variables: str | int = "tensors"
    bounded: bool = True
    steps: int = 0

    def __post_init__(self) -> None:
        self.next_reset = 1
        self.resets = 0

    def step(self, gradients: list[list[np.ndarray | None]]) -> None:
        self.steps += 1
        t = self.steps - self.warmup
        regularized = [
            [self._with_decay(group, i, g) for i, g in enumerate(row)]
            for group, row in zip(self.groups, gradients, strict=True)
        ]
        if t <= 0:
            self._sgd(regularized)
        elif t == self.next_reset:
            self._reset(regularized, t)
        else:
            self._iterate(regularized, t)

    def _with_decay(self, group: Group, i: int, g: np.ndarray | None) -> np.ndarray | None:
        if g is None:
            return None
        g = np.array(g, dtype=Real) * (-1 if group.maximize else 1)
        return g if group.decoupled else g + Real(group.weight_decay) * group.weights[i]

    def _sgd(self, gradients: list[list[np.ndarray | None]]) -> None:
        for group, row in zip(self.groups, gradients, strict=True):
            for i, g in enumerate(row):
                if g is not None:
                    w = group.weights[i]
                    group.weights[i] = w - Real(group.lr) * g - self._shrink(group, w)

    def _reset(self, gradients: list[list[np.ndarray | None]], t: int) -> None:
        for group, row in zip(self.groups, gradients, strict=True):
            group.mu = self._mu(group, t)
            for i, g in enumerate(row):
                missing = np.zeros_like(group.iterate[i])
                group.iterate[i] = missing if g is None else -Real(group.lr) * g
        if self.interval == 0:
            self.next_reset = -1
        else:
            grown = np.floor(self.interval * self.growth**self.resets + 0.5)
            self.next_reset = t + max(1, int(grown))
        self.resets += 1

    def _iterate(self, gradients: list[list[np.ndarray | None]], t: int) -> None:
        r = self.distance()
        for group, row in zip(self.groups, gradients, strict=True):
            eta, mu = Real(group.lr), self._mu(group, t)
            group.mu = mu
            for i, g in enumerate(row):
                if g is None:
                    continue
                w, v = group.weights[i], group.average[i]
                d = g + self._force(r, eta, mu) * (w - v)
                m = mu * group.iterate[i] - eta * d
                group.iterate[i] = m
                group.weights[i] = w + mu * m - eta * d - self._shrink(group, w)
                moved = group.weights[i]
                group.average[i] = moved + Real(self.gamma) * (v - moved)

    def _shrink(self, group: Group, w: np.ndarray) -> np.ndarray:
        return Real(group.lr) * Real(group.weight_decay if group.decoupled else 0.0) * w

    def _force(self, r: Real, eta: Real, mu: Real) -> Real:
        """(α r² − β/r²)/r, the repulsion's r held at r* where it is bounded."""
        alpha, beta, gamma = Real(self.alpha), Real(self.beta) * self.count(), Real(self.gamma)
        reach = r
        if self.bounded:
            reach = max(r, (gamma * eta * beta / ((1 - gamma) * (1 - mu))) ** (Real(1) / 3))
        return alpha * r - (beta / reach**3 if reach > 0 else 0)

    def _mu(self, group: Group, t: int) -> Real:
        return min(Real(group.momentum), 1 - Real(1) / (1 + t))

    def count(self) -> int:
        tensors = [w for group in self.groups for w in group.weights]
        if self.variables == "tensors":
            return len(tensors)
        if self.variables == "elements":
            return sum(w.size for w in tensors)
        return int(self.variables)

    def distance(self) -> Real:
        squares = [
            ((w - v) ** 2).sum()
            for group in self.groups
            for w, v in zip(group.weights, group.average, strict=True)
        ]
        return np.sqrt(sum(squares, Real(0)))

    def evaluation(self) -> list[list[np.ndarray]]:
        """w − μm, what the algorithm returns."""
        return [
            [w - group.mu * m for w, m in zip(group.weights, group.iterate, strict=True)]
            for group in self.groups
        ]
