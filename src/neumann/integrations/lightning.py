"""Lightning: a callback that shows w − μm to everything except training.

Lightning never calls an optimizer's `train()` and `eval()`. Without the callback it validates,
tests and saves the displaced weights w.
"""

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from neumann.extras import describe_install
from neumann.optim import Neumann, recipe
from neumann.optim.guard import find_neumann
from neumann.optim.long_warmup import warn_of_long_warmup
from neumann.optim.state import WEIGHTS

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            message = f"Lightning is missing: {describe_install('lightning')}"
            raise ImportError(message) from error

__all__ = ["EvaluationWeights", "large_batch"]


def large_batch(
    module: "LightningModule", steps: int | None = None, **options: Any
) -> dict[str, Any]:
    """What `configure_optimizers` returns for :func:`neumann.large_batch`::

        def configure_optimizers(self):
            return large_batch(self)

    Args:
        module: its trainer knows the number of steps.
        steps: optimizer steps of the whole run, if the trainer does not know them.
        **options: as for `neumann.large_batch`.
    """
    if steps is None and not hasattr(module, "trainer"):
        raise TypeError(
            f"cannot get the number of steps from {type(module).__name__}: pass a LightningModule, "
            "or steps"
        )
    if steps is None:
        estimated = module.trainer.estimated_stepping_batches
        if estimated == float("inf") or estimated < 1:
            raise ValueError(
                "the Trainer does not know how many steps it will take: give it max_steps, or "
                "max_epochs and data with a length, or pass steps"
            )
        steps = int(estimated)
    optimizer, schedule = recipe.large_batch(module, steps, **options)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }


class EvaluationWeights(Callback):
    """Evaluate and save w − μm; train on w::

        Trainer(callbacks=[EvaluationWeights()])

    The parameters hold the evaluation weights from the start of a validation, test or prediction,
    and from the end of an epoch, until the next training batch. Every checkpoint holds them too,
    even one written between two training batches, with two exceptions below. fit(ckpt_path=...)
    still continues as if there had been no interruption, because the optimizer's state keeps w and
    the mode. After fit() the model holds the evaluation weights, even if an exception ended it.

    Several optimizers may be Neumann; the callback ignores all others. You need it where you train,
    not where you only load a checkpoint, whose `state_dict` already is w − μm.

    The exceptions: a checkpoint written between two batches under a strategy that gathers or shards
    the model (FSDP2) holds w; it still resumes exactly. And if your own code calls
    `trainer.save_checkpoint(path, weights_only=True)` within an epoch, it writes w, because
    Lightning does not notify callbacks of it: call it inside `optimizer.evaluating()`.
    """

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        steps = trainer.estimated_stepping_batches
        for optimizer in _neumann_optimizers(trainer):
            if steps != float("inf"):
                warn_of_long_warmup(optimizer, int(steps))

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        _switch_to_evaluation(trainer)

    on_test_start = on_predict_start = on_train_epoch_end = on_train_end = on_validation_start

    def on_train_batch_start(self, trainer: "Trainer", *args: Any, **kwargs: Any) -> None:
        for optimizer in _neumann_optimizers(trainer):
            optimizer.train()

    def on_train_batch_end(self, trainer: "Trainer", *args: Any, **kwargs: Any) -> None:
        """Switch for a checkpoint of the weights only, which `on_save_checkpoint` never sees."""
        if any(_saves_weights_between_batches(c) for c in trainer.checkpoint_callbacks):
            _switch_to_evaluation(trainer)

    def on_exception(self, trainer: "Trainer", *args: Any, **kwargs: Any) -> None:
        # A device that has failed or run out of memory fails here again; the exception that
        # Lightning is about to raise says more.
        with suppress(RuntimeError):
            _switch_to_evaluation(trainer)

    def on_save_checkpoint(
        self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Put the evaluation weights into a checkpoint written during training.

        The live model does not change. Switching it to evaluation and back would be shorter, but
        that writes the parameters, which autograd forbids between a forward and its backward pass.
        """
        names: dict[Tensor, list[str]] = defaultdict(list)  # tied parameters have several
        for name, p in pl_module.named_parameters(remove_duplicate=False):
            names[p].append(name)
        saved, states = checkpoint["state_dict"], checkpoint["optimizer_states"]
        for index, optimizer in enumerate(map(find_neumann, trainer.optimizers)):
            if optimizer is None or not optimizer.training:
                continue
            replacements = [
                (name, p, weights)
                for p, weights in _evaluation_weights(optimizer)
                for name in names[p] or [""]
            ]
            # All or nothing: a mixture of w and w − μm would be neither.
            if all(_is_saved_as(saved.get(name), p) for name, p, _ in replacements):
                saved.update({name: weights for name, _, weights in replacements})
                states[index] = _as_evaluation_state(optimizer, states[index])


def _neumann_optimizers(trainer: "Trainer") -> list[Neumann]:
    """Return the trainer's Neumann optimizers; there are none before fit() creates them."""
    return [o for o in map(find_neumann, trainer.optimizers) if o is not None]


def _switch_to_evaluation(trainer: "Trainer") -> None:
    for optimizer in _neumann_optimizers(trainer):
        optimizer.eval()


def _evaluation_weights(optimizer: Neumann) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter that has state with a copy of its evaluation weights."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.eval_params()
    copies = found.values() if isinstance(found, dict) else found
    # A frozen parameter has no second set of weights.
    return [pair for pair in zip(parameters, copies, strict=True) if pair[0] in optimizer.state]


def _as_evaluation_state(optimizer: Neumann, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn a state dict written in training mode into what evaluation mode would have written."""
    state = dict(state_dict["state"])
    groups = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append({**saved, "training": False})
        for p, key in zip(group["params"], saved["params"], strict=True):
            if key in state:
                state[key] = {**state[key], WEIGHTS: p.detach()}
    return {**state_dict, "state": state, "param_groups": groups}


def _is_saved_as(saved: Tensor | None, p: Tensor) -> bool:
    """Whether an entry of a state dict is the parameter itself, not a gathered or replaced one."""
    return saved is not None and saved.shape == p.shape and saved.data_ptr() == p.data_ptr()


def _saves_weights_between_batches(callback: object) -> bool:
    """Whether this is a ModelCheckpoint(save_weights_only=True) that counts steps or seconds."""
    weights_only = bool(getattr(callback, "save_weights_only", False))
    return weights_only and not getattr(callback, "every_n_epochs", 1)
