"""Claims about invented runs."""

from benchmarks.paper.claims import Claim


def make_claim(number, *tests):
    return Claim(number, f"Claim {number}", "It is so.", "here", "`one.toml`", "A rule.", tests)
