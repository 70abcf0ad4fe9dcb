"""Settings are read from the source as Python would import them, but without torch."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
from typing_extensions import Doc

import neumann
from neumann.lab.commands.flags import SETTINGS
from neumann.lab.commands.parser import COMMANDS
from neumann.lab.commands.settings_source import ModuleSource, read_settings
from tests.support.processes import PROCESS_TIMEOUT

SOURCE = Path(neumann.__file__).parents[1]
TABLE = {"one": print, "two": print}
TEXT = f"choose from {', '.join(TABLE)}"


@dataclasses.dataclass(frozen=True)
class Base:
    first: int = 3  # after it
    # above it,
    # in two lines
    second: float | None = None


@dataclasses.dataclass(frozen=True)
class Example(Base):
    """About it."""

    third: tuple[str, ...] = ("a", "b")
    """below it, in
    two lines"""
    fourth: Annotated[str, Doc(TEXT)] = "×"  # not this
    fifth: bool | None = None  # μ, with a # inside
    sixth: Path | None = None


def test_texts_types_and_defaults():
    about, settings = ModuleSource(Path(__file__)).read_class("Example")
    assert about == "About it."
    assert {setting.name: setting.text for setting in settings.values()} == {
        "first": "after it",
        "second": "above it, in two lines",
        "third": "below it, in two lines",
        "fourth": "choose from one, two",
        "fifth": "μ, with a # inside",
        "sixth": "",
    }
    assert {name: setting.default for name, setting in settings.items()} == vars(Example())
    hints = get_type_hints(Example, include_extras=True)
    assert {name: setting.hint for name, setting in settings.items()} == hints


@pytest.mark.parametrize("command", COMMANDS)
def test_they_are_what_python_imports(command):
    kind = COMMANDS[command].settings
    assert SETTINGS[command] == f"{kind.__module__}:{kind.__qualname__}"
    about, settings = read_settings(SETTINGS[command])
    hints = get_type_hints(kind, include_extras=True)
    assert list(settings) == [field.name for field in dataclasses.fields(kind)]
    assert {name: setting.hint for name, setting in settings.items()} == hints
    assert {name: setting.default for name, setting in settings.items()} == vars(kind())
    assert about.splitlines()[0] in kind.__doc__


def test_torch_is_not_imported():
    script = (
        "import sys\n"
        "from neumann.lab.commands.flags import SETTINGS, list_flags\n"
        "assert all(list_flags(command) for command in SETTINGS)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_TIMEOUT)


def test_the_source_may_be_in_a_zip_file(tmp_path):
    """As with a package that is imported from an archive."""
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", SOURCE, "neumann")
    command = [sys.executable, "-m", "neumann", "train", "--help"]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": packed}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "--eval-steps" in found.stdout
