"""What the API reference shows of the source.

Docstrings become Markdown: they have the roles and the `::` of reStructuredText, which Sphinx would
read. The comments beside the fields of a dataclass become a list in its docstring.
"""

import re
from pathlib import Path
from typing import Any

from griffe import Class, Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
CODE_FOLLOWS = re.compile(r"::$", re.MULTILINE)
COMMENT = re.compile(r"\s{2}# (.+)")


class SourceComments(Extension):
    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        """List the fields of a dataclass that have a comment."""
        if "dataclass" not in cls.labels or cls.docstring is None:
            return
        lines = Path(str(cls.filepath)).read_text().splitlines()
        found = {
            name: COMMENT.search(lines[attribute.lineno - 1])
            for name, attribute in cls.attributes.items()
            if attribute.lineno and not name.startswith("_")
        }
        fields = [f"    {name}: {comment[1]}" for name, comment in found.items() if comment]
        if fields:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Turn :class:`Name` into `Name`, and a `::` before a code block into a colon."""
        if obj.docstring is not None:
            plain = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = CODE_FOLLOWS.sub(":", plain)
