"""The loss: plain, smoothed, of sequences, and with an auxiliary head."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from neumann.lab.models import classification_loss

LOGITS, AUXILIARY = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits(smoothing):
    chosen = torch.full((6, 5), smoothing / 5)
    chosen[torch.arange(6), LABELS] += 1 - smoothing
    expected = -(chosen * LOGITS.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(LOGITS, LABELS, smoothing), expected)


def test_an_auxiliary_head_weighs_two_fifths():
    expected = cross_entropy(LOGITS, LABELS) + 0.4 * cross_entropy(AUXILIARY, LABELS)
    torch.testing.assert_close(classification_loss((LOGITS, AUXILIARY), LABELS), expected)


def test_sequences_are_averaged_over_batch_and_time():
    loss = classification_loss(LOGITS.view(2, 3, 5), LABELS.view(2, 3))
    torch.testing.assert_close(loss, cross_entropy(LOGITS, LABELS))
