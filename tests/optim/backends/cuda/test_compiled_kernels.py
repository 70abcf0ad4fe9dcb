"""The Triton kernels compiled for a Hopper GPU, without having one.

The interpreter takes what the compiler refuses, and knows nothing of how memory is accessed. The
compiler cannot be had in a process that interprets, so this file is also the script of another.
"""

import os
import re
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", minversion="3.5")

WIDTH = {"fp32": 4, "fp64": 8, "bf16": 2}
# Of weight, gradient, iterate and offset; and whether the state is rounded stochastically.
KERNELS = {
    "single": ("fp32", "fp32", "fp32", "fp32", False),
    "no offsets": ("fp32", "fp32", "fp32", None, False),
    "bfloat16 state": ("fp32", "fp32", "bf16", "bf16", True),
    "bfloat16 weights": ("bf16", "bf16", "fp32", "fp32", False),
    "double": ("fp64", "fp64", "fp64", "fp64", False),
}


# 16-byte loads and stores of a thread: its 16 elements (8 of double) in the fewest parts.
LEAST = {
    "single": (16, 12),
    "no offsets": (12, 8),
    "bfloat16 state": (8, 4),  # the state 8 bytes at a time
    "bfloat16 weights": (8, 8),
    "double": (16, 12),
}


def test_every_kernel_compiles_and_moves_16_bytes_at_a_time(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = dict(line.rsplit(": ", 1) for line in run.stdout.splitlines())
    for name, (loads, stores) in LEAST.items():
        counted = [int(number) for number in found[name].split()]
        assert counted[0] >= loads, name
        assert counted[1] >= stores, name


def main() -> None:
    """Compile every kernel to machine code; print the 16-byte loads and stores of the updates."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from neumann.optim.backends.cuda import scalars_kernel, update_kernel

    target = GPUTarget("cuda", 90, 32)
    names = {"fp32": tl.float32, "fp64": tl.float64, "bf16": tl.bfloat16}

    def compiled(kernel, types, constants, warps):
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, signature, constexprs=constants)
        return triton.compile(source, target=target, options={"num_warps": warps})

    for name, (*dtypes, stochastic) in KERNELS.items():
        double = "fp64" in dtypes
        spelled = [names.get(dtype) for dtype in dtypes]
        roles = ("WEIGHT_TYPE", "GRADIENT_TYPE", "ITERATE_TYPE", "OFFSET_TYPE")
        constants = {
            **dict(zip(roles, spelled, strict=True)),
            "ARITHMETIC": tl.float64 if double else tl.float32,
            "BLOCK": 4096,
            "VECTOR": 16 // max(WIDTH[dtype] for dtype in dtypes if dtype),
            "STOCHASTIC": stochastic,
        }
        types = {
            "programs": "*i32",
            "records": "*i64",
            "gradients": "*i64",
            "coefficients": "*fp64",
            "clock": "*i64",
            "partials": "*fp64",
            "base": "i32",
        }
        result = compiled(update_kernel.update_kernel, types, constants, 16 if double else 8)
        wide = r"\.global\.(v4\.b32|v2\.b64)"
        loads, stores = (len(re.findall(kind + wide, result.asm["ptx"])) for kind in ("ld", "st"))
        print(f"{name}: {loads} {stores}")

    types = {
        "clock": "*i64",
        "distance_squared": "*fp64",
        "pending": "*i32",
        "partials": "*fp64",
        "count": "i32",
        "found_inf": "*fp32",
        "grad_scale": "*fp32",
        "settings": "*i64",
        "numbers": "*fp64",
        "groups": "i32",
        "resets": "*i64",
        "coefficients": "*fp64",
    }
    compiled(scalars_kernel.scalars_kernel, types, {"OFFSETS": True}, 16)
    missing = {"found_inf": None, "grad_scale": None}
    compiled(scalars_kernel.scalars_kernel, types, {"OFFSETS": False, **missing}, 16)
    types = {name: types[name] for name in ("distance_squared", "pending", "partials", "count")}
    compiled(scalars_kernel.finish_distance_kernel, types, {}, 16)


if __name__ == "__main__":
    main()
