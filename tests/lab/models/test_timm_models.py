"""timm models: a step of the paper's four, unusual image sizes, and errors."""

import sys

import pytest
import torch

from neumann.lab.data import Plan, load
from neumann.lab.errors import UsageError
from neumann.lab.models import build, classification_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "millions"),
    [
        ("resnet50", 32, 23.5),
        ("resnet101", 32, 42.5),
        ("inception_v3", 299, 24.4),  # the smallest that its auxiliary head takes
        ("inception_resnet_v2", 75, 54.3),
    ],
)
def test_a_step_of_the_papers_models(name, size, millions):
    data = load(f"synthetic:3x{size}x{size},10,2", shift=0)
    model = build(f"timm:{name}", data)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert weights / 1e6 == pytest.approx(millions, abs=0.1)
    assert model.training
    [(x, y)] = next(data.train.batches(Plan(2)))
    output = model(x)
    assert isinstance(output, tuple) == (name == "inception_v3")
    loss = classification_loss(output, y, 0.1)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert model(x).shape == (2, 10)


@pytest.mark.slow
def test_gray_images_and_a_transformer_at_another_size():
    gray = load("synthetic:1x32x32,7,4")
    [(x, _)] = next(gray.train.batches(Plan(4)))
    for name in ("timm:resnet18", "timm:vit_tiny_patch16_224"):
        assert build(name, gray)(x).shape == (4, 7)


@pytest.mark.slow
def test_options_of_a_model():
    data = load("synthetic:3x32x32,10,4")
    model = build("timm:vit_tiny_patch16_224,patch_size=4,depth=2,drop_path_rate=0.1", data)
    assert len(model.blocks) == 2
    assert model.patch_embed.proj.weight.shape[-2:] == (4, 4)
    assert model.blocks[1].drop_path1.drop_prob == pytest.approx(0.1)


@pytest.mark.slow
def test_dropout_and_stochastic_depth_act_in_training_only():
    data = load("synthetic:3x32x32,10,4")
    torch.manual_seed(0)
    model = build("timm:resnet50,drop_rate=0.2,drop_path_rate=0.1", data)
    assert model.drop_rate == 0.2
    assert max(getattr(m, "drop_prob", 0) for m in model.modules()) == pytest.approx(0.1)
    [(x, _)] = next(data.train.batches(Plan(4)))
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("depth", "'depth' should be an option of the model with a number"),
        ("depth=two", "'depth=two' should be an option"),
        ("depth=nan", "'depth=nan' should be an option"),
        ("num_classes=3", "not one of num_classes"),
        ("pretrained=true", "not one of num_classes"),
        ("no_such_option=3", "vit_tiny_patch16_224 has no option no_such_option$"),
        ("drop_rate=0.1,drop_rate=0.2", "names drop_rate twice"),
        ("drop_rate=2", r"drop_rate must be in \[0, 1\), got 2"),
        ("drop_path_rate=-0.1", r"drop_path_rate must be in \[0, 1\), got -0.1"),
        ("global_pool=true", "timm:vit_tiny_patch16_224,global_pool=true"),
    ],
)
def test_wrong_options(options, message):
    data = load("synthetic:3x32x32,10,4")
    with pytest.raises(UsageError, match=message) as caught:
        build(f"timm:vit_tiny_patch16_224,{options}", data)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_building_draws_only_the_weights():
    """Trying the model on an image changes neither the statistics nor the generator."""
    data = load("synthetic:3x32x32,10,4")
    torch.manual_seed(0)
    model = build("timm:resnet18", data)
    state = torch.get_rng_state()
    import timm

    torch.manual_seed(0)
    plain = timm.create_model("resnet18", num_classes=10)
    assert state.equal(torch.get_rng_state())
    for name, value in plain.state_dict().items():
        assert value.equal(model.state_dict()[name])


@pytest.mark.slow
def test_unsupported_image_sizes():
    data = load("synthetic:3x32x32,10,4")
    with pytest.raises(UsageError) as caught:
        build("timm:inception_v3", data)
    message = str(caught.value)
    assert "does not take images of 3x32x32; it was made for 3x299x299" in message
    assert "\n" not in message


def test_unknown_names():
    with pytest.raises(UsageError, match="unknown timm model 'resnet5O'; did you mean resnet50"):
        build("timm:resnet5O", load("synthetic:3x32x32,10,4"))


def test_missing_timm_names_the_extra(monkeypatch):
    data = load("synthetic:3x32x32,10,4")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r'timm, .*pip install "\.\[timm\]"'):
        build("timm:resnet50", data)
    assert build("cnn", data) is not None
