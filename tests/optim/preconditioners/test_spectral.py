"""The spectral preconditioner by itself: what UVᵀ is, of which tensors, and where it lies."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from neumann.optim.preconditioners import Diagonal, Momentum, Spectral, orthogonalization
from neumann.optim.preconditioners.matrix_view import MatrixView
from neumann.optim.preconditioners.orthogonalization import is_matrix, orthogonalize


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 8, 21), (1, 7, 7)])
def test_orthogonalized_matrices_keep_the_singular_vectors(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonalize(matrices) @ v.mT  # diagonal, with the new singular values
    values = torch.diagonal(found, dim1=1, dim2=2)
    assert (found - torch.diag_embed(values)).abs().max() < 1e-4
    large = s > 0.05 * s[:, :1]
    assert values[large].min() > 0.6
    assert values.max() < 1.3


def test_small_singular_values_grow_to_one_too():
    """From a few thousandths of the norm, for which four iterations are too few."""
    values = torch.tensor([1.0, 0.3, 0.03, 0.003])
    u, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    v, _ = torch.linalg.qr(torch.randn(9, 4, generator=torch.Generator().manual_seed(1)))
    found = torch.linalg.svdvals(orthogonalize((u @ torch.diag(values) @ v.mT)[None])[0])
    assert found.min() > 0.65
    assert found.max() < 1.25


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 3e38])
def test_the_size_of_the_gradient_does_not_matter(size):
    """Where squares underflow and overflow, too; what is next to nothing fades away."""
    matrix = torch.tensor([[[0.3, -0.9, 0.1], [1.0, 0.2, -0.4]]])
    torch.testing.assert_close(orthogonalize(matrix * size), orthogonalize(matrix))
    assert orthogonalize(matrix * 1e-42).abs().max() < 0.1


def test_zero_matrices_stay_zero():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()


def test_batched_matrices_give_the_same_result_as_single_ones(monkeypatch):
    """Tall, lying, padded with zeros as on a GPU: each as if there were no other."""
    shapes = [(8, 20), (20, 8), (8, 12), (12, 8), (8, 3, 2, 2), (8, 8), (9, 20), (5, 5)]
    gradients = [torch.randn(shape) for shape in shapes]
    alone = [Spectral().apply([g], [{}])[0] for g in gradients]
    sizes = []
    for launching in (0.0, 2e4, 1e9):
        monkeypatch.setattr(orthogonalization, "launch_cost", lambda matrix, value=launching: value)
        wide = {
            i: g.flatten(1)[None] if len(g) < 10 else g.mT[None] for i, g in enumerate(gradients)
        }
        sizes.append(sorted(map(len, orthogonalization.make_batches(wide))))
        together = Spectral().apply(gradients, [{} for _ in gradients])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert sizes == [[1, 1, 1, 2, 3], [3, 5], [8]]


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((8, 20), MatrixView()),
        ((20, 8), MatrixView()),
        ((8, 16), MatrixView()),
        ((8, 15), MatrixView()),
        ((7, 7), MatrixView()),
        ((6, 4, 3, 3), MatrixView()),
        ((12, 8), MatrixView(parts=3)),
        ((5, 6, 4), MatrixView(stacked=True)),
    ],
)
def test_operations_are_those_of_the_products(shape, view, monkeypatch):
    """As torch counts them, in the form that large matrices take on a GPU."""

    def multiply(x, y=None, *, alpha=1.0, addend=None, beta=1.0):
        product = alpha * torch.bmm(x, (x if y is None else y).mT)
        return product if addend is None else product + beta * addend

    def iterate(x):
        wide = x.shape[2] >= orthogonalization.GRAM_COLUMNS * x.shape[1]
        return orthogonalization.iterate_gram(x) if wide else direct(x)

    direct = orthogonalization.iterate
    monkeypatch.setattr(orthogonalization, "multiply_by_transpose", multiply)
    monkeypatch.setattr(orthogonalization, "iterate", iterate)
    spectral = Spectral(view=view)
    gradient = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        spectral.apply([gradient], [{}])
    assert spectral.count_operations(gradient) == counter.get_total_flops()


def test_any_memory_layout_gives_the_same_result():
    plain = torch.randn(4, 6, 3, 3)
    odd = torch.randn(3, 3, 6, 4).permute(3, 2, 0, 1).copy_(plain)
    (ours,), (theirs,) = (Spectral().apply([g], [{}]) for g in (odd, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_every_direction_has_the_same_root_mean_square():
    half = Spectral(scale=0.5, vectors=Diagonal(scale=0.5))
    tensors = [torch.randn(shape) for shape in [(64, 3, 3, 3), (128, 256), (10, 512), (90,)]]
    found = half.apply(tensors, [half.create(t) for t in tensors])
    for direction in found:  # singular values end up between 0.7 and 1.2
        assert direction.square().mean().sqrt().item() == pytest.approx(0.5, rel=0.25)


def test_the_memory_format_does_not_matter():
    plain = torch.randn(6, 4, 3, 3)
    last = plain.to(memory_format=torch.channels_last)
    (ours,), (theirs,) = (Spectral().apply([g], [{}]) for g in (last, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert ours.stride() == last.stride()


@pytest.mark.parametrize(
    ("shape", "whether"),
    [
        ((2, 3), True),
        ((8, 3, 3, 3), True),
        ((6, 1, 3, 3), True),
        ((3,), False),
        ((), False),
        ((1, 5), False),
        ((5, 1), False),
        ((1, 3, 3, 3), False),
        ((5, 1, 1, 1), False),
        ((0, 3), False),
        ((3, 0), False),
    ],
)
def test_which_shapes_are_matrices(shape, whether):
    assert is_matrix(torch.empty(shape)) == whether
    assert not is_matrix(torch.empty(shape, dtype=torch.complex64))
    direction = Spectral(before=None).apply(
        [torch.ones(shape)], [Spectral().create(torch.ones(shape))]
    )[0]
    assert direction.shape == shape


LAYOUTS = {
    "tall": torch.empty(20, 8),
    "lying": torch.empty(8, 20),
    "transposed": torch.empty(20, 8).mT,
    "convolution": torch.empty(8, 4, 3, 3),
    "channels last": torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last),
    "tall channels last": torch.empty(64, 2, 3, 3).to(memory_format=torch.channels_last),
    "1 × 1": torch.empty(8, 9, 1, 1),
    "1 × 1 channels last": torch.empty(8, 9, 1, 1).to(memory_format=torch.channels_last),
    "narrow": torch.empty(8, 12),
}


def test_directions_have_the_strides_of_their_gradients(monkeypatch):
    """The update would have to copy them otherwise; padded ones, too."""
    monkeypatch.setattr(orthogonalization, "launch_cost", lambda matrix: 1e9)
    gradients = [torch.empty_like(t).normal_() for t in LAYOUTS.values()]
    for gradient, direction in zip(
        gradients, Spectral().apply(gradients, [{} for _ in gradients]), strict=True
    ):
        assert direction.shape == gradient.shape
        assert direction.stride() == gradient.stride()


@pytest.mark.parametrize(
    "name", ["lying", "convolution", "channels last", "1 × 1", "1 × 1 channels last"]
)
def test_a_suitable_layout_is_not_copied(name):
    gradient = torch.empty_like(LAYOUTS[name]).normal_()
    (direction,) = Spectral().apply([gradient], [{}])
    assert direction._is_view()


def sizes(shapes):
    matrices = {i: torch.empty(1, *shape, device="meta") for i, shape in enumerate(shapes)}
    return sorted(map(len, orthogonalization.make_batches(matrices)))


def test_matrices_are_padded_only_where_that_is_cheap(monkeypatch):
    monkeypatch.setattr(orthogonalization, "launch_cost", lambda matrix: 2e10)
    assert sizes([(256, 2304)] * 6 + [(256, 1024)] * 11 + [(256, 512)] * 2) == [19]
    assert sizes([(512, 4608)] * 3 + [(512, 2048)]) == [4]
    assert sizes([(512, 4608)] * 3 + [(512, 2048)] * 5) == [3, 5]  # too many operations
    assert sizes([(1024, 2048), (1000, 2048)]) == [2]
    assert sizes([(128, 1152)] * 4 + [(64, 1500)]) == [5]  # which makes the others wider
    assert sizes([(4, 128_256)] + [(4, 4096)] * 224) == [1, 224]  # too many zeros


def test_default_options():
    assert Spectral() == Spectral(0.2, Diagonal(0.99, 1e-8, 0.2), Momentum(0.6))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": float("inf")},
        {"before": "momentum"},
        {"before": Momentum},
        {"vectors": None},
    ],
)
def test_refused_options(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must be"):
        Spectral(**options)


def test_momentum_that_would_never_run_is_refused():
    with pytest.raises(ValueError, match="has a `before` of its own, which would never run"):
        Spectral(vectors=Diagonal(before=Momentum(0.9)))


def test_both_parts_of_spectral_may_keep_the_same_state_names():
    """Diagonal for both: each has a state of its own."""
    preconditioner = Spectral(scale=1.0, before=Diagonal())
    vector = torch.randn(5)
    assert set(preconditioner.create(vector)) == {"vector_second_moment", "vector_seen"}
    matrix = torch.randn(4, 6)
    state = Diagonal().create(matrix)
    (direction,) = preconditioner.apply([matrix], [state])
    values = torch.linalg.svdvals(direction) / 6**0.5
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert state["seen"] == 0


@pytest.mark.parametrize(("shape", "size"), [((1, 64), 1 / 8), ((64, 1), 8), ((1, 4, 4, 4), 1 / 4)])
def test_by_norm_one_row_is_a_matrix_too(shape, size):
    """A regression head moves like a head of several outputs: √(outputs/inputs), as a whole."""
    p = Spectral(before=None, scale=1.0, scaling="norm")
    gradient = torch.randn(shape)
    assert not p.elementwise(gradient)
    assert p.create(gradient) == {}
    (direction,) = p.apply([gradient], [{}])
    assert 0.6 * size < direction.norm() < 1.3 * size
    torch.testing.assert_close(direction / direction.norm(), gradient / gradient.norm())
    assert Spectral(scaling="rms").elementwise(torch.zeros(1, 64))
    assert p.elementwise(torch.zeros(64))
    assert p.elementwise(torch.zeros(2, 3, dtype=torch.complex64))
