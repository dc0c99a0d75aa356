"""Stage `collect`: one table of a plan's runs.

`summary.csv` has one row a run, in the plan's order, and these columns; a value that the plan does not
measure is empty.

- run, label: the run's name, and what tables call it.
- plan, study, dataset: what it belongs to.
- source: `PLAN/RUN` whose folder holds the results: another plan's for a run named with `use`.
- KEY: of a sweep, what the trial has of each setting that is varied, under its dotted key.
- parameters: trainable parameters of the model.
- epochs, steps, samples: trained in all.
- train_loss, valid_loss: of the last epoch; best_valid_loss: the least of all epochs.
- best_metric, best_epoch, best_value: what the weights in `model_best.pt` are the best in, of which epoch, how good.
- target: what the run was to reach (`training.target`); target_reached: `yes` or `no`. target_epoch, target_samples:
  after how many epochs and training samples it was first reached. target_seconds, target_gpu_hours,
  target_energy_joules: what that took, from the first step to the end of the validation that showed it: training and
  validation, these seconds x devices (a process without a GPU counts as one), the energy of its GPUs. Empty where
  geometry or loader changed on the way; the energy, where an earlier try did a part of it.
- train_samples_per_second: median over the epochs, the first one left out where there are more.
- energy_joules: of the run's GPUs in the train stage, set-up and validation included; empty if an earlier try did a
  part of it. energy_per_sample: J, over the epochs that the speed is of, validation left out.
- io_samples_per_second, synthetic_samples_per_second, full_samples_per_second: means over the throughput trials; each
  is followed by its standard deviation, `…_std`.
- speed_up: how many times as fast as the plan's first run: from turns with it where the run has one process, else
  `full_samples_per_second` relative to its; without throughput, the speed of training. speed_up_low, speed_up_high: the
  ends of its 95 % interval, empty where no spread is known. speed_up_noise: `yes` where the two may be equally fast.
- step_speed_up, …: of a ladder, the same over the run before.
- devices: nodes x devices of each.
- io_efficiency, io_communication, and the same of synthetic and full: of a scaling plan, samples/s relative to those of
  its fewest devices, times as many; and 1 - time without averaged gradients / time, from the run's twin.
- mfu, mbu: shares of the devices' peak FLOP/s (model FLOPs utilisation) and memory bandwidth that FULL reaches. The
  peaks are the greatest that a run of the plan measured on such a device; the bytes are those of a step that is not
  compiled.
- published_samples_per_second, published_speed_up, published_as, published_hardware, published_source: the published
  FULL throughput of what the run does, at full size; its ratio to that of the first run that has one; what was
  published, on which hardware and where. All of a plan's are of one source.
- seeds: of a plan with `repeat`, how many trainings train_loss, valid_loss and METRIC are the means of; each of these
  is then followed by its standard deviation, `…_std`. All other columns are of the first training.
- METRIC: each validation metric of the last epoch under its own name; units are in `provenance.json`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlscale.config.records import Published
from dlscale.core.files import write_text
from dlscale.core.metrics import Epoch
from dlscale.measure.records import MODES
from dlscale.report import published
from dlscale.report.results import PlanResult, RunResult, reached, read_plan
from dlscale.report.speedup import SCALING, Point, SpeedUp, SpeedUps, series

if TYPE_CHECKING:
    import pandas as pd

#: A row: None for what was not measured.
Row = dict[str, Any]


def main(args: argparse.Namespace) -> None:
    """Write `args.out` (CSV) from the runs of `args.plan`."""
    write_text(args.out, summary_csv(read_plan(args.plan)))


def summary_csv(plan: PlanResult) -> str:
    """Return the plan's table as CSV, numbers with all their digits."""
    # As text, since pandas writes a loss that is not a number as it writes one that was not measured: as nothing.
    return (
        summary(plan).map(lambda value: value if value is None else str(value)).to_csv(index=False, lineterminator="\n")
    )


def summary(plan: PlanResult) -> pd.DataFrame:
    """Return the columns of `summary.csv`, a row a run; a value that was not measured is None."""
    import pandas as pd

    rows = rows_of(plan)
    columns = dict.fromkeys(key for row in rows for key in row)
    return pd.DataFrame([[row.get(key) for key in columns] for row in rows], columns=list(columns), dtype=object)


def rows_of(plan: PlanResult) -> list[Row]:
    """Return the rows of that table."""
    figures = published.series(plan.record.published, plan.name, [run.name for run in plan.runs])
    scaled = plan.record.kind in SCALING
    points = {point.run: point for each in series(plan) for point in each.points} if scaled else {}
    speeds = SpeedUps(plan.runs)
    rows = []
    for run, before in zip(plan.runs, [None, *plan.runs], strict=False):
        row = {
            "run": run.name,
            "label": run.label,
            "plan": plan.name,
            "study": plan.record.study,
            "dataset": run.settings.get("dataset"),
            "source": run.owner,
            **(plan.record.sweep.trials[run.name] if plan.record.sweep else {}),
            **_trained(plan, run),
            **_target(run),
            **_rates(run),
            **_speed_up("speed_up", speeds.over_first(run)),
        }
        if plan.record.kind == "ladder":
            row |= _speed_up("step_speed_up", speeds.over(run, before) if before else None)
        row |= {"devices": run.devices} | {
            key: getattr(run.throughput, key)() if run.throughput else None for key in ("mfu", "mbu")
        }
        row |= _published(figures, run.name)
        for name in run.last.metrics if run.last else ():
            key = f"metric {name}" if name in row else name
            row |= _mean(plan, run, key, lambda epoch, name=name: epoch.metrics.get(name))  # type: ignore[misc]
        rows.append(row | (_scaled(points.get(run)) if scaled else {}))
    return rows


def _trained(plan: PlanResult, run: RunResult) -> Row:
    best = run.provenance.best if run.provenance else None
    return {
        "parameters": run.provenance.parameters if run.provenance else None,
        **({"seeds": 1 + len(run.repeats)} if plan.repeats else {}),
        "epochs": run.last.epoch if run.last else None,
        "steps": run.last.step if run.last else None,
        "samples": run.last.samples if run.last else None,
        **_mean(plan, run, "train_loss", lambda epoch: epoch.train_loss),
        **_mean(plan, run, "valid_loss", lambda epoch: epoch.valid_loss),
        "best_valid_loss": run.best_valid_loss,
        **{f"best_{key}": getattr(best, key) if best else None for key in ("metric", "epoch", "value")},
    }


def _target(run: RunResult) -> Row:
    target = reached(run)
    epoch = target.epoch if target else None
    return {
        "target": target.aim if target else None,
        "target_reached": ("yes" if epoch else "no") if target else None,
        "target_epoch": epoch.epoch if epoch else None,
        "target_samples": epoch.samples if epoch else None,
        "target_seconds": target.seconds if target else None,
        "target_gpu_hours": target.gpu_hours if target else None,
        "target_energy_joules": target.joules if target else None,
    }


def _rates(run: RunResult) -> Row:
    energy = run.energy
    row: Row = {
        "train_samples_per_second": run.training_speed,
        "energy_joules": energy,
        "energy_per_sample": run.energy_per_sample,
    }
    for mode in MODES:
        column, trials = f"{mode.lower()}_samples_per_second", run.trials(mode)
        row |= {column: trials.mean if trials else None, f"{column}_std": trials.std if trials else None}
    return row


def _speed_up(name: str, found: SpeedUp | None) -> Row:
    known = found and math.isfinite(found.error)
    return {
        name: found.ratio if found else None,
        f"{name}_low": found.low if found and known else None,
        f"{name}_high": found.high if found and known else None,
        f"{name}_noise": ("yes" if found.noise else "no") if found else None,
    }


def _scaled(point: Point | None) -> Row:
    """Return what a run of a scaling plan reaches; its twin without averaged gradients has no such columns filled."""
    row: Row = {}
    for mode in MODES:
        reached_, share = (point.efficiency(mode), point.communication(mode)) if point else (None, None)
        row[f"{mode.lower()}_efficiency"] = reached_.value if reached_ else None
        row[f"{mode.lower()}_communication"] = share.value if share else None
    return row


def _published(figures: dict[str, Published], run: str) -> Row:
    figure = figures.get(run)
    return {
        "published_samples_per_second": figure.speed if figure else None,
        "published_speed_up": published.ratio(figures, run),
        "published_as": figure.label if figure else None,
        "published_hardware": figure.devices if figure else None,
        "published_source": figure.source if figure else None,
    }


def _mean(plan: PlanResult, run: RunResult, key: str, value: Callable[[Epoch], float | None]) -> Row:
    """Return a value after the last epoch; of a plan that repeats its trainings their mean and standard deviation."""
    if not plan.repeats:
        return {key: value(run.last) if run.last else None}
    last = [epochs[-1] for epochs in (run.epochs, *run.repeats) if epochs]
    values = [found for epoch in last if (found := value(epoch)) is not None]
    return {
        key: statistics.fmean(values) if values else None,
        f"{key}_std": statistics.stdev(values) if values[1:] else None,
    }
