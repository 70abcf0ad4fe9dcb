"""The settings of a command, read from the source of their class.

The modules of these classes import torch, which takes seconds. The help of a command, and the
answer to a mistyped flag, need only the names of the settings, their types, defaults and texts. So
these few expressions are evaluated alone, and a name that another file of this package defines is
looked up there. What comes from elsewhere, such as `Path`, is imported.

The text of a setting is in a `Doc`, in a string below it, or in a comment after or above it.
"""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import pairwise
from typing import Any, NamedTuple

from typing_extensions import Doc

PACKAGE = "neumann"


class Setting(NamedTuple):
    name: str
    hint: Any  # its declared type
    default: Any
    text: str


class SettingsClass(NamedTuple):
    about: str  # the docstring
    settings: Mapping[str, Setting]  # by name, those of its bases first


def read_settings(place: str) -> SettingsClass:
    """Read a class, given as MODULE:CLASS."""
    module, _, name = place.partition(":")
    return open_module(module).read_class(name)


@cache
def open_module(name: str) -> "ModuleSource":
    """Open the source of a module of this package."""
    return ModuleSource(_find_file(name))


def _find_file(module: str) -> Traversable:
    """The source of a module, which may be in a zip file."""
    *folders, name = module.split(".")[1:]
    folder = files(PACKAGE).joinpath(*folders)
    package = folder.joinpath(name)
    return package.joinpath("__init__.py") if package.is_dir() else folder.joinpath(f"{name}.py")


class ModuleSource:
    """The source of a module, whose attributes are evaluated when they are asked for."""

    def __init__(self, path: Traversable) -> None:
        text = path.read_text(encoding="utf-8")
        self._path, self._lines = path, text.splitlines()
        self._statements: dict[str, ast.stmt] = {}  # by the name that they define
        for statement in ast.parse(text).body:
            self._statements |= dict.fromkeys(_list_defined_names(statement), statement)

    def __getattr__(self, name: str) -> Any:
        statement = self._statements.get(name)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return _look_up_import(statement, name)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return self._evaluate(statement.value)
        raise AttributeError(f"{self._path} defines no value {name}")

    def _evaluate(self, expression: ast.expr) -> Any:
        if isinstance(expression, ast.Dict):
            # A table such as that of the optimizers: only the names stand in a help.
            return dict.fromkeys(self._evaluate(key) for key in expression.keys if key is not None)
        used = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        values = {name: getattr(self, name) for name in used & self._statements.keys()}
        return eval(compile(ast.Expression(expression), str(self._path), "eval"), values)

    def read_class(self, name: str) -> SettingsClass:
        """Read the settings of a class, which may be imported from another module."""
        statement = self._statements[name]
        if isinstance(statement, ast.ImportFrom):
            return open_module(str(statement.module)).read_class(name)
        assert isinstance(statement, ast.ClassDef)
        found: dict[str, Setting] = {}
        for base in statement.bases:
            if isinstance(base, ast.Name):
                found |= self.read_class(base.id).settings
        for node, following in pairwise([*statement.body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = self._read_setting(node.target.id, node, following)
        return SettingsClass(ast.get_docstring(statement) or "", found)

    def _read_setting(self, name: str, node: ast.AnnAssign, following: ast.stmt) -> Setting:
        hint = self._evaluate(node.annotation)
        default = inspect.Parameter.empty if node.value is None else self._evaluate(node.value)
        documented = [each for each in get_extras(hint) if isinstance(each, Doc)]
        if documented:
            text = documented[0].documentation
        else:
            text = (
                _read_string(following)
                or _read_comment_after(node, self._lines)
                or _read_comments_above(node, self._lines)
            )
        return Setting(name, hint, default, " ".join(text.split()))


def get_extras(hint: Any) -> tuple[Any, ...]:
    """What an Annotated type has beside the type."""
    return getattr(hint, "__metadata__", ())


def _list_defined_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name.partition(".")[0] for alias in aliases]
    return []


def _look_up_import(statement: ast.Import | ast.ImportFrom, name: str) -> Any:
    original = {alias.asname or alias.name: alias.name for alias in statement.names}.get(name, name)
    if isinstance(statement, ast.Import):
        return import_module(original)
    module = str(statement.module)
    if module.partition(".")[0] != PACKAGE:
        return getattr(import_module(module), original)
    if _find_file(f"{module}.{original}").is_file():
        return open_module(f"{module}.{original}")
    return getattr(open_module(module), original)


# ---------------------------------------------------------------------- texts


def _read_string(node: ast.stmt) -> str:
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
