"""Writers and a reader of TensorBoard event files."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.errors import UserError
from dlscale.core.files import make_folder, open_regular

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"  #: Name of the folder for event files in a run's folder.
LAST = ".last"  #: Suffix of an event file that is written only once, at the end of a run.


def writer(folder: Path, step: int = -1) -> SummaryWriter:
    """Return a writer of event files in `folder`.

    Without `step`, the writer replaces all older files. With a `step`, it only replaces the file with suffix `LAST` and
    continues after this step.
    """
    from torch.utils.tensorboard import SummaryWriter

    for each in (folder, *folder.parents):  # up to the run's `tensorboard` folder
        make_folder(each)
        if each.name == NAME or NAME not in folder.parts:
            break
    for file in files(folder):
        if step < 0 or file.name.endswith(LAST):
            file.unlink()
    _print_no_traceback()
    return SummaryWriter(str(folder), purge_step=step + 1)


def last_writer(folder: Path) -> SummaryWriter:
    """Return a writer of a separate event file for values at the end of a run."""
    from torch.utils.tensorboard import SummaryWriter

    _print_no_traceback()
    return SummaryWriter(str(folder), filename_suffix=LAST)


@functools.cache
def _print_no_traceback() -> None:
    """Suppress the traceback of TensorBoard's thread.

    The traceback is redundant, because the writer raises the same error at its next use.
    """
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if type(failed.thread).__name__ != "_AsyncWriterThread":
            before(failed)

    threading.excepthook = hook


def files(folder: Path) -> list[Path]:
    """Return the event files in `folder`."""
    return [*folder.glob("events.out.tfevents.*")]


def write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Write scalars to `folder`, replacing older files; skip None."""
    with writer(folder) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)


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
                    f"{path}: not an event file of TensorBoard (it begins with {head!r}); {expected}; write the curves "
                    "of a CSV or JSON file with PyTorch's SummaryWriter.add_scalar(tag, value, step)"
                )
            if not whole or masked_crc32c(data) != struct.unpack("<I", checksum)[0]:
                raise UserError(f"{path}: record {read} is damaged; copy the file again; {expected}")
            try:
                event = Event.FromString(data)
            except DecodeError:
                raise UserError(f"{path}: record {read} is not an event; {expected}") from None
            yield event  # with encoded tensors, because a header may claim a tensor that exceeds the memory
    if not read and head:
        raise UserError(f"{path}: not an event file of TensorBoard, or cut short ({head!r}); {expected}")
    if not read:
        raise UserError(f"{path}: has no events; {expected}")


def is_restart(event: Event) -> bool:
    """Return whether an event marks a restart.

    At a restart, TensorBoard discards the earlier points of the folder that have the event's step or a later one.
    """
    return event.HasField("session_log") and event.session_log.status == event.session_log.START


def scalar(value: Summary.Value) -> float | None:
    """Return the number in a summary's value, from `simple_value` or a scalar tensor.

    Return None for other values.
    """
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor
    if not value.HasField("tensor") or tensor.tensor_shape.dim or tensor.dtype not in (DT_FLOAT, DT_DOUBLE):
        return None
    try:
        return float(make_ndarray(tensor))
    except ValueError:
        return None
