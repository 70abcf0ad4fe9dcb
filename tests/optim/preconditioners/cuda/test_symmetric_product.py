"""The symmetric product: its values and its symmetry, on a GPU or through Triton's interpreter."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from neumann.optim.preconditioners import Spectral, orthogonalization
from neumann.optim.preconditioners.cuda import symmetric_product
from neumann.optim.preconditioners.cuda.symmetric_product import (
    LARGE,
    LARGE_DEEP,
    LEAST_ROWS,
    SMALL,
    Tiling,
    choose_tiling,
    count_tiles,
    is_faster,
    multiply_by_transpose,
)
from tests.support.triton_runs import device

TILING = Tiling(tile=16, depth=16, band=2, warps=4, stages=2)


def random(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device(), dtype)


def assert_rounded(found, exact):
    """What one rounding of the exact result to its dtype gives, up to the last bit of float32."""
    error = (found.double() - exact).abs()
    assert (error <= torch.finfo(found.dtype).eps * exact.abs() + 1e-5).all()


SHAPES = {
    "one tile": (1, 16, 16),
    "square": (1, 48, 48),
    "batch": (3, 32, 48),
    "ragged": (2, 37, 21),
    "taller than wide": (1, 40, 5),
    "a row": (2, 1, 19),
    "many bands": (1, 90, 16),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_product_has_the_values_of_bmm_and_is_symmetric(shape, dtype):
    x = random(*shape, dtype=dtype)
    found = multiply_by_transpose(x, tiling=TILING)
    assert_rounded(found, torch.bmm(x.double(), x.double().mT))
    assert torch.equal(found, found.mT)
    assert found.is_contiguous()


@pytest.mark.parametrize("shape", [(2, 32, 32), (1, 37, 21)])
def test_the_addend_is_added_before_rounding(shape):
    x = random(*shape)
    half = random(shape[0], shape[1], shape[1], seed=1)
    addend = half + half.mT
    found = multiply_by_transpose(x, alpha=2.0315, addend=addend, beta=-4.775, tiling=TILING)
    exact = -4.775 * addend.double() + 2.0315 * torch.bmm(x.double(), x.double().mT)
    assert_rounded(found, exact)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_matrices_that_commute(dtype):
    """X and X² − 3X: only the lower triangle of their product is computed."""
    x = random(2, 37, 37, dtype=torch.float64)
    x = (x + x.mT) / 16
    y = (x @ x - 3 * x).to(dtype)
    x = x.to(dtype)
    found = multiply_by_transpose(x, y, addend=y, beta=0.5, tiling=TILING)
    exact = 0.5 * y.double() + x.double() @ y.double().mT
    assert_rounded(found.tril(), exact.tril())
    assert torch.equal(found, found.mT)
    last = y.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    other = multiply_by_transpose(x, last, addend=y, beta=0.5, tiling=TILING)
    assert torch.equal(other, found)


def test_any_strides_give_the_same_bits():
    x = random(2, 20, 36)
    addend = random(2, 20, 20)
    addend = addend + addend.mT
    wanted = multiply_by_transpose(x, addend=addend, tiling=TILING)
    layouts = {
        "transposed": x.mT.contiguous().mT,
        "padded": torch.nn.functional.pad(x, (3, 5, 0, 2))[:, :20, 3:39],
        "batch last": x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "every second": x.repeat_interleave(2, dim=0)[::2],
    }
    for name, other in layouts.items():
        assert other.stride() != x.stride(), name
        found = multiply_by_transpose(other, addend=addend.mT, tiling=TILING)
        assert torch.equal(found, wanted), name


def test_only_the_lower_triangle_of_the_addend_is_read():
    x = torch.zeros(1, 20, 20, dtype=torch.bfloat16, device=device())
    addend = random(1, 20, 20).tril()
    found = multiply_by_transpose(x, addend=addend, beta=1.0, tiling=TILING)
    assert torch.equal(found, addend + addend.tril(-1).mT)


def test_zeros_give_zeros_and_nan_stays_in_its_rows():
    x = torch.zeros(2, 40, 24, dtype=torch.bfloat16, device=device())
    assert not multiply_by_transpose(x, tiling=TILING).any()
    x[0, 33, 2] = float("nan")
    found = multiply_by_transpose(x, tiling=TILING).isnan()
    expected = torch.zeros_like(found)
    expected[0, 33, :] = expected[0, :, 33] = True
    assert torch.equal(found, expected)


def test_empty_batches_and_wrong_arguments():
    assert multiply_by_transpose(random(0, 16, 16)).shape == (0, 16, 16)
    with pytest.raises(ValueError, match=r"bfloat16 or torch\.float16, got torch\.float32"):
        multiply_by_transpose(torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match=r"y must be of shape \(1, 4, 4\) and torch\.bfloat16"):
        multiply_by_transpose(random(1, 4, 4), random(1, 4, 5))
    with pytest.raises(ValueError, match=r"y must be .* got \(1, 4, 4\) and torch\.float16"):
        multiply_by_transpose(random(1, 4, 4), random(1, 4, 4).half())
    with pytest.raises(ValueError, match=r"addend must be of shape \(1, 4, 4\)"):
        multiply_by_transpose(random(1, 4, 4), addend=random(1, 4, 5))


@pytest.mark.parametrize(("tiles", "band"), [(1, 8), (4, 2), (5, 2), (7, 3), (8, 8), (9, 8)])
def test_a_program_for_each_tile_on_and_below_the_diagonal(tiles, band, monkeypatch):
    """As many programs as such tiles; a tile without one would keep what memory held before."""
    launched = []
    launch = symmetric_product._launch

    def count(programs, *rest):
        launched.append(programs)
        launch(programs, *rest)

    monkeypatch.setattr(symmetric_product, "_launch", count)
    x = random(1, 16 * tiles, 16)
    found = multiply_by_transpose(x, tiling=dataclasses.replace(TILING, band=band))
    assert launched == [tiles * (tiles + 1) // 2]
    assert_rounded(found, torch.bmm(x.double(), x.double().mT))


def test_the_iteration_with_symmetric_products_agrees_with_the_general_one(monkeypatch):
    x = torch.randn(2, 40, 56, generator=torch.Generator().manual_seed(0)).to(device())
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)).to(torch.bfloat16)
    assert not is_faster(x)
    general = orthogonalization.iterate(x)
    calls = use_kernel(monkeypatch)
    symmetric = orthogonalization.iterate(x)
    assert len(calls) == 2 * orthogonalization.ITERATIONS
    exact = iterate_in_double(x)
    error = (symmetric - exact).norm() / exact.norm()
    assert error < 0.02  # bfloat16 has 8 bits, and there are five iterations
    assert error < 1.2 * (general - exact).norm() / exact.norm()
    assert not orthogonalization.iterate(torch.zeros_like(x)).any()


def use_kernel(monkeypatch):
    """Have iterations take the kernel with small tiles, in the interpreter too; counts products."""
    calls = []

    def multiply(*given, **options):
        calls.append(options)
        return multiply_by_transpose(*given, tiling=TILING, **options)

    monkeypatch.setattr(orthogonalization, "is_faster", lambda x: True)
    monkeypatch.setattr(orthogonalization, "multiply_by_transpose", multiply)
    return calls


def make_spectrum(kind, rows=40, columns=100):
    """A matrix of norm 1 with singular values of this kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    place = torch.arange(1, rows + 1, dtype=torch.float64)
    values = {
        "random": s,
        "falling": place**-2,
        "few large ones": torch.where(place <= 3, 1.0, 2e-3),
        "half of them zero": (place <= rows // 2).double(),
    }[kind]
    return (u * (values / values.norm()) @ v).unsqueeze(0).to(device())


@pytest.mark.parametrize("kind", ["random", "falling", "few large ones", "half of them zero"])
def test_the_gram_form_errs_less_than_the_other_one_in_bfloat16(kind, monkeypatch):
    x = make_spectrum(kind)
    exact = iterate_in_double(x)
    other = orthogonalization.iterate(x.to(torch.bfloat16))
    calls = use_kernel(monkeypatch)
    found = orthogonalization.iterate(x.half())
    assert len(calls) == 16  # and two products with X
    error = (found - exact).norm() / exact.norm()
    assert error < 0.03
    assert error < 0.2 * (other - exact).norm() / exact.norm()
    assert not orthogonalization.iterate(torch.zeros_like(x).half()).any()


def test_without_the_restart_rounding_errors_would_grow(monkeypatch):
    x = make_spectrum("falling")
    exact = iterate_in_double(x)
    use_kernel(monkeypatch)
    x = x.half()
    restarted = (orthogonalization.iterate(x) - exact).norm()
    gram = orthogonalization.multiply_by_transpose(x)
    polynomials = orthogonalization.multiply_polynomials(gram, orthogonalization.ITERATIONS)
    assert (torch.bmm(polynomials, x) - exact).norm() > 3 * restarted


def test_which_batches_take_the_gram_form(monkeypatch):
    monkeypatch.setattr(symmetric_product, "can_run", lambda index: True)
    n = LEAST_ROWS
    choose = orthogonalization.choose_dtype
    assert choose(Stub(24, n, 2 * n)) is torch.float16
    assert choose(Stub(24, n, 2 * n - 16)) is torch.bfloat16
    assert choose(Stub(1, n, 8 * n)) is torch.bfloat16  # small: the kernel does not run
    assert choose(Stub(24, n, 2 * n, is_cuda=False)) is torch.float32


def iterate_in_double(x):
    a, b, c = orthogonalization.COEFFICIENTS
    x = x.double()
    for _ in range(orthogonalization.ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Stub:
    """What `is_faster` reads of a batch on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, *shape, **changes):
        self.shape = shape
        self.__dict__.update(changes)


def test_where_the_kernel_is_chosen(monkeypatch):
    monkeypatch.setattr(symmetric_product, "can_run", lambda index: True)
    n = LEAST_ROWS
    assert is_faster(Stub(64, n, n))
    assert is_faster(Stub(1, 4096, 4096))
    assert not is_faster(Stub(1, n, 4096))  # does not fill the device
    assert not is_faster(Stub(64, n - 16, n))
    assert not is_faster(Stub(64, n + 1, n + 16))
    assert not is_faster(Stub(64, n, n + 8))
    assert not is_faster(Stub(1, 2**15, 2**16))  # more than 32 bits count
    assert not is_faster(Stub(64, n, n, is_cuda=False))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not is_faster(Stub(64, n, n))


@pytest.mark.parametrize(
    ("hip", "capability", "missing"), [("6.2", (9, 0), 0), (None, (7, 5), 0), (None, (9, 0), 1)]
)
def test_where_the_kernel_cannot_run(monkeypatch, hip, capability, missing):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)

    def fail():
        raise ImportError("no Triton")

    if missing:
        monkeypatch.setattr(symmetric_product, "_import_kernel", fail)
    assert not symmetric_product.can_run.__wrapped__(0)


def test_a_compiler_that_fails_is_reported_once(monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(symmetric_product, "is_interpreted", lambda kernel: False)
    monkeypatch.setattr(symmetric_product, "multiply_by_transpose", fail)
    monkeypatch.setattr(torch, "zeros", lambda *given, **options: None)
    with pytest.warns(UserWarning, match=r"cannot compile here \(Failed to find C compiler"):
        assert not symmetric_product.can_run.__wrapped__(0)


def test_tiles_are_large_where_there_are_enough_of_them():
    assert choose_tiling(Stub(16, 2048, 2048), has_addend=False) == LARGE
    assert choose_tiling(Stub(16, 2048, 2048), has_addend=True) == LARGE_DEEP
    assert choose_tiling(Stub(16, 2048, 8192), has_addend=False) == LARGE_DEEP
    assert choose_tiling(Stub(1, 2048, 8192), has_addend=True) == SMALL
    assert count_tiles(4096, 128) == 32 * 33 // 2
    assert count_tiles(100, 64) == 3


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (4, 2048, 2048), (4, 1040, 1600), (16, 1024, 4096)]
)
def test_large_products_on_a_gpu(shape):
    x = random(*shape) / 32
    assert is_faster(x)
    gram = multiply_by_transpose(x)
    wanted = torch.bmm(x, x.mT)
    torch.testing.assert_close(gram, wanted, rtol=2**-7, atol=1e-4)
    assert torch.equal(gram, gram.mT)
    found = multiply_by_transpose(gram, alpha=2.0315, addend=gram, beta=-4.775)
    wanted = torch.baddbmm(gram, gram, gram, alpha=2.0315, beta=-4.775)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * float(gram.abs().max()))


@pytest.mark.gpu
def test_transposed_and_ragged_products_on_a_gpu():
    for x in (random(2, 512, 384).mT, random(2, 100, 333), random(1, 1000, 512)[:, :, ::2]):
        for tiling in (LARGE, LARGE_DEEP, SMALL):
            found = multiply_by_transpose(x, tiling=tiling)
            torch.testing.assert_close(found, torch.bmm(x, x.mT), rtol=2**-7, atol=1e-2)
            assert torch.equal(found, found.mT)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.parametrize("shape", [(16, 768, 3072), (4, 1600, 4800), (1, 2048, 8192)])
def test_the_gram_form_on_a_gpu(shape, rank):
    wide = torch.randn(shape, device="cuda")
    if rank is not None:
        wide = wide[:, :, :rank] @ wide[:, :rank]
    x = orthogonalization.normalize(wide)
    assert x.dtype is torch.float16
    exact = iterate_in_double(x)
    error = (orthogonalization.iterate(x) - exact).norm() / exact.norm()
    assert error < (0.005 if rank is None else 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 2048])
def test_a_graph_captures_the_orthogonalization_and_nothing_waits(columns):
    x = torch.randn(8, LEAST_ROWS, columns, device="cuda")
    first = orthogonalization.orthogonalize(x)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = orthogonalization.orthogonalize(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = orthogonalization.orthogonalize(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, orthogonalization.orthogonalize(x))
    assert not torch.equal(captured, first)


@pytest.mark.gpu
def test_a_compiled_step_takes_the_general_product(fresh_compiler):
    g = torch.randn(2048, 2048, device="cuda")
    spectral = Spectral(before=None)
    compiled = torch.compile(lambda g: spectral.apply([g], [{}])[0], fullgraph=True)
    eager = spectral.apply([g], [{}])[0]
    error = (compiled(g) - eager).norm() / eager.norm()
    assert error < 0.02
