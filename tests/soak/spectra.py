"""Random matrices and networks with known ends: how often a stated error is too small.

An end may lie outside its error with the stated risk. One that does is no failure; more of them
than the risk allows are, and so is an end that is far outside.
"""

from collections import Counter

from tests.soak.program import Program, check
from tests.support import spectra
from tests.support.spectra import End, allowed_outside

MATRICES = 25  # in a case; then comes one network
FAR = 100.0  # times its error: no matter how rare, this is a bug


class Spectra(Program):
    name = "spectra"
    counted = ("ends", "outside", "matrix ends", "matrix outside", "network ends")
    counted += ("network outside", "converged")
    weight = 1.5

    def run(self, case: int, counts: Counter[str]) -> None:
        chance = self.chance(case)
        for _ in range(MATRICES):
            self._count("matrix", spectra.matrix_ends(chance.getrandbits(48)), counts)
        self._count("network", spectra.network_ends(chance.getrandbits(48)), counts)

    def _count(self, kind: str, ends: list[End], counts: Counter[str]) -> None:
        for end in ends:
            counts["ends"] += 1
            counts[f"{kind} ends"] += 1
            counts["outside"] += end.outside
            counts[f"{kind} outside"] += end.outside
            counts["converged"] += end.converged
            gap = abs(end.value - end.truth)
            close = not end.outside or gap <= FAR * end.error
            stated = f"{end.value:g} ± {end.error:g}"
            check(close, f"{end.problem}: {stated}, and the truth is {end.truth:g}")

    @classmethod
    def judge(cls, counts: Counter[str]) -> str | None:
        for kind in ("matrix", "network"):
            ends, outside = counts[f"{kind} ends"], counts[f"{kind} outside"]
            allowed = allowed_outside(ends)
            if outside > allowed:
                return (
                    f"{outside} of {ends:,} ends of a {kind} lie outside their errors, and a risk "
                    f"of {spectra.RISK:g} allows {allowed}"
                )
        return None
