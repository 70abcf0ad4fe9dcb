"""Text as windows of characters, synthetic sets, and wrong names of data sets."""

import pytest
import torch

from neumann.lab.data import Plan, load
from neumann.lab.errors import UsageError
from tests.support.batches import flat, same

SENTENCE = "the quick brown fox — über den Hund.\r\n"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "tale.txt"
    file.write_bytes((SENTENCE * 20).encode())
    return file


@pytest.fixture
def tale(path):
    return load(f"text:{path}", context=8)


def test_splits_and_classes(tale):
    characters = len(SENTENCE) * 20
    test = round(characters * 0.1)
    assert (tale.kind, tale.shape, tale.classes) == ("text", (8,), len(set(SENTENCE)))
    assert len(tale.train) == (characters - test - 1) // 8
    assert len(tale.test) == (test - 1) // 8


def test_windows_spell_the_text(tale):
    alphabet = sorted(set(SENTENCE))
    x, y = flat(tale.test.batches(Plan(4, train=False)))
    assert x.dtype == y.dtype == torch.int64
    spelt = "".join(alphabet[k] for k in x.flatten())
    text = SENTENCE * 20
    end = text[-round(len(text) * 0.1) :]
    assert spelt == end[: len(spelt)]
    assert "".join(alphabet[k] for k in y.flatten()) == end[1 : len(spelt) + 1]


def test_training_windows_move_with_seed_and_epoch(tale):
    def starts(**options):
        length = len(tale.train.tokens)
        # With each character equal to its position, a window shows where it starts.
        source = type(tale.train)(torch.arange(length, dtype=torch.int32), 8)
        x, y = flat(source.batches(Plan(4, **options)))
        assert (y == x + 1).all()
        assert (x[:, -1] - x[:, 0] == 7).all()
        return x[:, 0]

    first = starts()
    assert first.equal(starts())
    assert len({int(starts(epoch=epoch).min()) % 8 for epoch in range(40)}) == 8
    assert not first.equal(starts(seed=1))
    assert len(first.unique()) == len(first)
    assert first.max() < len(tale.train.tokens) - 8


def test_ranks_micro_batches_and_resuming(tale):
    whole = list(tale.train.batches(Plan(8, seed=2)))
    shares = [list(tale.train.batches(Plan(8, 2, 2, rank=rank, ranks=2))) for rank in range(2)]
    joined = [a + b for a, b in zip(*shares, strict=True)]
    rest = list(tale.train.batches(Plan(8, seed=2, first=5)))
    assert same(whole, joined)
    assert same(whole[5:], rest)


def test_the_held_out_part_is_the_end(tale):
    parts = tale.hold_out(0.25)
    length = len(tale.train.tokens)
    assert torch.cat([parts.train.tokens, parts.test.tokens]).equal(tale.train.tokens)
    assert len(parts.test.tokens) == round(length * 0.25)
    with pytest.raises(UsageError, match="leaves too few for a window; lower --context from 8"):
        tale.hold_out(0.01)


def test_paths_are_looked_up_in_the_data_folder(path):
    assert load("text:tale.txt", data_dir=path.parent, context=8).name == "text:tale.txt"
    with pytest.raises(
        UsageError, match=r"other.txt was not found: looked for .* and .*--data-dir"
    ):
        load("text:other.txt", data_dir=path.parent)
    with pytest.raises(UsageError, match=r"^--data text:/nowhere/x: /nowhere/x does not exist$"):
        load("text:/nowhere/x")


def test_unusable_texts(path):
    with pytest.raises(UsageError, match="context of 128 needs at least 1290"):
        load(f"text:{path}")
    with pytest.raises(UsageError, match="context must be at least 1 character, got 0"):
        load(f"text:{path}", context=0)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load(f"text:{path.parent}")
    with pytest.raises(UsageError, match="a path after the colon or a comma is missing"):
        load("text:")
    with pytest.raises(UsageError, match=r"a text file is named text:.*\.txt"):
        load(str(path))
    copy = path.with_name("copy.txt")
    copy.write_bytes(path.read_bytes())
    with pytest.raises(UsageError, match="names the same text twice"):
        load(f"text:{path},{copy}", context=2)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a text in UTF-8"):
        load(f"text:{path}")
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"tale\.txt holds no text; name a file that does"):
        load(f"text:{path}")


def test_synthetic():
    images = load("synthetic:3x32x32,10,40")
    assert (images.kind, images.shape, images.classes) == ("image", (3, 32, 32), 10)
    assert (len(images.train), len(images.test)) == (40, 4)
    assert images.train.augmentation.shift == 4
    vectors = load("synthetic:64,5,20")
    assert (vectors.kind, vectors.shape, vectors.classes) == ("vector", (64,), 5)
    [[(x, y)]] = vectors.train.batches(Plan(20))
    assert x.shape == (20, 64)
    assert 0 <= y.min() <= y.max() < 5
    [[(again, _)]] = load("synthetic:64,5,20").train.batches(Plan(20))
    assert x.equal(again)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("synthetic:32x32,10,40", "should look like synthetic:SHAPE,CLASSES,N, for example"),
        ("synthetic:64,10", "should look like"),
        ("synthetic:64,0,40", "every number must be at least 1"),
        ("cifar", "unknown data set 'cifar'; did you mean cifar10 or cifar100"),
        ("fashion_mnist", "did you mean fashion-mnist"),
        ("cifar10:", "unknown data set 'cifar10:'; did you mean cifar10"),
        ("xyz", "unknown data set 'xyz'; choose from: digits, .*text:FILE.*, folder:PATH"),
        ("", "unknown data set ''; choose from: digits"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_text_refuses_augmentation(path):
    with pytest.raises(UsageError, match="flip, shift and cutout are for built-in sets of images"):
        load(f"text:{path}", shift=2)
