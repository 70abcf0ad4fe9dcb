"""Preconditioners P: from gradients to the directions that the Neumann series sums.

The series A⁻¹ = Σ(I − A)ⁱ converges as fast as A is well conditioned. With a preconditioner it is
the series of PA, and the iteration stays the same with P(g) in place of g:

    g → ±g/grad_scale + λw → P → the update

P = I is the paper. To add a preconditioner, write a class with the interface of
`protocol.Preconditioner` and, if it should have a name, list it in `NAMED`. Its defaults for
Neumann are `_PRECONDITIONED` in `defaults.py`; add a case to `_usual_options` there if it needs
others.

protocol            the interface
diagonal, spectral  the two that have a name
momentum            what `spectral` takes before it
orthogonalization   the arithmetic of `spectral`
batch_plan          which matrices it takes together, worked out once
cuda                kernels for NVIDIA GPUs
matrix_view         the matrices inside one tensor, such as fused projections
apply               where P acts in a step
captured            the same in a CUDA graph
exchange            which matrices are divided among processes
ownership           which process applies P to which of them, and what travels for that
journey             carries that out, with asynchronous collectives
memory              what P remembers about a parameter, and its checkpoint
narrow_memory       that in bfloat16: wide for P, rounded after it

A preconditioner fails where its arithmetic does: a gradient that is not finite gives a direction
that is not finite. If the step is skipped, the preconditioner's state is restored.
"""

from collections.abc import Mapping

from neumann.optim.preconditioners.diagonal import Diagonal
from neumann.optim.preconditioners.momentum import Momentum, SlowMomentum
from neumann.optim.preconditioners.protocol import Preconditioner
from neumann.optim.preconditioners.spectral import Spectral

__all__ = ["NAMED", "Diagonal", "Momentum", "Preconditioner", "SlowMomentum", "Spectral"]

# What `precondition="name"` can ask for.
NAMED: Mapping[str, Preconditioner] = {p.name: p for p in (Diagonal(), Spectral())}
