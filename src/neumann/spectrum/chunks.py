"""Whether the chunks of a batch make up the batch.

They do if neither a layer nor the loss mixes examples, and the loss is their mean:

    loss(batch) = Σ (nᵪ/N)·loss(chunk)        and so its derivatives

Compared are the loss of the whole batch, and the gradient of its first two chunks put together,
which takes no more memory than a product with one of them. They may differ by rounding: by some
units of it, and by what a change of all weights by a few units does. The latter counts where values
are small differences of larger ones, as at the end of a training.

How it fails: dropout is off meanwhile, and a pass that draws random numbers all the same cannot be
compared, so it is refused. So is a model that computes in less than the precision of its weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from neumann.spectrum.batches import Piece, first_of
from neumann.spectrum.precision import without_tf32

UNITS = 100.0  # of rounding, relative to the chunks, that are no difference
STIRRED = 16.0  # units of rounding by which the weights are changed; enough to cross a step of it
AGAIN = 2.0  # times what that changes

Values = Callable[[Piece], Tensor]  # a piece to the values that are compared


def check_chunks(
    whole: Piece,
    chunks: Sequence[Piece],
    parameters: Sequence[Tensor],
    loss: Values,
    gradient: Values,
) -> None:
    """Raise if the chunks are another function of the weights than the whole."""
    device = parameters[0].device
    with torch.autocast(device.type, enabled=False), without_tf32(device):
        _compare("loss", loss, whole, chunks, parameters)
        two = chunks[:2]
        pair = first_of(whole, sum(chunk.examples for chunk in two))
        _compare("gradient", gradient, pair, two, parameters)


def _compare(
    name: str,
    values: Values,
    whole: Piece,
    chunks: Sequence[Piece],
    parameters: Sequence[Tensor],
) -> None:
    expected = values(whole)
    found, scale = torch.zeros_like(expected), 0.0
    for chunk in chunks:
        part = values(chunk) * (chunk.examples / whole.examples)
        found += part
        scale += float(torch.linalg.vector_norm(part))
    unit = torch.finfo(parameters[0].dtype).eps
    with _stirred(parameters, STIRRED * unit):
        noise = float(torch.linalg.vector_norm(values(whole) - expected))
    off = float(torch.linalg.vector_norm(found - expected))
    if off > UNITS * unit * scale + AGAIN * noise:
        raise ValueError(
            f"chunk= changes the {name}, by {off / max(off, scale):.1e} of itself: a layer or the "
            "loss mixes the examples of a batch, or the loss is not their mean; pass chunk=None"
        )


@contextmanager
def _stirred(parameters: Sequence[Tensor], share: float) -> Iterator[None]:
    """Each weight larger by this share of itself."""
    before = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                p.mul_(1 + share)
        yield
    finally:
        with torch.no_grad():
            for p, w in zip(parameters, before, strict=True):
                p.copy_(w)
