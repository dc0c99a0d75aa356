"""Section of the page: the settings that were tried for tuned runs."""

from __future__ import annotations

import statistics

from dlscale.core import text
from dlscale.extensions.tune.records import Tried, Tuning
from dlscale.report.figures import Cell, Fold, Link, Section, Table, View, cell, table
from dlscale.report.sections import Page
from dlscale.results import PlanResult, RunResult


def card(plan: PlanResult) -> View:
    """Return the verdict of each tuned run, and the best settings of the first tuned run."""
    tuned = [(run, run.records["tune"]) for run in plan.runs if "tune" in run.records]
    verdicts = [{"run": run.called, "id": plan.anchor(run), "verdict": each.verdict()} for run, each in tuned]
    return {"tuned": verdicts, "winner": tuned_winner(plan)}


def tuned_winner(plan: PlanResult) -> View | None:
    """Return the combination of settings that tuning chose for the first tuned run; None if no run was tuned."""
    run = next((run for run in plan.runs if "tune" in run.records), None)
    if run is None:
        return None
    tuning: Tuning = run.records["tune"]
    changes, duel = tuning.changes, tuning.duel
    won = ", ".join(f"{key}: {value}" for key, value in changes.items()) or "the run's original settings"
    ratio = duel and {"ratio": duel.ratio, "interval_text": f"± {text.number((duel.high - duel.low) / 2, 2)}"}
    speeds = [rates[0 if changes else 1] for rates in duel.rates] if duel else []
    return {
        "settings": won,
        "gain": ratio if changes else None,
        "speed": statistics.geometric_mean(speeds) if speeds else _rate(tuning.candidates[0], -1),
    }


def section(plan: PlanResult, page: Page) -> Section | None:
    """Return the settings that were tried for each tuned run; None if no run was tuned."""
    folds = [_fold(plan, run, run.records["tune"]) for run in plan.runs if "tune" in run.records]
    return Section("Tuning", folds=folds) if folds else None


def _fold(plan: PlanResult, run: RunResult, tuning: Tuning) -> Fold:
    said = (
        f"{len(tuning.candidates)} combinations of settings were tried in {text.duration(tuning.seconds)}, rung by "
        "rung: the best combinations of a rung were tried for longer in the next rung."
    )
    if tuning.duel:
        said += (
            " The best combination and the run's original settings were then timed alternately, in "
            f"{len(tuning.duel.rates)} rounds. The result is the trimmed geometric mean of their speed ratios."
        )
    if tuning.command:
        said += (
            " This command trains with the tuned settings and compares their speed with the run's original settings: "
            f"`{tuning.command}`. To use the tuned settings in another plan, pass the same file with `--configfile`, "
            f"and write `from: {tuning.plan}.tuned` in that plan."
        )
    batch = ["A different batch size changes the training. Check the learning rate."] * ("batch_size" in tuning.changes)
    title, tables = Link(run.called, f"#{plan.anchor(run)}"), [tried(tuning, run.called)]
    return Fold(title, tuning.verdict(), [said, *batch], tables, open=True)


def tried(tuning: Tuning, run: str = "") -> Table:
    """Return the table of the candidates: the run's original settings, then the other candidates, the best first.

    Each speed is from a candidate's last rung, relative to the original settings in the same rung, because the
    machine's speed drifts between rungs.
    """
    own, *others = tuning.candidates
    winner = tuning.candidates[tuning.duel.challenger] if tuning.duel else None
    # Order: the duel's challenger; other candidates by last rung and speed in this rung; then failed candidates.
    others.sort(
        key=lambda each: (each is not winner, bool(each.problem), -len(each.rates), -(_relative(each, own) or 0))
    )
    rows = [own, *others]
    words = [", ".join(f"{key}: {value}" for key, value in each.changes.items()) for each in others]
    columns = [
        ("", "settings", [Cell(name, n) for n, name in enumerate(["original", *words])]),
        ("", "samples/s", [cell(_rate(each, -1)) for each in rows]),
        ("", "relative", [cell(_relative(each, own), lambda ratio: f"{text.number(ratio)}×") for each in rows]),
        ("", "rungs", [cell(len(each.rates), text.count) for each in rows]),
        ("", "dropped because", [cell(each.problem or text.NONE) for each in rows]),
    ]
    caption = (
        "Speeds are from the last rung that each combination reached, relative to the run's original settings in the "
        "same rung. These speeds only rank the combinations. The final comparison decides."
    )
    return table(columns, caption, f"Combinations tried, {run}", sortable=False)


def _rate(each: Tried, rung: int) -> float | None:
    return statistics.geometric_mean(each.rates[rung]) if each.rates and each.rates[rung] else None


def _relative(each: Tried, own: Tried) -> float | None:
    rate, base = _rate(each, -1), _rate(own, len(each.rates) - 1)
    return rate / base if rate and base else None
