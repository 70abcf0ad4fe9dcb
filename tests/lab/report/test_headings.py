"""Lines above a report about its settings."""

import pytest

from neumann.lab.report.headings import describe_held_out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": "digits", "tokens": "chars"}, "a tenth of the training set held out"),
        ({"data": "text:a.txt"}, "a tenth of the training set held out"),
        ({"data": "text:a.txt", "tokens": "chars"}, "a tenth of the training set held out"),
        ({"data": "text:a.txt", "tokens": "bytes"}, "scored on the validation documents"),
        ({"data": "text:a.txt", "tokens": "bpe:512"}, "scored on the validation documents"),
    ],
)
def test_what_held_out_means(settings, words):
    assert describe_held_out(settings) == words
