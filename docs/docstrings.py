"""Docstrings as Markdown: the roles and the `::` of reStructuredText, which Sphinx would read."""

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
CODE_FOLLOWS = re.compile(r"::$", re.MULTILINE)


class Roles(Extension):
    """Turn :class:`Name` into `Name`, and a `::` before a code block into a colon."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            plain = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = CODE_FOLLOWS.sub(":", plain)
