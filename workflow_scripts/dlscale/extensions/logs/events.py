"""Read event files of TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.errors import UserError
from dlscale.core.files import open_regular

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary


def events(path: Path) -> Iterator[Event]:
    """Yield the events of a file, one at a time in memory.

    An incomplete last record, from a killed writer, is ignored. A file that is damaged, empty or not an event file
    raises a `UserError`.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    expected, read = "expected an event file of TensorBoard, events.out.tfevents.*", 0
    with open(path, "rb", opener=open_regular) as file:
        while len(head := file.read(12)) == 12:  # a record: length, checksum of the length, data, checksum
            length, mark = struct.unpack("<QI", head)
            whole = masked_crc32c(head[:8]) == mark
            data, checksum = file.read(length if whole else 0), file.read(4)
            if len(checksum) < 4:
                break
            read += 1
            if not whole and read == 1:
                raise UserError(
                    f"{path}: not an event file of TensorBoard (it begins with {head!r}); {expected}. Convert a "
                    "CSV or JSON file with PyTorch's SummaryWriter.add_scalar(tag, value, step)"
                )
            if not whole or masked_crc32c(data) != struct.unpack("<I", checksum)[0]:
                raise UserError(f"{path}: record {read} is damaged; {expected}. Copy the file again")
            try:
                event = Event.FromString(data)
            except DecodeError:
                raise UserError(f"{path}: record {read} is not an event; {expected}") from None
            yield event  # its tensors stay encoded, because a header may claim a tensor larger than the memory
    if not read and head:
        raise UserError(f"{path}: not an event file of TensorBoard, or cut short ({head!r}); {expected}")
    if not read:
        raise UserError(f"{path}: has no events; {expected}")


def is_restart(event: Event) -> bool:
    """Return whether an event marks a restart.

    At a restart, TensorBoard discards the folder's earlier points whose step is the event's step or later.
    """
    return event.HasField("session_log") and event.session_log.status == event.session_log.START


def scalar(value: Summary.Value) -> float | None:
    """Return the number in a summary's value (`simple_value` or a scalar tensor); None if the value is not a number."""
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_HALF, DT_INT32, DT_INT64
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor
    kinds = (DT_FLOAT, DT_DOUBLE, DT_HALF, DT_INT32, DT_INT64)
    if not value.HasField("tensor") or tensor.tensor_shape.dim or tensor.dtype not in kinds:
        return None
    try:
        return float(make_ndarray(tensor))
    except ValueError:
        return None
