"""A tokenized text in one file, next to the text: a line of JSON, then the tokens.

The line says what the file holds (`Header`) and is padded to a multiple of 64 bytes. The tokens of
the training, validation and test sets follow, little-endian, and are mapped into memory. The file
is written atomically, so it is complete or absent. A file of another text, vocabulary or format, or
a damaged one, is a UsageError that names it: it is never replaced, because a run may depend on it.
"""

import dataclasses
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from neumann.lab.data.documents import read_bytes
from neumann.lab.data.tokens import Tokens, count_bytes
from neumann.lab.errors import UsageError
from neumann.lab.storage import strict_json
from neumann.lab.storage.atomic_files import explain_os_errors, remove_leftovers, write_atomically
from neumann.lab.storage.field_types import find_wrong_field

FORMAT = 2
ALIGNMENT = 64  # bytes
MAX_HEADER = 1 << 30  # bytes
SETS = ("train", "validation", "test")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Header:
    """The first line of the file."""

    format: int
    files: list[str]  # names of the text files
    text_hash: str  # of their content, as stored
    tokens: str  # as in --tokens
    bytes_per_token: int  # 2 or 4
    lengths: dict[str, int]  # tokens in each set
    checksum: int  # crc32 of this line with a checksum of 0, and of all tokens
    versions: dict[str, str]  # of the packages that made it
    tokenizer: str  # as JSON of Hugging Face's tokenizers


@dataclass(frozen=True)
class TokenizedText:
    sets: Mapping[str, Array]  # by name in SETS, each (length,) uint16 or uint32
    tokenizer: str  # as JSON

    @property
    def token_bytes(self) -> list[int]:
        """The bytes of each token; ValueError if the tokenizer is unusable."""
        return count_bytes(self.tokenizer)


def get_cache_path(files: Sequence[Path], tokens: Tokens) -> Path:
    """Name the cache after the text: next to its first file, with a hash if there are more."""
    name = files[0].name
    if len(files) > 1:
        # Relative to the first file, so that the folder can be moved.
        listed = "\0".join(os.path.relpath(file, files[0].parent) for file in files).encode()
        name += f"+{len(files) - 1}-{blake2b(listed, digest_size=4).hexdigest()}"
    return files[0].with_name(f"{name}.{str(tokens).replace(':', '-')}.tokens")


def hash_files(files: Sequence[Path]) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        content = read_bytes(file)
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def choose_dtype(vocabulary: int) -> type[Any]:
    return np.uint16 if vocabulary <= 2**16 else np.uint32


def check_writable(path: Path) -> None:
    """Raise a UsageError if no cache can be written there, before it takes minutes to make one."""
    with _explain_failure(path), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_cache(
    path: Path, files: Sequence[Path], text_hash: str, tokens: Tokens, text: TokenizedText
) -> None:
    """Write the cache, or raise a UsageError and leave nothing behind."""
    sets = [text.sets[name] for name in SETS]
    size = sets[0].dtype.itemsize
    contents = [array.astype(f"<u{size}", copy=False).tobytes() for array in sets]
    lengths = {name: len(array) for name, array in zip(SETS, sets, strict=True)}
    names = [file.name for file in files]
    versions = {"tokenizers": metadata.version("tokenizers")}
    about = Header(
        FORMAT, names, text_hash, str(tokens), size, lengths, 0, versions, text.tokenizer
    )
    about = dataclasses.replace(about, checksum=_compute_checksum(about, contents))
    line = strict_json.dumps(dataclasses.asdict(about)).removesuffix(b"\n")
    padding = b" " * (-(len(line) + 1) % ALIGNMENT)
    parts = [line + padding + b"\n", *contents]
    with _explain_failure(path):
        remove_leftovers(path.parent)
        write_atomically(path, parts)


def read_cache(path: Path, text_hash: str, tokens: Tokens) -> TokenizedText | None:
    """Map the tokens into memory; None if there is no cache."""
    try:
        with path.open("rb") as opened:
            line = opened.readline(MAX_HEADER)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    about = _parse_header(path, line)
    for what, found, expected in (
        ("another text", about.text_hash, text_hash),
        (f"another vocabulary ({about.tokens!r:.40})", about.tokens, str(tokens)),
    ):
        if found != expected:
            raise UsageError(f"{path} holds tokens of {what}; remove it to make them again")
    dtype = np.dtype(f"<u{about.bytes_per_token}")
    total = sum(about.lengths.values())
    if path.stat().st_size != len(line) + total * dtype.itemsize:
        raise _damaged(path, "it has the wrong size")
    # Copy on write: torch warns about arrays that it may not change.
    mapped = np.memmap(path, dtype, "c", len(line), (total,)) if total else np.zeros(0, dtype)
    if _compute_checksum(about, [mapped.data]) != about.checksum:
        raise _damaged(path, "its checksum does not match")
    text = TokenizedText(dict(_cut(mapped, about.lengths)), about.tokenizer)
    try:
        fits = len(text.token_bytes) == tokens.vocabulary
    except ValueError:
        fits = False
    if not fits or mapped.max(initial=0) >= tokens.vocabulary:
        raise _damaged(path, f"its tokens do not fit a vocabulary of {tokens.vocabulary}")
    return text


def _compute_checksum(about: Header, contents: Sequence[bytes | memoryview]) -> int:
    blank = dataclasses.replace(about, checksum=0)
    checksum = zlib.crc32(strict_json.dumps(dataclasses.asdict(blank)))
    for content in contents:
        checksum = zlib.crc32(content, checksum)
    return checksum


def _explain_failure(path: Path) -> AbstractContextManager[None]:
    advice = "copy the text to a writable folder"
    return explain_os_errors(UsageError, f"cannot write {path} ({advice})")


def _parse_header(path: Path, line: bytes) -> Header:
    try:
        content = strict_json.loads(line)
    except ValueError as error:
        raise _damaged(path, "its first line is not JSON") from error
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise UsageError(
            f"{path} has the format {content.get('format')!r:.40}, and this version reads "
            f"{FORMAT}; remove it to make it again"
        )
    wrong = find_wrong_field(content, Header)
    if wrong is None and content["bytes_per_token"] not in (2, 4):
        wrong = "bytes_per_token should be 2 or 4"
    if wrong is None and set(content["lengths"]) != set(SETS):
        wrong = f"lengths should name {', '.join(SETS)}"
    if wrong is not None:
        raise _damaged(path, wrong)
    return Header(**{field.name: content[field.name] for field in dataclasses.fields(Header)})


def _cut(mapped: Array, lengths: Mapping[str, int]) -> Iterator[tuple[str, Array]]:
    start = 0
    for name in SETS:
        yield name, mapped[start : start + lengths[name]]
        start += lengths[name]


def _damaged(path: Path, wrong: str) -> UsageError:
    return UsageError(f"{path} is damaged: {wrong}; remove it to make it again")
