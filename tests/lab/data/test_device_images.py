"""Images on the device: partition of a batch, resuming, augmentation, normalization."""

import numpy as np
import pytest
import torch

from neumann.lab.data import Plan, load
from neumann.lab.data.augmentation import Augmentation, draw
from neumann.lab.data.device_images import DeviceImages, Normalization, compute_normalization
from neumann.lab.errors import UsageError
from tests.support.batches import flat, same

COLORED = "synthetic:3x12x10,7,50"


@pytest.fixture(scope="module")
def colored():
    return load(COLORED, flip=True, shift=4, cutout=4)


@pytest.fixture
def numbered():
    """Images in which every pixel has its own number, without normalization."""
    images = torch.arange(4 * 5 * 6).reshape(4, 5, 6, 1).to(torch.uint8)
    identity = Normalization(torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    return lambda how: DeviceImages(images, torch.arange(4), identity, how)


def test_digits_match_scikit_learn():
    from sklearn.datasets import load_digits

    digits = load("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert (digits.classes, digits.shape, digits.kind) == (10, (64,), "vector")
    x, y = flat(digits.train.batches(Plan(1000, train=False)))
    assert x.shape == (1437, 64)
    assert x.mean().abs() < 1e-6
    assert (x.std(correction=0) - 1).abs() < 1e-6
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert y.equal(torch.tensor(labels)[order[360:]])
    assert torch.corrcoef(torch.stack([x.flatten(), torch.tensor(images)[order[360:]].flatten()]))[
        0, 1
    ] == pytest.approx(1)


def test_ranks_and_micro_batches_partition_a_batch(colored):
    whole = list(colored.train.batches(Plan(16, seed=3, epoch=1)))
    assert len(whole) == len(colored.train) // 16
    for ranks, micro_batches in ((2, 1), (1, 4), (2, 2), (4, 2)):
        shares = [
            list(colored.train.batches(Plan(16, micro_batches, 3, 1, rank=rank, ranks=ranks)))
            for rank in range(ranks)
        ]
        for number, batch in enumerate(whole):
            pieces = [piece for share in shares for piece in share[number]]
            assert len(pieces) == ranks * micro_batches
            assert same([pieces], [batch])


def test_resuming_in_mid_epoch_gives_the_same_batches(colored):
    whole = list(colored.train.batches(Plan(8, 2, seed=3, epoch=1)))
    torch.manual_seed(17)
    rest = list(colored.train.batches(Plan(8, 2, seed=3, epoch=1, first=4)))
    assert same(whole[4:], rest)


def test_the_global_generator_is_left_alone(colored):
    before = torch.get_rng_state()
    list(colored.train.batches(Plan(8)))
    assert before.equal(torch.get_rng_state())


def test_epochs_and_seeds_differ(colored):
    first, epoch, seed = (
        flat(colored.train.batches(plan))
        for plan in (Plan(50), Plan(50, epoch=1), Plan(50, seed=1))
    )
    assert not first[0].equal(epoch[0])
    assert not first[0].equal(seed[0])


def test_evaluation_is_not_augmented_and_covers_everything_over_ranks(colored):
    plans = [Plan(12, rank=rank, ranks=3, train=False) for rank in range(3)]
    shares = [list(colored.train.batches(plan)) for plan in plans]
    joined = [[piece for share in shares for piece in share[k]] for k in range(len(shares[0]))]
    x, y = flat(joined)
    assert len(y) == 50
    assert x.mean((0, 2, 3)).abs().max() < 1e-6
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-6


def test_shift_and_flip_against_padding(numbered):
    """The gather gives a crop of the image padded by reflection, then flipped."""
    source = numbered(Augmentation(flip=True, shift=3))
    plan = Plan(4, seed=11)
    order = plan.order(4)
    shifts = torch.randint(-3, 4, (4, 2), generator=plan.generator("shift"))
    flips = torch.rand(4, generator=plan.generator("flip")) < 0.5
    [[(x, y)]] = source.batches(plan)
    assert y.equal(order)
    for image, number in zip(x, order.tolist(), strict=True):
        original = source.images[number, :, :, 0].numpy()
        padded = np.pad(original, 3, mode="reflect")
        down, across = (shifts[number] + 3).tolist()
        crop = padded[down : down + 5, across : across + 6]
        # Columns are looked up in the flipped image, so its shift is mirrored too.
        mirrored = padded[:, ::-1][down : down + 5, across : across + 6]
        expected = mirrored if flips[number] else crop
        assert image[0].numpy().tolist() == expected.tolist()


def test_every_shift_and_flip_occurs(numbered):
    rows, columns = set(), set()
    for epoch in range(200):
        plan = Plan(4, epoch=epoch)
        draws = draw(Augmentation(True, 2), plan, plan.order(4), (5, 6), torch.device("cpu"))
        rows |= {tuple(row) for row in draws.rows.tolist()}
        columns |= {tuple(column) for column in draws.columns.tolist()}
    assert len(rows) == 5
    assert len(columns) == 10


def test_cutout_leaves_the_mean_color(colored):
    plain = load(COLORED, flip=True, shift=4)
    for (x, _), (cut, _) in zip(
        (p for b in plain.train.batches(Plan(25)) for p in b),
        (p for b in colored.train.batches(Plan(25)) for p in b),
        strict=True,
    ):
        gone = (cut == 0).all(1)
        assert cut.equal(x * ~gone[:, None]), "cutout must not change the shifts"
        assert gone.sum((1, 2)).max() == 16
        assert gone.sum((1, 2)).min() >= 4


def test_the_held_out_part_comes_from_train_and_is_not_augmented():
    whole = load("synthetic:3x12x10,7,50", shift=4)
    parts = whole.hold_out(0.2, seed=4)
    assert (len(parts.train), len(parts.test)) == (40, 10)
    again = whole.hold_out(0.2, seed=4)
    assert same(
        parts.test.batches(Plan(4, train=False)),
        again.test.batches(Plan(4, train=False)),
    )
    held = flat(parts.test.batches(Plan(4, train=False)))[0]
    kept = flat(parts.train.batches(Plan(4, train=False)))[0]
    every = flat(whole.train.batches(Plan(50, train=False)))[0]
    together = {tuple(x.flatten().tolist()) for x in torch.cat([held, kept])}
    assert together == {tuple(x.flatten().tolist()) for x in every}
    other = whole.hold_out(0.2, seed=5)
    assert not held.equal(flat(other.test.batches(Plan(4, train=False)))[0])


@pytest.mark.parametrize(
    ("fraction", "message"), [(0.0, "between 0 and 1, got 0.0"), (0.001, "leaves one part empty")]
)
def test_impossible_held_out_fractions(fraction, message):
    with pytest.raises(UsageError, match=message):
        load("synthetic:4,2,10").hold_out(fraction)


def test_a_constant_channel_is_not_divided_by_zero():
    images = torch.full((3, 4, 4, 2), 9, dtype=torch.uint8)
    images[0, :, :, 1] = 0
    how = compute_normalization(images)
    assert how.scale[0].item() == 1
    assert (images[:, :, :, 0] * how.scale[0] + how.offset[0] == 0).all()
    assert how.scale.isfinite().all()


def test_memory_format():
    plan = Plan(10)
    for channels_last in (False, True):
        data = load("synthetic:3x12x10,7,50", channels_last=channels_last, cutout=3)
        [[x, _]] = next(data.train.batches(plan))
        form = torch.channels_last if channels_last else torch.contiguous_format
        assert x.is_contiguous(memory_format=form)
        assert x.dtype == torch.float32


def test_a_plan_that_does_not_fit_is_refused_at_the_call(colored):
    with pytest.raises(UsageError, match="batch size 64 is larger than the training set"):
        colored.train.batches(Plan(64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": 10}, "shift must be from 0 to 9 for images of 12x10, got 10"),
        ({"cutout": 11}, "cutout must be from 0 to 10 for images of 12x10, got 11"),
    ],
)
def test_images_too_small_for_the_augmentation(options, message):
    with pytest.raises(UsageError, match=message):
        load(COLORED, **options)
