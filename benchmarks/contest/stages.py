"""The stages of the contest: which runs each one needs. Several processes can share one stage."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.common.ledger import MissingRunError, Runner, claim
from benchmarks.contest.entrants import ENTRANTS, ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.summary import BatchSummary, summarize
from benchmarks.contest.tuning import (
    FINAL_EPOCHS,
    LARGE_BATCH,
    Search,
    Tuning,
    count_full_epochs,
    count_search_epochs,
)

BATCHES = (8192, 16384, 2048, 512)
TIMED_EPOCHS = 4
TRANSFER_MODEL = "resnet18"


@dataclass(frozen=True)
class ContestOptions:
    """What a stage covers."""

    batches: tuple[int, ...] = BATCHES
    entrants: tuple[str, ...] = tuple(ENTRANTS)
    seeds: int = 5  # of each final run
    first_seed: int = 0
    setting: Setting | None = None  # for final runs, instead of the chosen one
    epochs: int | None = None  # of all runs, for a trial


class Contest:
    """The contest, as far as its ledger has it. Without a runner, nothing can be trained."""

    def __init__(
        self,
        ledger: ContestLedger,
        runner: Runner[RunKey] | None = None,
        options: ContestOptions | None = None,
    ) -> None:
        self._ledger, self._given_runner = ledger, runner
        self._options = options or ContestOptions()
        self._pairs = list(itertools.product(self._options.batches, self._options.entrants))

    def run(self, stage: str) -> None:
        """Start with the runs that are known beforehand, then those that depend on results.

        Raises MissingRunError if the time is up before the stage is finished.
        """
        known: dict[str, Callable[[], Iterator[RunKey]]] = {
            "search": self._list_search_runs,
            "retune": self._list_retune_runs,
            "final": self._list_final_runs,
            "transfer": self._list_transfer_runs,
            "time": self._list_timed_runs,
        }
        dependent: dict[str, Callable[[str, int], object]] = {
            "search": lambda entrant, batch: self.search(entrant, batch).find_best(self._finish),
            "retune": self._retune,
            "range": self._search_range,
            "transfer": self._transfer,
        }
        if stage in known:
            for key in list(known[stage]()):
                self._runner.run(key)
        if stage in dependent:
            for batch, entrant in self._pairs:
                with claim(self._runner.share, (stage, entrant, batch)) as claimed:
                    if claimed:
                        dependent[stage](entrant, batch)

    def search(self, entrant: str, batch: int, model: str = "resnet9") -> Search:
        return Search(entrant, batch, self._options.epochs or count_search_epochs(batch), model)

    def find_chosen(self, entrant: str, batch: int) -> Setting | None:
        """The entrant's setting, if its search is finished."""
        self._ledger.refresh()
        with _report_missing(entrant, batch):
            return self.tuning(batch).find_chosen(entrant).setting
        return None

    def tuning(self, batch: int) -> Tuning:
        """The outcome of the searches at a batch size."""
        options = self._options
        short = options.epochs or count_search_epochs(batch)
        once = options.epochs or batch < LARGE_BATCH
        full = short if once else count_full_epochs(batch)
        return Tuning(self._ledger.score, batch, short, full)

    def summarize(self, first_seed: int = 0) -> dict[str, list[BatchSummary]]:
        """The outcome for each model and batch size, from the seeds at or above `first_seed`."""
        batches = {"resnet9": sorted(BATCHES), TRANSFER_MODEL: [8192]}
        return {
            model: [summarize(self._ledger, self.tuning(b), model, first_seed) for b in sizes]
            for model, sizes in batches.items()
        }

    @property
    def _runner(self) -> Runner[RunKey]:
        assert self._given_runner is not None, "this contest was opened without a runner"
        return self._given_runner

    def _finish(self, key: RunKey) -> float:
        return read_accuracy(self._runner.finish(key))

    def _list_chosen(self) -> Iterator[tuple[str, int, Setting]]:
        for batch, entrant in self._pairs:
            if setting := self.find_chosen(entrant, batch):
                yield entrant, batch, setting

    def _list_search_runs(self) -> Iterator[RunKey]:
        for batch, entrant in self._pairs:
            yield from self.search(entrant, batch).start_keys()

    def _list_retune_runs(self) -> Iterator[RunKey]:
        for batch, entrant in self._pairs:
            tuning = self.tuning(batch)
            with _report_missing(entrant, batch):
                if tuning.is_contender(entrant):
                    momentum = tuning.find_first(entrant).setting.momentum
                    search = Search(entrant, batch, tuning.full_epochs)
                    yield from search.start_keys(momenta=(momentum,))

    def _retune(self, entrant: str, batch: int) -> None:
        contender = False
        with _report_missing(entrant, batch):
            contender = self.tuning(batch).is_contender(entrant)
        if contender:
            self.tuning(batch).find_second(entrant, self._finish)

    def _list_final_runs(self) -> Iterator[RunKey]:
        """Seed by seed, so that an interrupted contest has complete pairs."""
        options = self._options
        for batch in options.batches:
            chosen = {e: options.setting or self.find_chosen(e, batch) for e in options.entrants}
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for entrant, setting in chosen.items():
                    if setting is not None:
                        yield self._final_key("resnet9", entrant, batch, setting, seed)

    def _search_range(self, entrant: str, batch: int) -> None:
        if setting := self.find_chosen(entrant, batch):
            self.search(entrant, batch).find_lr_range(self._finish, setting)

    def _list_timed_runs(self) -> Iterator[RunKey]:
        for entrant, batch, setting in self._list_chosen():
            yield RunKey("time", "resnet9", batch, TIMED_EPOCHS, entrant, setting)

    def _list_transfer_runs(self) -> Iterator[RunKey]:
        for entrant, batch, setting in self._list_chosen():
            search = self.search(entrant, batch, TRANSFER_MODEL)
            yield from search.start_keys((setting.decay,), (setting.momentum,))

    def _transfer(self, entrant: str, batch: int) -> None:
        if chosen := self.find_chosen(entrant, batch):
            setting = self.search(entrant, batch, TRANSFER_MODEL).find_lr(self._finish, chosen)
            for seed in range(self._options.seeds):
                self._runner.run(self._final_key(TRANSFER_MODEL, entrant, batch, setting, seed))

    def _final_key(
        self, model: str, entrant: str, batch: int, setting: Setting, seed: int
    ) -> RunKey:
        epochs = self._options.epochs or FINAL_EPOCHS
        return RunKey("final", model, batch, epochs, entrant, setting, seed)


@contextlib.contextmanager
def _report_missing(entrant: str, batch: int) -> Iterator[None]:
    try:
        yield
    except MissingRunError:
        print(f"the search of {entrant} at batch {batch} is not finished", flush=True)
