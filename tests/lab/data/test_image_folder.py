"""Image folders: transforms, workers, resuming, and folders with the wrong layout."""

import os
import signal
import sys
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image

from neumann.lab.data import Plan, load
from neumann.lab.errors import UsageError
from tests.support.batches import flat, same

# Python 3.12 warns when DataLoader forks a process that has threads, as a test runner does.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def write(path, size=(40, 30), mode="RGB", color=None):
    generator = np.random.default_rng(len(str(path)) + sum(path.name.encode()))
    pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels) if color is None else Image.new("RGB", size, color)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path)


@pytest.fixture
def root(tmp_path):
    """Two classes of JPEG, PNG, gray and transparent images, and a file that is not an image."""
    for k in range(3):
        write(tmp_path / "train" / "cat" / f"{k}.JPEG")
        write(tmp_path / "train" / "dog" / f"{k}.png", mode=("RGB", "L", "RGBA")[k])
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    write(tmp_path / "val" / "cat" / "red.png", (80, 60), color=(255, 0, 0))
    write(tmp_path / "val" / "dog" / "a.jpg")
    write(tmp_path / "val" / "dog" / "b.jpg")
    return tmp_path


def load_root(root, workers=0, **options):
    return load(f"folder:{root}", image_size=16, workers=workers, **options)


def test_splits_shapes_and_normalization(root):
    data = load_root(root)
    assert (data.kind, data.shape, data.classes) == ("image", (3, 16, 16), 2)
    assert (len(data.train), len(data.test)) == (6, 3)
    x, y = flat(data.test.batches(Plan(2, train=False)))
    assert y.tolist() == [0, 1, 1]
    assert x.dtype == torch.float32
    red = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    torch.testing.assert_close(x[0], red.view(3, 1, 1).expand(3, 16, 16))


def test_evaluation_crops_seven_eighths_from_the_center(root):
    """An image that already has the size before the crop is only cropped."""
    pixels = np.random.default_rng(0).integers(0, 256, (18, 18, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "val" / "cat" / "red.png")
    x, _ = flat(load_root(root).test.batches(Plan(1, train=False)))
    crop = torch.tensor(pixels[1:17, 1:17] / 255).permute(2, 0, 1)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (crop - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(x[0], expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one CPU
def test_batches_do_not_depend_on_workers_ranks_or_resuming(root):
    plan = Plan(2, seed=1, epoch=3)
    whole = list(load_root(root).train.batches(plan))
    assert len(whole) == 3
    before = torch.get_rng_state()
    assert same(whole, load_root(root, workers=2).train.batches(plan))
    torch.manual_seed(3)
    resumed = Plan(2, seed=1, epoch=3, first=1)
    assert same(whole[1:], load_root(root, workers=1).train.batches(resumed))
    assert same(whole, load_root(root).train.batches(Plan(2, 2, seed=1, epoch=3)))
    shares = [
        list(load_root(root).train.batches(Plan(2, 1, 1, 3, rank=rank, ranks=2)))
        for rank in range(2)
    ]
    assert same(whole, [a + b for a, b in zip(*shares, strict=True)])
    torch.set_rng_state(before)
    list(load_root(root).train.batches(plan))
    assert before.equal(torch.get_rng_state()), "the global generator must not move"


def test_epochs_and_examples_are_augmented_differently(root):
    for k in range(3):
        write(root / "train" / "cat" / f"{k}.JPEG", color=None)
        Image.open(root / "train" / "cat" / "0.JPEG").save(root / "train" / "cat" / f"{k}.JPEG")
    x, y = flat(load_root(root).train.batches(Plan(6)))
    cats = x[y == 0]
    assert not cats[0].equal(cats[1])
    other, _ = flat(load_root(root).train.batches(Plan(6, epoch=1)))
    assert not x.equal(other)


def test_evaluation_over_ranks_is_complete(root):
    shares = [
        list(load_root(root).test.batches(Plan(2, rank=rank, ranks=2, train=False)))
        for rank in range(2)
    ]
    assert [len(share) for share in shares] == [2, 2]
    assert sum(len(y) for share in shares for batch in share for _, y in batch) == 3
    assert list(load_root(root, workers=1).test.batches(Plan(2, first=2, train=False))) == []


def test_the_held_out_part_is_not_augmented(root):
    parts = load_root(root).hold_out(0.5)
    assert (len(parts.train), len(parts.test)) == (3, 3)
    assert not set(parts.train.paths) & set(parts.test.paths)
    once, again = (list(parts.test.batches(Plan(2, epoch=k, train=False))) for k in range(2))
    assert same(once, again)


def test_workers_ignore_an_interrupt(root):
    """Ctrl-C reaches every process of a terminal; the batches must still arrive."""
    others = set(active_children())
    batches = load_root(root, workers=1).train.batches(Plan(1))
    before = [next(batches)]
    [worker] = set(active_children()) - others
    os.kill(worker.pid, signal.SIGINT)
    assert same([*before, *batches], load_root(root).train.batches(Plan(1)))


def test_memory_format(root):
    [[(x, _)]] = load_root(root, channels_last=True).train.batches(Plan(6))
    assert x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"", b"GIF? no", None])
def test_an_unreadable_image_is_named(root, workers, content):
    path = root / "train" / "dog" / "1.png"
    path.write_bytes(path.read_bytes()[:200] if content is None else content)
    with pytest.raises(UsageError) as caught:
        list(load_root(root, workers).train.batches(Plan(2)))
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be read as an image: ")
    assert "\n" not in message


def test_folders_with_the_wrong_layout(root):
    for image in (root / "train" / "dog").iterdir():
        image.unlink()
    with pytest.raises(UsageError, match=f"class folder {root}/train/dog holds no images"):
        load_root(root)
    (root / "train" / "dog").rmdir()
    with pytest.raises(UsageError, match=f"class folder dog is only in {root}/val"):
        load_root(root)
    with pytest.raises(UsageError, match="train/train was not found; an image folder holds"):
        load_root(root / "train")
    (root / "empty" / "train").mkdir(parents=True)
    with pytest.raises(UsageError, match="empty/train holds no class folders"):
        load_root(root / "empty")
    with pytest.raises(UsageError, match="nowhere does not exist"):
        load_root(root / "nowhere")


def test_impossible_options(root):
    with pytest.raises(UsageError, match=r"image_size must be at least 1 .* got 0 and 1"):
        load(f"folder:{root}", image_size=0, workers=1)
    with pytest.raises(UsageError, match="flip, shift and cutout are for built-in sets"):
        load_root(root, cutout=4)
    with pytest.raises(UsageError, match="batch size 7 is larger than the training set"):
        load_root(root).train.batches(Plan(7))
    assert load_root(root, workers=None).train.workers >= 1


def test_missing_torchvision_names_the_extra(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    for module in ("image_folder",):
        monkeypatch.delitem(sys.modules, f"neumann.lab.data.{module}", raising=False)
    with pytest.raises(UsageError, match=r'torchvision, .*pip install "\.\[lab\]"'):
        load_root(root)
