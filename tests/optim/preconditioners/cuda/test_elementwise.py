"""P's elementwise arithmetic in one pass: the values of torch's, and where the kernels run."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from neumann.optim.preconditioners import Diagonal, Momentum, batch_plan
from neumann.optim.preconditioners.batch_plan import orthogonalize_planned
from neumann.optim.preconditioners.cuda import elementwise
from neumann.optim.preconditioners.cuda.elementwise import copy_scaled, split_by_size
from neumann.optim.preconditioners.matrix_view import MatrixView
from tests.support.triton_runs import device

SIZES = {"one block": 1000, "exact": 1024, "ragged": 2500}


def make(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def take_steps(preconditioner, size, steps=3):
    """Directions of these steps, and the state after them."""
    gradients = [make(size, seed=step) * 10.0**-step for step in range(steps)]
    state = preconditioner.create(gradients[0])
    found = [preconditioner.apply([g], [state])[0] for g in gradients]
    return found, state


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("preconditioner", [Momentum(0.6), Diagonal(), Diagonal(0.9, 1e-3, 2.0)])
def test_the_kernels_give_the_values_of_torch(preconditioner, size, monkeypatch):
    wanted, state = take_steps(preconditioner, size)
    module = type(preconditioner).apply.__globals__
    monkeypatch.setitem(module, "split_by_size", lambda *lists: ([0], []))
    found, other = take_steps(preconditioner, size)
    # A device may round a product and a sum once together.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(other, state, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("preconditioner", [Momentum(), Diagonal()])
def test_large_and_small_tensors_keep_their_order(preconditioner, monkeypatch):
    gradients = [make(n, seed=n) for n in (5, 40, 7, 30)]

    def apply():
        return preconditioner.apply(gradients, [preconditioner.create(g) for g in gradients])

    wanted = apply()
    module = type(preconditioner).apply.__globals__
    monkeypatch.setitem(module, "split_by_size", lambda *lists: ([1, 3], [0, 2]))
    torch.testing.assert_close(apply(), wanted, rtol=1e-6, atol=1e-8)


def test_a_gradient_of_zero_or_nan():
    zero = torch.zeros(100, device=device())
    correction = torch.ones((), device=device())
    found = elementwise.apply_diagonal(zero, zero.clone(), correction, 0.99, 1e-8, 0.2)
    assert torch.equal(found, zero)
    bad = zero.clone()
    bad[3] = float("nan")
    found = elementwise.apply_momentum(bad, zero.clone(), 0.5)
    assert found.isnan().nonzero().tolist() == [[3]]


def test_writes_to_the_state_are_counted():
    """As torch counts its own, so that autograd would see them."""
    past = make(64)
    version = past._version
    elementwise.apply_momentum(make(64, seed=1), past, 0.5)
    assert past._version == version + 1


class Stub(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


def stub(*shape, **options):
    return torch.empty(shape, device="meta", **options).as_subclass(Stub)


def test_which_tensors_the_kernels_take(monkeypatch):
    monkeypatch.setattr(elementwise, "can_run", lambda index: True)
    n = elementwise.LEAST_ELEMENTS
    plain = [stub(n), stub(n - 1), stub(64, n // 64), stub(2 * n)]
    assert split_by_size(plain, plain) == ([0, 2, 3], [1])
    assert split_by_size([], []) == ([], [])
    other = [stub(n), stub(n - 1), stub(n // 64, 64).mT, stub(2 * n, dtype=torch.float64)]
    assert split_by_size(plain, other) == ([0], [1, 2, 3])
    gaps = [stub(64, n // 32)[:, ::2]]
    assert split_by_size(gaps, gaps) == ([], [0])
    turned = [stub(n // 64, 64).mT]
    assert split_by_size(turned, turned) == ([0], [])
    monkeypatch.setattr(elementwise, "can_run", lambda index: False)
    assert split_by_size(plain, plain) == ([], [0, 1, 2, 3])
    on_cpu = [torch.empty(n)]
    assert split_by_size(on_cpu, on_cpu) == ([], [0])


COPIES = {  # shape, order of the source's and of the result's dimensions in memory
    "as it is": ((2, 3, 70, 90), (0, 1, 2, 3), (0, 1, 2, 3)),
    "transposed on the way": ((1, 4, 65, 130), (0, 1, 3, 2), (0, 1, 2, 3)),
    "transposed on the way back": ((2, 1, 20, 80), (0, 1, 2, 3), (0, 1, 3, 2)),
    "any order": ((2, 2, 5, 7), (3, 1, 0, 2), (2, 0, 3, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COPIES)
def test_scaled_copies_have_the_bits_of_torch(name, dtype):
    shape, source_order, out_order = COPIES[name]

    def order(tensor, dimensions):
        back = [dimensions.index(d) for d in range(4)]
        return tensor.permute(dimensions).contiguous().permute(back)

    source = order(make(*shape), source_order)
    factors = make(shape[0] * shape[1], seed=1)
    out = order(torch.full(shape, 7.0, device=device(), dtype=dtype), out_order)
    copy_scaled(source, out, factors)
    assert torch.equal(out, (source * factors.view(*shape[:2], 1, 1)).to(dtype))
    back = order(torch.empty(shape, device=device()), source_order)
    copy_scaled(out, back, 0.3)
    assert torch.equal(back, out.float() * 0.3)


def test_copies_of_nothing():
    empty = torch.empty(1, 0, 4, 5, device=device())
    copy_scaled(empty, empty, 2.0)


VIEWS = {
    "wide and tall": (MatrixView(), [(8, 20), (20, 8), (8, 20), (20, 8)]),
    "tall": (MatrixView(), [(20, 8)]),
    "square": (MatrixView(), [(9, 9), (9, 9)]),
    "convolutions": (MatrixView(), [(8, 3, 3, 3), (27, 8)]),
    "fused": (MatrixView(parts=3), [(36, 12), (36, 12)]),
    "fused, transposed": (MatrixView(parts=3, transposed=True), [(12, 36), (12, 36)]),
    "stacked": (MatrixView(stacked=True), [(4, 8, 20), (4, 8, 20)]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_batches_in_one_pass_give_the_directions_of_those_in_several(name, monkeypatch):
    view, shapes = VIEWS[name]
    gradients = [make(*shape, seed=i) for i, shape in enumerate(shapes)]
    if name == "convolutions":
        gradients[0] = gradients[0].to(memory_format=torch.channels_last)
    wanted = orthogonalize_planned(gradients, view, 0.2, "norm")
    copies = []

    def copy(*given):
        copies.append(given)
        copy_scaled(*given)

    monkeypatch.setattr(batch_plan, "can_copy_scaled", lambda *given: True)
    monkeypatch.setattr(batch_plan, "copy_scaled", copy)
    found = orthogonalize_planned(gradients, view, 0.2, "norm")
    assert copies
    for ours, theirs, gradient in zip(found, wanted, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours.stride() == gradient.stride()


@pytest.mark.parametrize("size", [1e-42, 1e-36, 1e-20, 1.0, 1e20, 3e38])
def test_norms_of_any_size(size):
    batch = make(3, 40, 120).clamp(-1, 1) * size
    batch[1] = 0
    factors = elementwise.find_factors(batch)
    assert factors.shape == (3, 1, 1)
    norms = torch.linalg.vector_norm(batch * factors, dim=(1, 2))
    if size > 1e-38:
        torch.testing.assert_close(norms, torch.tensor([1.0, 0.0, 1.0], device=device()))
    assert (norms <= 1.0001).all()
    assert factors.isfinite().all()


def test_a_gradient_that_is_negated_lazily_is_left_to_torch():
    x = torch.ones(4)
    assert elementwise._is_flat([x])
    assert not elementwise._is_flat([torch._neg_view(x)])


def test_which_tensors_are_copied_in_one_pass(monkeypatch):
    monkeypatch.setattr(elementwise, "can_run", lambda index: True)
    assert elementwise.can_copy_scaled(stub(8, 8), 64)
    assert not elementwise.can_copy_scaled(stub(8, 8), 2**31)
    assert not elementwise.can_copy_scaled(stub(8, 8, dtype=torch.float64), 64)
    assert not elementwise.can_copy_scaled(torch.empty(8, 8), 64)
    monkeypatch.setattr(elementwise, "can_run", lambda index: False)
    assert not elementwise.can_copy_scaled(stub(8, 8), 64)


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["rms", "norm"])
def test_batches_in_one_pass_on_a_gpu(scaling, monkeypatch):
    gradients = [make(768, 2304), make(2304, 768), make(1024, 256, 3, 3), make(2304, 2304)[:768]]
    gradients[2] = gradients[2].to(memory_format=torch.channels_last)
    found = orthogonalize_planned(gradients, MatrixView(), 0.2, scaling)
    monkeypatch.setattr(batch_plan, "can_copy_scaled", lambda *given: False)
    plain = orthogonalize_planned(gradients, MatrixView(), 0.2, scaling)
    for ours, theirs, gradient in zip(found, plain, gradients, strict=True):
        # A = XXᵀ is in bfloat16. If an element on its diagonal rounds the other way, its row of X
        # moves by up to 4 %.
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01
        assert ours.stride() == gradient.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 1024), (1500, 1001), (64, 256, 9, 9)])
@pytest.mark.parametrize("preconditioner", [Momentum(), Diagonal()])
def test_large_tensors_on_a_gpu(preconditioner, shape, monkeypatch):
    g = make(*shape)
    if len(shape) == 4:
        g = g.to(memory_format=torch.channels_last)
    assert split_by_size([g], [g]) == ([0], [])

    def run():
        state = preconditioner.create(g)
        return [preconditioner.apply([g * k], [state])[0] for k in (1.0, 0.1)], state

    found = run()
    module = type(preconditioner).apply.__globals__
    monkeypatch.setitem(module, "split_by_size", lambda *lists: ([], [0]))
    torch.testing.assert_close(found, run(), rtol=1e-5, atol=1e-8)
    assert found[0][0].stride() == g.stride()
