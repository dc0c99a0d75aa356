"""Record of the headroom of a program's loader."""

from __future__ import annotations

import math

from dlscale.core.noise import interval
from dlscale.core.record import Measured, Positive, Record
from dlscale.core.text import number

#: Minimum speed-up that is reported as a gain.
MIN_GAIN = 1.05


class Headroom(Record):
    """Speed of a program with its loader and with a loader that costs nothing, timed in turns."""

    turns: list[tuple[Positive, Positive]]  #: Batches/s of each plain turn and of the replayed turn after it.
    batches: int  #: Minimum number of kept batches, over all processes and turns.
    bytes: int  #: Maximum size of the kept batches of a process.
    processes: int
    seconds: Measured  #: Duration of the timing, s.
    copied: bool = False  #: Whether each replayed batch was copied, because the program changes its batches.
    others: bool = False  #: Whether the program also used loaders that were not replayed.

    @property
    def gain(self) -> tuple[float, float, float]:
        """Speed-up with a loader that costs nothing, and the limits of its 95 % interval."""
        centre, reach = interval([math.log(replayed / plain) for plain, replayed in self.turns])
        return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)

    @property
    def significant(self) -> bool:
        gain, low, _ = self.gain
        return low > 1 and gain >= MIN_GAIN

    @property
    def text(self) -> str:  # type: ignore[override]
        """The result in one sentence."""
        gain, low, high = self.gain
        ratio = f"{number(gain)}× (95 % interval {number(low)} to {number(high)})"
        rest = "; other loaders kept loading, so more may be possible" if self.others else ""
        if not self.significant:
            return f"no significant gain by a faster loader: if loading costs nothing, the speed is {ratio}{rest}"
        return f"a faster loader gains {'about' if self.others else 'at most'} {ratio}{rest}"
