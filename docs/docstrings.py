"""What the API reference shows of the source.

Docstrings become Markdown: they have the roles and the `::` of reStructuredText, which Sphinx would
read. The comments beside the fields of a dataclass become a list in its docstring. A default that
the source names, such as `lr=LR`, is shown as its value. In place of a private base class, a class
has that one's own bases.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import (
    Attribute,
    Class,
    Expr,
    ExprAttribute,
    ExprName,
    Extension,
    Function,
    Module,
    Object,
)

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

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Put values in the place of constants that are defaults, and hide private bases."""
        for member in list_members(pkg):
            if isinstance(member, Class):
                hide_private_bases(member)
            elif isinstance(member, Function):
                for parameter in member.parameters:
                    value = find_constant(parameter.default, pkg)
                    parameter.default = parameter.default if value is None else str(value)
            elif isinstance(member.parent, Class):  # a field becomes a parameter of `__init__`
                value = find_constant(member.value, pkg)
                member.value = member.value if value is None else value


def list_members(found: Module | Class) -> Iterator[Class | Function | Attribute]:
    """The classes, functions and attributes that are defined in a module or class, at any depth."""
    for member in list(found.members.values()):
        if member.is_alias:
            continue
        if isinstance(member, Class | Function | Attribute):
            yield member
        if isinstance(member, Module | Class):
            yield from list_members(member)


def hide_private_bases(cls: Class) -> None:
    """Give a class the bases of its private ones, but keep the `__init__` that it inherits."""
    resolved = {base.name: base for base in cls.resolved_bases if isinstance(base, Class)}
    private = {name for name in resolved if name.startswith("_")}
    if not private:
        return
    if "__init__" not in cls.members and "__init__" in cls.inherited_members:
        cls.set_member("__init__", cls.inherited_members["__init__"])
    bases: list[str | Expr] = []
    for base in cls.bases:
        name = str(base).rpartition(".")[2]
        if name in private:
            hide_private_bases(resolved[name])
            bases += resolved[name].bases
        else:
            bases.append(base)
    cls.bases = bases


def find_constant(default: str | Expr | None, package: Module) -> str | Expr | None:
    """The value of the constant that a default names, or None if it names none."""
    if not isinstance(default, ExprName | ExprAttribute):
        return None
    root, _, path = default.canonical_path.partition(".")
    if root != package.name or not path.rpartition(".")[2].isupper():
        return None
    constant = package[path]
    constant = constant.final_target if constant.is_alias else constant
    return constant.value if isinstance(constant, Attribute) else None
