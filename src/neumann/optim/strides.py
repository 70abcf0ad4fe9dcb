"""What the strides of a tensor say about its memory."""

from collections.abc import Sequence


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one range of memory, in any order of the dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True
