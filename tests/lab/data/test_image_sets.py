"""Named sets, read from tiny files in the formats of CIFAR, Fashion-MNIST and NumPy."""

import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from neumann.lab.data import Plan, load
from neumann.lab.errors import UsageError

GENERATOR = np.random.default_rng(0)


def images(*shape):
    return GENERATOR.integers(0, 256, shape, dtype=np.uint8)


def read_all(source):
    [batch] = source.batches(Plan(1000, train=False))
    [(x, y)] = batch
    return x, y


def normalize(x, train):
    """Normalize images NHWC as the lab should, to NCHW."""
    mean, std = train.mean((0, 1, 2)), train.std((0, 1, 2))
    return torch.tensor(((x - mean) / std).transpose(0, 3, 1, 2))


def write_cifar(folder, files, labels, meta, meta_key):
    """Write batches in CIFAR's format: pickled rows of 3,072 bytes, channel by channel."""
    folder.mkdir(parents=True)
    written = {}
    for name, count in files.items():
        rows = images(count, 3072)
        numbers = [k % 10 for k in range(count)]
        content = {"data": rows, labels: numbers, "filenames": ["x.png"] * count}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        written[name] = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    (folder / meta).write_bytes(pickle.dumps({meta_key: ["a", "b"]}, protocol=2))
    return written


def disable_checksums(monkeypatch, cls):
    """Let torchvision unpickle our files, which do not have the published checksums."""
    for attribute in ("train_list", "test_list"):
        files = [[name, None] for name, _ in getattr(cls, attribute)]
        monkeypatch.setattr(cls, attribute, files)
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": None})


@pytest.fixture
def cifar10(tmp_path):
    files = {**{f"data_batch_{k}": 4 for k in range(1, 6)}, "test_batch": 6}
    folder = tmp_path / "cifar-10-batches-py"
    return write_cifar(folder, files, "labels", "batches.meta", "label_names")


def test_cifar10(tmp_path, monkeypatch, cifar10):
    from torchvision.datasets import CIFAR10

    disable_checksums(monkeypatch, CIFAR10)
    data = load("cifar10", data_dir=tmp_path)
    assert (data.classes, data.shape, data.kind) == (10, (3, 32, 32), "image")
    train = np.concatenate([cifar10[f"data_batch_{k}"] for k in range(1, 6)])
    x, y = read_all(data.train)
    torch.testing.assert_close(x, normalize(train, train).float())
    assert y.tolist() == [0, 1, 2, 3] * 5
    x, y = read_all(data.test)
    torch.testing.assert_close(x, normalize(cifar10["test_batch"], train).float())
    assert y.tolist() == list(range(6))
    assert data.train.augmentation.flip
    assert data.train.augmentation.shift == 4


@pytest.mark.usefixtures("cifar10")
def test_files_without_the_published_checksum_are_not_unpickled(tmp_path):
    with pytest.raises(UsageError, match=r"files of cifar10 in .* are damaged .* --download"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.usefixtures("cifar10")
def test_a_truncated_cifar_batch(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    disable_checksums(monkeypatch, CIFAR10)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"files of cifar10 in .* are damaged"):
        load("cifar10", data_dir=tmp_path)


def test_cifar100(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR100

    disable_checksums(monkeypatch, CIFAR100)
    folder = tmp_path / "cifar-100-python"
    write_cifar(folder, {"train": 12, "test": 5}, "fine_labels", "meta", "fine_label_names")
    data = load("cifar100", data_dir=tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (12, 5, 100)


def write_idx(path, array):
    """Write MNIST's format: 0, 0, type 8 (bytes), dimensions, sizes in big endian, the bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


@pytest.fixture
def fashion(tmp_path):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    found = {}
    for part, count in (("train", 9), ("t10k", 4)):
        found[part] = images(count, 28, 28)
        write_idx(folder / f"{part}-images-idx3-ubyte", found[part])
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8))
    return found


def test_fashion_mnist(tmp_path, fashion):
    data = load("fashion-mnist", data_dir=tmp_path)
    assert (data.classes, data.shape, data.kind) == (10, (1, 28, 28), "image")
    train = fashion["train"][..., None]
    x, y = read_all(data.test)
    torch.testing.assert_close(x, normalize(fashion["t10k"][..., None], train).float())
    assert y.tolist() == list(range(4))
    assert not data.train.augmentation.flip
    assert load("fashion-mnist", data_dir=tmp_path, flip=True).train.augmentation.flip


@pytest.mark.usefixtures("fashion")
def test_a_truncated_idx_file(tmp_path):
    path = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UsageError, match=r"files of fashion-mnist in .* are damaged"):
        load("fashion-mnist", data_dir=tmp_path)


def arrays(**changes):
    return {
        "x_train": images(8, 6, 5, 3),
        "y_train": np.arange(8).reshape(8, 1),
        "x_test": images(3, 6, 5, 3),
        "y_test": np.arange(3, dtype=np.uint8),
        **changes,
    }


def test_npz(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # not needed for .npz files
    found = arrays()
    np.savez_compressed(tmp_path / "cifar10.npz", **found)
    for data_dir in (tmp_path, tmp_path / "cifar10.npz"):
        data = load("cifar10", data_dir=data_dir)
        assert (data.shape, data.classes) == ((3, 6, 5), 10)
        x, y = read_all(data.test)
        torch.testing.assert_close(x, normalize(found["x_test"], found["x_train"]).float())
        assert y.tolist() == [0, 1, 2]
        assert len(read_all(data.train)[1]) == 8


def test_npz_without_channels(tmp_path):
    found = arrays(x_train=images(8, 6, 5), x_test=images(3, 6, 5))
    np.savez(tmp_path / "fashion-mnist.npz", **found)
    assert load("fashion-mnist", data_dir=tmp_path).shape == (1, 6, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((8, 6, 5, 3))}, "train: images must be uint8 of shape .* float64"),
        ({"x_test": images(3, 6)}, r"test: images must be uint8 of shape .* of \(3, 6\)"),
        ({"x_test": images(3, 5, 6, 3)}, r"test images \(5, 6, 3\); they must have the same shape"),
        ({"y_train": np.zeros(7, dtype=int)}, "train: labels must be 8 integers, one per image"),
        ({"y_test": np.zeros(3)}, "test: labels must be 3 integers, .* float64"),
        ({"y_test": np.array([0, 1, 10])}, "labels must be from 0 to 9, got 0 to 10"),
        ({"y_test": np.array([{}, 1, 2])}, "not a readable .npz file"),
    ],
)
def test_npz_with_wrong_arrays(tmp_path, changes, message):
    np.savez(tmp_path / "cifar10.npz", **arrays(**changes))
    with pytest.raises(UsageError, match=message) as caught:
        load("cifar10", data_dir=tmp_path)
    assert "cifar10.npz" in str(caught.value)


def test_unreadable_npz(tmp_path):
    path = tmp_path / "cifar10.npz"
    partial = arrays()
    del partial["y_test"]
    np.savez(path, **partial)
    with pytest.raises(UsageError, match="has no array y_test; it must hold"):
        load("cifar10", data_dir=tmp_path)
    whole = path.read_bytes()
    np.save(tmp_path / "bare.npy", np.zeros(3))
    for content in (b"", b"not a zip", whole[: len(whole) // 2], pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"is not a readable .npz file"):
            load("cifar10", data_dir=tmp_path)
    path.write_bytes((tmp_path / "bare.npy").read_bytes())
    with pytest.raises(UsageError, match=r"is not a readable .npz file"):
        load("cifar10", data_dir=tmp_path)


def test_missing_files_are_named_with_where_we_looked(tmp_path, monkeypatch):
    with pytest.raises(UsageError) as caught:
        load("cifar100", data_dir=tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "cifar100.npz") in message
    assert str(tmp_path / "cifar-100-python" / "train") in message
    assert "--data-dir" in message
    assert "--download" in message
    assert not list(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=str(Path("data") / "cifar10.npz")):
        load("cifar10")


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    def no_network(self):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(CIFAR10, "download", no_network)
    with pytest.raises(UsageError) as caught:
        load("cifar10", data_dir=tmp_path, download=True)
    assert str(caught.value) == f"cifar10 could not be downloaded to {tmp_path}: no network"


@pytest.mark.usefixtures("fashion")
def test_missing_torchvision_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UsageError, match=r'torchvision, .*pip install "\.\[lab\]"'):
        load("fashion-mnist", data_dir=tmp_path)


def test_missing_sklearn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r'scikit-learn, .*pip install "\.\[lab\]"'):
        load("digits")
