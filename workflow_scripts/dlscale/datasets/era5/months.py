"""Calendar months as a time axis: their length is no constant number of hours."""

from __future__ import annotations

import numpy as np

#: By how much the stamps of one series may differ in how far into the month they are: the 28th and the 31st.
_SPREAD = np.timedelta64(3, "D")


def months_apart(times: np.ndarray) -> int | None:
    """Return the calendar months between times, datetime64[s] [T], ascending; None where they are not that regular.

    A month's stamp may be its first day, its middle or its last day. Times that are equally far apart in hours, and
    whose day of the month wanders, are no months.
    """
    months = times.astype("datetime64[M]")
    apart = np.unique(np.diff(months).astype(int))
    into = times - months.astype(times.dtype)
    if apart.size != 1 or apart[0] < 1 or into.max() - into.min() > _SPREAD:
        return None
    wander = times.size > 2 and np.unique(np.diff(times)).size == 1 and into.min() != into.max()
    return None if wander else int(apart[0])


def begin(times: np.ndarray) -> np.ndarray:
    """Return the beginning of the month of each time, of the same type."""
    return times.astype("datetime64[M]").astype(times.dtype)
