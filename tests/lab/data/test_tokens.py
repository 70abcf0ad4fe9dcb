"""Texts as bytes and BPE tokens: documents, sets, the cache of tokens, and unusable texts."""

import errno
import gzip
import json
import lzma
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from neumann.lab.data import Plan, load
from neumann.lab.data.documents import list_documents, read_text, split_documents
from neumann.lab.data.token_cache import get_cache_path
from neumann.lab.data.tokens import Tokens, encode_bytes, train_bpe
from neumann.lab.data.windows import Windows
from neumann.lab.errors import UsageError
from tests.support.batches import flat
from tests.support.texts import make_documents, write_documents


@pytest.fixture
def path(tmp_path):
    return write_documents(tmp_path / "pages.txt", make_documents(40))


def read_set(source):
    """All tokens of a set as a list."""
    tokens = source.tokens.long()
    return (tokens & 0xFFFF if source.tokens.dtype == torch.int16 else tokens).tolist()


def caches(folder):
    """The caches in a folder, and files that were not finished."""
    names = sorted(file.name for file in folder.iterdir())
    return [name for name in names if "tokens" in name or name.startswith(".")]


# ---------------------------------------------------------------------- documents and sets


def test_a_nul_line_ends_a_document():
    text = "one\n\nstill one\n\0\ntwo\n\0\r\n\n \n\0\nthree \0 three\n\0"
    assert list_documents(text) == ["one\n\nstill one\n", "two\n", "three \0 three\n"]


def test_without_nul_lines_blank_lines_separate_documents():
    assert list_documents("one\none\n\ntwo\r\n\r\n \t\n\nthree\n\n") == [
        "one\none",
        "two",
        "three",
    ]
    # Copies of a document are equal, at the end of a file and with line breaks of Windows too.
    assert list_documents("same\r\n\r\nsame\n\nsame\n") == ["same"] * 3
    assert list_documents("\n\n \n") == []


def test_sets_depend_on_the_documents_alone():
    documents = make_documents(300)
    splits = split_documents(documents, "pages")
    assert (len(splits.validation), len(splits.test)) == (3, 3)
    assert sorted(splits.train + splits.validation + splits.test) == sorted(documents)
    shuffled = split_documents(documents[::-1], "pages")
    assert shuffled.test == splits.test[::-1]
    assert shuffled.validation == splits.validation[::-1]


def test_copies_of_a_document_share_a_set():
    documents = make_documents(4)
    splits = split_documents(documents * 50, "pages")
    assert not set(splits.train) & set(splits.test + splits.validation)
    assert not set(splits.test) & set(splits.validation)
    assert len(splits.test) == 50


# ---------------------------------------------------------------------- bytes


def test_bytes_spell_the_documents(path):
    data = load(f"text:{path}", tokens="bytes", context=16)
    splits = split_documents(make_documents(40), "pages")
    assert (data.classes, data.shape, data.kind) == (256, (16,), "text")
    for source, documents in (
        (data.train, splits.train), (data.validation, splits.validation), (data.test, splits.test),
    ):  # fmt: skip
        assert bytes(read_set(source)).decode() == "".join(d + "\0" for d in documents)
    x, y = flat(data.test.batches(Plan(4, train=False)))
    assert x.dtype == y.dtype == torch.int64
    assert x[:, 1:].equal(y[:, :-1])
    assert caches(path.parent) == []


def test_the_validation_set_replaces_the_test_set(path):
    data = load(f"text:{path}", tokens="bytes", context=16)
    held_out = data.hold_out()
    assert held_out.test is data.validation
    assert held_out.train is data.train


def test_packed_files_and_several_files(path):
    documents = make_documents(40)
    folder = path.parent
    packed = folder / "pages.txt.gz", folder / "others.txt.xz"
    packed[0].write_bytes(gzip.compress(path.read_bytes()))
    others = write_documents(folder / "others.txt", make_documents(30, seed=1))
    packed[1].write_bytes(lzma.compress(others.read_bytes()))
    joined = load(f"text:{packed[0]},{packed[1]}", tokens="bytes", context=8)
    plain = load("text:pages.txt,others.txt", data_dir=folder, tokens="bytes", context=8)
    expected = split_documents(documents + make_documents(30, seed=1), "both")
    assert read_set(joined.train) == read_set(plain.train) == encode_bytes(expected.train).tolist()
    as_characters = load(f"text:{packed[0]}", context=8)
    assert read_set(as_characters.test) == read_set(load(f"text:{path}", context=8).test)


def test_a_comma_may_belong_to_a_file_name(path):
    file = path.rename(path.with_name("a,b.txt"))
    assert load(f"text:{file}", context=8).classes > 10


# ---------------------------------------------------------------------- BPE


def test_bpe_tokens_decode_to_the_documents(path):
    from tokenizers import Tokenizer

    data = load(f"text:{path}", tokens="bpe:300", context=8)
    assert data.classes == 300
    splits = split_documents(make_documents(40), "pages")
    line = get_cache_path([path], Tokens("bpe", 300)).read_bytes().partition(b"\n")[0]
    about = json.loads(line)
    tokenizer = Tokenizer.from_str(about["tokenizer"])
    for source, documents in (
        (data.train, splits.train), (data.validation, splits.validation), (data.test, splits.test),
    ):  # fmt: skip
        pages, page = [], []
        for token in read_set(source):
            if token == 299:
                pages.append(tokenizer.decode(page))
            page = [] if token == 299 else [*page, token]
        assert pages == documents
        assert int(data.token_bytes[read_set(source)].sum()) == len(encode_bytes(documents))
    # A merge was learned: fewer tokens than bytes.
    assert len(data.train.tokens) < 0.6 * len(encode_bytes(splits.train))


def test_the_vocabulary_is_learned_from_training_documents_alone(path, monkeypatch):
    seen = []

    def learn(documents, vocabulary):
        seen.append(documents)
        return train_bpe(documents, vocabulary)

    monkeypatch.setattr("neumann.lab.data.text.train_bpe", learn)
    load(f"text:{path}", tokens="bpe:290", context=8)
    assert seen == [split_documents(make_documents(40), "pages").train]


def test_the_cache_is_used_and_mapped(path, monkeypatch, capfd):
    first = load(f"text:{path}", tokens="bpe:300", context=8)
    assert caches(path.parent) == ["pages.txt.bpe-300.tokens"]
    assert "learning bpe:300" in capfd.readouterr().err
    monkeypatch.setattr("neumann.lab.data.text.train_bpe", None)
    again = load(f"text:{path}", tokens="bpe:300", context=8)
    for name in ("train", "validation", "test"):
        assert read_set(getattr(first, name)) == read_set(getattr(again, name))
    assert first.token_bytes.equal(again.token_bytes)
    assert again.train.tokens.dtype == torch.int16
    assert capfd.readouterr().err == ""


def test_two_corpora_with_the_same_first_file_have_their_own_caches(path):
    write_documents(path.with_name("b.txt"), make_documents(10, seed=1))
    write_documents(path.with_name("c.txt"), make_documents(10, seed=2))
    for other in ("b.txt", "c.txt"):
        load(f"text:pages.txt,{other}", data_dir=path.parent, tokens="bpe:280", context=8)
    assert len(caches(path.parent)) == 2


def test_files_of_one_name_in_two_folders_make_two_corpora(path):
    options = {"tokens": "bpe:300", "context": 8}
    for folder in ("first", "second"):
        (path.parent / folder).mkdir()
        other = write_documents(path.parent / folder / "more.txt", make_documents(50))
        load(f"text:{path},{other}", **options)
    assert len(caches(path.parent)) == 2


def test_tokens_of_two_bytes_keep_their_value():
    values = np.array([0, 32767, 32768, 65535, 1, 2], np.uint16)
    source = Windows(torch.from_numpy(values.view(np.int16)), 2)
    x, y = flat(source.batches(Plan(2, train=False)))
    assert x.tolist() == [[0, 32767], [32768, 65535]]
    assert y.tolist() == [[32767, 32768], [65535, 1]]


def test_no_text_spells_the_end_of_a_document(tmp_path):
    documents = [d + "<|endoftext|> \0 <s>\n" for d in make_documents(30)]
    path = write_documents(tmp_path / "odd.txt", documents)
    data = load(f"text:{path}", tokens="bpe:300", context=8)
    sets = (data.train, data.validation, data.test)
    assert sum(read_set(source).count(299) for source in sets) == 30


# ---------------------------------------------------------------------- errors


def refuse(message, name, **options):
    with pytest.raises(UsageError, match=message) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("words", "unknown --tokens 'words'; choose from: chars, bytes, bpe:N"),
        ("", "unknown --tokens ''"),
        ("bpe", "needs a number, as in bpe:16384; got 'bpe'"),
        ("bpe:1e4", "needs a number"),
        ("bpe:-300", "needs a number"),
        ("bpe:256", "bpe:256: a vocabulary has 257 .* to 16777216 tokens"),
        ("bpe:5000", "bpe:5000 is too large for this text, .* have 3.. tokens; choose bpe:3.. or"),
    ],
)
def test_wrong_tokens(path, tokens, message):
    refuse(message, f"text:{path}", tokens=tokens, context=8)
    assert caches(path.parent) == []


def test_without_tokenizers_the_message_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r'--tokens bpe:300 needs tokenizers, .*pip install "\.\[lab\]"'
    refuse(message, f"text:{path}", tokens="bpe:300", context=8)


@pytest.mark.parametrize("tokens", ["chars", "bytes", "bpe:300"])
def test_a_text_that_changes_while_it_is_read(path, tokens, monkeypatch):
    """Otherwise a run would be recorded with the hash of a text that it was not trained on."""

    def read_and_change(file):
        content = read_text(file)
        with file.open("a") as appended:
            appended.write("more")
        return content

    monkeypatch.setattr("neumann.lab.data.text.read_text", read_and_change)
    refuse("pages.txt changed while it was read", f"text:{path}", tokens=tokens, context=8)
    assert caches(path.parent) == []


def test_tokens_are_for_text():
    refuse("--tokens bytes is for text, not for digits", "digits", tokens="bytes")


@pytest.mark.parametrize("tokens", ["bytes", "bpe:300"])
def test_unusable_texts(path, tokens):
    options = {"tokens": tokens, "context": 8}
    unit = "byte" if tokens == "bytes" else "token"
    refuse(f"the validation documents of .* have .* {unit}s; a context of 900 needs at least 901",
           f"text:{path}", tokens=tokens, context=900)  # fmt: skip
    refuse("at least 1 token, got 0", f"text:{path}", tokens=tokens, context=0)
    refuse("names .*pages.txt twice", f"text:{path},{path}", **options)
    link = path.with_name("link.txt")
    link.symlink_to(path)
    refuse("names .*pages.txt twice", f"text:{path},{link}", **options)
    copy = path.with_name("copy.txt.gz")
    copy.write_bytes(gzip.compress(path.read_bytes()))
    refuse("names the same text twice, so a model would be trained on every document of it twice",
           f"text:{path},{copy}", **options)  # fmt: skip
    refuse("a path after the colon or a comma is missing", f"text:{path},", **options)
    write_documents(path, make_documents(2))
    refuse("holds 2 distinct documents, .* need at least 3", f"text:{path}", **options)
    write_documents(path, make_documents(2) * 9)
    refuse("holds 2 distinct documents", f"text:{path}", **options)
    path.write_bytes(b" \n\n\0\n")
    refuse("pages.txt holds no text", f"text:{path}", **options)
    path.write_bytes(b"")
    refuse("pages.txt holds no text", f"text:{path}", **options)
    path.write_bytes(b"fine\n\0\n\xff\xfe")
    refuse("pages.txt is not a text in UTF-8", f"text:{path}", **options)
    for name, pack in (("a.gz", gzip.compress), ("a.xz", lzma.compress)):
        packed = path.with_name(name)
        packed.write_bytes(pack(b"fine" * 1000)[:-9])
        refuse(f"{name} cannot be unpacked", f"text:{packed}", **options)
        packed.write_bytes(b"not packed")
        refuse(f"{name} cannot be unpacked", f"text:{packed}", **options)
    assert caches(path.parent) == []


def test_a_cache_of_something_else_is_refused_and_kept(path):
    options = {"tokens": "bpe:300", "context": 8}
    load(f"text:{path}", **options)
    cache = get_cache_path([path], Tokens("bpe", 300))
    good = cache.read_bytes()
    line, _, rest = good.partition(b"\n")

    def change(message, content):
        cache.write_bytes(content)
        refuse(message, f"text:{path}", **options)
        assert cache.read_bytes() == content

    def edit(**fields):
        return json.dumps({**json.loads(line), **fields}).encode() + b"\n" + rest

    change("has the format 1, and this version reads 2; remove it", edit(format=1))
    change("holds tokens of another vocabulary .'bpe:310'.; remove it", edit(tokens="bpe:310"))
    change("holds tokens of another text; remove it", edit(text_hash="0" * 32))
    change("is damaged: its first line is not JSON", b"")
    change("is damaged: its first line is not JSON", good[:100])
    change("is damaged: it has the wrong size", good[:-2])
    change("is damaged: it has the wrong size", good + b"\0\0")
    change("is damaged: its checksum does not match", good[:-2] + b"\1\1")
    change("is damaged: lengths should name", edit(lengths={"train": 1}))
    change("is damaged: lengths should be", edit(lengths={"train": -1}))
    change("is damaged: bytes_per_token should be 2 or 4", edit(bytes_per_token=8))
    about = json.loads(line)
    longer = about["tokenizer"].replace('"e"', '"eeeeeeee"', 1)  # would change the bits per byte
    change("is damaged: its checksum does not match", edit(tokenizer=longer))
    moved = {**about["lengths"], "train": about["lengths"]["train"] - 9}
    moved["validation"] += 9
    change("is damaged: its checksum does not match", edit(lengths=moved))
    cache.write_bytes(good)
    load(f"text:{path}", **options)
    path.write_bytes(path.read_bytes().replace(b"quick", b"quack", 1))
    refuse("bpe-300.tokens holds tokens of another text; remove it", f"text:{path}", **options)
    cache.unlink()
    load(f"text:{path}", **options)


def test_a_full_disk_leaves_no_cache(path, monkeypatch):
    def fail(descriptor, part):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("neumann.lab.storage.atomic_files.write_fully", fail)
    refuse("cannot write .*bpe-300.tokens .*No space left", f"text:{path}", tokens="bpe:300",
           context=8)  # fmt: skip
    assert caches(path.parent) == []


def test_a_folder_that_cannot_be_written_is_refused_before_the_text_is_tokenized(
    path, monkeypatch, capfd
):
    def fail(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    refuse("cannot write .*bpe-300.tokens .*Read-only", f"text:{path}", tokens="bpe:300", context=8)
    assert "learning" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_learning_at_once(number):
    """The tokenizer does not return from its own code until it has learned everything."""
    script = f"""
import signal, threading, time
from neumann.lab.data import tokens
signal.signal(signal.SIGTERM, signal.default_int_handler)
threading.Timer(0.5, lambda: signal.raise_signal({number:d})).start()
try:
    tokens._wait_for(lambda: time.sleep(60))
except KeyboardInterrupt:
    print("stopped")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == "stopped\n"


def test_what_goes_wrong_while_learning_is_raised():
    with pytest.raises(TypeError):
        train_bpe([1, 2], 300)


@pytest.mark.slow
def test_every_process_learns_the_same_vocabulary(path):
    call = "load(sys.argv[1], tokens='bpe:300', context=8)"
    script = f"import sys\nfrom neumann.lab.data import load\n{call}"
    cache = get_cache_path([path], Tokens("bpe", 300))
    load(f"text:{path}", tokens="bpe:300", context=8)
    ours = cache.read_bytes()
    cache.unlink()
    subprocess.run([sys.executable, "-c", script, f"text:{path}"], check=True)
    assert cache.read_bytes() == ours
