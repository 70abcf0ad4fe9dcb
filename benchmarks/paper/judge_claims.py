"""Print the verdict on each of the paper's 28 claims, from results/paper, or update the page.

    python -m benchmarks.paper.judge_claims
    python -m benchmarks.paper.judge_claims --update     # docs/paper.md

Run it again when `benchmarks.paper.collect_runs` has added results.
"""

import argparse
from pathlib import Path

from benchmarks.paper.run_lines import Results
from benchmarks.paper.verdict_table import count_verdicts, fill_page, format_rows, judge_claims

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/paper.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results/paper")
    parser.add_argument("--update", action="store_true", help="write the parts of docs/paper.md")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    rows = judge_claims(results)
    if arguments.update:
        PAGE.write_text(fill_page(PAGE.read_text(), rows, results))
    else:
        print(format_rows(rows))
    print(count_verdicts(rows))


if __name__ == "__main__":
    main()
