"""Models by name: outputs, sizes, and data sets they cannot read; and the loss."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.lab.data import Dataset, Plan, load
from neumann.lab.errors import UsageError
from neumann.lab.models import build, classification_loss, list_fitting_models
from neumann.lab.models.text_models import GPT


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tale.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return {
        "vector": load("digits"),
        "image": load("synthetic:3x32x32,10,20"),
        "gray": load("synthetic:1x28x28,10,20"),
        "text": load(f"text:{path}", context=16),
    }


def weights(model):
    return sum(parameter.numel() for parameter in model.parameters())


def one_step(model, dataset, batch=4):
    """Take one training step on a batch; return the loss before and after."""
    torch.manual_seed(0)
    [(x, y)] = next(dataset.train.batches(Plan(batch)))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = classification_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(x)
    assert logits.shape == (*y.shape, dataset.classes)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mlp", "vector"),
        ("mlp", "image"),
        ("cnn", "image"),
        ("cnn", "gray"),
        ("resnet9", "image"),
        ("resnet9", "gray"),
        ("resnet18", "image"),
        ("resnet50", "gray"),
        ("gru", "text"),
        ("gpt", "text"),
    ],
)
def test_a_step_lowers_the_loss(data, name, kind):
    torch.manual_seed(0)
    before, after = one_step(build(name, data[kind]), data[kind])
    assert after < before


def test_resnet9_has_the_published_layers(data):
    model = build("resnet9", data["image"])
    assert weights(model) == 6_573_120
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [64, 128, 128, 128, 256, 512, 512, 512]
    linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
    assert linear.bias is None
    narrow = build("resnet9:width=4", data["image"])
    convolutions = [m for m in narrow.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [4, 8, 8, 8, 16, 32, 32, 32]
    features = torch.randn(2, 512, 4, 4)
    last = list(model)[-4:]
    expected = 0.125 * features.amax((2, 3)) @ linear.weight.T
    torch.testing.assert_close(nn.Sequential(*last)(features), expected)


def test_resnet18_has_the_published_size(data):
    model = build("resnet18", data["image"])
    assert weights(model) == 11_173_962
    assert not any(isinstance(m, nn.MaxPool2d) for m in model.modules())


def test_resnet50_is_the_published_network_behind_a_stem_for_small_images(data):
    """Beyond stem and head its tensors are those of timm's, in the same order, and as random."""
    timm = pytest.importorskip("timm")
    model = build("resnet50", data["image"])
    assert weights(model) == 23_520_842
    assert not any(isinstance(m, nn.MaxPool2d) for m in model.modules())
    stem = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    assert (stem.kernel_size, stem.stride) == ((3, 3), (1, 1))
    published = timm.create_model("resnet50", num_classes=10)
    ours, theirs = (
        [m for m in net.modules() if isinstance(m, nn.Conv2d)][1:] for net in (model, published)
    )
    shape = [(m.weight.shape, m.stride, m.padding) for m in ours]
    assert shape == [(m.weight.shape, m.stride, m.padding) for m in theirs]
    assert model[3](torch.zeros(1, 64, 8, 8)).shape == (1, 256, 8, 8)


def test_the_size_of_the_mlp_for_digits(data):
    assert weights(build("mlp", data["vector"])) == 65 * 128 + 129 * 64 + 65 * 10


@pytest.mark.parametrize("name", ["gru", "gpt"])
def test_text_models_are_causal(data, name):
    model = build(name, data["text"]).eval()
    [(x, _)] = next(data["text"].test.batches(Plan(2, train=False)))
    changed = x.clone()
    changed[:, 9:] = (x[:, 9:] + 1) % data["text"].classes
    with torch.no_grad():
        before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_gpt_ties_its_head_and_refuses_long_windows(data):
    model = build("gpt", data["text"])
    assert model.head.weight is model.embedding.weight
    assert isinstance(model, GPT)
    shorter = model(torch.zeros(1, 5, dtype=torch.int64))
    assert shorter.shape == (1, 5, data["text"].classes)
    with pytest.raises(ValueError, match="a window has at most 16 tokens, got 17"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_weights_come_from_the_global_generator(data):
    first, second, other = (
        (torch.manual_seed(seed), build("mlp", data["vector"]))[1] for seed in (1, 1, 2)
    )
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(a.equal(b) for a, b in pairs)
    assert not next(first.parameters()).equal(next(other.parameters()))


def test_list_fitting_models(data):
    assert list_fitting_models(data["vector"]) == ["mlp"]
    assert list_fitting_models(data["image"]) == [
        "mlp",
        "cnn",
        "resnet9",
        "resnet18",
        "resnet50",
        "timm:NAME",
    ]
    assert list_fitting_models(data["text"])[:4] == ["gru", "gpt", "gpt:small", "gpt:124m"]
    tiny = Dataset("tiny", data["image"].train, data["image"].test, 10, (3, 6, 6), "image")
    assert list_fitting_models(tiny) == ["mlp", "cnn", "resnet18", "resnet50", "timm:NAME"]
    with pytest.raises(UsageError, match="resnet9 reads images of at least 8x8, but tiny holds"):
        build("resnet9", tiny)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("gpt", "image", "gpt reads text, but .* holds images of 3x32x32; .*: mlp, cnn, resnet9"),
        ("cnn", "vector", "cnn reads images, but digits holds vectors of 64; .* fit: mlp$"),
        (
            "mlp",
            "text",
            "mlp reads vectors or images, but .* text of 16; .*: gru, gpt, gpt:small",
        ),
        ("timm:resnet50", "vector", "timm:resnet50 reads images, but digits holds vectors"),
        ("resnet", "image", "unknown model 'resnet'; did you mean resnet9, resnet50 or resnet18"),
        ("xyz", "image", "unknown model 'xyz'; choose from: mlp, .*, timm:NAME"),
        ("resnet9:width=0", "image", "width must be a whole number above 0, got '0'"),
        ("resnet9:width=x", "image", "width must be a whole number above 0, got 'x'"),
        ("resnet9:width=9999999", "image", "width must be a whole number above 0"),
    ],
)
def test_wrong_names_and_data_sets_are_refused(data, name, kind, message):
    with pytest.raises(UsageError, match=message) as caught:
        build(name, data[kind])
    assert "\n" not in str(caught.value)


LOGITS, AUXILIARY = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_loss(smoothing):
    chosen = torch.full((6, 5), smoothing / 5)
    chosen[torch.arange(6), LABELS] += 1 - smoothing
    expected = -(chosen * LOGITS.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(LOGITS, LABELS, smoothing), expected)


def test_loss_with_an_auxiliary_head():
    expected = cross_entropy(LOGITS, LABELS) + 0.4 * cross_entropy(AUXILIARY, LABELS)
    torch.testing.assert_close(classification_loss((LOGITS, AUXILIARY), LABELS), expected)


def test_loss_averages_over_batch_and_time():
    loss = classification_loss(LOGITS.view(2, 3, 5), LABELS.view(2, 3))
    torch.testing.assert_close(loss, cross_entropy(LOGITS, LABELS))
