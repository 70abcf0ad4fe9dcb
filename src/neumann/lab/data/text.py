"""Text files, read as characters, bytes or BPE tokens.

With characters, the last tenth of the text is the test split. With bytes and BPE, documents are
divided into training, validation and test sets.
"""

import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neumann.lab.data import token_cache
from neumann.lab.data.dataset import Dataset, Request
from neumann.lab.data.documents import Splits, list_documents, read_text, split_documents
from neumann.lab.data.tokens import (
    BYTES,
    Tokens,
    encode_bpe,
    encode_bytes,
    train_bpe,
)
from neumann.lab.data.windows import Windows
from neumann.lab.errors import UsageError, require

TEST = 0.1  # of the characters
SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}  # by bytes of an index


def load_text(request: Request) -> Dataset:
    """Load `text:FILE[,FILE…]`; its classes are the characters, bytes or tokens."""
    request.refuse_augmentation()
    tokens = Tokens.parse(request.tokens)
    files = request.find_paths("text:FILE")
    if request.context < 1:
        unit = "character" if tokens.kind == "chars" else "token"
        raise UsageError(f"context must be at least 1 {unit}, got {request.context}")
    text_hash = token_cache.hash_files(files)
    dataset = _read_dataset(request, files, tokens, text_hash)
    _refuse_change(request, files, text_hash)
    return replace(dataset, data_hash=text_hash)


def _read_dataset(
    request: Request, files: Sequence[Path], tokens: Tokens, text_hash: str
) -> Dataset:
    if tokens.kind == "chars":
        return _load_characters(request, files)
    if tokens.kind == "bytes":
        splits = _read_splits(request, files)
        arrays = {name: encode_bytes(getattr(splits, name)) for name in token_cache.SETS}
        return _make_dataset(request, arrays, [1] * BYTES, "byte")
    text = _load_bpe(request, files, tokens, text_hash)
    return _make_dataset(request, text.sets, text.token_bytes, "token")


def _refuse_change(request: Request, files: Sequence[Path], text_hash: str) -> None:
    """Raise a UsageError if the text is no longer the one with this hash."""
    if token_cache.hash_files(files) != text_hash:
        raise UsageError(f"{request.argument} changed while it was read: run the command again")


def _load_characters(request: Request, files: Sequence[Path]) -> Dataset:
    context = request.context
    content = "".join(_read_different(request, files, "tested on text that it was trained on"))
    _require_text(request, content)
    code_points = np.frombuffer(content.encode("utf-32-le"), dtype=np.uint32)
    test = round(len(code_points) * TEST)
    if test <= context:
        raise UsageError(
            f"{', '.join(map(str, files))} has {len(code_points)} characters; a context of "
            f"{context} needs at least {round((context + 1) / TEST)}, because the last tenth is "
            "the test split"
        )
    alphabet, indices = np.unique(code_points, return_inverse=True)
    tokens = torch.from_numpy(indices.astype(np.int32)).to(request.device)
    train, held = Windows(tokens[:-test], context), Windows(tokens[-test:], context)
    lengths = torch.tensor([len(chr(code_point).encode()) for code_point in alphabet])
    token_bytes = lengths.to(request.device)
    about = request.name, train, held, len(alphabet), (context,)
    return Dataset(*about, "text", token_bytes=token_bytes)


def _read_different(request: Request, files: Sequence[Path], harm: str) -> list[str]:
    """The texts of the files; UsageError if one is a copy of another, however it is packed."""
    texts = list(map(read_text, files))
    if len(set(texts)) < len(texts):
        raise UsageError(f"{request.name} names the same text twice, so a model would be {harm}")
    return texts


def _require_text(request: Request, content: Sized) -> None:
    require(len(content) > 0, f"{request.argument} holds no text; name a file that does")


def _read_splits(request: Request, files: Sequence[Path]) -> Splits:
    texts = _read_different(request, files, "trained on every document of it twice")
    documents = [document for text in texts for document in list_documents(text)]
    _require_text(request, documents)
    return split_documents(documents, request.argument)


def _load_bpe(
    request: Request, files: Sequence[Path], tokens: Tokens, text_hash: str
) -> token_cache.TokenizedText:
    """Take the tokens from the cache next to the text, or make them and write it."""
    path = token_cache.get_cache_path(files, tokens)
    found = token_cache.read_cache(path, text_hash, tokens)
    if found is None:
        token_cache.check_writable(path)
        found = _tokenize(request, files, tokens)
        _refuse_change(request, files, text_hash)
        token_cache.write_cache(path, files, text_hash, tokens, found)
    return found


def _tokenize(request: Request, files: Sequence[Path], tokens: Tokens) -> token_cache.TokenizedText:
    splits = _read_splits(request, files)
    print(
        f"learning {tokens} from {request.argument} (once; the tokens are kept next to the text)",
        file=sys.stderr,
        flush=True,
    )
    tokenizer = train_bpe(splits.train, tokens.vocabulary)
    dtype = token_cache.choose_dtype(tokens.vocabulary)
    arrays = {n: encode_bpe(tokenizer, getattr(splits, n), dtype) for n in token_cache.SETS}
    for name, array in arrays.items():
        _check_window(request, name, len(array), "token")
    return token_cache.TokenizedText(arrays, tokenizer.to_str())


def _make_dataset(
    request: Request, arrays: Mapping[str, Any], token_bytes: Sequence[int], unit: str
) -> Dataset:
    sets = {}
    for name, array in arrays.items():
        _check_window(request, name, len(array), unit)
        # torch can index few unsigned types. Indices have the same bits in the signed ones.
        signed = np.asarray(array).view(SIGNED[array.itemsize])
        tokens = torch.from_numpy(signed).to(request.device)
        sets[name] = Windows(tokens, request.context, unit)
    return Dataset(
        request.name,
        sets["train"],
        sets["test"],
        len(token_bytes),
        (request.context,),
        "text",
        sets["validation"],
        torch.tensor(token_bytes).to(request.device),
    )


def _check_window(request: Request, name: str, length: int, unit: str) -> None:
    if length <= request.context:
        raise UsageError(
            f"the {'training' if name == 'train' else name} documents of {request.argument} have "
            f"{length} {unit}s; a context of {request.context} needs at least "
            f"{request.context + 1}: choose a smaller --context, or use more text"
        )
