"""Pages of the docs with generated parts.

A part stands between <!-- KIND NAME --> and <!-- end of KIND -->. The rest of a page is written by
hand.
"""

import re
from collections.abc import Mapping


def fill_parts(page: str, kind: str, parts: Mapping[str, str]) -> str:
    """The page with its parts of a kind up to date; KeyError if one has no text."""
    return _find(kind).sub(lambda place: f"{place[1]}{parts[place[2]]}\n{place[3]}", page)


def list_parts(page: str, kind: str) -> list[str]:
    """The names of the parts of a kind, as they follow each other."""
    return [place[2] for place in _find(kind).finditer(page)]


def _find(kind: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {kind} (.+?) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)
