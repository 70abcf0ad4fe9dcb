"""An arm of a study is an optimizer with options, settings of its own, and a name."""

from pathlib import Path

import pytest

from neumann.lab.contenders import Contender, compose, get_name, parse_setting
from neumann.lab.errors import UsageError
from neumann.lab.studies.settings import CompareConfig


@pytest.mark.parametrize(
    ("text", "label", "opt", "own"),
    [
        ("sgd", "", "sgd", {}),
        ("sgd:lr=1e-1", "", "sgd:lr=1e-1", {}),
        ("base=sgd:lr=0.1", "base", "sgd:lr=0.1", {}),
        ("base=sgd", "base", "sgd", {}),
        (
            "sgd:lr=0.1@sched=step@batch-size=512",
            "",
            "sgd:lr=0.1",
            {"sched": "step", "batch_size": 512},
        ),
        ("a b=adam@flip=false@bn_batch=none", "a b", "adam", {"flip": False, "bn_batch": None}),
    ],
)
def test_parts_of_an_arm(text, label, opt, own):
    found = Contender.parse(text)
    assert (found.label, found.opt, found.get_own_settings()) == (label, opt, own)
    assert get_name(text) == (label or text)


def test_learning_rates_keep_name_and_settings():
    found = Contender.parse("base=sgd:lr=1:2:3,momentum=0.5@batch-size=512")
    assert str(found.with_lr(0.1)) == "base=sgd:lr=0.1,momentum=0.5@batch_size=512"
    assert found.name_without_lr == found.at_lr(0.1).name_without_lr == "base"
    assert str(found.at_lr(0.1)) == "base at 0.1=sgd:lr=0.1,momentum=0.5@batch_size=512"
    nameless = Contender.parse("sgd:lr=1:2:3@batch-size=512")
    assert nameless.name_without_lr == nameless.at_lr(0.1).name_without_lr == "sgd@batch_size=512"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sgd@bach-size=512", "unknown setting 'bach-size'; did you mean batch-size"),
        ("sgd@batch-size", "after @ comes SETTING=VALUE, got 'batch-size'"),
        ("sgd@batch-size=many", "batch_size should be a whole number of at least 0, got 'many'"),
        ("sgd@flip=3", "flip should be true or false or null"),
        ("sgd@data=cifar10", "data has to be the same for all arms"),
        ("sgd@seed=3", "seed has to be the same for all arms"),
        ("sgd@lr=0.1", "lr is an option of the optimizer, as in sgd:lr=0.1"),
        ("sgd@epochs=3@epochs=4", "names --epochs twice"),
        ("base=sgdd", "unknown optimizer 'sgdd'"),
    ],
)
def test_unusable_arms_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        Contender.parse(text)


def test_composed_arms_can_be_parsed():
    text = compose("base", "sgd:lr=0.1", {"flip": True, "bn_batch": None, "batch_size": 8})
    assert text == "base=sgd:lr=0.1@flip=true@bn_batch=none@batch_size=8"
    found = Contender.parse(text)
    assert found.get_own_settings() == {"flip": True, "bn_batch": None, "batch_size": 8}
    with pytest.raises(UsageError, match="a name cannot have"):
        compose("a=b", "sgd", {})


def test_settings_have_their_types():
    assert parse_setting("smoothing", "1e-1") == 0.1
    assert parse_setting("model", "resnet9:width=32") == "resnet9:width=32"
    assert parse_setting("compile", "off") == "off"


def test_runs_have_the_settings_of_their_arm():
    config = CompareConfig(arms=("neumann", "base=sgd:lr=0.1@batch-size=32"), device="cpu")
    first, second = (config.make_run_config(arm, 1, Path("x")) for arm in config.arms)
    assert (first.batch_size, first.opt) == (64, "neumann")
    assert (second.batch_size, second.opt, second.lr) == (32, "sgd:lr=0.1", 0.1)
    with pytest.raises(UsageError, match="sgd@batch-size=0: --batch-size must be at least 1"):
        config.make_run_config("sgd@batch-size=0", 0, Path("x"))
