"""What it takes to know both ends of a Hessian's spectrum, beside the tools people use.

Every tool gets the same model, weights and batch and is asked for λ_min and λ_max to 1e-3, in the
way its documentation suggests; all but PyHessian, which switches the model to evaluation, measure
with the statistics of the batch. `right` compares with values converged to 1e-8 in float64: both
ends within 1e-3 of the largest |λ|; `right, itself` within 1e-3 of their own size.

    python benchmarks/spectrum.py --model cnn --side 8 --batch 32 --output spectrum-cpu.json
    python benchmarks/spectrum.py --device cuda --model resnet18 --batch 64 --data cifar10.npz

The weights are trained for some steps of SGD on the batch first: at initialization the spectrum has
no outliers to speak of. TF32 is off for all, unless asked for. Tools that cannot be imported are
listed as such. Peak memory is beyond what model and batch take; on a CPU it is that of the process,
sampled.
"""

import argparse
import copy
import gc
import importlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from neumann.lab.models.resnet18 import resnet18
from neumann.lab.models.small import cnn
from neumann.spectrum import Hessian, extremes

TOLERANCE = 1e-3
Pair = tuple[Tensor, Tensor]
Found = tuple[float | None, float, int, str]  # λ_min, λ_max, products, what the tool says of itself


@dataclass(frozen=True)
class Row:
    """One line of the table. Errors as shares of the largest |λ|, and of the end itself."""

    tool: str
    seconds: float | None  # median of the repeats
    peak_bytes: int | None
    products: int | None
    smallest: float | None
    largest: float | None
    errors: tuple[float, float] | None
    errors_itself: tuple[float, float] | None
    right: bool | None
    right_itself: bool | None
    says: str


def ours(relative_to: Any = "largest", **options: Any) -> Callable[[nn.Module, Pair, int], Found]:
    def measure(model: nn.Module, batch: Pair, seed: int) -> Found:
        operator = Hessian(model, cross_entropy, batch=batch)
        found = extremes(operator, seed=seed, relative_to=relative_to, **options)
        errors = f"±{found.smallest.error:.2g}, ±{found.largest.error:.2g}"
        says = f"{'converged' if found.converged else 'not converged'} ({errors})"
        return found.smallest.value, found.largest.value, found.products, says

    return measure


def pyhessian(model: nn.Module, batch: Pair, seed: int) -> Found:
    """Its largest |λ| by power iteration, and the smallest node of its density."""
    hessian = importlib.import_module("pyhessian").hessian
    torch.manual_seed(seed)
    computed = hessian(model, cross_entropy, data=batch, cuda=batch[0].is_cuda)
    module: Any = importlib.import_module("pyhessian.hessian")
    original, count = module.hessian_vector_product, [0]

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return original(*arguments)

    module.hessian_vector_product = counted
    try:
        (largest,), _ = computed.eigenvalues(maxIter=100, tol=TOLERANCE, top_n=1)
        try:
            nodes, _ = computed.density(iter=100, n_v=1)
            smallest, says = float(min(nodes[0])), "evaluation mode"
        except RuntimeError:  # it calls torch.eig, which newer versions do not have
            smallest, says = None, "evaluation mode; density() fails on this torch, so no λ_min"
    finally:
        module.hessian_vector_product = original
    return smallest, float(largest), count[0], says


def curvlinops(model: nn.Module, batch: Pair, seed: int) -> Found:
    """Its operator in scipy's eigsh, one eigenvalue of either end."""
    operator_class = importlib.import_module("curvlinops").HessianLinearOperator
    linalg = importlib.import_module("scipy.sparse.linalg")
    numpy = importlib.import_module("numpy")
    parameters = [p for p in model.parameters() if p.requires_grad]
    criterion = nn.CrossEntropyLoss()
    operator = operator_class(model, criterion, parameters, [batch], check_deterministic=False)
    inner, count = operator.to_scipy(), [0]

    def counted(vector: Any) -> Any:
        count[0] += 1
        return inner @ vector

    wrapped = linalg.LinearOperator(inner.shape, matvec=counted, dtype=inner.dtype)
    start = numpy.random.default_rng(seed).standard_normal(inner.shape[0]).astype(inner.dtype)
    low, high = linalg.eigsh(
        wrapped, k=2, which="BE", tol=TOLERANCE, v0=start, return_eigenvectors=False
    )
    return float(low), float(high), count[0], "converged"


def hessian_eigenthings(model: nn.Module, batch: Pair, seed: int) -> Found:
    """All Ritz values of one run, with 1.4 times the steps until it calls both ends converged.

    Only the products of the last run count.
    """
    package = importlib.import_module("hessian_eigenthings")
    operator = package.HessianOperator(model, [batch], package.supervised_loss(cross_entropy))
    steps = STEPS_OF_EIGENTHINGS.get(id(model), 25)
    while True:
        found = package.lanczos(
            operator, k=steps, max_iter=steps, tol=TOLERANCE, which="LA", seed=seed
        )
        ends = [int(found.eigenvalues.argmin()), int(found.eigenvalues.argmax())]
        done = bool(found.converged[ends].all())
        if done or steps >= 400:
            break
        steps = int(steps * 1.42)
    STEPS_OF_EIGENTHINGS[id(model)] = steps
    low, high = (float(found.eigenvalues[end]) for end in ends)
    return low, high, found.iterations, "converged" if done else "not converged"


# Found in the warm-up, so that the timed run does not search for the number of steps.
STEPS_OF_EIGENTHINGS: dict[int, int] = {}

TOOLS: dict[str, tuple[str | None, Callable[[nn.Module, Pair, int], Found]]] = {
    "neumann.spectrum": (None, ours()),
    "neumann.spectrum, each end to 1e-3 of itself": (None, ours("itself")),
    "10 Lanczos steps, as in the paper": (None, ours(tolerance=0.0, max_products=10)),
    "curvlinops and scipy's eigsh": ("curvlinops", curvlinops),
    "hessian-eigenthings": ("hessian_eigenthings", hessian_eigenthings),
    "PyHessian": ("pyhessian", pyhessian),
}


def batch_of(arguments: argparse.Namespace, device: torch.device) -> Pair:
    torch.manual_seed(arguments.seed)
    shape = (arguments.batch, 3, arguments.side, arguments.side)
    if arguments.data is None:
        images, labels = torch.randn(shape), torch.randint(10, (arguments.batch,))
    else:
        stored = importlib.import_module("numpy").load(arguments.data)
        images = torch.from_numpy(stored["x_train"][: arguments.batch]).permute(0, 3, 1, 2).float()
        labels = torch.from_numpy(stored["y_train"][: arguments.batch]).long()
        images = (images - images.mean((0, 2, 3), True)) / images.std((0, 2, 3), keepdim=True)
    return images.to(device), labels.to(device)


def trained(arguments: argparse.Namespace, batch: Pair) -> nn.Module:
    """The model after some steps of SGD on the batch, which keeps no running statistics up."""
    torch.manual_seed(arguments.seed)
    model = (cnn if arguments.model == "cnn" else resnet18)(3, 10).to(batch[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
    optimizer.zero_grad()
    return model


def for_a_tool(model: nn.Module) -> nn.Module:
    """A copy whose BatchNorm uses the batch and updates nothing, which all can differentiate."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
    return model


@contextmanager
def peak_memory(device: torch.device, into: list[int]) -> Iterator[None]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        into.append(torch.cuda.max_memory_allocated(device) - before)
        return
    before, highest, stop = resident(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            highest[0] = max(highest[0], resident())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    into.append(highest[0] - before)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(
    name: str, model: nn.Module, batch: Pair, truth: tuple[float, float], repeats: int, seed: int
) -> Row:
    needs, tool = TOOLS[name]
    empty = (None,) * 9
    if needs is not None:
        try:
            importlib.import_module(needs)
        except ImportError as error:
            return Row(name, *empty, says=f"not importable: {error}")
    device, times, peaks = batch[0].device, list[float](), list[int]()
    model = for_a_tool(model)
    try:
        for repeat in range(repeats + 1):  # the first warms up
            with peak_memory(device, peaks):
                begin = time.perf_counter()
                low, high, products, says = tool(model, batch, seed)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            if repeat == 0:
                times.clear()
    except Exception as error:  # a tool that fails is a line of the table
        return Row(name, *empty, says=f"{type(error).__name__}: {error}"[:200])
    off = math.inf if low is None else abs(low - truth[0]), abs(high - truth[1])
    scale = max(map(abs, truth))
    errors = off[0] / scale, off[1] / scale
    itself = off[0] / abs(truth[0]), off[1] / abs(truth[1])
    return Row(
        name,
        statistics.median(times),
        max(peaks),
        products,
        low,
        high,
        errors,
        itself,
        max(errors) <= TOLERANCE,
        max(itself) <= TOLERANCE,
        says,
    )


def reference(model: nn.Module, batch: Pair, tolerance: float, seed: int) -> dict[str, Any]:
    """Both ends in float64, converged far beyond what is asked of the tools."""
    double = copy.deepcopy(model).double()
    operator = Hessian(double, cross_entropy, batch=(batch[0].double(), batch[1]))
    found = extremes(operator, tolerance=tolerance, max_products=1000, seed=seed + 1000, risk=1e-6)
    return {
        "smallest": found.smallest.value,
        "largest": found.largest.value,
        "errors": [found.smallest.error, found.largest.error],
        "converged": found.converged,
        "products": found.products,
        "parameters": found.about.parameters,
    }


def plain(value: Any) -> Any:
    """For JSON, which has no infinity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def cell(value: Any, form: str = "{}") -> str:
    if value is None:
        return ""
    return {True: "right", False: "wrong"}[value] if isinstance(value, bool) else form.format(value)


def table(rows: list[Row]) -> str:
    lines = [
        "| tool | s | peak, MiB | products | λ_min | λ_max | errors/max\\|λ\\| | right "
        "| errors/itself | right, itself | says |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|---|---|",
    ]
    for row in rows:
        pairs = [
            "" if e is None else f"{e[0]:.1e}, {e[1]:.1e}" for e in (row.errors, row.errors_itself)
        ]
        cells = [
            row.tool,
            cell(row.seconds, "{:.2f}"),
            cell(None if row.peak_bytes is None else row.peak_bytes / 2**20, "{:.0f}"),
            cell(row.products),
            cell(row.smallest, "{:.6g}"),
            cell(row.largest, "{:.6g}"),
            pairs[0],
            cell(row.right),
            pairs[1],
            cell(row.right_itself),
            row.says,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=["cnn", "resnet18"], default="cnn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=16, help="of random images, pixels")
    parser.add_argument("--data", help=".npz with x_train (N, H, W, 3) and y_train (N,)")
    parser.add_argument("--steps", type=int, default=30, help="of SGD before measuring")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--reference-tolerance", type=float, default=1e-8)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    device = torch.device(arguments.device)
    batch = batch_of(arguments, device)
    model = trained(arguments, batch)
    truth = reference(model, batch, arguments.reference_tolerance, arguments.seed)
    ends = truth["smallest"], truth["largest"]
    print(f"reference: {truth}", flush=True)
    rows = []
    for name in arguments.tools:
        rows.append(measure(name, model, batch, ends, arguments.repeats, arguments.seed))
        print(rows[-1], flush=True)
        if arguments.output:  # now, lest the next tool take for ever
            result = {
                "environment": environment(device, arguments.commit),
                "settings": {k: str(v) for k, v in vars(arguments).items()},
                "reference": truth,
                "rows": [plain(asdict(row)) for row in rows],
            }
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
