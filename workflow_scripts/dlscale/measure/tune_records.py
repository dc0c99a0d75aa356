"""Records of stage `tune`, the content of `tune.json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dlscale.core.record import Record


class Tried(Record):
    """A setting that was tried."""

    changes: dict[str, Any]  #: Changes to the run, by dotted key; empty for the run's own setting.
    rates: list[list[float]] = []  #: Samples/s of the setting's trials by rung, without the duel.
    problem: str | None = None  #: Reason if the setting could not be measured.


class Duel(Record):
    """Paired timing of the best other setting (`challenger`) and the run's own setting."""

    challenger: int  #: Index of the challenger in `Tuning.candidates`.
    rates: list[tuple[float, float]]  #: Samples/s of the challenger and of the run's own setting, by round.
    ratio: float  #: Speed of the challenger / speed of the run's own setting.
    low: float  #: Lower end of the ratio's 95 % interval (`dlscale.core.noise.ratio_interval`).
    high: float  #: Upper end of the interval.

    @property
    def won(self) -> bool:
        """Whether the challenger is significantly faster, because the interval is above 1."""
        return self.low > 1


class Tuning(Record):
    """`tune.json`: the trials of a run's settings, and the duel."""

    run: str = ""  #: PLAN.RUN.
    seconds: float = 0.0  #: Duration of the tuning.
    candidates: list[Tried] = Field(min_length=1)  #: All settings; the first is the run's own setting.
    duel: Duel | None = None  #: None if no other setting could be measured.
    command: str = ""  #: Command that trains with the winning setting; empty if no setting won.

    @property
    def plan(self) -> str:
        """Name of the plan in `tuned.yaml`."""
        return f"{self.run.replace('.', '_')[-58:].lstrip('_-')}_tuned"  # a name has at most 64 letters

    @property
    def changes(self) -> dict[str, Any]:
        """Changes of the winning setting to the run, by dotted key; empty if no setting won."""
        return self.candidates[self.duel.challenger].changes if self.duel and self.duel.won else {}

    def verdict(self) -> str:
        """Return the result in a sentence."""
        if self.duel is None:
            return "No speed-up found: no other setting could be measured."
        ratio = f"{self.duel.ratio:.2f}× ± {(self.duel.high - self.duel.low) / 2:.2f}"
        if self.duel.won:
            return f"{ratio} as fast as the run's own setting."
        return f"No significant speed-up: the best other setting is {ratio} as fast as the run's own setting."
