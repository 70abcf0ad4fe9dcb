"""The modern GPT: sizes, names, causality, positions, and the first steps of training."""

from math import log

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.lab.data import Dataset, load
from neumann.lab.errors import UsageError
from neumann.lab.models import build
from neumann.lab.models.gpt import ModernGPT, Size, parse_size
from neumann.optim.groups import param_groups

TINY = Size(32, 2, 2)


def make(vocabulary=50, context=16, size=TINY, seed=0):
    torch.manual_seed(seed)
    return ModernGPT(vocabulary, context, size)


def weights(model):
    return sum(p.numel() for p in model.parameters())


def draw(*shape, vocabulary=50):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "vocabulary", "width", "depth", "expected"),
    [
        ("gpt:small", 16384, 384, 6, 23_199_744),
        ("gpt:124m", 16384, 768, 12, 110_100_480),
        ("gpt:124m", 50257, 768, 12, 162_129_408),
    ],
)
def test_sizes(name, vocabulary, width, depth, expected):
    with torch.device("meta"):
        model = ModernGPT(vocabulary, 256, parse_size(name))
    assert weights(model) == expected == 2 * vocabulary * width + depth * 12 * width**2
    assert all(layer.heads == width // 64 for layer in model.layers)
    assert all(p.ndim == 2 for p in model.parameters())
    assert model.head.weight is not model.embedding.weight


def test_with_its_vocabulary_and_a_tied_output_layer_it_is_as_large_as_gpt_2():
    with torch.device("meta"):
        model = ModernGPT(50257, 256, parse_size("gpt:124m,tied=1"))
    assert weights(model) == 123_532_032


def test_a_tied_output_layer_is_one_matrix_with_the_embedding():
    model = ModernGPT(32, 8, Size(16, 1, 2, tied=1))
    assert model.head.weight is model.embedding.weight
    groups = param_groups(model)
    assert [group["role"] for group in groups] == ["hidden", "embedding"]
    assert model(draw(2, 8, vocabulary=32)).shape == (2, 8, 32)


def test_names():
    assert parse_size("gpt:width=512") == Size(512, 6)
    assert parse_size("gpt:124m,depth=3,heads=6") == Size(768, 3, 6)
    assert parse_size("gpt:width=48").head_count == 1
    assert parse_size("gpt:small,tied=1") == Size(384, 6, tied=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt:", "unknown model 'gpt:'"),
        ("gpt:smal", "unknown model 'gpt:smal'; did you mean gpt:small"),
        (
            "gpt:small,layers=3",
            "unknown gpt option 'layers'; choose from: width, depth, heads, tied",
        ),
        ("gpt:small,", "unknown gpt option ''"),
        ("gpt:small,context=64", "set the context with --context"),
        ("gpt:width=0", "gpt:width=0: width must be a whole number of at least 1, got '0'"),
        ("gpt:width=1e3", "width must be a whole number"),
        ("gpt:width=9999999", "width must be a whole number"),
        ("gpt:depth", "unknown model 'gpt:depth'"),
        ("gpt:width=64,width=64", "names width twice"),
        ("gpt:small,tied=2", "gpt:small,tied=2: tied must be 0 or 1, got 2"),
        ("gpt:width=64,heads=3", "the width must be a multiple of 6, twice the number of heads"),
        ("gpt:width=6,heads=2", "the width must be a multiple of 4"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        build(name, load("digits"))
    assert "\n" not in str(caught.value)


def test_it_reads_text_alone():
    with pytest.raises(UsageError, match="model gpt:small reads text, but digits holds vectors"):
        build("gpt:small", load("digits"))


def test_build_takes_vocabulary_and_context_from_the_data():
    digits = load("digits")
    data = Dataset("text:x", digits.train, digits.test, 70, (24,), "text")
    model = build("gpt:width=64,depth=1", data)
    assert model(draw(2, 24)).shape == (2, 24, 70)
    assert model(draw(2, 5)).shape == (2, 5, 70)
    with pytest.raises(ValueError, match="a window has at most 24 tokens, got 25"):
        model(draw(2, 25))


def test_it_is_causal():
    model, tokens = make(), draw(2, 16)
    changed = tokens.clone()
    changed[:, 9:] = (tokens[:, 9:] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_it_starts_nearly_uniform_and_every_weight_has_a_gradient():
    model, tokens = make(), draw(4, 16)
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    assert loss.item() == pytest.approx(log(50), abs=0.05)
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())


def test_attention_is_what_the_docstring_says():
    """Against the equations, with rotations as complex numbers and attention spelled out."""
    model = make().double()
    layer, x = model.layers[0], torch.randn(1, 16, 32, dtype=torch.float64)

    def norm(v):
        return v / v.square().mean(-1, keepdim=True).add(1e-7).sqrt()

    def rotate(v):  # (time, features)
        pairs = torch.complex(v[:, :8], v[:, 8:])
        exponents = torch.arange(8, dtype=torch.float64) / 8
        angles = torch.arange(16, dtype=torch.float64)[:, None] * 10_000**-exponents
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    q, k, v = (part(norm(x))[0].view(16, 2, 16) for part in (layer.query, layer.key, layer.value))
    heads = []
    for head in range(2):
        scores = norm(rotate(q[:, head])) @ norm(rotate(k[:, head])).T / 16**0.5
        scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, head])
    expected = x + layer.attention_out(torch.cat(heads, -1)[None])
    expected = expected + layer.forward_out(layer.forward_in(norm(expected)).relu() ** 2)
    found = layer(x, model.cosines, model.sines)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_attention_depends_on_distances_alone():
    """The same two words at other positions, with nothing else in sight, give the same scores."""
    layer = make(size=Size(32, 1, 1)).layers[0]
    model = make(size=Size(32, 1, 1), context=64)
    x = torch.randn(1, 8, 32)
    early = layer(x, model.cosines[:8], model.sines[:8])
    late = layer(x, model.cosines[40:48], model.sines[40:48])
    torch.testing.assert_close(early, late, rtol=1e-4, atol=1e-4)


def test_positions_are_not_saved():
    assert not [key for key in make().state_dict() if "cosines" in key or "sines" in key]


def test_bfloat16_autocast_is_close():
    model, tokens = make(), draw(2, 16)
    with torch.no_grad():
        exact = model(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(tokens)
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.slow
def test_it_learns_to_copy():
    torch.manual_seed(0)
    model: nn.Module = make(vocabulary=12, size=Size(32, 2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(150):
        half = torch.randint(12, (32, 8))
        tokens = torch.cat([half, half], 1)
        loss = cross_entropy(model(tokens)[:, 7:-1].flatten(0, 1), tokens[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
