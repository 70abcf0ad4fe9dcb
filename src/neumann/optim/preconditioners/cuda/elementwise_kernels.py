"""The Triton kernels of P's elementwise arithmetic: each reads and writes every tensor once."""

# Triton reads the annotations of these functions; they are not Python's.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def momentum_kernel(gradients, past, out, size, decay, BLOCK: tl.constexpr):
    """b ← decay·b + g, and g + decay·b."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    gradient = tl.load(gradients + at, mask=here)
    momentum = decay * tl.load(past + at, mask=here) + gradient
    tl.store(past + at, momentum, mask=here)
    tl.store(out + at, gradient + decay * momentum, mask=here)


@triton.jit
def diagonal_kernel(
    gradients,
    squares,
    correction,  # √(1 − decayⁿ)
    out,
    size,
    decay,
    gain,  # 1 − decay
    eps,
    scale,
    BLOCK: tl.constexpr,
):
    """v ← decay·v + (1 − decay)·g², and scale·g / (√v/correction + ε)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    gradient = tl.load(gradients + at, mask=here)
    square = decay * tl.load(squares + at, mask=here) + gain * gradient * gradient
    tl.store(squares + at, square, mask=here)
    root = tl.sqrt_rn(square) / tl.load(correction) + eps
    tl.store(out + at, scale * tl.div_rn(gradient, root), mask=here)
