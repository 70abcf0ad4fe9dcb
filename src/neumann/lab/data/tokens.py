"""What a model reads a text as: characters, bytes, or tokens of a byte-level BPE vocabulary.

Characters are the code points that occur in the text. Bytes are those of UTF-8; the byte 0 ends a
document. A BPE vocabulary of N tokens has the 256 bytes, N - 257 merges learned from the training
documents, and as its last token the end of a document. Its merges stay inside words, as GPT-2's
do. It needs Hugging Face's tokenizers, which the extra `lab` installs.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from neumann.lab.errors import UsageError, missing_package, unknown

Kind = Literal["chars", "bytes", "bpe"]
FORMS = ("chars", "bytes", "bpe:N")
BYTES = 256
SMALLEST_BPE = BYTES + 1  # the bytes, and the end of a document
LARGEST_BPE = 2**24
DOCUMENTS_AT_ONCE = 512  # more would hold more Python integers at a time
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Tokens:
    """The value of --tokens."""

    kind: Kind
    vocabulary: int = 0  # of bpe

    @staticmethod
    def parse(text: str) -> "Tokens":
        """Raise a UsageError for anything but chars, bytes and bpe:N."""
        if text == "chars":
            return Tokens("chars")
        if text == "bytes":
            return Tokens("bytes")
        kind, _, number = text.partition(":")
        if kind != "bpe":
            raise unknown("--tokens", text, FORMS)
        if not (number.isascii() and number.isdigit() and len(number) <= 9):
            raise UsageError(f"--tokens bpe:N needs a number, as in bpe:16384; got {text!r}")
        if not SMALLEST_BPE <= int(number) <= LARGEST_BPE:
            raise UsageError(
                f"--tokens {text}: a vocabulary has {SMALLEST_BPE} (256 bytes and the end of a "
                f"document) to {LARGEST_BPE} tokens"
            )
        return Tokens("bpe", int(number))

    def __str__(self) -> str:
        return f"bpe:{self.vocabulary}" if self.kind == "bpe" else self.kind


def encode_bytes(documents: Sequence[str]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Join documents as bytes, each ended by a byte 0: (length,) uint8."""
    joined = b"".join(document.encode() + b"\0" for document in documents)
    return np.frombuffer(bytearray(joined), dtype=np.uint8)


def train_bpe(documents: Sequence[str], vocabulary: int) -> Any:
    """Learn merges; UsageError if the documents do not have enough of them."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise missing_package("tokenizers", "lab", f"--tokens bpe:{vocabulary}", error) from error
    tokenizer: Any = Tokenizer(models.BPE())
    # The end of a document is not known to it, so that no text can spell it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _wait_for(lambda: tokenizer.train_from_iterator(documents, trainer, length=len(documents)))
    found = tokenizer.get_vocab_size() + 1
    if found < vocabulary:
        raise UsageError(
            f"--tokens bpe:{vocabulary} is too large for this text, whose training documents have "
            f"{found} tokens; choose bpe:{found} or fewer"
        )
    return tokenizer


def _wait_for(work: Callable[[], None]) -> None:
    """Do slow work that leaves Python in a thread, so that Ctrl-C need not wait for its end.

    After Ctrl-C, the thread works on until the process ends.
    """
    failures: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)  # Python handles signals in between
    if failures:
        raise failures[0]


def encode_bpe(tokenizer: Any, documents: Sequence[str], dtype: type[Any]) -> np.ndarray[Any, Any]:
    """Join documents as tokens, each ended by the last token: (length,)."""
    end = tokenizer.get_vocab_size()
    pieces = [np.zeros(0, dtype)]
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        some = list(documents[start : start + DOCUMENTS_AT_ONCE])
        encodings = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        pieces += [np.array([*encoding.ids, end], dtype) for encoding in encodings]
    return np.concatenate(pieces)


def count_bytes(tokenizer_json: str) -> list[int]:
    """Count the bytes of each token of a saved tokenizer; the end of a document counts as one.

    Raises ValueError if it is not the tokenizer of a byte-level BPE vocabulary.
    """
    try:
        entries = json.loads(tokenizer_json)["model"]["vocab"]
        lengths = {number: len(token) for token, number in entries.items()}  # a letter is a byte
        return [*(lengths[number] for number in range(len(entries))), 1]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it holds no byte-level BPE vocabulary") from error
