"""The lab's errors: one line that names what was given and what would be right.

`UsageError` is for what the user can put right: a flag, a name, a file, a missing package. Anything
else that is raised is a fault of the lab and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches

DISTRIBUTION = "neumann-optimizer"


class UsageError(ValueError):
    """What was given cannot be used. The message is one line, whatever it was made from."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def unknown(what: str, name: str, known: Iterable[str], forms: Iterable[str] = ()) -> UsageError:
    """An error for a name that is not among `known`: the nearest of them, or all if none is near.

    Args:
        what: the kind of thing, such as "model".
        name: what was given.
        known: the names there are.
        forms: further ways to name one, such as "timm:NAME", listed after all names.
    """
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        hint = f"the nearest: {', '.join(near)}"
    else:
        shown = [*names[:20], *(["…"] if len(names) > 20 else []), *forms]
        hint = f"there are: {', '.join(shown)}"
    return UsageError(f"unknown {what} {name!r}; {hint}")


def missing_package(package: str, extra: str, wanted_by: str) -> UsageError:
    """An error for an optional package that is not installed; names the extra that brings it."""
    return UsageError(
        f"{wanted_by} needs {package}, which is not installed: pip install {DISTRIBUTION}[{extra}]"
    )


def shorten(error: BaseException, limit: int = 200) -> str:
    """What another library raised, in one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
