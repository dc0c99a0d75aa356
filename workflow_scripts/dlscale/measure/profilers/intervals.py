"""Arithmetic of time intervals: float64 [n, 2] of begins and ends, in any order, overlapping or not."""

from __future__ import annotations

import numpy as np

Intervals = np.ndarray


def union(x: Intervals) -> Intervals:
    """Return the disjoint intervals, in order, that cover the same time; those that touch are one, empty ones none."""
    x = x[x[:, 1] > x[:, 0]]
    if not len(x):
        return x
    x = x[np.argsort(x[:, 0], kind="stable")]
    ends = np.maximum.accumulate(x[:, 1])
    first = np.r_[True, x[1:, 0] > ends[:-1]]  # begins after all before it have ended
    last = np.r_[first[1:], True]
    return np.stack([x[first, 0], ends[last]], axis=1)


def total(x: Intervals) -> float:
    """Return the time that is covered; what several intervals cover counts once."""
    x = union(x)
    return float((x[:, 1] - x[:, 0]).sum())


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the disjoint intervals, in order, of the time that both cover."""
    a, b = union(a), union(b)
    # Of each in `a`, those in `b` that end after it begins and begin before it ends.
    low, high = np.searchsorted(b[:, 1], a[:, 0], "right"), np.searchsorted(b[:, 0], a[:, 1], "left")
    counts = np.maximum(high - low, 0)
    of_a = np.repeat(np.arange(len(a)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    return np.stack([np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1])], axis=1)


def gaps(x: Intervals, begin: float, end: float) -> Intervals:
    """Return the disjoint intervals, in order, of the time from `begin` to `end` that nothing covers."""
    x = union(x)
    edges = np.stack([np.r_[begin, x[:, 1]], np.r_[x[:, 0], end]], axis=1).clip(begin, end)
    return edges[edges[:, 1] > edges[:, 0]]


def index_at(x: Intervals, times: np.ndarray) -> np.ndarray:
    """Return for each time [m] the number of the interval that holds it, int64 [m]; -1 where there is none.

    The intervals are disjoint and in order; they hold their begins and ends.
    """
    if not len(x):
        return np.full(len(times), -1)
    found = np.searchsorted(x[:, 0], times, "right") - 1
    return np.where((found >= 0) & (times <= x[found, 1]), found, -1)
