"""Short names for arms: the optimizer, with only those options that tell it from the other arms.

    sgd:lr=0.1,momentum=0.9    sgd (momentum 0.9)
    sgd:lr=0.1,momentum=0      sgd (momentum 0)
    adamw:lr=0.003             adamw

An arm that has a name keeps it, and so does text that is not an arm.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neumann.lab.contenders import get_name

MAX_OPTIONS = 32  # characters; an arm that would need more shows no more than tell it apart
_ARM = re.compile(r"([A-Za-z][\w.-]*)(?::(\w+=.+))?", re.DOTALL)
_OPTION = re.compile(r"([A-Za-z_][\w-]*)=([\w.+\-%:/()\[\], ]+)")


@dataclass(frozen=True)
class _Parts:
    optimizer: str
    options: Mapping[str, str]


def shorten_names(texts: Sequence[str]) -> dict[str, str]:
    """Return a short name for each arm, given as the command wrote it; no two are the same."""
    texts = list(dict.fromkeys(texts))
    parts = {text: _split(get_name(text)) for text in texts}
    names = {text: _name(of_text, list(parts.values())) for text, of_text in parts.items()}
    count = Counter(names.values())
    return {text: name if count[name] == 1 else get_name(text) for text, name in names.items()}


def _split(text: str) -> _Parts:
    """Split OPTIMIZER:OPTION=VALUE,…@SETTING=VALUE; text that is something else stays whole."""
    head, *settings = text.split("@")
    found = _ARM.fullmatch(head)
    if found is None:
        return _Parts(text, {})
    # A value may hold commas too, as in betas=(0.9,0.95).
    options = re.split(r",(?=[A-Za-z_]\w*=)", found[2]) if found[2] else []
    pairs = [_OPTION.fullmatch(piece) for piece in (*options, *settings)]
    known = {pair[1]: pair[2] for pair in pairs if pair is not None}
    return _Parts(found[1], known) if len(known) == len(pairs) else _Parts(text, {})


def _name(arm: _Parts, all_arms: Sequence[_Parts]) -> str:
    same = [other for other in all_arms if other.optimizer == arm.optimizer]
    differing = [
        key for key, value in arm.options.items() if any(o.options.get(key) != value for o in same)
    ]
    shown = _write(arm, differing)
    if len(shown) > MAX_OPTIONS:
        shown = _write(arm, _tell_apart(arm, differing, same))
    return f"{arm.optimizer} ({shown})" if shown else arm.optimizer


def _tell_apart(arm: _Parts, keys: Sequence[str], others: Sequence[_Parts]) -> list[str]:
    """Return the first options that no other arm shares."""
    kept: list[str] = []
    rest = [other for other in others if other is not arm]
    for key in keys:
        left = [other for other in rest if other.options.get(key) == arm.options[key]]
        if len(left) < len(rest):
            kept.append(key)
            rest = left
    return kept


def _write(arm: _Parts, keys: Sequence[str]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {arm.options[key]}" for key in keys)
