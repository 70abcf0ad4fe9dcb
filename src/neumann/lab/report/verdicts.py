"""What came out, in sentences: the first thing a page says.

A sentence never hides what is missing: unfinished runs are counted before anything is said
about the others, and a divergence is called one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neumann.lab.metrics import choose_metric
from neumann.lab.report import formatting
from neumann.lab.report.formatting import format_count, format_interval, format_list
from neumann.lab.report.runs import ArmRuns, to_number
from neumann.lab.report.study_records import Search, Study
from neumann.lab.studies.results import Comparison, find_long_warmup
from neumann.lab.studies.wording import describe_warmup_of_arm
from neumann.lab.training.records import CHECKPOINTS


@dataclass(frozen=True)
class Verdict:
    findings: tuple[str, ...]
    warnings: tuple[str, ...]  # what is unfinished, or limits the findings


def state_verdict(study: Study) -> Verdict:
    """State the verdict on a run, a comparison or a sweep."""
    comparison, search = study.comparison, study.search
    if comparison is None and search is None:
        return _judge_run(study.arms[0])
    findings: list[str] = []
    warnings: list[str] = []
    if search is not None:
        if search.winners:
            findings.append(_describe_choice(search, search.winners))
        warnings += _describe_progress(search)
        warnings += [f"{text} in the search." for text in search.warmups]
    elif comparison is not None and comparison.missing:
        planned = format_count(comparison.seeds * len(comparison.rows), "run")
        warnings.append(
            f"Unfinished: {comparison.missing} of {planned} {_have(comparison.missing)} "
            "not finished. What follows is about the others."
        )
    warnings += [text for arm in study.sensitivities if (text := arm.warning()) is not None]
    if comparison is not None:
        findings += _judge_comparison(comparison)
        warnings += map(_to_sentence, comparison.state_limits())
    return Verdict(tuple(findings), tuple(warnings))


def _judge_comparison(comparison: Comparison) -> list[str]:
    if not any(row.runs for row in comparison.rows):
        return []
    if len(comparison.rows) > 1:
        return [_to_sentence(text) for text in comparison.state_verdicts()]
    (row,) = comparison.rows
    metric, diverged = comparison.metric, row.score.diverged
    if row.score.mean is None:
        return [f"{row.arm} diverged in every run that has finished."]
    failed = f"; {format_count(diverged, 'run')} diverged" if diverged else ""
    reached = metric.phrase.format(format_interval(row.score, metric))
    return [f"{row.arm} reaches {reached} (n = {row.score.n}){failed}."]


def _judge_run(arm: ArmRuns) -> Verdict:
    run = arm.runs[0]
    diverged, summary = run.diverged, run.summary
    if diverged is not None:
        kept = diverged.get("checkpoint")
        # The name alone: a page goes to other people, whose machines do not have the path.
        name = f"{CHECKPOINTS}/{Path(str(kept)).name}"
        where = f"The last good checkpoint is {name}." if kept else "There is no checkpoint."
        step, lr = diverged.get("step"), to_number(diverged.get("lr"))
        failure = f"Diverged: the loss was not finite in step {step} at lr {lr:g}. {where}"
        return Verdict((), (failure,))
    if summary is None:
        epochs = sum(line.get("kind") == "epoch" for line in run.lines)
        verb = "is" if run.last_step == 1 else "are"
        steps = f"{format_count(run.last_step, 'step')} {verb} recorded"
        planned = run.config.get("epochs")
        return Verdict((), (f"Unfinished: {epochs} of {planned} epochs are done; {steps}.",))
    metric = choose_metric(run.config)
    score = formatting.format_value(to_number(summary.get(metric.key)), f".{metric.digits}f")
    reached = metric.phrase.format(score)
    reached = reached[0].upper() + reached[1:]
    extras = ", ".join(metric.list_extras(summary))
    steps = format_count(int(to_number(summary.get("steps", 0)) or 0), "step")
    seconds = formatting.format_seconds(to_number(summary.get("seconds")), " s")
    beside = f" ({extras})" if extras else ""
    findings = [f"{reached}{beside} after {steps}, in {seconds} of training."]
    target = run.config.get("target")
    if isinstance(target, int | float):
        first = summary.get("steps_to_target")
        epochs_taken = to_number(summary.get("epochs_to_target"))
        when = "never reached."
        if first is not None:
            when = f"reached after {first:,} steps ({epochs_taken:.1f} epochs)."
        findings.append(f"{metric.format_target(target)} was {when}")
    warmup = find_long_warmup(run.lines)
    warnings = () if warmup is None else (_to_sentence(describe_warmup_of_arm(arm.name, warmup)),)
    return Verdict(tuple(findings), warnings)


def _describe_choice(search: Search, winners: Mapping[str, float]) -> str:
    searched = [f"{lr:g} for {arm}" for arm, lr in winners.items() if arm not in search.sources]
    chosen = f"Learning rates chosen on held-out data: {format_list(searched)}"
    return f"{'; '.join([chosen, *search.describe_sources()])}."


def _describe_progress(search: Search) -> list[str]:
    """Say what is unfinished, if anything is."""
    if search.winners is not None:
        runs = format_count(search.final_runs, "run")
        unfinished = (
            f"Unfinished: {search.final_missing} of {runs} of the chosen learning rates on the "
            f"test set {_have(search.final_missing)} not finished."
        )
        return [unfinished] if search.final_missing else []
    if not search.missing:
        return ["Every run of the search has finished; no learning rate is chosen yet."]
    return [
        f"Unfinished: {search.missing} of {format_count(search.runs, 'run')} of the search "
        f"{_have(search.missing)} not finished, so no learning rate is chosen and nothing is "
        "tested yet."
    ]


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _to_sentence(text: str) -> str:
    """End with a full stop. Arm names keep their case, so only our own words are capitalized."""
    text = text if text.endswith(".") else f"{text}."
    return text[0].upper() + text[1:] if text.startswith("no clear") else text
