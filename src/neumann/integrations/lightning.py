"""Lightning: a callback that shows w − μm to everything but training.

Lightning never calls an optimizer's `train()` and `eval()`, so without the callback it validates,
tests and saves the displaced weights w.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from neumann.integrations.optimizers import evaluation_weights, in_evaluation_mode, neumann_inside
from neumann.optim import Neumann

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                "neumann.integrations.lightning needs Lightning: "
                "`pip install neumann-optimizer[lightning]`"
            ) from error

__all__ = ["EvaluationWeights"]


class EvaluationWeights(Callback):
    """Evaluate and save w − μm; train on w::

        Trainer(callbacks=[EvaluationWeights()])

    From the start of a validation, a test or a prediction, and from the end of an epoch, until the
    next training batch the parameters hold the evaluation weights. So a checkpoint written there
    holds them too, and since the optimizer's state keeps w and the mode, fit(ckpt_path=...)
    continues as if there had been no interruption. A checkpoint written between two training
    batches is given the same form. fit() leaves the evaluation weights in the model, also when it
    ends by an exception.

    Several optimizers may be Neumann; all others are left alone. Needed where it trains, not where
    a checkpoint is merely loaded: its `state_dict` is w − μm already.

    Limits: a checkpoint written between two batches under a strategy that gathers or shards the
    model (FSDP2) holds w, and resumes exactly. Code of your own that calls
    `trainer.save_checkpoint(path, weights_only=True)` within an epoch writes w, as Lightning tells
    no callback of it: call it inside `optimizer.evaluating()`.
    """

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _evaluate(trainer)

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _evaluate(trainer)

    def on_predict_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _evaluate(trainer)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        for optimizer in _found(trainer):
            optimizer.train()

    def on_train_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Switch for a checkpoint of the weights alone, which `on_save_checkpoint` never sees."""
        if any(_saves_weights_between_batches(c) for c in trainer.checkpoint_callbacks):
            _evaluate(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _evaluate(trainer)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _evaluate(trainer)

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        # An accelerator that has just failed or run out of memory fails again: the exception that
        # is on its way says more.
        with suppress(RuntimeError):
            _evaluate(trainer)

    def on_save_checkpoint(
        self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Give a checkpoint written in mid-training the evaluation weights, and the live model not.

        A switch there and back would be shorter, but writes the parameters, which autograd refuses
        between a forward and its backward pass.
        """
        names: dict[Tensor, list[str]] = defaultdict(list)  # tied parameters have several
        for name, p in pl_module.named_parameters(remove_duplicate=False):
            names[p].append(name)
        saved = checkpoint["state_dict"]
        states = checkpoint["optimizer_states"]
        for index, wrapped in enumerate(trainer.optimizers):
            optimizer = neumann_inside(wrapped)
            if optimizer is None or not optimizer.training:
                continue
            shown = [
                (name, p, weights)
                for p, weights in evaluation_weights(optimizer)
                for name in names[p] or [""]
            ]
            # All or nothing: a mixture of w and w − μm would be neither.
            if all(_is_saved_as(saved.get(name), p) for name, p, _ in shown):
                saved.update({name: weights for name, _, weights in shown})
                states[index] = in_evaluation_mode(optimizer, states[index])


def _found(trainer: "Trainer") -> Iterator[Neumann]:
    """The trainer's Neumann optimizers; none before fit() has made them."""
    for wrapped in trainer.optimizers:
        optimizer = neumann_inside(wrapped)
        if optimizer is not None:
            yield optimizer


def _evaluate(trainer: "Trainer") -> None:
    for optimizer in _found(trainer):
        optimizer.eval()


def _is_saved_as(saved: Tensor | None, p: Tensor) -> bool:
    """Whether this entry of a state dict is the parameter itself: not gathered, not replaced."""
    return saved is not None and saved.shape == p.shape and saved.data_ptr() == p.data_ptr()


def _saves_weights_between_batches(callback: object) -> bool:
    """A ModelCheckpoint(save_weights_only=True) that counts steps or seconds, not epochs."""
    return bool(getattr(callback, "save_weights_only", False)) and not getattr(
        callback, "every_n_epochs", 1
    )
