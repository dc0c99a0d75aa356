"""TensorBoard's event files: writers of a run's, and a reader of any program's."""

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

NAME = "tensorboard"  #: Folder in a run's folder.
LAST = ".last"  #: Suffix of the file that is written once, at a run's end.


def writer(folder: Path, step: int = -1) -> SummaryWriter:
    """Return a writer of event files in `folder`, in place of older ones, or going on after a step."""
    from torch.utils.tensorboard import SummaryWriter

    for each in (folder, *folder.parents):  # up to the run's folder of all event files
        make_folder(each)
        if each.name == NAME or NAME not in folder.parts:
            break
    for file in files(folder):
        if step < 0 or file.name.endswith(LAST):
            file.unlink()
    _print_no_traceback()
    return SummaryWriter(str(folder), purge_step=step + 1)


def last_writer(folder: Path) -> SummaryWriter:
    """Return a writer of what is known at a run's end, in a file of its own beside the others."""
    from torch.utils.tensorboard import SummaryWriter

    _print_no_traceback()
    return SummaryWriter(str(folder), filename_suffix=LAST)


@functools.cache
def _print_no_traceback() -> None:
    """Keep quiet when TensorBoard's thread fails: the writer raises the same error where it is used or closed."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if type(failed.thread).__name__ != "_AsyncWriterThread":
            before(failed)

    threading.excepthook = hook


def files(folder: Path) -> list[Path]:
    """Return the event files in `folder`."""
    return [*folder.glob("events.out.tfevents.*")]


def write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Show these scalars in `folder`, in place of older ones; None is left out."""
    with writer(folder) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)


def events(path: Path) -> Iterator[Event]:
    """Yield a file's events, one at a time in memory; half a record at its end, of a killed writer, is left out.

    A `UserError` is raised for a file that is damaged, holds no event, or is no event file.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    expected, read = "expected an event file of TensorBoard, events.out.tfevents.*", 0
    with open(path, "rb", opener=open_regular) as file:
        while len(head := file.read(12)) == 12:  # length and its checksum, as many bytes and theirs
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
                raise UserError(f"{path}: record {read} is damaged: copy the file again; {expected}")
            try:
                event = Event.FromString(data)
            except DecodeError:
                raise UserError(f"{path}: record {read} is no event; {expected}") from None
            yield event  # of a tensor nothing is made: it may claim to be larger than memory
    if not read and head:
        raise UserError(f"{path}: not an event file of TensorBoard, or cut short ({head!r}); {expected}")
    if not read:
        raise UserError(f"{path}: holds no event; {expected}")


def is_restart(event: Event) -> bool:
    """Return whether earlier points of the folder from the event's step on are void, as TensorBoard has it."""
    return event.HasField("session_log") and event.session_log.status == event.session_log.START


def scalar(value: Summary.Value) -> float | None:
    """Return the number in a summary's value, written by either generation of programs; None if it is none."""
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
