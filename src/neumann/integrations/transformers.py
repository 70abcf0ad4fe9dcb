"""Hugging Face's Trainer: a callback that keeps displaced weights out of checkpoints.

The Trainer itself calls `optimizer.train()` before every training batch and `optimizer.eval()`
before every evaluation, so evaluation is correct without the callback. But it saves in whatever
mode the optimizer happens to be in, and unless it has just evaluated that means the displaced w.
"""

from typing import TYPE_CHECKING, Any

from neumann.optim.guard import find_neumann

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        message = "transformers is missing: `pip install neumann-optimizer[transformers]`"
        raise ImportError(message) from error

__all__ = ["EvaluationWeights"]


class EvaluationWeights(TrainerCallback):
    """Save w − μm, and leave it in the model when training ends::

        Trainer(..., callbacks=[EvaluationWeights()])

    It switches to the evaluation weights before a checkpoint is written and at the end of every
    epoch; the Trainer switches back before the next training batch. A checkpoint holds the
    evaluation weights as its model. It still resumes exactly, because the optimizer's state keeps w
    and the mode. After train(), save_model() and push_to_hub() ship w − μm, and
    `load_best_model_at_end` loads weights that no later evaluate() corrects a second time.

    List this callback last. If a later callback requests a checkpoint in `on_step_end`, it holds w;
    it still resumes exactly. Optimizers other than Neumann are left alone.
    """

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kw: Any
    ) -> None:
        if control.should_save:
            _switch_to_evaluation(kw["optimizer"])

    def on_epoch_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kw: Any
    ) -> None:
        # Every training ends with this hook. `on_train_end` would be too late: the best model is
        # loaded before it.
        _switch_to_evaluation(kw["optimizer"])


def _switch_to_evaluation(wrapped: object) -> None:
    optimizer = find_neumann(wrapped)
    if optimizer is not None:
        optimizer.eval()
