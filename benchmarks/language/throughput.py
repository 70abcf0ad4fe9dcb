"""How many tokens per second does each arm of the language contest train on, alone on a GPU?

    python -m benchmarks.language.throughput --data-dir data --output throughput.json

All arms take turns in one process, ten steps each, on one compiled network; a first round warms up.
Ten steps, because SOAP decomposes its matrices once in as many. An arm whose package is not
installed is left out and named. Ours has slow momentum, where its search in the contest starts.
Learning rates are tiny: they do not matter here. Ratios are the median over rounds of an arm's
tokens per second by those of AdamW in the same round.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.script import write_measurements
from benchmarks.common.timing import read_clock, take_turns
from benchmarks.language.contest_stages import DATA, MIDDLE, MUON, OTHERS, OURS, SLOW_SHARE
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
from benchmarks.language.speed_table import REFERENCE, find_ratios, format_speeds
from neumann.lab.errors import UsageError

ARMS = (OURS, *MUON, *OTHERS)
LR = 1e-6
RUN_STEPS = 20  # of the run that an arm is built for: the paper's warm-up ends in the first round


def measure(
    trainer: LanguageTrainer, key: RunKey, arms: tuple[str, ...], rounds: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Tokens per second of each arm in each round, and the arms that are not installed."""
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
        setting = replace(make_setting(arm, choose_start(arm)), lr=LR, decay=0.0)
        if arm == OURS:
            setting = replace(setting, slow=SLOW_SHARE)
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
    speeds, missing = measure(open_trainer(arguments), key, ARMS, arguments.rounds)
    print(format_speeds(speeds))
    device = torch.device(arguments.device)
    found = {"tokens_per_second": speeds, "of_adamw": find_ratios(speeds), "missing": missing}
    write_measurements(arguments, device, model=arguments.model,
                       tokens_per_step=arguments.batch_tokens, **found)  # fmt: skip


if __name__ == "__main__":
    main()
