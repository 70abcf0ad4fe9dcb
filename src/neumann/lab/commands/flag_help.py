"""The help of a command: its flags in groups, the important ones first.

A group has a title and the names of settings, in the order in which they are shown; flags that no
group names come last.
"""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from neumann.lab.commands.flags import SETTINGS, Flag, list_flags
from neumann.lab.commands.settings_source import read_settings

GROUPS: Mapping[str, Sequence[str]] = {
    "data": (
        *("data", "data_dir", "download", "held_out", "tokens", "context", "img_size"),
        *("flip", "shift", "cutout"),
    ),
    "model": ("model", "smoothing", "ema", "bn_batch", "sync_bn"),
    "optimizer": (
        *("opt", "arms", "lr", "weight_decay", "batch_size", "micro_batch_size", "clip_grad"),
    ),
    "schedule": ("epochs", "search_epochs", "sched", "ramp", "ramp_epochs"),
    "run": (
        *("output", "seed", "seeds", "search_seeds", "resume", "jobs", "seconds", "target"),
        *("eval_every", "eval_steps", "log_every", "checkpoint_every", "checkpoint_steps"),
        "tensorboard",
    ),
    "machine": ("device", "amp", "compile", "cuda_graph", "channels_last", "fsdp", "workers"),
    "curvature": ("spectrum_every", "spectrum_batch", "spectrum_products"),
}
GROUPED = ("train", "compare", "sweep")
REST = "flags"  # the title of flags that no group names
EXAMPLES = {  # they fit 80 columns and need no data
    "train": "--opt neumann-spectral --batch-size 512",
    "compare": "--arms neumann-spectral adamw:lr=0.01 --batch-size 512",
    "sweep": "--arms neumann-spectral adamw --batch-size 512",
}
MARGIN, TEXT_COLUMN = 2, 26


def print_help(command: str, values: Mapping[str, Any] | None = None) -> None:
    """Print what a command does, and its flags, at the width of the terminal.

    `values` are shown as defaults, in place of those of the settings.
    """
    width = shutil.get_terminal_size().columns - 1
    flags = list_flags(command, values)
    arguments = [flag for flag in flags if flag.is_argument]
    print(" ".join(["usage: neumann", command, *(each.usage for each in arguments), "[FLAGS]"]))
    for paragraph in read_settings(SETTINGS[command]).about.split("\n\n"):
        print(f"\n{textwrap.fill(' '.join(paragraph.split()), width)}")
    if command in EXAMPLES:
        print(f"\nexample: neumann {command} {EXAMPLES[command]}")
    for title, group in {"arguments": arguments, **group_flags(command, flags)}.items():
        if group:
            print(f"\n{title}:")
            for flag in group:
                print(_format_flag(flag, width))


def group_flags(command: str, flags: Sequence[Flag]) -> dict[str, list[Flag]]:
    """Sort the flags of a command into groups, by title."""
    rest = {flag.names[0]: flag for flag in flags if not flag.is_argument}
    by_setting = {flag.setting: flag for flag in rest.values() if flag.setting}
    groups: dict[str, list[Flag]] = {}
    for title, order in GROUPS.items() if command in GROUPED else ():
        found = [by_setting[name] for name in order if name in by_setting]
        groups[title] = [rest.pop(flag.names[0]) for flag in found]
    further = [name for name, flag in rest.items() if not flag.setting]
    if command in GROUPED:
        groups["run"] += [rest.pop(name) for name in further]
    return {**groups, REST: list(rest.values())}


def _format_flag(flag: Flag, width: int) -> str:
    margin, indent = " " * MARGIN, " " * TEXT_COLUMN
    # Words such as text:FILE and step:0.3,17.7% stay whole.
    lines = textwrap.wrap(
        flag.text,
        max(width - TEXT_COLUMN, 20),
        break_long_words=False,
        break_on_hyphens=False,
    )
    if len(margin + flag.usage) > TEXT_COLUMN - 2:
        return "\n".join([margin + flag.usage, *(indent + line for line in lines)])
    first, *others = lines
    return "\n".join([f"{margin + flag.usage:{TEXT_COLUMN}}{first}", *(indent + o for o in others)])
