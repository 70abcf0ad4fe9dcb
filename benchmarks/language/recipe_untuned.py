"""Is the recipe, untuned, as good as AdamW and Muon after tuning?

    python -m benchmarks.language.recipe_untuned train --data-dir data --seconds 1200
    python -m benchmarks.language.recipe_untuned table

`tune` instead of `train` leaves out the test.

AdamW and Muon (with AdamW for the rest) get a coordinate search of 12 runs each, scored on the
validation set. The recipe gets none: learning rate, decay and momenta are its defaults. Then all
three train with ten fresh seeds and are scored on the test set. Runs are lines of
results/language/recipe.jsonl and are not repeated.
"""

from pathlib import Path

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.language.language_arms import Setting, make_recipe
from benchmarks.language.language_runs import RunKey, create_language_parser, open_language_runner
from benchmarks.language.search_space import search_setting
from neumann.lab.studies.statistics import mean_interval, paired_difference, select_common_seeds
from neumann.optim.recipe import FORGETTING, LR

RESULTS = Path("results/language/recipe.jsonl")
OURS = "recipe"
PEERS = ("muon by norm", "muon", "adamw")
LENGTHS = ((131_072, 200), (65_536, 600))  # tokens per step, steps
RUNS = 12  # of a peer's search
SEEDS = range(1, 11)
MARGIN = 0.01  # nats that we may be worse


def make_ours(steps: int) -> Setting:
    """The recipe with its default learning rate and the decay that it chooses."""
    return make_recipe(LR, decay=FORGETTING / (LR * steps))


def make_key(stage: str, length: tuple[int, int], setting: Setting, seed: int = 0) -> RunKey:
    return RunKey(stage, "gpt:small", 256, *length, setting, seed)


def tune(runner: Runner[RunKey], arm: str, length: tuple[int, int]) -> Setting:
    """The best of the 12 settings of a peer; MissingRunError if the time is up."""
    return search_setting(
        runner, arm, lambda setting: make_key("recipe", length, setting), limit=RUNS
    )


def find_best(ledger: Ledger[RunKey], arm: str, length: tuple[int, int]) -> Setting | None:
    """The setting of an arm with the lowest validation loss so far."""
    if arm == OURS:
        return make_ours(steps=length[1])
    found = {
        key.setting: run["loss"]
        for key, run in ledger.runs.items()
        if (key.stage, key.tokens_per_step, key.steps) == ("recipe", *length)
        and key.setting.arm == arm
        and run["loss"] is not None
    }
    return min(found, key=lambda setting: found[setting]) if found else None


def print_table(ledger: Ledger[RunKey]) -> None:
    rows = []
    for length in LENGTHS:
        losses = {}
        for arm in (OURS, *PEERS):
            setting = find_best(ledger, arm, length)
            if setting is not None:
                runs = ledger.find_seeds(make_key("test", length, setting))
                losses[arm] = {seed: run["loss"] for seed, run in runs.items()}
        for arm, found in losses.items():
            mean = mean_interval(list(found.values()))
            if mean.mean is None:
                continue
            behind = verdict = ""
            difference = paired_difference(*select_common_seeds(losses[OURS], found))
            if arm != OURS and difference.mean is not None and difference.high is not None:
                behind = f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
                verdict = "not worse" if difference.high < MARGIN else "may be worse"
            tokens, steps = length
            shown = f"{tokens:,} × {steps}", arm, f"{mean.mean:.4f}", str(mean.n), behind, verdict
            rows.append(shown)
    heads = ("tokens × steps", "arm", "test loss", "n", "the recipe is behind by", f"{MARGIN} nats")
    print(format_table(heads, "llrrrl", rows))


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=("tune", "train", "table"))
    arguments = parser.parse_args()
    ledger, runner = open_language_runner(arguments)
    if arguments.stage != "table":
        try:
            train_all(runner, test=arguments.stage == "train")
        except MissingRunError:
            print("the time is up; run it again to continue")
    print_table(ledger)


def train_all(runner: Runner[RunKey], test: bool = True) -> None:
    """Tune the peers, then test everybody."""
    for length in LENGTHS:
        chosen = [make_ours(length[1]), *(tune(runner, arm, length) for arm in PEERS)]
        for seed in SEEDS if test else ():
            for setting in chosen:
                runner.run(make_key("test", length, setting, seed))


if __name__ == "__main__":
    main()
