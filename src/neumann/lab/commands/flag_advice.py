"""What an unknown flag was probably meant to be.

Names that look like it come from `find_near_names`. Before these, there are words that people know
from other programs, and options of optimizers, which are not flags.
"""

from collections.abc import Sequence

from neumann.lab.commands.flags import Flag
from neumann.lab.errors import UsageError, find_near_names, join_alternatives

OPTIMIZER = ("--opt", "--arms")  # the flag for optimizers; no command has both
# The start of a word, and the flags that it may stand for. A command has one of them, or none.
OTHER_WORDS = {
    ("opt", "arm"): OPTIMIZER,
    ("gpu", "cuda", "cpu"): ("--device",),
    ("warmup", "warm-up"): ("--ramp",),  # timm's name; Neumann's own warm-up is an option of it
    ("lr-sched",): ("--sched",),
    ("net", "arch"): ("--model",),
    ("steps", "max-steps", "iter"): ("--epochs",),
    ("dir", "folder", "save", "outdir", "out-dir", "log-dir", "logdir"): ("--output",),
    ("grad-clip", "gradient-clip", "max-norm"): ("--clip-grad",),
    ("label-smooth",): ("--smoothing",),
    ("num-workers",): ("--workers",),
    ("parallel", "threads", "processes"): ("--jobs",),
    ("repeat", "runs", "trials"): ("--seeds",),
    ("bf16", "fp16", "precision", "mixed"): ("--amp",),
    ("verbose",): ("--log-every",),
}
# Options of optimizers, each with an arm that has it.
OPTIONS = {
    "momentum": "sgd:momentum=0.9",
    "nesterov": "sgd:nesterov=true",
    "betas": "adamw:betas=(0.9,0.95)",
    "beta1": "adamw:betas=(0.9,0.95)",
    "beta2": "adamw:betas=(0.9,0.95)",
    "eps": "adamw:eps=1e-6",
    "decay-norms": "adamw:decay_norms=true",
    "rest-lr": "adamw:rest_lr=0.01",
    "precondition": "neumann:precondition=diagonal",
    "reset": "neumann:reset=4.4%",
    "cubic": "neumann:cubic=0",
    "repulsive": "neumann:repulsive=0",
    "damping": "cg:damping=1",
    "inner-steps": "idealized:inner_steps=3",
}


def describe_unknown_flag(command: str, given: str, flags: Sequence[Flag]) -> UsageError:
    """Build the error for a flag that this command does not have."""
    word = given.strip("-").replace("_", "-")
    known = [flag.names[-1] for flag in flags if not flag.is_argument]
    if word.startswith("no-"):
        known = [form for flag in flags for form in flag.forms if form.startswith("--no-")]
    arms = next((name for name in OPTIMIZER if name in known), None)
    near = _find_other_words(word, known)
    if arms is not None and word in OPTIONS:
        example = OPTIONS[word]
        example = f"'{example}'" if "(" in example else example
        hint = f"it is an option of the optimizer: {arms} {example}"
    elif near or (near := find_near_names(given, known)):
        hint = f"did you mean {join_alternatives(near)}?"
    else:
        hint = f"neumann {command} --help lists the flags"
    return UsageError(f"unknown flag {given!r}; {hint}")


def _find_other_words(word: str, known: Sequence[str]) -> list[str]:
    for starts, meant in OTHER_WORDS.items():
        if word.startswith(starts):
            return [name for name in meant if name in known]
    return []
