"""Write the tables and verdicts of the language contest into its page of the docs.

    python -m benchmarks.language.update_page

The parts are those of `contest table`, and `throughput`. What has not been run says so.
"""

import json
from pathlib import Path

from benchmarks.common.pages import fill_parts
from benchmarks.language.contest_stages import RESULTS, LanguageContest
from benchmarks.language.contest_tables import make_parts
from benchmarks.language.speed_table import format_speeds

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/language-contest.md"
SPEEDS = ROOT / "results/language/throughput.json"
KIND = "language"  # of parts of the page
MISSING = "*Still to come.*"


def collect_parts() -> dict[str, str]:
    """All parts, from the runs and measurements in results/language."""
    parts = make_parts(LanguageContest.read(ROOT / RESULTS))
    parts["throughput"] = format_speeds(json.loads(SPEEDS.read_text())["tokens_per_second"])
    sentences = parts.pop("sentences")  # they follow the table, which says what is missing
    return {name: text or MISSING for name, text in parts.items()} | {"sentences": sentences}


def main() -> None:
    PAGE.write_text(fill_parts(PAGE.read_text(), KIND, collect_parts()))


if __name__ == "__main__":
    main()
