"""The help of a command: its flags in groups, the important ones first.

The text of a flag stands beside its field in the settings class: in a `Doc`, as a string below it,
or as a comment after or above it. A group has a title and the names of fields, in the order in
which they are shown; fields that no group names come last, under "flags".
"""

import ast
import inspect
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro
from typing_extensions import Doc

from neumann.lab.config import flag_name

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
        *("eval_every", "log_every", "checkpoint_every", "tensorboard"),
    ),
    "machine": ("device", "amp", "compile", "cuda_graph", "channels_last", "fsdp", "workers"),
    "curvature": ("spectrum_every", "spectrum_batch", "spectrum_products"),
}
GROUPED = ("train", "compare", "sweep")
REST = "flags"  # the title of fields that no group names
HIDDEN = ("allow_code",)  # fields that the command line fills in another way
EXAMPLES = {  # they fit 80 columns and need no data
    "train": "--opt neumann-spectral --batch-size 512",
    "compare": "--arms neumann-spectral adamw:lr=0.01 --batch-size 512",
    "sweep": "--arms neumann-spectral adamw --batch-size 512",
}
MARGIN, TEXT_COLUMN = 2, 26
METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


class Flag(NamedTuple):
    usage: str  # as in "--epochs INT"
    text: str


def print_help(command: str, defaults: Any, further: Mapping[str, str]) -> None:
    """Print what a command does, and its flags, at the width of the terminal.

    `defaults` are its settings; `further` are flags that are not settings, with their texts.
    """
    width = shutil.get_terminal_size().columns - 1
    groups = list_groups(command, defaults)
    groups.setdefault("run" if command in GROUPED else REST, []).extend(
        Flag(usage, text) for usage, text in further.items()
    )
    arguments = groups.pop("", [])
    print(" ".join(["usage: neumann", command, *(each.usage for each in arguments), "[FLAGS]"]))
    for paragraph in inspect.cleandoc(type(defaults).__doc__ or "").split("\n\n"):
        print(f"\n{textwrap.fill(' '.join(paragraph.split()), width)}")
    if command in EXAMPLES:
        print(f"\nexample: neumann {command} {EXAMPLES[command]}")
    for title, flags in {"arguments": arguments, **groups}.items():
        if flags:
            print(f"\n{title}:")
            for flag in flags:
                print(_format_flag(flag, width))


def list_groups(command: str, defaults: Any) -> dict[str, list[Flag]]:
    """List the flags of a command by the title of their group; those without a name under ""."""
    kind = type(defaults)
    texts, types = read_texts(kind), get_type_hints(kind, include_extras=True)
    shown = {field.name: field for field in fields(kind) if field.name not in HIDDEN}
    groups: dict[str, list[Flag]] = {"": []}
    orders = GROUPS if command in GROUPED else {}
    named = {name for order in orders.values() for name in order}
    for title, order in {**orders, REST: [name for name in shown if name not in named]}.items():
        groups[title] = []
        for name in order:
            if name in shown:
                place = "" if tyro.conf.Positional in _get_extras(types[name]) else title
                groups[place].append(
                    _describe_flag(shown[name], types[name], texts[name], getattr(defaults, name))
                )
    return groups


def _describe_flag(field: "Field[Any]", kind: Any, text: str, default: Any) -> Flag:
    name, extras = flag_name(field.name), _get_extras(kind)
    plain = get_args(kind)[0] if extras else kind
    choices = [each for each in get_args(plain) or (plain,) if each is not type(None)]
    if tyro.conf.Positional in extras:
        return Flag(field.name.upper(), text)
    if choices == [bool]:
        negated = flag_name(f"no_{field.name}")
        return Flag(name if default is False else f"{name}, {negated}", text)
    if get_origin(plain) is tuple:
        metavar = "STR …"
    elif all(isinstance(choice, str) for choice in choices):
        metavar = "{" + ",".join(choices) + "}"
    elif get_origin(choices[0]) is Literal:
        metavar = "{" + ",".join(get_args(choices[0])) + "}"
    else:
        metavar = METAVARS[choices[0]]
    if default is None or default == ():
        return Flag(f"{name} {metavar}", text)
    shown = " ".join(default) if isinstance(default, tuple) else default
    shown = f"{shown:g}" if isinstance(shown, float) else shown
    return Flag(f"{name} {metavar}", f"{text} (default: {shown})")


def _get_extras(kind: Any) -> tuple[Any, ...]:
    """What an Annotated type has beside the type."""
    return getattr(kind, "__metadata__", ())


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


# ---------------------------------------------------------------------- texts in the source


def read_texts(kind: type[Any]) -> dict[str, str]:
    """Read the text of each field of a settings class, its bases included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        texts |= _read_own_texts(base)
    for name, annotated in get_type_hints(kind, include_extras=True).items():
        for extra in _get_extras(annotated):
            if isinstance(extra, Doc):
                texts[name] = extra.documentation
    return {name: " ".join(text.split()) for name, text in texts.items()}


def _read_own_texts(kind: type[Any]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for node, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            texts[node.target.id] = (
                _read_string(following) or _read_comment_after(node, lines)
            ) or _read_comments_above(node, lines)
    return texts


def _read_string(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


def _read_comment_after(node: ast.stmt, lines: list[str]) -> str:
    assert node.end_lineno is not None
    rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    return rest.partition("#")[2]


def _read_comments_above(node: ast.stmt, lines: list[str]) -> str:
    found: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line.strip().lstrip("# "))
    return " ".join(found)
