"""The symmetric product beside torch.bmm: values and times.

    python -m benchmarks.step.time_symmetric_product --output results/symmetric-product-h200.json

`gram` is XXᵀ, `polynomial` is bA + cA² of A = XXᵀ. Times are of the device, per product, with
quartiles; in every round all variants take a turn, of several products each. `speedup` is the time
of torch.bmm by that of a variant in the same round, with quartiles over the rounds. `host` is the
time until a product is launched. `error` is the largest difference from the product in float32,
relative to its largest element: bfloat16 rounds by up to 0.2 %. The first two variants are what the
library has; the others are tilings to compare, with --tune. Where the library uses the kernel, and
with which tiling (neumann.optim.preconditioners.cuda.symmetric_product), follows from this table.

The numbers are written after every size, all into one file. On a CPU, where Triton interprets the
kernel, only values mean something.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.markdown import format_cell, format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import find_quartiles, synchronize, time_on_gpu
from neumann.optim.preconditioners.cuda.symmetric_product import (
    LARGE,
    LARGE_DEEP,
    SMALL,
    Tiling,
    is_faster,
    multiply_by_transpose,
)
from neumann.optim.preconditioners.orthogonalization import COEFFICIENTS

SIZES = [  # batch × rows × columns; 768: GPT-2 124M, 1600: GPT-2 1.5B, 512: ResNet-50
    "1x512x4608",
    "16x512x2048",
    "24x768x768",
    "24x768x3072",
    "1x1024x1024",
    "8x1024x1024",
    "16x1024x4096",
    "24x1600x1600",
    "24x1600x6400",
    "1x2048x2048",
    "4x2048x2048",
    "16x2048x2048",
    "16x2048x8192",
    "1x4096x4096",
    "4x4096x4096",
]
TUNED = {
    "128, depth 32": Tiling(128, 32, 8, 8, 4),
    "128, depth 128": Tiling(128, 128, 8, 8, 2),
    "128, 4 warps": Tiling(128, 64, 8, 4, 3),
    "128, band 4": Tiling(128, 64, 4, 8, 3),
    "128, band 16": Tiling(128, 64, 16, 8, 3),
}
GENERAL = "bmm"
Product = Callable[[], Tensor]


def list_products(x: Tensor, *, tune: bool) -> dict[str, dict[str, Product]]:
    """By kind of product and variant."""
    _, b, c = COEFFICIENTS
    gram = torch.bmm(x, x.mT)
    gram = (gram + gram.mT) / 2  # bmm's own need not be symmetric in the last bit
    tilings: dict[str, Tiling | None] = {"symmetric": None}
    if tune:
        tilings |= {"128": LARGE, "128, 4 stages": LARGE_DEEP, "64": SMALL, **TUNED}
    grams: dict[str, Product] = {GENERAL: lambda: torch.bmm(x, x.mT)}
    polynomials: dict[str, Product] = {
        GENERAL: lambda: torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    }
    for name, tiling in tilings.items():

        def square(tiling: Tiling | None = tiling) -> Tensor:
            return multiply_by_transpose(x, tiling=tiling)

        def add(tiling: Tiling | None = tiling) -> Tensor:
            return multiply_by_transpose(gram, alpha=c, addend=gram, beta=b, tiling=tiling)

        grams[name], polynomials[name] = square, add
    return {"gram": grams, "polynomial": polynomials}


def compute_exactly(kind: str, x: Tensor) -> Tensor:
    wide = x.float()
    gram = torch.bmm(wide, wide.mT)
    if kind == "gram":
        return gram
    _, b, c = COEFFICIENTS
    narrow = torch.bmm(x, x.mT)
    narrow = ((narrow + narrow.mT) / 2).float()
    return torch.baddbmm(narrow, narrow, narrow, beta=b, alpha=c)


def measure(kind: str, size: str, x: Tensor, products: dict[str, Product], rounds: int) -> Any:
    """One row for each variant; a tiling that does not run is left out."""
    exact = compute_exactly(kind, x)
    rows: dict[str, dict[str, Any]] = {}
    for name, product in products.items():
        try:
            found = product()
        except Exception as error:  # more shared memory or registers than there are
            print(f"{name} does not run: {error}", flush=True)
            continue
        deviation = (found.float() - exact).abs().max() / exact.abs().max()
        rows[name] = {
            "kind": kind,
            "size": size,
            "variant": name,
            "chosen": is_faster(x),
            "error": float(deviation),
            "symmetric": bool(torch.equal(found, found.mT)),
            "gpu_ms": [],
            "host_us": [],
        }
    repeats = 10
    order = list(rows)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds if x.is_cuda else 0):
        shuffle(order)
        for name in order:
            product = products[name]

            def call(product: Product = product) -> None:
                for _ in range(repeats):
                    product()

            rows[name]["gpu_ms"].append(time_on_gpu(call, 2.0) / repeats)
            synchronize(x.device)
            start = time.perf_counter()
            call()
            rows[name]["host_us"].append(1e6 * (time.perf_counter() - start) / repeats)
            synchronize(x.device)
    general = rows[GENERAL]["gpu_ms"]
    for row in rows.values():
        ratios = [plain / own for plain, own in zip(general, row["gpu_ms"], strict=True)]
        row["speedup_quartiles"] = find_quartiles(ratios)
        row["speedup"] = row["speedup_quartiles"] and row["speedup_quartiles"][1]
    for row in rows.values():
        for key in ("gpu_ms", "host_us"):
            row[key] = find_quartiles(row[key])
    return list(rows.values())


def format_rows(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        times, host, speedup = row["gpu_ms"], row["host_us"], row["speedup_quartiles"]
        cells.append(
            [
                row["kind"],
                row["size"].replace("x", " × "),
                row["variant"],
                "{1:.4f} [{0:.4f}, {2:.4f}]".format(*times) if times else "",
                "{1:.2f} [{0:.2f}, {2:.2f}]".format(*speedup) if speedup else "",
                format_cell(host and host[1], "{:.1f}"),
                f"{row['error']:.1e}",
                "yes" if row["symmetric"] else "no",
                "yes" if row["chosen"] else "no",
            ]
        )
    heads = ["product", "batch", "variant", "gpu ms [quartiles]", "speedup [quartiles]"]
    heads += ["host µs", "error", "symmetric", "chosen"]
    return format_table(heads, "lllrrrrll", cells)


def main() -> None:
    parser = create_parser(__doc__, "cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="batch × rows × columns")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="compare other tilings too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes:
        batch, height, width = map(int, size.split("x"))
        x = torch.randn(batch, height, width, device=device)
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        x = x.to(torch.bfloat16)
        for kind, products in list_products(x, tune=arguments.tune).items():
            rows += measure(kind, size, x, products, arguments.rounds)
        write_measurements(arguments, device, rows=rows)
    print(format_rows(rows))


if __name__ == "__main__":
    main()
