"""Hugging Face's Trainer: a callback that keeps displaced weights out of checkpoints.

The Trainer itself calls `optimizer.train()` before every training batch and `optimizer.eval()`
before every evaluation, so evaluation is correct without the callback. But it saves in whatever
mode the optimizer happens to be in, and unless it has just evaluated that means the displaced w.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from neumann.extras import describe_install
from neumann.optim import Neumann, recipe
from neumann.optim.groups import param_groups
from neumann.optim.guard import find_neumann
from neumann.optim.long_warmup import warn_of_long_warmup

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        message = f"transformers is missing: {describe_install('transformers')}"
        raise ImportError(message) from error

__all__ = ["EvaluationWeights", "NeumannByRole", "large_batch"]

_OF_GROUPS = ("roles", "options", "split_heads")  # arguments of param_groups


def large_batch(
    model: nn.Module, steps: int, *, callbacks: Sequence[Any] = (), **options: Any
) -> dict[str, Any]:
    """Arguments of the Trainer for :func:`neumann.large_batch`, with the callback below::

        Trainer(model, args, train_dataset=data, **large_batch(model, steps=args.max_steps))

    Args:
        model: the Trainer's model.
        steps: optimizer steps of the whole run.
        callbacks: further callbacks of the Trainer.
        **options: as for `neumann.large_batch`.
    """
    if steps == -1:  # what TrainingArguments holds unless it is given
        raise ValueError(
            "max_steps is -1, because the Trainer counts epochs: pass the number of optimizer "
            "steps of the whole run, or give max_steps to TrainingArguments"
        )
    pair = recipe.large_batch(model, steps, **options)
    return {"optimizers": pair, "callbacks": [*callbacks, EvaluationWeights()]}


class NeumannByRole:
    """Builds the optimizer inside the Trainer, after it has wrapped or sharded the model::

        Trainer(model, args, optimizer_cls_and_kwargs=(NeumannByRole, {"steps": 2_000}), ...)

    The weight decay follows from `steps`, the optimizer steps of the whole run, unless it is given.
    The schedule is the Trainer's own. With `lr_scheduler_type="linear", warmup_steps=0.03` in its
    arguments it is close to the recipe's: it rises over 3 % of the steps, then falls linearly.
    Needs transformers 5.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float = recipe.LR,
        steps: int | None = None,
        weight_decay: float | Literal["auto"] | None = recipe.AUTO,
        **options: Any,
    ) -> Neumann:
        """Build the optimizer.

        Args:
            model: the model, as the Trainer has wrapped or sharded it.
            lr: the peak learning rate.
            steps: optimizer steps of the whole run; needed unless `weight_decay` is a number.
            weight_decay: as for `neumann.large_batch`; None is "auto".
            **options: `roles`, `options` and `split_heads`, as for `neumann.param_groups`, and
                options of `Neumann`. Slow momentum is only in `large_batch`.

        Raises:
            ValueError: `steps` is missing, or an option is wrong.
        """
        recipe.refuse_precondition(options)
        if weight_decay is None or weight_decay == recipe.AUTO:
            if steps is None:
                raise ValueError(
                    "NeumannByRole needs the optimizer steps of the whole run for its weight "
                    'decay: pass {"steps": 2_000}, or a weight_decay'
                )
            roles = options.get("roles")
            weight_decay = recipe.choose_weight_decay(model, steps, lr, roles=roles)
        of_groups = {name: options.pop(name) for name in _OF_GROUPS if name in options}
        groups = param_groups(model, weight_decay=weight_decay, **of_groups)
        return Neumann(groups, lr, **options)


class EvaluationWeights(TrainerCallback):
    """Save w − μm, and leave it in the model when training ends::

        Trainer(..., callbacks=[EvaluationWeights()])

    It switches to the evaluation weights before a checkpoint is written and at the end of every
    epoch; the Trainer switches back before the next training batch. A checkpoint holds the
    evaluation weights as its model. It still resumes exactly, because the optimizer's state keeps w
    and the mode. After train(), save_model() and push_to_hub() save w − μm. The weights that
    `load_best_model_at_end` loads are used as they are, also by a later evaluate().

    List this callback last. If a later callback requests a checkpoint in `on_step_end`, it holds w;
    it still resumes exactly. Optimizers other than Neumann are ignored.
    """

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kw: Any
    ) -> None:
        optimizer = find_neumann(kw["optimizer"])
        if optimizer is not None:
            warn_of_long_warmup(optimizer, state.max_steps)
            if not optimizer.training:  # the last training may have loaded its best model
                optimizer.note_loaded_weights()

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
