"""What the host does for the spectral P: its time without any arithmetic, and what it launches.

    python -m benchmarks.step.preconditioner_host
    PYTHONPATH=../older/src:. python -m benchmarks.step.preconditioner_host

The tensors have the shapes of real networks with every width divided by 16, and the products are
left out, so that the time is that of Python and of torch's dispatch. Matrices form the batches that
they would form on a GPU. CPU time of one thread; median of rounds. Operations that return views are
not counted as launches.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.markdown import format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.step.shapes import Shape, gpt2_shapes, resnet50_shapes
from neumann.optim.preconditioners import Spectral, orthogonalization
from neumann.optim.preconditioners.matrix_view import MatrixView

SHRINK = 16
LAUNCHES = {"aten::cat", "aten::copy_", "aten::new_zeros", "aten::_foreach_mul_", "aten::clone"}


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.name().partition(".")[0]
        if name in LAUNCHES:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def make_gradients(shapes: list[Shape]) -> list[Tensor]:
    """Small tensors that form as many shapes as the given ones."""
    return [
        torch.randn(*(max(2, s // SHRINK) if s >= SHRINK else s for s in shape[:2]), *shape[2:])
        for shape in shapes
        if len(shape) > 1
    ]


def list_cases() -> dict[str, list[tuple[Spectral, list[Tensor]]]]:
    """What each P of a network is applied to."""
    convolutions = make_gradients(resnet50_shapes())
    last = [g.to(memory_format=torch.channels_last) if g.ndim == 4 else g for g in convolutions]
    hidden = make_gradients(gpt2_shapes()[2:])
    fused = [g for g in hidden if len(g) == 3 * g.shape[1]]
    single = [g for g in hidden if len(g) != 3 * g.shape[1]]
    plain = Spectral(before=None)
    return {
        "ResNet-50": [(plain, convolutions)],
        "ResNet-50, channels last": [(plain, last)],
        "GPT-2 124M": [
            (Spectral(before=None, view=MatrixView(parts=3)), fused),
            (plain, single),
        ],
    }


def leave_products_out() -> None:
    """Take the arithmetic out of the orthogonalization, for the rest of the process."""
    orthogonalization.normalize = lambda stack, **options: stack
    orthogonalization.iterate = lambda x: x


def measure(call: Callable[[], Any], rounds: int, repeats: int = 20) -> list[float]:
    """Microseconds of CPU time per call, one value per round."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        for _ in range(repeats):
            call()
        times.append(1e6 * (time.process_time() - start) / repeats)
    return times[1:]


def main() -> None:
    parser = create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    leave_products_out()
    orthogonalization.launch_cost = lambda matrix: 2e10 / SHRINK**3
    cases: dict[str, Any] = {}
    for name, calls in list_cases().items():

        def apply(calls: list[tuple[Spectral, list[Tensor]]] = calls) -> None:
            for preconditioner, gradients in calls:
                preconditioner.apply(gradients, [{} for _ in gradients])

        times = measure(apply, arguments.rounds)
        with Launches() as launches:
            apply()
        quartiles = statistics.quantiles(times, n=4)
        cases[name] = {"microseconds": quartiles, "launches": dict(launches.found)}
    rows = []
    for name, case in cases.items():
        shown = "{1:.0f} [{0:.0f}, {2:.0f}]".format(*case["microseconds"])
        rows.append([name, shown, str(sum(case["launches"].values()))])
    print(format_table(["network", "host µs [quartiles]", "launches, no products"], "lrr", rows))
    write_measurements(arguments, "cpu", cases=cases)


if __name__ == "__main__":
    main()
