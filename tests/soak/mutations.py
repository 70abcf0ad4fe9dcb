"""Ways to damage a file, each a function of the file's content and of chance.

`damage_file` damages one file of a run, a comparison or a sweep and says what it did.
`is_plausible` says whether the result could have been written by another run: then no reader can
tell, and any answer will do that is not a traceback.
"""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neumann.lab.training.checkpoints import Checkpoints

Mutation = Callable[[bytes, random.Random], bytes]

STRANGE = (
    *(None, True, "text", "", -1, 0, 10**30, 1.5, -0.0, "NaN", "Infinity", [], {}, [[]], {"a": 1}),
    *([1, 2], "\ud800", "\x00", "../../etc", "x" * 5000, 1e308),
)


def _truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))] if data else data


def _cut_tail(data: bytes, chance: random.Random) -> bytes:
    return data[: -chance.randint(1, 40)]


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 5, 100))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _garble(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + chance.randbytes(chance.randint(1, 200)) + data[start + 100 :]


def _append(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice((b"\x00" * 512, b"garbage", data[:100] or b"{", b"\n{}\n", b"]"))


def _repeat_middle(data: bytes, chance: random.Random) -> bytes:
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:]


BYTES: tuple[Mutation, ...] = (
    lambda data, chance: b"",
    lambda data, chance: chance.randbytes(len(data)),
    lambda data, chance: b"\x00" * len(data),
    lambda data, chance: chance.randbytes(chance.randint(1, 50)),
    _truncate,
    _truncate,
    _cut_tail,
    _flip,
    _flip,
    _garble,
    _append,
    _repeat_middle,
)
TEXT: tuple[Mutation, ...] = (
    lambda data, chance: b"\xef\xbb\xbf" + data,
    lambda data, chance: data.decode(errors="replace").encode("utf-16"),
    lambda data, chance: b"[" * 100_000,
    lambda data, chance: b'{"config":' * 20_000,
    lambda data, chance: b"null",
    lambda data, chance: b"[]",
    lambda data, chance: b"{}",
    lambda data, chance: b"1e999",
    lambda data, chance: data.replace(b"\n", b"\r\n"),
    lambda data, chance: data.replace(b"true", b"True").replace(b"null", b"None"),
)


def damage_file(path: Path, chance: random.Random) -> str:
    """Damage the file in one of many ways; returns what was done."""
    draw = chance.random()
    if draw < 0.06:
        return _replace_file(path, chance)
    if path.suffix == ".pt":
        return _damage_payload(path, chance) if draw < 0.4 else _change_bytes(path, chance, BYTES)
    if draw < 0.55 and path.suffix in (".json", ".jsonl"):
        return _change_values(path, chance)
    return _change_bytes(path, chance, BYTES if draw < 0.8 else TEXT)


def _change_bytes(path: Path, chance: random.Random, ways: tuple[Mutation, ...]) -> str:
    number = chance.randrange(len(ways))
    path.write_bytes(ways[number](path.read_bytes(), chance))
    return f"bytes {number}" if ways is BYTES else f"text {number}"


def _replace_file(path: Path, chance: random.Random) -> str:
    kind = chance.choice(("removed", "folder", "dangling link", "link to itself"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    return kind


def _change_values(path: Path, chance: random.Random) -> str:
    """Change a key or a value of the JSON, and write it as the lab would."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    contents = [json.loads(line) for line in lines if line.strip()]
    done = _change_one(contents, chance)
    indent = None if path.suffix == ".jsonl" else 2
    path.write_text("".join(json.dumps(c, indent=indent) + "\n" for c in contents))
    return done


def _change_one(contents: list[Any], chance: random.Random) -> str:
    places = [place for content in contents for place in list_places(content)]
    holder, key = chance.choice(places)
    what = chance.choice(("strange value", "strange value", "removed key", "added key", "nested"))
    if what == "removed key":
        holder.pop(key)
    elif what == "added key" and isinstance(holder, dict):
        holder["unknown"] = chance.choice(STRANGE)
    elif what == "nested":
        holder[key] = [[copy.deepcopy(holder[key])]]
    else:
        holder[key] = copy.deepcopy(chance.choice(STRANGE))
    return f"{what} at {key!r}"


def list_places(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    if isinstance(content, dict):
        pairs = list(content.items())
    elif isinstance(content, list):
        pairs = list(enumerate(content))
    else:
        return []
    return [(content, key) for key, _ in pairs] + [
        place for _, child in pairs for place in list_places(child)
    ]


def _damage_payload(path: Path, chance: random.Random) -> str:
    """A checkpoint that matches its checksum, and is wrong."""
    folder, step = path.parent, int(path.stem.rpartition("-")[2])
    payload = torch.load(path, weights_only=True)
    places = [p for p in _payload_places(payload) if isinstance(p[0], dict | list)]
    holder, key = chance.choice(places)
    what = chance.choice(("removed", "strange", "other shape"))
    value = holder[key]
    tensor = isinstance(value, torch.Tensor)
    if what == "other shape" and tensor:
        holder[key] = torch.zeros(*value.shape, 2, dtype=value.dtype)
    elif what == "removed":
        holder.pop(key)
    else:
        what = "strange"
        holder[key] = chance.choice((None, "text", [], {}, -1, {"a": torch.ones(2)}))
    path.unlink()
    before = set(os.listdir(folder))
    keep = Checkpoints(folder, keep=100)
    keep.save(step, payload)
    assert set(os.listdir(folder)) == before | {path.name}
    return f"sealed, {what} at {key!r}"


def _payload_places(payload: Any) -> list[tuple[Any, Any]]:
    """Places of a payload, without the many words of the random generators' states."""
    return [
        (holder, key)
        for holder, key in list_places(payload)
        if not (isinstance(holder, list) and len(holder) > 50)
    ]


# ---------------------------------------------------------------------- what cannot be detected


def is_plausible(path: Path, original: bytes) -> bool:
    """Whether another run could have written the damaged file."""
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return False
    try:
        if path.name == "config.json":  # of another version; a page shows what is there
            return isinstance(json.loads(path.read_bytes())["config"], dict)
        now, before = path.read_bytes(), original
        if path.suffix == ".jsonl":
            pieces = [part for part in now.split(b"\n") if part.strip()]
            old = [part for part in before.split(b"\n") if part.strip()]
            kinds = {_shape(json.loads(part)) for part in old}
            # A line may be missing, doubled or moved, but the last one has to be there.
            return (
                bool(pieces)
                and all(_shape(json.loads(part)) in kinds for part in pieces)
                and json.loads(pieces[-1]).get("step") == json.loads(old[-1]).get("step")
            )
        return _shape(json.loads(now)) == _shape(json.loads(before))
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return False


def _shape(value: Any) -> Any:
    """Keys and kinds of a JSON value. Numbers, and strings that stand for them, are alike."""
    if isinstance(value, dict):
        # The environment is for readers alone, and another machine describes itself otherwise.
        fields = ((key, child) for key, child in value.items() if key != "environment")
        return tuple(sorted((key, _shape(child)) for key, child in fields))
    if isinstance(value, list):
        return ("list", tuple(sorted({repr(_shape(child)) for child in value})))
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return "number"
    return type(value).__name__


def restore(template: Path, folder: Path) -> None:
    """Make the folder equal to the template again."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
