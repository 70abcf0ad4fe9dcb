"""Whether two versions of the library take the same 200 steps, bit for bit.

    PYTHONPATH=../older/src:. python -m benchmarks.step.same_bits --output before.json
    PYTHONPATH=src:. python -m benchmarks.step.same_bits --against before.json

Runs every backend with every dtype and preconditioner on small tensors and prints a digest of the
weights, the evaluation weights and the state after the last step. Without a GPU, Triton interprets
its kernels. Exits with 1 if a digest differs.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from benchmarks.common.script import create_parser, write_result
from neumann import Neumann

STEPS = 200
# Dtypes of the weights and of the state; None means the dtype of the weights.
DTYPES = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16 weights, float32 state": (torch.bfloat16, torch.float32),
    "float32, bfloat16 state": (torch.float32, torch.bfloat16),
    "float16, float32 state": (torch.float16, torch.float32),
    "complex64": (torch.complex64, None),
}
BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"foreach": False},
    "lists": {"foreach": True},
    "numba": {"fused": True},
    "triton": {"fused": True},
    "compiled": {"foreach": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {"weight_decay": 0.01},
    "paper, decoupled": {"weight_decay": 0.01, "decoupled_weight_decay": True, "maximize": True},
    "without forces": {"cubic": 0.0, "repulsive": 0.0},
    "diagonal": {"precondition": "diagonal", "weight_decay": 0.1},
    "spectral": {"precondition": "spectral", "weight_decay": 0.1},
    "spectral with forces": {"precondition": "spectral", "cubic": 1e-2, "repulsive": 1e-3},
}
SHAPES = [(17, 9), (9,), (4, 3, 3, 3), (), (33,)]


def list_cases(device: str, backends: list[str]) -> Iterator[tuple[str, str, str]]:
    """The combinations of backend, dtype and options that the device can run."""
    for backend, dtype, options in product(backends, DTYPES, OPTIONS):
        compiled_too = dtype not in ("complex64", "float16, float32 state")
        if (backend != "numba" or device == "cpu") and (backend != "compiled" or compiled_too):
            yield backend, dtype, options


def use_interpreter() -> None:
    """Send fused=True to the Triton kernels on CPU tensors, in this version or an older one."""
    try:
        execution: Any = import_module("neumann.optim.execution")
        execution._fused = lambda devices: (execution.Implementation.CUDA, None)
    except ImportError:
        backends = import_module("neumann.optim.backends")
        backends.FUSED[:] = [b for b in backends.FUSED if b.name == "triton"]
        backends.FUSED[0].device_type = "cpu"


def run_case(backend: str, dtype: str, options: str, device: str, steps: int) -> str:
    """Take the steps and return a hash of everything that they leave behind."""
    torch.manual_seed(0)
    weight_dtype, state_dtype = DTYPES[dtype]
    parameters = [
        torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(weight_dtype).to(device))
        for shape in SHAPES
    ]
    groups = [
        {"params": parameters[:2], "lr": 0.02},
        {"params": parameters[2:], "lr": 0.01, "momentum": 0.8},
    ]
    chosen = {"warmup_steps": 5, "reset_steps": 7, **OPTIONS[options], **BACKENDS[backend]}
    optimizer = Neumann(groups, 0.05, state_dtype=state_dtype, **chosen)
    step = torch.compile(optimizer.step) if backend == "compiled" else optimizer.step
    sign = -1 if chosen.get("maximize") else 1
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        for index, p in enumerate(parameters):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(device)
            missing = backend != "compiled" and index == 4 and number % 11 == 3
            p.grad = None if missing else (sign * (p.detach() + 0.3 * noise)).to(p.dtype)
        step()
    tensors = [*parameters, *optimizer.eval_params()]
    state = optimizer.state_dict()["state"]
    for index in sorted(state):
        tensors += [state[index][key] for key in sorted(state[index])]
    return hash_tensors(tensors)


def hash_tensors(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        digest.update(real.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def compare(found: dict[str, str], before: dict[str, str]) -> bool:
    """Print the differing cases; True if there are common cases and all of them agree."""
    common = [name for name in found if name in before]
    differing = [name for name in common if found[name] != before[name]]
    for name in differing:
        print(f"differs: {name}")
    print(f"{len(common) - len(differing)} of {len(common)} cases have the same bits")
    return bool(common) and not differing


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--against", type=Path, help="compare with the digests in this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for backend, dtype, options in list_cases(arguments.device, arguments.backends):
        if backend == "triton" and arguments.device == "cpu":
            use_interpreter()
        if backend == "compiled":
            torch.compiler.reset()
        name = f"{backend} | {dtype} | {options}"
        try:
            found[name] = run_case(backend, dtype, options, arguments.device, arguments.steps)
        except (RuntimeError, TypeError, ValueError) as error:
            # An unsupported combination is a result too: both versions must refuse it.
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"{found[name]:20.90}  {name}", flush=True)
    write_result(arguments.output, found)
    if arguments.against:
        sys.exit(0 if compare(found, json.loads(arguments.against.read_text())) else 1)


if __name__ == "__main__":
    main()
