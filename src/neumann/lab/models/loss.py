"""Cross-entropy for whatever a model of the lab returns."""

from torch import Tensor
from torch.nn.functional import cross_entropy

AUXILIARY = 0.4  # weight of an auxiliary head's loss, as Inception-V3 was trained

Output = Tensor | tuple[Tensor, Tensor]  # logits, or logits and auxiliary logits


def classification_loss(output: Output, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy, a scalar; with an auxiliary head, plus 0.4 times that of the head.

    Args:
        output: logits (batch, classes), or (batch, time, classes) for sequences; or a pair of
            logits and auxiliary logits.
        labels: (batch,) or (batch, time) int64.
        smoothing: the share of each label that is spread over all classes, from 0 to 1.
    """
    if isinstance(output, tuple):
        logits, auxiliary = output
        return _loss(logits, labels, smoothing) + AUXILIARY * _loss(auxiliary, labels, smoothing)
    return _loss(output, labels, smoothing)


def _loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)
