"""Records of the memory of a step."""

from __future__ import annotations

from dlscale.core.record import Record


class MemoryUse(Record):
    """Bytes on one device, by what they hold."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  #: Saved by autograd between forward and backward pass, the batch included.
    #: The greatest at one time: gradients come as activations go, and operators need some memory for a while.
    peak: int | None = None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


class Memory(Record):
    """Memory of one device, bytes: predicted before a step, and measured at each of its stages."""

    predicted: MemoryUse
    #: By stage (`set-up`, `forward`, `backward`, `step`): in use then, of the device; of a CPU, of the process.
    measured: dict[str, int] = {}
    peak: int | None = None  #: The greatest in use.
    device: int | None = None  #: That the device has.
