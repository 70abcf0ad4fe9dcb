"""What came out, in sentences: the first thing a page says.

A sentence never hides what is missing: unfinished trainings are counted before anything is said
about the others, and divergence is said as such.
"""

from dataclasses import dataclass

from neumann.lab.comparison import only_warmed_up, warmup_note
from neumann.report import wording
from neumann.report.curves import ArmRuns
from neumann.report.runs import Run, number
from neumann.report.studies import Search, Study


@dataclass(frozen=True)
class Verdict:
    """What a page begins with."""

    findings: tuple[str, ...]
    warnings: tuple[str, ...]  # what is unfinished, or limits what the findings say


def verdict_of(study: Study) -> Verdict:
    """Of a run, a comparison or a sweep."""
    notes = tuple(note for each in study.sensitivities if (note := each.note()) is not None)
    if study.comparison is not None:
        notes += tuple(_sentence(text) for text in study.comparison.limits())
    if study.search is not None:
        searched = tuple(f"{text} in the search." for text in study.search.warmups)
        warnings = (*_search_warnings(study.search), *searched, *notes)
        return Verdict(_winners(study.search) + _findings(study), warnings)
    if study.comparison is None:
        return _of_run(study.arms[0])
    missing = study.comparison.missing
    if not missing:
        return Verdict(_findings(study), notes)
    wanted = study.comparison.seeds * len(study.comparison.rows)
    verb = "has" if missing == 1 else "have"
    unfinished = (
        f"Unfinished: {missing} of {wording.count(wanted, 'training')} {verb} not ended. What "
        "follows is about those that have."
    )
    return Verdict(_findings(study), (unfinished, *notes))


def _findings(study: Study) -> tuple[str, ...]:
    comparison = study.comparison
    if comparison is None:
        return ()
    if len(comparison.rows) > 1:
        # Before both arms have a seed in common there is nothing to say about the pair.
        begun = any(row.runs for row in comparison.rows)
        sentences = comparison.verdicts() if begun else []
        return tuple(_sentence(text) for text in sentences)
    (row,) = comparison.rows
    diverged = row.accuracy.diverged
    failed = f"; {wording.count(diverged, 'run')} diverged" if diverged else ""
    if row.accuracy.mean is None:
        return (f"{row.arm} diverged in every run that has ended.",) if diverged else ()
    reached = f"{row.arm} reaches {wording.interval(row.accuracy)} % accuracy"
    return (f"{reached} (n = {row.accuracy.n}){failed}.",)


def _of_run(arm: ArmRuns) -> Verdict:
    run = arm.runs[0]
    done = f"{wording.count(run.last_step, 'step')} are recorded"
    if run.last_step == 1:
        done = "1 step is recorded"
    diverged, summary = run.diverged, run.summary
    if diverged is not None:
        kept = diverged.get("checkpoint")
        where = f"The last good checkpoint is {kept}." if kept else "There is no checkpoint."
        lr = number(diverged.get("lr"))
        failed = f"Diverged: the loss was not finite in step {diverged.get('step')} at lr {lr:g}."
        return Verdict((), (f"{failed} {where}",))
    if summary is None:
        epochs, wanted = number_of_epochs(run), run.config.get("epochs")
        return Verdict((), (f"Unfinished: {epochs} of {wanted} epochs have ended, and {done}.",))
    sentences = [
        f"{wording.percent(summary.get('accuracy'))} % accuracy after "
        f"{wording.count(int(number(summary.get('steps', 0)) or 0), 'step')}, in "
        f"{wording.seconds(number(summary.get('seconds')))} s of training."
    ]
    target = run.config.get("target")
    if isinstance(target, int | float):
        steps, epochs_taken = (
            summary.get("steps_to_target"),
            number(summary.get("epochs_to_target")),
        )
        sentences.append(
            f"{target:g} % was never reached."
            if steps is None
            else f"{target:g} % was reached after {steps:,} steps ({epochs_taken:.1f} epochs)."
        )
    warmup = only_warmed_up(run.lines)
    notes = () if warmup is None else (_sentence(warmup_note(arm.name, warmup)),)
    return Verdict(tuple(sentences), notes)


def number_of_epochs(run: Run) -> int:
    """Epochs of the run that have ended."""
    return sum(line.get("kind") == "epoch" for line in run.lines)


def _search_warnings(search: Search) -> tuple[str, ...]:
    if search.winners is None and not search.missing:
        return ("Every training of the search has ended; no learning rate is chosen yet.",)
    if search.winners is None:
        return (
            f"Unfinished: {search.missing} of {wording.count(search.trainings, 'training')} of the "
            "search have not ended, so no learning rate is chosen and nothing is tested yet.",
        )
    if search.final_missing:
        trainings = wording.count(search.final_trainings, "training")
        return (
            f"Unfinished: {search.final_missing} of {trainings} of the chosen learning rates on "
            "the test set have not ended.",
        )
    return ()


def _winners(search: Search) -> tuple[str, ...]:
    if not search.winners:
        return ()
    chosen = wording.listed([f"{lr:g} for {arm}" for arm, lr in search.winners.items()])
    return (f"Learning rates chosen on held-out data: {chosen}.",)


def _sentence(text: str) -> str:
    """Arm names keep their spelling, so only what begins with a word of ours is capitalised."""
    text = text if text.endswith(".") else f"{text}."
    return text[0].upper() + text[1:] if text.startswith("no difference") else text
