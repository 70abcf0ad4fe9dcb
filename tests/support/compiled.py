"""Steps compiled as one graph, beside eager ones."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from neumann import Neumann

STRONG = {"cubic": 0.05, "repulsive": 0.05}
CLOCK = {"warmup_steps": 3, "reset_steps": 4}
MARKS = [
    pytest.mark.slow,  # Dynamo takes seconds for each graph
    pytest.mark.usefixtures("fresh_compiler"),
    # From inside torch, where its compiler is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # And of torch 2.6, where it logs a graph and has read this option before: it depends on the
    # tests that ran earlier in the process.
    pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles:UserWarning"),
]
# Dynamo of torch 2.6 does not follow an exception out of a `with`, and says that instead.
FOLLOWS = hasattr(torch._dynamo.symbolic_convert.InstructionTranslatorBase, "WITH_EXCEPT_START")


class Compiled:
    """A step compiled as one graph, which counts the graphs that were finished."""

    def __init__(self, step, backend="eager"):
        self.graphs = 0
        self.backend = torch._dynamo.lookup_backend(backend)
        self.step = torch.compile(step, fullgraph=True, backend=self._compile)

    def _compile(self, module, inputs):
        finished = self.backend(module, inputs)  # or raises, where Dynamo traces once more
        self.graphs += 1
        return finished

    def __call__(self, *args):
        return self.step(*args)


def whole(compiled, graphs=1):
    """So many graphs, which is also not none, and nothing between them."""
    return compiled.graphs == graphs and not counters["graph_break"]


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def make(shapes=((5,), (3, 4)), dtype=torch.float64, seed=0, **options):
    """An optimizer of two groups."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]
    groups = [{"params": made[:1]}, {"params": made[1:], "lr": 0.02}]
    return Neumann(groups, **{"lr": 0.1, "fused": False, **CLOCK, **STRONG, **options})


def give_gradients(optimizer, step, missing=()):
    """Noise around a slope, the same for the same weights."""
    for i, p in enumerate(parameters(optimizer)):
        if i in missing:
            p.grad = None
            continue
        generator = torch.Generator().manual_seed(1000 * step + i)
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        slope = 0.5 * p.detach().to(torch.complex128 if p.is_complex() else torch.float64)
        p.grad = (slope + noise).to(p.dtype)


def go(optimizer, step, steps, start=0, missing=()):
    for k in range(start, start + steps):
        give_gradients(optimizer, k, missing)
        step()


def difference(one, other):
    """The largest relative difference in any parameter or state."""
    pairs = list(zip(parameters(one), parameters(other), strict=True))
    for p, q in pairs[:]:
        assert one.state[p].keys() == other.state[q].keys()
        pairs += [(one.state[p][key], other.state[q][key]) for key in one.state[p]]
    errors = []
    for a, b in pairs:
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.detach().to(wide), b.detach().to(wide)
        errors.append(float((a - b).norm() / b.norm().clamp(min=1e-30)))
    return max(errors)


def check(steps=16, bound=1e-13, missing=(), backend="eager", **options):
    """Compiled steps beside eager ones."""
    ours, reference = make(**options), make(**options)
    compiled = Compiled(ours.step, backend)
    go(ours, compiled, steps, missing=missing)
    go(reference, reference.step, steps, missing=missing)
    assert whole(compiled)
    assert difference(ours, reference) <= bound
    assert ours.diagnostics().step == reference.diagnostics().step
    return ours, reference


def refused(optimizer, match):
    before = [p.detach().clone() for p in parameters(optimizer)]
    give_gradients(optimizer, 0)
    with pytest.raises(RuntimeError, match=match if FOLLOWS else "WITH_EXCEPT_START"):
        Compiled(optimizer.step)()
    assert all(map(torch.equal, before, parameters(optimizer)))
