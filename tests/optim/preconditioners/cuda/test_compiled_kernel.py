"""The kernels of P compiled for real GPUs, without having one.

The interpreter takes what the compiler refuses. The compiler cannot be had in a process that
interprets, so this file is also the script of another.
"""

import json
import os
import re
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", minversion="3.5")

LEAST_SHARED = 99 * 1024  # bytes that a program may have on every GPU from 8.0 on
CASES = {  # capability, tiling, with an addend, whether the depth divides the columns, dtype
    "Hopper": (90, "LARGE", True, True, "bf16"),
    "Hopper, float16": (90, "LARGE", True, True, "fp16"),
    "Hopper, ragged": (90, "LARGE", False, False, "bf16"),
    "Hopper, small": (90, "SMALL", True, True, "bf16"),
    "Ada": (89, "LARGE", True, True, "bf16"),
}
ELEMENTWISE = ("momentum_kernel", "diagonal_kernel")


def test_the_product_compiles_and_uses_the_tensor_cores(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout)
    for name in ELEMENTWISE:
        assert compiled.pop(name)["wide stores"] >= 2, name
    for name, found in compiled.items():
        assert found["shared"] <= LEAST_SHARED, name
        assert found["wgmma" if CASES[name][0] == 90 else "mma"], name
        assert found["wide stores"] >= 8, name  # 16 bytes at a time, in the mirror image too
        assert not found["narrow stores"], name


def compile_elementwise(name):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from neumann.optim.preconditioners.cuda import elementwise, elementwise_kernels

    kernel = getattr(elementwise_kernels, name)
    types = dict.fromkeys(kernel.arg_names, "fp32")
    pointers = [n for n in ("gradients", "past", "squares", "correction", "out") if n in types]
    types |= dict.fromkeys(pointers, "*fp32") | {"size": "i32", "BLOCK": "constexpr"}
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument in (*pointers, "size")
    }
    result = triton.compile(
        ASTSource(kernel, types, constexprs={"BLOCK": elementwise.BLOCK}, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
    )
    return {"wide stores": len(re.findall(r"st\.global\.v4\.b32", result.asm["ptx"]))}


def main() -> None:
    """Compile every case; print what the machine code consists of."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from neumann.optim.preconditioners.cuda import symmetric_kernel, symmetric_product

    kernel = symmetric_kernel.symmetric_kernel
    numbers = ("rows", "columns", "x_batch", "x_row", "y_batch", "y_row", "addend_batch")
    numbers += ("addend_row",)
    tensors = ("x", "y", "addend", "out")
    found = {name: compile_elementwise(name) for name in ELEMENTWISE}
    for name, (capability, tiling_name, with_addend, even, dtype) in CASES.items():
        tiling = getattr(symmetric_product, tiling_name)
        constants = {
            "TILE": tiling.tile,
            "DEPTH": tiling.depth,
            "BAND": tiling.band,
            "EVEN": even,
            "INTERPRETED": False,
            "x_column": 1,
            "y_column": 1,
            "addend_column": 1,
        }
        if not with_addend:
            constants["addend"] = None
        types = dict.fromkeys(tensors, f"*{dtype}")
        types |= {**dict.fromkeys(numbers, "i32"), "alpha": "fp32", "beta": "fp32"}
        types |= dict.fromkeys(constants, "constexpr")
        aligned = {  # as Triton finds it: pointers, and numbers that 16 divides
            (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
            for argument in (*tensors, *numbers)
            if types[argument] != "constexpr"
        }
        result = triton.compile(
            ASTSource(kernel, types, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": tiling.warps, "num_stages": tiling.stages},
        )
        patterns = {
            "wgmma": r"wgmma\.mma_async",
            "mma": r"mma\.sync",
            "wide stores": r"st\.global\.v4\.b32",
            "narrow stores": r"st\.global\.b16",
        }
        ptx = result.asm["ptx"]
        found[name] = {key: len(re.findall(pattern, ptx)) for key, pattern in patterns.items()}
        found[name]["shared"] = result.metadata.shared
    print(json.dumps(found))


if __name__ == "__main__":
    main()
