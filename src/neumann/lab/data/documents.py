"""Text files as documents, and which documents belong to the training, validation and test sets.

A line that holds only a NUL character ends a document. In a file without such lines, blank lines
separate documents. Files that end in .gz or .xz are unpacked. A file that cannot be read, or is not
UTF-8, is a UsageError.

Which set a document belongs to depends on its hash, so copies of a document share a set, and it
does not matter in which order or in which files documents come.
"""

import gzip
import lzma
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from neumann.lab.errors import UsageError, shorten

HELD_OUT = 0.01  # of the documents, for validation and for testing each; at least one document
_NUL_LINE = re.compile(r"^\0\r?(?:\n|\Z)", re.MULTILINE)
_BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")
_UNPACKERS = {".gz": gzip.decompress, ".xz": lzma.decompress}


@dataclass(frozen=True)
class Splits:
    """The documents of each set, in the order of the files."""

    train: list[str]
    validation: list[str]
    test: list[str]


def read_text(path: Path) -> str:
    """Read a text in UTF-8, and unpack it if its name ends in .gz or .xz."""
    content = read_bytes(path)
    unpack = _UNPACKERS.get(path.suffix.lower())
    try:
        return (content if unpack is None else unpack(content)).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not a text in UTF-8: byte {error.start} is "
            f"{error.object[error.start]:#x}; convert it, for example with iconv (.gz and .xz are "
            "unpacked, other archives are not)"
        ) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be unpacked ({shorten(error)}); copy or download it again"
        ) from error


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def list_documents(text: str) -> list[str]:
    """Divide a text into its documents, without those that are blank."""
    if _NUL_LINE.search(text) is not None:
        pieces = _NUL_LINE.split(text)
    else:
        # A copy in the middle of a text has no line break at its end, so the last one has none.
        pieces = [piece.strip("\r\n") for piece in _BLANK_LINES.split(text)]
    return [piece for piece in pieces if piece.strip("\0 \t\r\n")]


def split_documents(documents: Sequence[str], name: str) -> Splits:
    """Divide documents into three sets; UsageError if there are too few."""
    hashes = [blake2b(document.encode(), digest_size=16).digest() for document in documents]
    different = sorted(set(hashes))
    if len(different) < 3:
        raise UsageError(
            f"{name} holds {len(different)} distinct document{'s' * (len(different) != 1)}, and "
            "training, validation and test sets need at least 3; a blank line or a line with a NUL "
            "character ends a document"
        )
    count = max(1, round(HELD_OUT * len(different)))
    validation, test = set(different[:count]), set(different[count : 2 * count])
    splits = Splits([], [], [])
    for document, found in zip(documents, hashes, strict=True):
        if found in validation:
            splits.validation.append(document)
        elif found in test:
            splits.test.append(document)
        else:
            splits.train.append(document)
    return splits
