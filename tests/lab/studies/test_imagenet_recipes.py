"""The recipes for ImageNet train: three steps of each network on images of full size."""

import numpy as np
import pytest
from PIL import Image

from neumann.lab.storage.reading import read_summary
from neumann.lab.studies.comparison import Session
from neumann.lab.studies.study_toml import read_study_toml
from neumann.lab.training.inputs import plan_epoch
from neumann.lab.training.learner import Learner
from neumann.lab.training.processes import Process
from tests.lab.studies.test_study_toml import STUDIES

RECIPES = STUDIES / "imagenet"
pytest.importorskip("timm")


def read(name, folder, *changes):
    return read_study_toml(RECIPES / f"{name}.toml", folder, changes)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes of noise, larger than the crops."""
    folder = tmp_path_factory.mktemp("imagenet")
    noise = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 1)):
        for label in ("n01", "n02"):
            (folder / split / label).mkdir(parents=True)
            for index in range(count):
                pixels = noise.integers(0, 256, (320, 340, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.jpeg")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet50", 224), ("resnet101", 224), ("inception-v3", 299), ("inception-resnet-v2", 299)],
)
def test_three_steps_on_images_of_full_size(name, size, images, tmp_path):
    # Each step accumulates two micro-batches.
    tiny = ("epochs=1", "batch-size=4", "micro-batch-size=2", "workers=0", "device=cpu")
    (point,) = read(name, tmp_path, f"data=folder:{images}", *tiny).points
    run = point.config.make_run_config(point.config.arms[0], 0, tmp_path)
    learner = Learner(run, Process())
    # Not the whole run: its evaluations and checkpoints would take most of the time.
    for pieces in learner.dataset.train.batches(plan_epoch(run, Process(), 0)):
        assert [piece[0].shape for piece in pieces] == [(2, 3, size, size)] * 2
        learner.take_step(pieces)
    assert learner.step == learner.total_steps == 3
    assert all(weight.isfinite().all() for weight in learner.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "inception-v3", "resnet50-regularizers"])
def test_all_arms_train_on_small_images(name, tmp_path):
    small = ("data=digits", "model=mlp", "img-size=8", "epochs=1", "batch-size=479")
    study = read(name, tmp_path, *small, "micro-batch-size=240", "device=cpu")
    study.check()
    (comparison,) = study.test({}, Session())
    assert [read_summary(row.runs[0].folder)["steps"] for row in comparison.rows] == [3] * len(
        comparison.rows
    )


def test_networks_of_one_family_have_the_same_arms(tmp_path):
    def arms(name):
        return read(name, tmp_path).points[0].config.arms

    assert arms("resnet50") == arms("resnet101")
    assert arms("inception-v3")[:2] == arms("inception-resnet-v2")


def test_learning_rates_are_proportional_to_the_batch(tmp_path):
    points = read("resnet50-scaling", tmp_path).points
    assert [point.config.batch_size for point in points] == [1600, 4000, 8000, 16000, 32000]
    assert [point.config.arms[0].rpartition("=")[2] for point in points] == [
        "2.25",
        "5.625",
        "11.25",
        "22.5",
        "45.0",
    ]
