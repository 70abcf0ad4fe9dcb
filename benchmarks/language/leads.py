"""Which leads put the recipe ahead of itself, and Muon ahead of itself?

    python -m benchmarks.language.leads select --data-dir data --seconds 1200
    python -m benchmarks.language.leads confirm --data-dir data --seconds 1200
    python -m benchmarks.language.leads select --arm muon --data-dir data --seconds 1200
    python -m benchmarks.language.leads table

Each lead is a variant of an arm (`language_variants`) with a few strengths of its own. Every run is
`gpt:small` with 131,072 tokens per step, scored on the validation set, and compared with the arm
without the lead at the same seed.

    select   100 steps, two seeds: every strength of every lead
    confirm  200 and 400 steps, three fresh seeds: the best strength of the eight leads that gained
             most. p is corrected (Holm) for all comparisons of an arm, made or planned.

Three controls change nothing but the learning rate, that of hidden matrices, or the decay. A lead
goes on only if it gains more than each of them, because many leads, as a fixed norm or cautious
decay, change these too.

The recipe has its default learning rate and decay. Muon has no defaults, so it gets a search of
12 runs first. lr · decay · steps is the same at all lengths. Runs are lines of
results/language/leads.jsonl and are not repeated.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.language.language_arms import Setting, make_default_recipe
from benchmarks.language.language_runs import (
    RunKey,
    create_language_parser,
    open_language_runner,
    parse_language,
    read_loss,
)
from benchmarks.language.language_variants import (
    MUON,
    RECIPE,
    VARIANTS,
    list_variants,
    make_variant,
)
from benchmarks.language.search_space import choose_start, search_setting
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    paired_difference,
    select_common_seeds,
)

RESULTS = Path("results/language/leads.jsonl")
TOKENS = 131_072
ARMS = {"recipe": RECIPE, "muon": MUON}
STAGES = ("select", "confirm")
SELECT_STEPS, CONFIRM_STEPS = 100, (200, 400)
SELECT_SEEDS, CONFIRM_SEEDS = range(2), range(3, 6)
SEARCH_RUNS = 12  # of Muon's own search
MARGIN = 0.001  # nats, about what seeds make of the difference of two runs
FINALISTS = 8  # leads that are confirmed
CONTROL = "control: "  # how the names of controls begin


@dataclass(frozen=True)
class Choice:
    """The best strength of a lead in the selection."""

    name: str
    strength: float
    lead: Difference  # without minus with it: positive if it helps

    @property
    def gain(self) -> float:
        return self.lead.mean or 0.0


class Leads:
    """The runs about one arm, and what follows from them."""

    def __init__(
        self,
        arm: str,
        ledger: Ledger[RunKey],
        runner: Runner[RunKey],
        only: Container[str] | None = None,
    ) -> None:
        self.arm, self.ledger, self._runner = arm, ledger, runner
        self._only = only  # the leads to train; all that were trained before count

    def run(self, stage: str) -> None:
        """Train what a stage lacks; MissingRunError if the time is up."""
        keys = list(self._list_selection() if stage == "select" else self._list_confirmation())
        for key in keys:
            self._runner.run(key)
        for key in keys:  # those that other processes are on
            self._runner.finish(key)

    def find_base(self, steps: int) -> Setting:
        """The arm without any lead; MissingRunError if Muon has not been tuned."""
        if self.arm == RECIPE:
            return make_default_recipe(steps)
        found = {
            key.setting: run["loss"]
            for key, run in self.ledger.runs.items()
            if key.stage == "search" and key.setting.arm == self.arm and run["loss"] is not None
        }
        if not found:
            raise MissingRunError(f"no search of {self.arm}")
        best = min(found, key=lambda setting: found[setting])
        return replace(best, decay=best.decay * SELECT_STEPS / steps)

    def find_choices(self) -> list[Choice]:
        """The best strength of each lead that has been tried, the leads by what they gain."""
        choices = []
        for name, variant in list_variants(self.arm).items():
            tried = [
                Choice(name, strength, difference)
                for strength in variant.strengths
                if (difference := self.compare("select", SELECT_STEPS, name, strength)).mean
                is not None
            ]
            if tried:
                choices.append(max(tried, key=lambda choice: choice.gain))
        return sorted(choices, key=lambda choice: -choice.gain)

    def find_finalists(self) -> list[Choice]:
        """The leads to confirm: the best of those that gain more than the controls."""
        choices = self.find_choices()
        bar = max([MARGIN, *(c.gain for c in choices if c.name.startswith(CONTROL))])
        ahead = [c for c in choices if c.gain > bar and not c.lead.diverged_b]
        return ahead[:FINALISTS]

    def compare(self, stage: str, steps: int, name: str, strength: float) -> Difference:
        """The losses without the lead minus those with it, over common seeds."""
        base = self.find_base(steps)
        without, within = (
            {
                seed: read_loss(run)
                for seed, run in self.ledger.find_seeds(_make_key(stage, steps, setting, 0)).items()
            }
            for setting in (base, make_variant(base, name, strength))
        )
        return paired_difference(*select_common_seeds(without, within))

    def _list_selection(self) -> Iterator[RunKey]:
        if self.arm != RECIPE:
            search_setting(
                self._runner,
                self.arm,
                lambda setting: _make_key("search", SELECT_STEPS, setting, 0),
                limit=SEARCH_RUNS,
                start=choose_start(self.arm),
                steps=SELECT_STEPS,
            )
        base = self.find_base(SELECT_STEPS)
        settings = [base]
        for name, variant in list_variants(self.arm).items():
            if self._only is None or name in self._only:
                settings += [make_variant(base, name, strength) for strength in variant.strengths]
        for seed in SELECT_SEEDS:
            for setting in settings:
                yield _make_key("select", SELECT_STEPS, setting, seed)

    def _list_confirmation(self) -> Iterator[RunKey]:
        self.run("select")  # a lead must not win because others are missing
        chosen = [c for c in self.find_finalists() if self._only is None or c.name in self._only]
        for steps in CONFIRM_STEPS if chosen else ():
            base = self.find_base(steps)
            settings = [base, *(make_variant(base, c.name, c.strength) for c in chosen)]
            for seed in CONFIRM_SEEDS:
                for setting in settings:
                    yield _make_key("confirm", steps, setting, seed)


def _make_key(stage: str, steps: int, setting: Setting, seed: int) -> RunKey:
    return RunKey(stage, "gpt:small", 256, TOKENS, steps, setting, seed)


def format_leads(leads: Leads) -> str:
    """A row for each lead: what it gained in the selection, and whether it was confirmed."""
    try:
        choices = leads.find_choices()
    except MissingRunError:
        return ""
    finalists = leads.find_finalists()
    compared = {
        (choice, steps): leads.compare("confirm", steps, choice.name, choice.strength)
        for choice in choices
        for steps in CONFIRM_STEPS
    }
    # Comparisons with leads that others have overtaken since count too, and those that are still
    # to come count as p = 1.
    confirmed = {
        (choice.name, steps): found
        for (choice, steps), found in compared.items()
        if choice in finalists or found.mean is not None
    }
    p_values = [1.0 if found.p is None else found.p for found in confirmed.values()]
    corrected = {
        key: p
        for (key, found), p in zip(confirmed.items(), correct_by_holm(p_values), strict=True)
        if found.p is not None
    }
    rows = []
    for choice in choices:
        keys = [(choice.name, steps) for steps in CONFIRM_STEPS]
        cells = [_format_difference(choice.lead)]
        for key in keys:
            cell = _format_difference(confirmed[key]) if key in confirmed else ""
            cells.append(f"{cell}, p {corrected[key]:.2g}" if key in corrected else cell)
        if choice.name.startswith(CONTROL):
            verdict = "control"
        elif all(key in corrected for key in keys):
            ahead = ((confirmed[key].mean or 0.0) > 0 and corrected[key] < 0.05 for key in keys)
            verdict = "holds up" if all(ahead) else "not confirmed"
        elif choice in finalists:
            verdict = "to be confirmed"
        else:
            verdict = "overtaken" if any(key in corrected for key in keys) else "not chosen"
        rows.append((choice.name, f"{choice.strength:g}", *cells, verdict))
    heads = [leads.arm, "best strength", f"lead at {SELECT_STEPS}"]
    heads += [*(f"lead at {steps}" for steps in CONFIRM_STEPS), "verdict"]
    return format_table(heads, "lrrrrl", rows) if rows else ""


def _format_difference(found: Difference) -> str:
    if found.mean is None:
        return ""
    diverged = f", {found.diverged_b} diverged" if found.diverged_b else ""
    if found.low is None:
        return f"{found.mean:+.4f} (n {found.n}{diverged})"
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] (n {found.n}{diverged})"


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=(*STAGES, "table"))
    parser.add_argument("--arm", choices=ARMS, default="recipe", help="whose variants to train")
    leads = parser.add_argument("--leads", nargs="+", choices=VARIANTS, help="train these alone")
    leads.metavar = "NAME"
    arguments = parse_language(parser)
    ledger, runner = open_language_runner(arguments)
    if arguments.stage != "table":
        try:
            arm = ARMS[arguments.arm]
            Leads(arm, ledger, runner, arguments.leads).run(arguments.stage)
        except MissingRunError:
            print(f"{arguments.stage} is not finished: run it again to continue")
    for arm in ARMS.values():
        if table := format_leads(Leads(arm, ledger, runner)):
            print(f"{table}\n")


if __name__ == "__main__":
    main()
