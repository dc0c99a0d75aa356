"""Refuse files that a user's data code opens, but that the kind's method `parts` does not name.

The workflow makes data again only if a named file changes, and would miss a change of any other file.
"""

from __future__ import annotations

import contextlib
import os
import re
import site
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py

from dlscale.config.dataset import DatasetSettings, dataset_type
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.settings import read_settings, validate

#: Environment variables that name folders of caches and settings, in which any file may be opened.
_CACHES = re.compile(r".*CACHE.*|XDG_CONFIG_HOME|MPLCONFIGDIR|TORCH_HOME|HF_HOME")
#: Suffixes of code files, which may be opened because fingerprints cover the modules of a study.
_CODE = (".py", ".pyc", ".pyi", ".so")


class _Guard:
    #: Current guard, if any. A single audit hook calls it, because Python cannot remove hooks.
    active: _Guard | None = None
    hooked = False

    def __init__(self, named: Iterable[str | Path]) -> None:
        places: list[str | Path] = [
            sys.prefix,
            sys.base_prefix,
            *site.getsitepackages(),
            site.getusersitepackages(),
            registry.PACKAGE,
        ]
        places += ["/proc", "/sys", "/dev", "/etc", "/usr/lib", "/usr/share", *named]
        places += [value for name, value in os.environ.items() if value and _CACHES.fullmatch(name)]
        self._places = [Path(os.path.realpath(place)) for place in places]
        self._temporary = Path(os.path.realpath(tempfile.gettempdir()))
        self._home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111 - Path.home fails for unknown users
        self._began, self._written = time.time(), set[Path]()
        self.refused: UserError | None = None

    def judge(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise a `UserError` if an audit event of Python opens a user's file that `parts` does not name."""
        path = arguments[0] if arguments else None
        if event not in ("open", "sqlite3.connect", "os.rename") or not isinstance(path, str | bytes | os.PathLike):
            return
        real = Path(os.path.realpath(os.fsdecode(path)))
        if event == "os.rename":
            self._written |= {Path(os.path.realpath(os.fsdecode(arguments[1])))} if real in self._written else set()
            return
        flags = arguments[2] if event == "open" else os.O_RDONLY
        with contextlib.suppress(OSError):
            made = bool(flags & os.O_TRUNC) or (flags & os.O_CREAT and not real.exists())
            if made or flags & os.O_ACCMODE == os.O_WRONLY:
                self._written |= {real} if made else set()
            elif self._is_unseen(real):
                self.refused = UserError(
                    f"{os.fsdecode(path)}: opened by the study's own code, but not named in `parts`, so changes of "
                    "this file would be ignored; let `parts` return a `RawFile` for the file, and open the file by its "
                    "path in `paths`; or use kind `starter`, for one input array and one target array (docs/adding.md)"
                )
                raise self.refused

    def _is_unseen(self, real: Path) -> bool:
        status = real.stat()
        if not stat.S_ISREG(status.st_mode) or real.suffix in _CODE or real in self._written:
            return False
        hidden = real.is_relative_to(self._home) and real.relative_to(self._home).parts[0].startswith(".")
        fresh = real.is_relative_to(self._temporary) and status.st_ctime >= self._began
        return not (hidden or fresh or any(map(real.is_relative_to, self._places)))


@contextlib.contextmanager
def only_named(kind: str, named: Iterable[str | Path]) -> Iterator[None]:
    """Refuse, within this context, to open users' files that are not in `named`.

    `named` has files and folders; all files in these folders are allowed. Kinds that dlscale ships are not checked.
    """
    if kind in registry.shipped_kinds():
        yield
        return
    if not _Guard.hooked:
        sys.addaudithook(lambda event, arguments: _Guard.active.judge(event, arguments) if _Guard.active else None)
        _Guard.hooked = True
    guard, before, init = _Guard(named), _Guard.active, h5py.File.__init__

    def checked(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if mode[0] in "wx" else os.O_RDONLY
        guard.judge("open", (name, mode, flags))  # HDF5 opens files without an audit event
        init(self, name, mode, *args, **kwargs)

    try:
        _Guard.active, h5py.File.__init__ = guard, checked
        yield
        if guard.refused:  # even if the study's code caught the error
            raise guard.refused
    finally:
        _Guard.active, h5py.File.__init__ = before, init


def load_dataset(config: str | Path) -> DatasetSettings:
    """Read a dataset's settings from a file, or from a JSON string.

    If dlscale does not ship the kind, refuse users' files that the kind's module opens when it is imported.
    """
    raw, where = read_settings(config)
    with only_named(str(raw.get("kind")), []):
        kind = registry.kind(str(raw.get("kind")))
    # `dataset_type` imports the modules of all kinds, and users' modules may take seconds. A kind that dlscale ships
    # needs only its own module.
    shipped = kind.name in registry.shipped_kinds()
    dataset: DatasetSettings = validate(kind.Settings if shipped else dataset_type(), raw, where)
    return dataset
