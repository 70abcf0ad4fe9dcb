"""Write tables, verdicts and plots of the language contest into its page of the docs.

    python -m benchmarks.language.update_page

The parts are those of `contest table`, how far the contest is, what the searches say, the plots,
which are drawn into results/language, and `throughput`. What has not been run says so.
"""

import json
import textwrap
from pathlib import Path

from benchmarks.common.pages import fill_parts
from benchmarks.language.contest_plots import draw_all, show_plots
from benchmarks.language.contest_stages import RESULTS, LanguageContest
from benchmarks.language.contest_state import describe_state, describe_validation
from benchmarks.language.contest_tables import make_parts
from benchmarks.language.speed_table import describe_speeds

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/language-contest.md"
PLOTS = ROOT / "results/language"
SPEEDS = ROOT / "results/language/throughput.json"
WIDTH = 120
KIND = "language"  # of parts of the page
MISSING = "*Still to come.*"
FOLLOWING = ("sentences", "plots")  # what they follow says that they are missing


def collect_parts(contest: LanguageContest) -> dict[str, str]:
    """All parts, from the runs of a contest and the measurements in results/language."""
    parts = make_parts(contest)
    parts["state"] = describe_state(contest)
    parts["validation"] = describe_validation(contest)
    parts["plots"] = show_plots(contest, f"../{PLOTS.relative_to(ROOT)}")
    parts["throughput"] = describe_speeds(json.loads(SPEEDS.read_text()), contest)
    return {
        name: _wrap(text) if text or name in FOLLOWING else MISSING for name, text in parts.items()
    }


def _wrap(text: str) -> str:
    """Sentences as wide as the page; rows of tables and images stay on their lines."""
    return "\n".join(
        line if line.startswith(("|", "!")) else textwrap.fill(line, WIDTH, break_on_hyphens=False)
        for line in text.splitlines()
    )


def update_page(contest: LanguageContest, page: Path, plots: Path) -> None:
    draw_all(contest, plots)
    page.write_text(fill_parts(page.read_text(), KIND, collect_parts(contest)))


def main() -> None:
    update_page(LanguageContest.read(ROOT / RESULTS), PAGE, PLOTS)


if __name__ == "__main__":
    main()
