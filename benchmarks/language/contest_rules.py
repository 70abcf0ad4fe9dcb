"""The rules of the language contest: who takes part, how long, with how many runs and seeds."""

from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import RunKey
from benchmarks.language.search_space import ORDER, RECIPE

OURS = RECIPE
MUON = ("muon", "muon original", "muon by norm")
OUR_OTHERS = ("diagonal", "paper")
OTHERS = ("normuon", "soap", "adamw", "schedule-free", *OUR_OTHERS)
# Screened but not tested: they are so far behind that five seeds would say nothing new.
UNTESTED = ("schedule-free", *OUR_OTHERS)
ROWS = "normuon by norm"  # what NorMuon adds to Muon, on top of Muon's best setting
LENGTHS = {65_536: 800, 262_144: 200, 1_048_576: 50}  # tokens per step: steps
MIDDLE = 262_144
LONGER = (MIDDLE, 400)
TESTED_FIRST = (MIDDLE, 1_048_576, 65_536)  # the goal asks for a lead at the first two
POWER = 0.7  # of the cooldown, where searches start: it suits the recipe and Muon better than 1
SLOW_SHARE = 0.6  # of slow momentum, where our search starts; leads.py found it
COORDINATES = (*ORDER, "slow")
# Of each searched arm at a batch size, whatever its number of coordinates; all its runs there
# count. Enough to try every value beside the best setting again after the last coordinate moved.
RUNS = {65_536: 42, MIDDLE: 44, 1_048_576: 51}
RUNS_OF_RATE = 4  # where the learning rate alone moves: at twice the length, and of ROWS at first
# Then the other coordinates of ROWS move, where the goal asks for a lead: a peer that is tuned too
# little proves nothing. It begins at Muon's best, so a dozen runs reach every value beside that.
RUNS_OF_ROWS = {(batch, LENGTHS[batch]): 16 for batch in TESTED_FIRST[:2]}
# Not among the seeds that have chosen the recipe's numbers and its options.
SEEDS, SEEDS_OF_OTHERS = range(101, 111), range(101, 106)
# Of the full length, from long to short. The first one at which every seed ends above the peer is
# the last: shorter runs would not change where we equal it.
SHARES = (0.95, 0.90, 0.85, 0.80)


def make_key(stage: str, batch: int, steps: int, setting: Setting, seed: int) -> RunKey:
    """A run of the network that everyone trains."""
    return RunKey(stage, "gpt:small", 256, batch, steps, setting, seed)
