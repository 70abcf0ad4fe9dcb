"""Hugging Face's Trainer: a callback that keeps displaced weights out of what it saves.

The Trainer itself calls `optimizer.train()` before every training batch and `optimizer.eval()`
before every evaluation, so evaluation is right without the callback. It saves in whatever mode the
optimizer happens to be, which is w unless it has just evaluated.
"""

from typing import TYPE_CHECKING, Any

from neumann.integrations.optimizers import neumann_inside

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(
            "neumann.integrations.transformers needs transformers: "
            "`pip install neumann-optimizer[transformers]`"
        ) from error

__all__ = ["EvaluationWeights"]


class EvaluationWeights(TrainerCallback):
    """Save w − μm, and end the training with it in the model::

        Trainer(..., callbacks=[EvaluationWeights()])

    It switches before a checkpoint is written and at the end of every epoch; the Trainer switches
    back before the next training batch. A checkpoint holds the evaluation weights as its model and
    resumes exactly, as the optimizer's state keeps w and the mode. After train(), save_model() and
    push_to_hub() ship w − μm, and `load_best_model_at_end` loads weights that no later evaluate()
    corrects a second time.

    List it last: a checkpoint that a later callback asks for in `on_step_end` is not foreseen; it
    holds w, and resumes exactly. Optimizers other than Neumann are left alone.
    """

    def on_step_end(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        **kwargs: Any,
    ) -> None:
        if control.should_save:
            _evaluate(kwargs["optimizer"])

    def on_epoch_end(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        **kwargs: Any,
    ) -> None:
        # Every training ends with this hook; the best model is loaded before `on_train_end`.
        _evaluate(kwargs["optimizer"])


def _evaluate(wrapped: object) -> None:
    optimizer = neumann_inside(wrapped)
    if optimizer is not None:
        optimizer.eval()
