"""Records of stage `tune`, the content of `tune.json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dlscale.core.record import Record


class Tried(Record):
    """Combination of settings that was tried."""

    changes: dict[str, Any]  #: Changes to the run, by dotted key; empty for the run's original settings.
    rates: list[
        list[float]
    ] = []  #: Samples/s of each trial of the combination, by rung; without the trials of the duel.
    problem: str | None = None  #: Reason why the combination could not be measured; else None.


class Duel(Record):
    """Paired timing of the run's original settings and of the best other candidate (`challenger`)."""

    challenger: int  #: Index of the challenger in `Tuning.candidates`.
    rates: list[tuple[float, float]]  #: Samples/s of the challenger and of the run's original settings, by round.
    ratio: float  #: Speed of the challenger / speed of the run's original settings.
    low: float  #: Lower end of the ratio's 95 % interval (`dlscale.extensions.tune.tune.ratio_interval`).
    high: float  #: Upper end of the interval.

    @property
    def won(self) -> bool:
        """Whether the challenger is significantly faster: the interval lies above 1."""
        return self.low > 1


class Tuning(Record):
    """`tune.json`: the trials of a run's settings, and the duel."""

    run: str = ""  #: PLAN.RUN.
    seconds: float = 0.0  #: Duration of the tuning.
    candidates: list[Tried] = Field(min_length=1)  #: All candidates; the first is the run's original settings.
    duel: Duel | None = None  #: None if there is no other candidate that could be measured in search and duel.
    command: str = ""  #: Command that trains with the winning candidate; empty if no candidate won.

    @property
    def plan(self) -> str:
        """Name of the plan in `tuned.yaml`."""
        return f"{self.run.replace('.', '_')[-58:].lstrip('_-')}_tuned"  # a name has at most 64 characters

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that the winning candidate changes, by dotted key; empty if no candidate won."""
        return self.candidates[self.duel.challenger].changes if self.duel and self.duel.won else {}

    def verdict(self) -> str:
        """Return the result in a sentence."""
        if self.duel is None:
            return "No speed-up found: no other combination could be measured."
        ratio = f"{self.duel.ratio:.2f}× ± {(self.duel.high - self.duel.low) / 2:.2f}"
        if self.duel.won:
            return f"{ratio} as fast as the run's original settings."
        return f"No significant speed-up: the best other combination is {ratio} as fast as the run's original settings."
