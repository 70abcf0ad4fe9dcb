"""Damages to the files of a run, a comparison or a sweep, drawn from a seed.

`list_damages(folder)` names every damage of every file that this module knows for a folder;
`draw_damages(folder, chance)` yields random ones without end, for a soak. `Damage.apply()` writes
it into the folder, which should be a copy. `find_fault` runs a command on it and says what is wrong
with the outcome: a damage must end in success or in one line that names a file or folder.
"""

import contextlib
import copy
import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neumann.lab.commands.main import main
from neumann.lab.training.checkpoints import NAME, SEAL, SEAL_BYTES

DEEP = 100_000
WRONG_VALUES: dict[str, Any] = {
    "null": None,
    "text": "far",
    "empty text": "",
    "true": True,
    "fraction": 1.5,
    "negative": -7,
    "zero": 0,
    "huge": 10**400,
    "large": 10**11,
    "NaN": "NaN",  # as strict_json writes it
    "infinity": "Infinity",
    "list": [1, "a"],
    "empty list": [],
    "object": {"a": {"b": 1}},
    "empty object": {},
    "escape": "\x1b[2J\ud800<script>",
}
# Kinds of damage that leave the numbers of a file unreadable or incomplete.
BYTES = ("empty", "half", "without the last byte", "zeros", "not UTF-8", "deep", "deleted", "noise")


@dataclass(frozen=True)
class Damage:
    file: Path
    kind: str  # what is done to it
    apply: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.file.name}: {self.kind}"


def find_fault(words: list[str], folder: str) -> str | None:
    """Run a command line on a damaged folder; return what is wrong with how it ends."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main(words)
    except Exception as error:
        return f"{words[0]} raised {type(error).__name__}: {error}"
    lines = errors.getvalue().splitlines()
    told = [line for line in lines if line.startswith("neumann: ") and "; using /" not in line]
    if code not in (0, 2, 3):
        return f"{words[0]} ended with {code}: {lines[-1:]}"
    if code == 2 and (len(told) != 1 or folder not in told[0]):
        return f"{words[0]} printed {told}"
    return None


def list_damages(folder: Path, limit: int | None = None) -> Iterator[Damage]:
    """Yield every damage of every file, at most `limit` of each kind of change within a file."""
    for file in _files(folder):
        for kind in BYTES:
            yield Damage(file, kind, lambda file=file, kind=kind: _damage_bytes(file, kind))
        if file.suffix == ".json":
            yield from _json_damages(file, limit)
        elif file.suffix == ".jsonl":
            yield from _lines_damages(file, limit)
        elif NAME.fullmatch(file.name):
            yield from _payload_damages(file, limit)


def draw_damages(folder: Path, chance: random.Random) -> Iterator[Damage]:
    """Yield random damages without end."""
    files = _files(folder)
    while True:
        file = chance.choice(files)
        if chance.random() < 0.2:
            kind = chance.choice(BYTES)
            yield Damage(file, kind, lambda file=file, kind=kind: _damage_bytes(file, kind))
            continue
        if file.suffix == ".json":
            found = list(_json_damages(file, None))
        elif file.suffix == ".jsonl":
            found = list(_lines_damages(file, None))
        else:
            found = list(_payload_damages(file, None)) if NAME.fullmatch(file.name) else []
        if found:
            yield chance.choice(found)


def _files(folder: Path) -> list[Path]:
    made = ("report.html", "spectrum.json")
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in made and path.suffix in (".json", ".jsonl", ".pt")
    )


def _damage_bytes(file: Path, kind: str) -> None:
    data = file.read_bytes()
    if kind == "deleted":
        file.unlink()
        return
    changed = {
        "empty": b"",
        "half": data[: len(data) // 2],
        "without the last byte": data[:-1],
        "zeros": bytes(len(data)),
        "not UTF-8": data[: len(data) // 2] + b"\xff\xfe\x80" + data[len(data) // 2 :],
        "deep": b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}\n" + data,
        "noise": hashlib.sha256(data).digest() * 20,
    }
    file.write_bytes(changed[kind])


# ---------------------------------------------------------------------- JSON


def _json_damages(file: Path, limit: int | None) -> Iterator[Damage]:
    content = json.loads(file.read_bytes())

    def write(changed: Any) -> None:
        file.write_text(json.dumps(changed, indent=2))

    yield from _value_damages(file, content, write, limit)


def _lines_damages(file: Path, limit: int | None) -> Iterator[Damage]:
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]

    def write(changed: Any) -> None:
        file.write_text("".join(json.dumps(line) + "\n" for line in changed))

    for cut in {1, len(lines) // 2, len(lines) - 1} & set(range(len(lines))):
        yield Damage(file, f"only the first {cut} lines", lambda cut=cut: write(lines[:cut]))
        kept = lines[:cut] + lines[cut + 1 :]
        yield Damage(file, f"without line {cut + 1}", lambda kept=kept: write(kept))
    yield Damage(file, "the last line twice", lambda: write([*lines, lines[-1]]))
    yield Damage(file, "reversed", lambda: write(lines[::-1]))
    yield from _value_damages(file, lines, write, limit)


def _value_damages(
    file: Path, content: Any, write: Callable[[Any], None], limit: int | None
) -> Iterator[Damage]:
    """Yield removed, renamed, added and replaced keys at every place of a JSON value."""
    places = list(_places(content))
    chance = random.Random(file.name)
    if limit is not None and len(places) > limit:
        places = chance.sample(places, limit)
    for place in places:
        name = ".".join(map(str, place))

        def change(edit: Callable[[Any, Any], None], place: tuple[Any, ...] = place) -> None:
            changed = copy.deepcopy(content)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            edit(holder, place[-1])
            write(changed)

        def remove(holder: Any, key: Any) -> None:
            del holder[key]

        def rename(holder: Any, key: Any) -> None:
            holder[f"{key}_"] = holder.pop(key)

        def add(holder: Any, key: Any) -> None:
            holder["unknown"] = {"to": "all"}

        if isinstance(place[-1], str):
            for edit in (remove, rename, add):
                kind = f"{edit.__name__} {name}"
                yield Damage(file, kind, lambda edit=edit, change=change: change(edit))
        words = list(WRONG_VALUES)
        for word in words if limit is None else chance.sample(words, 4):

            def replace(holder: Any, key: Any, word: str = word) -> None:
                holder[key] = WRONG_VALUES[word]

            kind = f"{name} is {word}"
            yield Damage(file, kind, lambda replace=replace, change=change: change(replace))


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, child in items:
        yield (*place, key)
        yield from _places(child, (*place, key))


# ---------------------------------------------------------------------- checkpoints


def seal(file: Path, payload: Any) -> None:
    """Write a payload with the right checksum, as a wrong program would."""
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    match = re.fullmatch(NAME, file.name)
    assert match is not None
    step = int(match[1])
    digest = hashlib.sha256(b"%012d" % step + buffer.getvalue()).hexdigest().encode()
    file.write_bytes(buffer.getvalue() + SEAL % (step, digest))


def read_payload(file: Path) -> Any:
    return torch.load(io.BytesIO(file.read_bytes()[:-SEAL_BYTES]), "cpu", weights_only=True)


def _payload_damages(file: Path, limit: int | None) -> Iterator[Damage]:
    """Yield payloads with the right checksum but without, or with other, content."""
    try:
        payload = read_payload(file)
    except Exception:  # it is damaged already
        return
    wrong: dict[str, Any] = {"None": None, "a list": [1], "empty": {}, "a tensor": torch.ones(2)}
    for name, value in wrong.items():
        yield Damage(file, f"sealed {name}", lambda value=value: seal(file, value))
    places = [place for place in _places(payload) if len(place) <= 4]
    chance = random.Random(file.name)
    if limit is not None and len(places) > limit:
        # The outer ones first: they are what the lab itself reads.
        outer = [place for place in places if len(place) == 1]
        places = outer + chance.sample(places, limit)
    values = {"None": None, "text": "far", "a tensor": torch.full((3,), torch.nan), "-1": -1}
    for place in places:
        for word in ("removed", *values):

            def apply(place: tuple[Any, ...] = place, word: str = word) -> None:
                changed = copy.deepcopy(payload)
                holder = changed
                for key in place[:-1]:
                    holder = holder[key]
                if word == "removed":
                    del holder[place[-1]]
                else:
                    holder[place[-1]] = values[word]
                seal(file, changed)

            yield Damage(file, f"sealed, {'.'.join(map(str, place))}: {word}", apply)
