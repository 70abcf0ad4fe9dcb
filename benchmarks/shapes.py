"""The parameter shapes that step benchmarks run on."""

from math import prod

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """ResNet-50 for 1,000 classes: 161 tensors, 25.6 M weights."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, inside, kernel in (
                (width, channels, 1),
                (width, width, 3),
                (4 * width, width, 1),
            ):
                shapes += [(out, inside, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2() -> Shapes:
    """GPT-2 small with tied embeddings: 148 tensors, 124 M weights."""
    width = 768
    block: Shapes = [
        (width,),
        (width,),
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
    ]
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


CASES: dict[str, Shapes] = {
    "a": resnet50(),
    "b": gpt2(),
    "c": [(2**27,)],
    "d": [(1000,)] * 10_000,
}
TITLES = {
    "a": "ResNet-50",
    "b": "GPT-2 124M",
    "c": "one tensor of 2^27",
    "d": "10,000 tensors of 1,000",
}


def weights(case: str) -> int:
    return sum(prod(shape) for shape in CASES[case])


assert (len(CASES["a"]), weights("a")) == (161, 25_557_032)
assert (len(CASES["b"]), weights("b")) == (148, 124_439_808)
