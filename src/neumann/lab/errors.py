"""The lab's errors: one line that says what was given and what would be right.

`UsageError` is for mistakes that the user can fix: a flag, a name, a file, a missing package. Any
other exception is a bug in the lab and keeps its traceback.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from neumann.extras import describe_install

MOST = 3  # names that an error suggests
ALIKE = 0.7  # difflib's ratio, from which on names are spelled alike: bs and jobs have 0.67
MISTYPED = 0.85  # from which on a name is taken for a slip of the hand
SHORTEST = 3  # letters of a name in which one may be wrong


class UsageError(ValueError):
    """The user gave something that cannot be used. The message is always one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def unknown(what: str, name: str, known: Iterable[str], forms: Iterable[str] = ()) -> UsageError:
    """Build the error for an unknown name. It suggests the nearest names, or lists all.

    `forms` are further valid forms, such as "timm:NAME", which are listed after the names.
    """
    names = list(known)
    near = find_near_names(name, names)
    if near:
        hint = f"did you mean {join_alternatives(near)}?"
    else:
        shown = [*names[:20], *(["…"] if len(names) > 20 else []), *forms]
        hint = f"choose from: {', '.join(shown)}"
    return UsageError(f"unknown {what} {name!r}; {hint}")


def join_alternatives(names: Sequence[str]) -> str:
    """Join names into "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def find_near_names(name: str, known: Sequence[str]) -> list[str]:
    """Find at most three names: slips of the hand first, then other forms, then like spellings.

    Slips are Lr: lr, sdg: sgd, opr: opt, or data-dr: data-dir. Longer and shorter forms are epoch:
    epochs, or optimizer: opt. Initials are bs: batch-size, or learning-rate: lr.
    """
    # The dashes of flags, and capitals, do not make names different.
    bare = {other.strip("-").lower(): other for other in known}
    given = name.strip("-").lower()
    near = [given] if given in bare and bare[given] != name else []
    near += [other for other in bare if _is_slip(given, other)]
    near += get_close_matches(given, bare, n=MOST, cutoff=MISTYPED)
    forms = [o for o in bare if _is_longer_form(given, o) or _is_longer_form(o, given)]
    near += get_close_matches(given, forms, n=MOST, cutoff=0)
    near += sorted(other for other in bare if given and _get_initials(other) == given)
    near += [initials] if (initials := _get_initials(given)) in bare else []
    near = list(dict.fromkeys(near)) or get_close_matches(given, bare, n=MOST, cutoff=ALIKE)
    return [bare[other] for other in near[:MOST]]


def _is_slip(given: str, name: str) -> bool:
    """Whether one letter is wrong, or the letters are in another order."""
    if given == name or len(given) != len(name) or len(name) < SHORTEST:
        return False
    wrong = sum(a != b for a, b in zip(given, name, strict=True))
    return wrong == 1 or sorted(given) == sorted(name)


def _is_longer_form(short: str, long: str) -> bool:
    """A single letter is the start of too many names."""
    return len(short) > 1 and long.startswith(short)


def _get_initials(name: str) -> str:
    """The first letter of each word; empty for a single word."""
    words = re.split("[-_]", name)
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def missing_package(
    package: str, extra: str, wanted_by: str, error: ImportError | None = None
) -> UsageError:
    """The error for a package that is not installed, or whose import fails with `error`."""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if error is None or missing.split(".")[0] == package:
        why = f"which is not installed: {describe_install(extra)}"
    else:
        why = f"which cannot be imported: {shorten(error)}"
    return UsageError(f"{wanted_by} needs {package}, {why}")


def shorten(error: BaseException, limit: int = 200) -> str:
    """Return the message of an exception in one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. For the host's, torch raises a plain RuntimeError."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "alloc_cpu" in str(error)
