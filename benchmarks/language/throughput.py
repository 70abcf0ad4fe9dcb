"""How many tokens per second does each arm of the language contest train on, alone on a GPU?

    python -m benchmarks.language.throughput --data-dir data --output throughput.json

All arms take turns in one process, ten steps each, on one compiled network; a first round warms up.
Ten steps, because SOAP decomposes its matrices once in as many. An arm whose package is not
installed is left out and named. Each arm has slow momentum if its best setting in the contest has
it, and the share is recorded. Learning rates are tiny: they do not matter here. Ratios are the
median over rounds of an arm's tokens per second by those of AdamW in the same round.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.script import write_measurements
from benchmarks.common.timing import read_clock, take_turns
from benchmarks.language.contest_rules import MIDDLE
from benchmarks.language.contest_stages import DATA, RESULTS, LanguageContest
from benchmarks.language.language_runs import (
    LanguageTrainer,
    RunKey,
    add_gradients,
    count_rows,
    create_data_parser,
    draw_batches,
    open_trainer,
)
from benchmarks.language.language_variants import build_variant
from benchmarks.language.search_space import choose_start, make_setting
from benchmarks.language.speed_table import (
    ARMS,
    REFERENCE,
    describe_speeds,
    find_ratios,
    find_slow_shares,
)
from neumann.lab.errors import UsageError

LR = 1e-6
RUN_STEPS = 20  # of the run that an arm is built for: the paper's warm-up ends in the first round


def measure(
    trainer: LanguageTrainer,
    key: RunKey,
    arms: tuple[str, ...],
    rounds: int,
    slow: Mapping[str, float],
) -> tuple[dict[str, list[float]], list[str]]:
    """Tokens per second of each arm in each round, and the arms that are not installed.

    `slow` has the share of slow momentum of those that have it.
    """
    model, compute_loss, dataset = trainer.prepare(key)
    device = next(model.parameters()).device
    rows, micro = count_rows(key)
    batches = draw_batches(dataset.train, rows, key.seed)

    def time_steps(optimizer: Any) -> float:
        given = [next(batches) for _ in range(key.steps)]
        start = read_clock(device)
        for batch in given:
            optimizer.zero_grad()
            add_gradients(compute_loss, batch, micro)
            optimizer.step()
        return read_clock(device) - start

    timers, missing = {}, []
    for arm in arms:
        setting = make_setting(arm, choose_start(arm))
        setting = replace(setting, lr=LR, decay=0.0, slow=slow.get(arm, 0.0))
        try:
            timers[arm] = partial(time_steps, build_variant(model, setting, RUN_STEPS))
        except (ModuleNotFoundError, UsageError) as error:  # torch below 2.9 has no Muon
            print(f"{arm} is left out: {error}")
            missing.append(arm)
    tokens = key.steps * rows * key.context
    seconds = take_turns(timers, rounds)
    return {arm: [tokens / each for each in found] for arm, found in seconds.items()}, missing


def main() -> None:
    parser = create_data_parser(__doc__, output=True)
    parser.set_defaults(data=DATA)
    parser.add_argument("--model", default="gpt:small")
    parser.add_argument("--batch-tokens", type=int, default=MIDDLE)
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    setting = make_setting(REFERENCE, choose_start(REFERENCE))
    size = arguments.model, 256, arguments.batch_tokens, arguments.steps
    key = RunKey("throughput", *size, setting, seed=0)
    contest = LanguageContest.read(RESULTS)
    slow = find_slow_shares(contest)
    speeds, missing = measure(open_trainer(arguments), key, ARMS, arguments.rounds, slow)
    device = torch.device(arguments.device)
    found = {"tokens_per_second": speeds, "of_adamw": find_ratios(speeds), "missing": missing}
    found["slow"] = slow
    print(describe_speeds(found, contest))
    write_measurements(arguments, device, model=arguments.model,
                       tokens_per_step=arguments.batch_tokens, **found)  # fmt: skip


if __name__ == "__main__":
    main()
