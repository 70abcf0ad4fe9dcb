"""The language contest: who has the lowest loss after a fixed number of tokens?

    python -m benchmarks.language.contest all --data-dir data --jobs 4 --seconds 1200
    python -m benchmarks.language.contest table

One network (`gpt:small`, 23 M parameters), 52 million tokens per run at three batch sizes, and
twice as many steps at the middle one. Stages, each of which continues where it was interrupted:

    screen   every arm at the middle batch: its learning rate in factors of 2, on the validation set
    tune     ours, Muon and the best other peer: a coordinate search at the middle batch, with
             learning rates a factor of about √2 apart and the same number of runs for all three.
             From its result, ours and Muon at the other batches. Then NorMuon's rows on Muon's
             best setting, at each batch: the learning rate, and at the larger two batches the
             other coordinates too. Last ours and NorMuon's rows at twice the length: the learning
             rate, around the best setting at half of it
    test     the two best settings of ours and of the best peer, 10 fresh seeds each, on the test
             set; with 5 the best setting of Muon, NorMuon, SOAP and AdamW, and ours and the
             peer's at twice the length
    saving   whole runs of ours of 95, 90, 85 and 80 % of the length, 5 seeds, on the test set; no
             shorter ones than the first that end above the peer with every seed
    124m     ours and the best peer at GPT-2's width and depth (`gpt:124m`, 110 million parameters
             with 16,384 tokens), with the settings of the small network and one seed, on the
             validation set

The best of Muon's three scalings in the screening stands for it; the other two are not tested. Runs
are lines of results/language/contest.jsonl.
"""

from benchmarks.common.ledger import MissingRunError
from benchmarks.language.contest_rules import MUON, OTHERS, OURS, ROWS
from benchmarks.language.contest_stages import DATA, RESULTS, STAGES, LanguageContest
from benchmarks.language.contest_tables import format_contest
from benchmarks.language.language_arms import check_arms
from benchmarks.language.language_runs import (
    create_language_parser,
    open_language_runner,
    parse_language,
)
from neumann.lab.errors import UsageError


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.set_defaults(data=DATA)
    parser.add_argument("stage", choices=(*STAGES, "all", "table"))
    arguments = parse_language(parser)
    contest = LanguageContest(*open_language_runner(arguments))
    if arguments.stage != "table" and arguments.seconds > 0:  # 0: other processes have trained
        try:
            check_arms((OURS, *MUON, ROWS, *OTHERS))
        except UsageError as error:
            raise SystemExit(str(error)) from error
    if arguments.stage != "table":
        for stage in STAGES if arguments.stage == "all" else (arguments.stage,):
            try:
                contest.run(stage)
            except MissingRunError:
                print(f"{stage} is not finished: run it again to continue")
                break
    if arguments.share is None:  # not one of several processes
        print(format_contest(contest))


if __name__ == "__main__":
    main()
