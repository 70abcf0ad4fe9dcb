"""From results to verdicts, and from verdicts to the table and the sections of docs/paper.md."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.common.markdown import format_table
from benchmarks.common.pages import fill_parts
from benchmarks.paper.claim_tests import Missing, Outcome, Source, read_study
from benchmarks.paper.claims import CLAIMS, CLAIMS_ON_TEST_SET, Claim
from benchmarks.paper.curve_figures import DRAWINGS
from benchmarks.paper.judging import Finding, Verdict, combine, correct_findings, judge
from benchmarks.paper.run_lines import Results, name_point
from benchmarks.paper.run_tables import (
    tabulate_ablations,
    tabulate_epochs,
    tabulate_main,
    tabulate_scaling,
)
from neumann.lab.studies.study_files import SEARCH

KIND = "paper"  # of parts of the page
STUDY = re.compile(r"`(?:studies/paper/)?([\w-]+)\.toml`")
COUNTED = {
    Verdict.SUPPORTED: "supported",
    Verdict.SMALLER: "supported with a smaller effect",
    Verdict.NOT_SUPPORTED: "not supported",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.NOT_RUN: "waiting for runs",
    Verdict.NOT_TESTABLE: "not testable here",
}


@dataclass(frozen=True)
class Row:
    """A claim with its verdict."""

    claim: Claim
    verdict: Verdict
    figure: str  # the result that decides, in words
    details: tuple[str, ...] = ()  # all results
    beside: tuple[str, ...] = ()  # results that are not part of the verdict
    notes: tuple[str, ...] = ()  # about the runs
    weak: bool = False  # corrected over all claims, p is not below 0.05

    @property
    def words(self) -> str:
        return f"{self.verdict} (weak)" if self.weak else str(self.verdict)


def judge_claims(results: Results, claims: Sequence[Claim] = CLAIMS) -> list[Row]:
    """Judge all claims together, because p values are corrected over all of them."""
    outcomes = {
        claim.number: [test.run(results) for test in claim.tests] for claim in claims if claim.tests
    }
    findings = {
        number: combine([each.evidence for each in found if isinstance(each, Outcome)])
        for number, found in outcomes.items()
        if not any(isinstance(each, Missing) for each in found)
    }
    listed = CLAIMS_ON_TEST_SET if claims is CLAIMS else tuple(outcomes)
    corrected = correct_findings(findings, listed)
    rows = []
    for claim in claims:
        if claim.number in corrected:
            found = [each for each in outcomes[claim.number] if isinstance(each, Outcome)]
            number = claim.number
            row = _judge_tests(claim, found, findings[number], corrected[number])
        elif claim.tests:
            row = _describe_missing(claim, outcomes[claim.number])
        else:
            row = _judge_measure(claim, results)
        rows.append(row)
    return [_describe_runs(row, results) for row in rows]


def _judge_tests(
    claim: Claim, found: Sequence[Outcome], finding: Finding, corrected: Finding
) -> Row:
    diverged = sum(each.diverged for each in found)
    lost = next((each for each in found if each.diverged and each.evidence.n == 0), None)
    if lost is not None:
        figure = f"{lost.label}: all {lost.diverged} runs diverged"
        return Row(claim, Verdict.NOT_SUPPORTED, figure, _describe(found))
    judgment = judge(finding, corrected, may_support=diverged == 0)
    verdict = judgment.verdict
    weakest = max(found, key=lambda each: each.evidence.p_for)
    smallest = min(found, key=lambda each: each.evidence.p_against)
    decisive = smallest if verdict is Verdict.NOT_SUPPORTED else weakest
    figure = f"{decisive.label}: {decisive.figure}, corrected p {format_p(judgment.p)}"
    if verdict is Verdict.NOT_SUPPORTED:
        figure += " against the claimed effect"
    if len(found) > 1:
        figure += f" (the decisive one of {len(found)})"
    if verdict is Verdict.SMALLER and smallest is not weakest:
        figure += f"; smaller than claimed: {smallest.label}: {smallest.figure}"
    details = _describe(found)
    notes = [f"{count_things(diverged, 'run')} diverged"] if diverged else []
    if without := sum(each.without for each in found):
        runs = count_things(without, "run")
        notes += [f"{runs} of the other arm diverged, so their seeds are left out"]
    return Row(claim, verdict, figure, details, notes=tuple(notes), weak=judgment.weak)


def _describe_missing(claim: Claim, found: Sequence[Outcome | Missing]) -> Row:
    missing = {each.study: each for each in found if isinstance(each, Missing)}
    figure = "; ".join(
        f"{each.study}: {each.seeds} of {each.needed} seeds" for each in missing.values()
    )
    return Row(claim, Verdict.NOT_RUN, figure, _describe(found))


def _describe(found: Sequence[Outcome | Missing]) -> tuple[str, ...]:
    return tuple(f"{each.label}: {each.figure}" for each in found if isinstance(each, Outcome))


def _judge_measure(claim: Claim, results: Results) -> Row:
    settled = claim.measure(results) if claim.measure is not None else None
    if settled is None:
        return Row(claim, Verdict.NOT_RUN, "")
    return Row(claim, settled.verdict, settled.figure)


def _describe_runs(row: Row, results: Results) -> Row:
    """Add the results beside the verdict, learning rates at an edge, and where it was run."""
    claim = row.claim
    tested = (source for test in claim.tests for source in test.sources)
    sources = list(dict.fromkeys((*tested, *claim.measured)))
    edges = [text for source in sources if (text := find_edge(source, results))]
    notes = list(row.notes)
    if edges:
        notes += [f"chosen at an edge of the range of learning rates: {', '.join(edges)}"]
    if origin := describe_origin(sources, results):
        notes += [origin]
    beside = _describe([test.run(results) for test in claim.beside])
    return replace(row, beside=beside, notes=tuple(notes))


def describe_origin(sources: Sequence[Source], results: Results) -> str:
    """The hardware, torch and commits of the runs, as far as they are known."""
    runs = [
        run
        for source in sources
        for run in results.find(source.study, source.arm, source.point).values()
    ]
    devices, versions, commits = (
        list(dict.fromkeys(str(run[key]) for run in runs if key in run))
        for key in ("device", "torch", "commit")
    )
    parts = [*devices, *(f"torch {version}" for version in versions)]
    if commits:
        short = ", ".join(commit[:8] for commit in commits)
        parts.append(f"commit{'s' if commits[1:] else ''} {short}")
    return f"trained on {', '.join(parts)}" if parts else ""


def find_edge(source: Source, results: Results) -> str | None:
    """The arm with its learning rate, if that was the lowest or the highest tried.

    An arm without a search of its own has taken its rate from another arm, or from another point.
    """
    searched = [
        (key.point, key.arm.rpartition(" at ")[0], run["lr"])
        for key, run in results.open(source.study).runs.items()
        if key.stage == SEARCH
    ]
    has_own = any(arm == source.arm and point == source.point for point, arm, _ in searched)
    asked = source if has_own else find_lender(source)
    tried = sorted({lr for point, arm, lr in searched if (point, arm) == (asked.point, asked.arm)})
    runs = results.find(source.study, source.arm, source.point).values()
    tested = {run["lr"] for run in runs if "lr" in run}  # not if it diverged at every rate
    at_edge = sorted(tested & {*tried[:1], *tried[-1:]})
    return f"{source} at {at_edge[0]:g}" if at_edge else None


def find_lender(source: Source) -> Source:
    """The arm and the point whose learning rate an arm takes, by the file of the study."""
    content = read_study(source.study)
    arms, at = content.get("arms", {}), content.get("tuning", {}).get("at", {})
    named = arms.get(source.arm, {}).get("lr")
    arm = named if named in arms else source.arm
    values = dict(part.split("=", 1) for part in source.point.split(",") if "=" in part)
    return replace(source, arm=arm, point=name_point(**values | at))


# ---------------------------------------------------------------------- the page


def fill_page(page: str, rows: Sequence[Row], results: Results) -> str:
    """The page with its generated parts up to date."""
    parts = {
        "figures": show_figures(results),
        "main": tabulate_main(results),
        "scaling": tabulate_scaling(results),
        "epochs": tabulate_epochs(results),
        "ablations": tabulate_ablations(results),
        "count": count_verdicts(rows),
        "table": format_rows(rows, links=True),
        "claims": "\n\n".join(format_section(row) for row in rows),
    }
    return fill_parts(page, KIND, parts)


def show_figures(results: Results) -> str:
    """The figures that have been drawn, and the paper's Figure 4, which is on another page."""
    shown = [
        f"![{each.alternative}](../results/paper/{each.file})\n\n*{each.caption}.*"
        for each in DRAWINGS
        if (results.folder / each.file).exists()
    ]
    missing = [str(d.number) for d in DRAWINGS if not (results.folder / d.file).exists()]
    if missing:
        names = f"{', '.join(missing[:-1])} and {missing[-1]}" if missing[1:] else missing[0]
        shown.append(f"Still to come, in the form of the paper's: {names}.")
    return "\n\n".join(shown)


def count_verdicts(rows: Sequence[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    words = [f"{counts[verdict]} {word}" for verdict, word in COUNTED.items() if counts[verdict]]
    return f"Of {len(rows)} claims: {', '.join(words)}."


def format_rows(rows: Sequence[Row], *, links: bool = False) -> str:
    return format_table(
        ("#", "claim", "what was run", "figure", "verdict"),
        "rllll",
        [
            (
                str(row.claim.number),
                f"[{row.claim.title}](#{make_anchor(row.claim)})" if links else row.claim.title,
                name_runs(row.claim),
                row.figure.replace("|", "\\|"),
                f"**{row.words}**" if links else row.words,
            )
            for row in rows
        ],
    )


def name_runs(claim: Claim) -> str:
    """The studies of a claim, or what else it rests on, in a few words."""
    studies = list(dict.fromkeys(STUDY.findall(claim.run)))
    if studies:
        return ", ".join(studies)
    command = re.search(r"python -m benchmarks\.(\w+\.\w+)", claim.run)
    if command:
        return command[1]
    return claim.run.partition(":")[0].partition(",")[0].partition(" in `")[0]


def format_section(row: Row) -> str:
    claim = row.claim
    lines = [
        f"### {make_heading(claim)}",
        "",
        f"- **The paper** ({claim.where}): {claim.says}",
        f"- **Run:** {claim.run}.",
        f"- **Rule:** {claim.rule}",
        f"- **Result:** {row.figure}." if row.figure else "- **Result:** none yet.",
    ]
    lines += [f"    - {detail}" for detail in row.details if len(row.details) > 1]
    if row.beside:
        lines += ["- **Also measured**, not part of the verdict:"]
        lines += [f"    - {detail}" for detail in row.beside]
    lines += [f"- **Note:** {claim.limits}"] if claim.limits else []
    lines += [f"- **About the runs:** {note}." for note in row.notes]
    return "\n".join([*lines, f"- **Verdict: {row.words}.**"])


def make_heading(claim: Claim) -> str:
    return f"{claim.number}. {claim.title}"


def make_anchor(claim: Claim) -> str:
    return re.sub(r"[^\w\- ]", "", make_heading(claim).lower()).replace(" ", "-")


def count_things(count: int, thing: str) -> str:
    """As in "1 run" and "2 runs"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def format_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"
