"""Reading TensorBoard's event files, whoever wrote them, with TensorBoard's own reader."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.errors import UserError
from dlscale.core.files import no_pipe

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

#: Greatest size of a record, bytes: one event, of which a picture is the largest.
LARGEST = 64 * 2**20

_EXPECTED = "expected an event file of TensorBoard, events.out.tfevents.*"


def events(path: Path) -> Iterator[Event]:
    """Yield a file's events, one at a time in memory. Half a record at its end is left out: its writer was killed.

    A `UserError` is raised for what is no event file, holds no event, or is damaged.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    no_pipe(path)
    count, read = len(ends(path)), 0
    try:
        # Of a tensor nothing is made here: it may claim to be larger than memory.
        for event in itertools.islice(LegacyEventFileLoader(str(path)).Load(), count):
            read += 1
            yield event
    except DecodeError:
        raise UserError(f"{path}: record {read + 1} is no event; {_EXPECTED}") from None
    if read < count:  # the reader ends at a wrong checksum as at the end of the file
        raise UserError(f"{path}: damaged: record {read + 1} of {count} has a wrong checksum; copy the file again")


def scalar(value: Summary.Value) -> float | None:
    """Return the number in a value of a summary, as programs of either generation write it; None if it is none."""
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT

    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor
    forms = {DT_FLOAT: ("<f", tensor.float_val), DT_DOUBLE: ("<d", tensor.double_val)}
    if not value.HasField("tensor") or tensor.tensor_shape.dim or tensor.dtype not in forms:
        return None
    form, values = forms[tensor.dtype]
    if len(tensor.tensor_content) == struct.calcsize(form):
        return float(struct.unpack(form, tensor.tensor_content)[0])
    return float(values[0]) if len(values) == 1 else None


def ends(path: Path) -> list[int]:
    """Return where each record ends (length, its checksum, as many bytes, their checksum), reading none of them."""
    found, size = list[int](), path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > LARGEST:
                raise UserError(f"{path}: record {len(found) + 1} claims to have {length} bytes; {_EXPECTED}")
            end = file.tell() + length + 4
            if end > size:
                break
            file.seek(end)
            found.append(end)
    if not found:
        raise UserError(f"{path}: holds no event; {_EXPECTED}")
    return found
