"""The tests of the untuned recipe on text: against whom, how long, and with which seeds."""

from benchmarks.common.ledger import Ledger
from benchmarks.language.language_runs import RunKey, read_loss

OURS = "recipe"
MUON = "muon by norm"
PEERS = (MUON, "adamw")
# The ledgers by text, in the folder of results.
TEXTS = {"MDN text": "language/recipe.jsonl", ".NET text": "language/recipe-dotnet.jsonl"}
LENGTHS = ((65_536, 200), (32_768, 600))  # tokens per step, steps
SEEDS = {MUON: range(11, 21), "adamw": range(1, 11)}


def find_tested(
    ledger: Ledger[RunKey], arm: str, length: tuple[int, int], seeds: range
) -> dict[int, float]:
    """The test losses of an arm by seed; that of a run that diverged is infinite."""
    return {
        key.seed: read_loss(run)
        for key, run in ledger.runs.items()
        if (key.stage, key.tokens_per_step, key.steps) == ("test", *length)
        and key.setting.arm == arm
        and key.seed in seeds
    }
