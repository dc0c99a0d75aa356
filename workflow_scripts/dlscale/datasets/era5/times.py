"""The times of a series: those that are asked for, at one step, and at each every channel exactly once."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence

import numpy as np

from dlscale.core.errors import UserError
from dlscale.datasets.era5.variables import Variable


def kept(times: np.ndarray, period: tuple[dt.date, dt.date] | None, step_hours: int | None) -> np.ndarray:
    """Return which times lie in the period and at the step: bool [T]."""
    keep = np.ones(times.shape, bool)
    if period:
        first, last = (np.datetime64(day, "D") for day in period)
        keep &= (times >= first) & (times < last + 1)
    if step_hours:
        keep &= times.astype(np.int64) % (3600 * step_hours) == 0
    return keep


def common_times(
    names: Sequence[str],
    variables: Sequence[Variable],
    keep: Callable[[np.ndarray], np.ndarray],
    period: tuple[dt.date, dt.date] | None,
    step_hours: int | None,
    label: str,
) -> np.ndarray:
    """Return the times [T], ascending, that every channel has exactly once; or say what is amiss."""
    own: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(names):
        holders = [variable for variable in variables if name in variable.channels]
        every = np.concatenate([variable.times for variable in holders])
        first, last = every.min(), every.max()
        if period and (first.astype("datetime64[D]") > period[0] or last.astype("datetime64[D]") < period[1]):
            raise UserError(
                f"{label}: needs {period[0]} to {period[1]}, but '{name}' covers {_text(first)} to {_text(last)}; "
                "set the dataset's `split` within that, or add files"
            )
        times = np.sort(np.concatenate([variable.times[keep(variable.times)] for variable in holders]))
        twice = times[1:][times[1:] == times[:-1]]
        if twice.size:
            places = [variable.origin for variable in holders for _ in range((variable.times == twice[0]).sum())]
            raise UserError(
                f"{label}: channel '{name}' stands twice at {_text(twice[0])}: in {' and '.join(places[:2])}; "
                "give each time once (one file, one ensemble member, one `expver`)"
            )
        own[name] = times
    union = np.unique(np.concatenate(list(own.values())))
    if not union.size:
        raise UserError(f"{label}: no time is left: none is a multiple of step_hours ({step_hours}) from midnight UTC")
    for name, times in own.items():
        missing = np.setdiff1d(union, times)
        if missing.size:
            other = next(other for other, has in own.items() if missing[0] in has)
            raise UserError(
                f"{label}: channel '{name}' is missing at {_text(missing[0])} ({missing.size} such times), "
                f"where '{other}' is there; add the file that holds it"
            )
    _check_step(union, step_hours, label)
    return union


def _check_step(times: np.ndarray, step_hours: int | None, label: str) -> None:
    """Refuse times that do not follow one another at one step: the asked one, or else the commonest."""
    if times.size < 2:
        return
    steps, counts = np.unique(np.diff(times), return_counts=True)
    step = np.timedelta64(3600 * step_hours, "s") if step_hours else steps[counts.argmax()]
    expected = np.arange(times[0], times[-1] + step, step)
    hours = step / np.timedelta64(1, "h")
    missing, extra = np.setdiff1d(expected[expected <= times[-1]], times), np.setdiff1d(times, expected)
    if missing.size:
        raise UserError(
            f"{label}: {_text(missing[0])} is missing ({missing.size} of {expected.size} times, every {hours:g} h "
            f"from {_text(times[0])} to {_text(times[-1])}); add the file that holds it, or set `split` around the gap"
        )
    if extra.size:
        raise UserError(f"{label}: {_text(extra[0])} breaks the step of {hours:g} h; set `step_hours`, or remove it")


def _text(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]")).replace("T", " ")
