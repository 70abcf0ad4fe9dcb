"""Small texts of several documents."""

import numpy as np

WORDS = ["quick", "brown", "Fuchs", "läuft", "über", "the", "lazy", "dog", "—", "again", "and"]
END = "\0\n"


def make_documents(count, seed=0, words=60):
    """Documents that differ, with some characters of several bytes."""
    generator = np.random.default_rng(seed)
    return [
        f"Page {seed}.{number}\n\n" + " ".join(generator.choice(WORDS, words)) + "\n"
        for number in range(count)
    ]


def write_documents(path, documents):
    path.write_bytes("".join(document + END for document in documents).encode())
    return path
