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
ELEMENTWISE = ("momentum_kernel", "diagonal_kernel", "scaled_copy_kernel", "squares_kernel")


def test_the_product_compiles_and_uses_the_tensor_cores(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout)
    for name in ELEMENTWISE:
        found = compiled.pop(name)
        assert found["loads"] >= 1, name  # 16 bytes at a time
        assert found["stores"] >= (name != "squares_kernel"), name
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
    constants = {"BLOCK": elementwise.BLOCK}
    types = dict.fromkeys(kernel.arg_names, "i32")
    if name == "scaled_copy_kernel":  # transposed float32 to float16
        constants = {"TILE": elementwise.TILE, "INTERPRETED": False}
        constants |= {"source_row": 1, "out_column": 1}
        types |= {"factor": "fp32", "out": "*fp16"}
    types |= dict.fromkeys({"decay", "gain", "eps", "scale"} & types.keys(), "fp32")
    pointers = {"gradients", "past", "squares", "correction", "source", "factors", "batch"}
    types |= dict.fromkeys(pointers & types.keys(), "*fp32")
    types |= dict.fromkeys({"partials"} & types.keys(), "*fp64")
    types |= {"out": types["out"].replace("i32", "*fp32")} if "out" in types else {}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument, kind in types.items()
        if kind not in ("constexpr", "fp32")
    }
    result = triton.compile(
        ASTSource(kernel, types, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
    )
    ptx = result.asm["ptx"]
    patterns = {"loads": r"ld\.global\.v4", "stores": r"st\.global\.v[24]"}
    return {key: len(re.findall(pattern, ptx)) for key, pattern in patterns.items()}


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
