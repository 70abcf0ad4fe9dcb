"""What the API reference shows of the source.

Docstrings become Markdown: they have the roles and the `::` of reStructuredText, which Sphinx would
read. The comment beside a field of a dataclass becomes its docstring.
"""

import ast
import re
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension, Object, ObjectNode

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
COMMENT = re.compile(r"\s{2}# (.+)")
CODE_FOLLOWS = re.compile(r"::$", re.MULTILINE)


class SourceComments(Extension):
    def on_attribute_instance(
        self, *, node: ast.AST | ObjectNode, attr: Attribute, **kwargs: Any
    ) -> None:
        in_dataclass = attr.parent is not None and "dataclass" in attr.parent.labels
        if in_dataclass and attr.docstring is None and attr.lineno and isinstance(node, ast.AST):
            line = Path(str(attr.filepath)).read_text().splitlines()[attr.lineno - 1]
            if found := COMMENT.search(line):
                text = found[1][0].upper() + found[1][1:]
                attr.docstring = Docstring(f"{text}.", parent=attr, lineno=attr.lineno)

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Turn :class:`Name` into `Name`, and a `::` before a code block into a colon."""
        if obj.docstring is not None:
            plain = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = CODE_FOLLOWS.sub(":", plain)
