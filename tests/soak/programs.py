"""The programs of the soak, in the order in which they run: those that end come first."""

from tests.soak.damage import Damage
from tests.soak.interrupts import Interrupts
from tests.soak.kills import Kills
from tests.soak.operations import Operations
from tests.soak.pages import Pages
from tests.soak.program import Program
from tests.soak.spectra import Spectra

PROGRAMS: dict[str, type[Program]] = {
    program.name: program for program in (Interrupts, Pages, Damage, Kills, Spectra, Operations)
}
