"""Records of tuning: what stage `tune` writes as `tune.json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dlscale.core.record import Record


class Tried(Record):
    """A setting that was tried."""

    changes: dict[str, Any]  #: What it changes of the run's own setting, by dotted key; of that one itself nothing.
    rates: list[list[float]] = []  #: Samples/s of its trials, by rung; the duel is not among them.
    problem: str | None = None  #: Why it was dropped, if not for its speed.


class Duel(Record):
    """The best of the other settings (`challenger`) against the run's own, measured in turns."""

    challenger: int  #: Its place among the settings that were tried.
    rates: list[tuple[float, float]]  #: Samples/s of the challenger and of the run's own setting, by round.
    ratio: float  #: How many times as fast the challenger is.
    low: float  #: Of the 95 % interval of the ratio (`dlscale.core.noise.ratio_interval`).
    high: float

    @property
    def won(self) -> bool:
        """Whether the challenger is faster beyond the noise."""
        return self.low > 1


class Tuning(Record):
    """`tune.json`: the trials of a run's settings, and the duel."""

    run: str = ""  #: PLAN.RUN.
    seconds: float = 0.0  #: That all of it took.
    candidates: list[Tried] = Field(min_length=1)  #: The first one is the run's own setting.
    duel: Duel | None = None  #: None where no other setting could be measured.
    command: str = ""  #: That trains with what won; nothing if nothing did.

    @property
    def plan(self) -> str:
        """The plan that `tuned.yaml` adds."""
        return f"{self.run.replace('.', '_')[-58:].lstrip('_-')}_tuned"  # a name has at most 64 letters

    @property
    def changes(self) -> dict[str, Any]:
        """Changes of the winner to the run, by dotted key; empty unless a setting won."""
        return self.candidates[self.duel.challenger].changes if self.duel and self.duel.won else {}

    def verdict(self) -> str:
        """Return what came of it, in a sentence."""
        if self.duel is None:
            return "Nothing to gain: no other setting could be measured."
        ratio = f"{self.duel.ratio:.2f}× ± {(self.duel.high - self.duel.low) / 2:.2f}"
        if self.duel.won:
            return f"{ratio} as fast as the run's own setting."
        return f"Nothing to gain: the best other setting is {ratio} as fast as the run's own."
