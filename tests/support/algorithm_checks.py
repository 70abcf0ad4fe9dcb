"""One check for each part of the algorithm, in closed form on a few numbers.

Each takes the class to check and the options that choose an implementation, so that the same check
runs on the real optimizer (test_algorithm_checks) and on deliberately broken ones (test_mutations).
"""

from typing import Any

import torch

ETA = 0.1


class Bench:
    """An optimizer on one small parameter, with the numbers of its state at hand."""

    def __init__(self, cls: Any, **options: Any) -> None:
        self.p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        defaults = {"lr": ETA, "warmup_steps": 2, "reset_steps": 3, "variables": 1}
        self.optimizer = cls([self.p], **{**defaults, **options})
        self.steps = 0

    def step(self, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            self.steps += 1
            g = torch.tensor([0.3, -0.5, 0.2 * self.steps], dtype=torch.float64)
            self.p.grad = g
            self.optimizer.step()
        return g

    @property
    def w(self) -> torch.Tensor:
        return self.p.detach().clone()

    @property
    def m(self) -> torch.Tensor:
        return self.optimizer.state[self.p]["iterate"].clone()

    @property
    def v(self) -> torch.Tensor:
        return self.optimizer.average_params()[0]

    @property
    def x(self) -> torch.Tensor:
        return self.optimizer.eval_params()[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14), (found, expected)


def warmup(cls: Any, **options: Any) -> None:
    """The first W steps are w ← w − ηg; m stays 0 and v at the initial weights."""
    bench = Bench(cls, **options)
    start = bench.w
    for _ in range(2):
        before = bench.w
        g = bench.step()
        close(bench.w, before - ETA * g)
        close(bench.m, torch.zeros_like(before))
        close(bench.v, start)
    before = bench.w
    bench.step()
    close(bench.w, before)  # the third is no longer an SGD step


def reset(cls: Any, **options: Any) -> None:
    """At a reset m ← −ηg, independent of the old m; w and v do not move."""
    bench = Bench(cls, **options)
    for steps_between in (2, 2):  # t = 1, and t = 4 when m is not 0
        bench.step(steps_between)
        w, v = bench.w, bench.v
        g = bench.step()
        close(bench.m, -ETA * g)
        close(bench.w, w)
        close(bench.v, v)


def growth(cls: Any, **options: Any) -> None:
    """Intervals 3, 6, 12: the weights stand still at t = 1, 4, 10, 22 and nowhere else."""
    bench = Bench(cls, **options)
    bench.step(2)
    still = []
    for t in range(1, 40):
        before = bench.w
        bench.step()
        if torch.equal(before, bench.w):
            still.append(t)
    assert still == [1, 4, 10, 22], still


def momentum(cls: Any, **options: Any) -> None:
    """w moves by μ(t)·m − ηg with μ(t) = min(0.9, 1 − 1/(1+t)), and m keeps μ(t) of itself."""
    bench = Bench(cls, cubic=0.0, repulsive=0.0, reset_steps=0, **options)
    bench.step(3)
    for t in range(2, 15):
        w, m = bench.w, bench.m
        g = bench.step()
        mu = min(0.9, 1 - 1 / (1 + t))
        close(bench.m, mu * m - ETA * g)
        close(bench.w, w + mu * bench.m - ETA * g)


def force_at(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The force of an iterate step, read off m, with the offset and the distance before it."""
    t = bench.steps - 1  # of the step that comes
    mu = min(0.9, 1 - 1 / (1 + t))
    m, offset = bench.m, bench.w - bench.v
    g = bench.step()
    return (mu * m - bench.m) / ETA - g, offset, float(offset.norm())


def cubic(cls: Any, **options: Any) -> None:
    """The attraction is α·r·(w − v)."""
    bench = Bench(cls, cubic=0.7, repulsive=0.0, reset_steps=0, **options)
    bench.step(3)
    for _ in range(5):
        force, offset, r = force_at(bench)
        close(force, 0.7 * r * offset)


def repulsive(cls: Any, **options: Any) -> None:
    """The repulsion is −β/r³·(w − v), far enough from the average also when it is bounded."""
    for bounded in (False, True):
        bench = Bench(cls, cubic=0.0, repulsive=1e-6, bounded=bounded, reset_steps=0, **options)
        bench.step(3)
        for _ in range(5):
            force, offset, r = force_at(bench)
            close(force, -1e-6 / r**3 * offset)


def bound(cls: Any, **options: Any) -> None:
    """Closer than r* the repulsion is −β/r*³·(w − v), r* = (γηβ / ((1−γ)(1−μ)))^⅓."""
    bench = Bench(cls, cubic=0.0, repulsive=5.0, reset_steps=0, **options)
    bench.step(3)
    for t in range(2, 6):
        mu = 1 - 1 / (1 + t)
        settled = (0.99 * ETA * 5.0 / (0.01 * (1 - mu))) ** (1 / 3)
        force, offset, r = force_at(bench)
        assert r < settled
        close(force, -5.0 / settled**3 * offset)


def average(cls: Any, **options: Any) -> None:
    """v ← w + γ(v − w) after w has moved."""
    bench = Bench(cls, reset_steps=0, average=0.8, **options)
    bench.step(3)
    for _ in range(6):
        v = bench.v
        bench.step()
        close(bench.v, bench.w + 0.8 * (v - bench.w))


def correction(cls: Any, **options: Any) -> None:
    """What is evaluated is w − μm, with the μ of the last completed step."""
    bench = Bench(cls, reset_steps=0, **options)
    close(bench.x, bench.w)
    bench.step(2)
    close(bench.x, bench.w)
    for t in range(1, 13):
        bench.step()
        w, expected = bench.w, bench.w - min(0.9, 1 - 1 / (1 + t)) * bench.m
        bench.optimizer.param_groups[0]["momentum"] = 0.9
        close(bench.x, expected)
        with bench.optimizer.evaluating():
            close(bench.w, expected)
        close(bench.w, w)


def decay(cls: Any, **options: Any) -> None:
    """L2 decay is part of the gradient: at a reset it enters m, at w as it is displaced."""
    bench = Bench(cls, weight_decay=0.3, **options)
    before = bench.w
    g = bench.step()
    close(bench.w, before - ETA * (g + 0.3 * before))
    bench.step()
    g = bench.step()
    close(bench.m, -ETA * (g + 0.3 * bench.w))


def decoupled_decay(cls: Any, **options: Any) -> None:
    """Decoupled decay takes ηλw from w in warm-up and iterate; m never sees it, δ does."""
    shared = {"weight_decay": 0.3, "decoupled_weight_decay": True, "repulsive": 0.0}
    # A force too weak to be seen, so that the average is kept.
    bench = Bench(cls, cubic=1e-30, reset_steps=0, **shared, **options)
    before = bench.w
    g = bench.step()
    close(bench.w, before - ETA * g - ETA * 0.3 * before)
    bench.step()
    w = bench.w
    g = bench.step()
    close(bench.w, w)
    close(bench.m, -ETA * g)
    w, m, v = bench.w, bench.m, bench.v
    g = bench.step()
    mu = 2 / 3
    close(bench.m, mu * m - ETA * g)
    close(bench.w, w + mu * bench.m - ETA * g - ETA * 0.3 * w)
    close(bench.v, bench.w + 0.99 * (v - bench.w))


def distance(cls: Any, **options: Any) -> None:
    """r is the norm over all parameters of all groups, not of each."""
    parameters = [torch.nn.Parameter(torch.full((2,), x, dtype=torch.float64)) for x in (3.0, 4.0)]
    groups = [{"params": [p]} for p in parameters]
    shared = {"lr": ETA, "warmup_steps": 1, "reset_steps": 0, "cubic": 0.5, "repulsive": 0.0}
    optimizer = cls(groups, **shared, **options)
    for _ in range(2):  # warm-up moves each weight by −η, t = 1 resets
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    r = ETA * 4**0.5
    for p in parameters:
        p.grad = torch.zeros_like(p)
    before = [optimizer.state[p]["iterate"].clone() for p in parameters]
    optimizer.step()
    for p, m in zip(parameters, before, strict=True):
        close(optimizer.state[p]["iterate"], 2 / 3 * m - ETA * (0.5 * r * -ETA))


PARTS = {
    part.__name__: part
    for part in (
        warmup,
        reset,
        growth,
        momentum,
        cubic,
        repulsive,
        bound,
        average,
        correction,
        decay,
        decoupled_decay,
        distance,
    )
}
