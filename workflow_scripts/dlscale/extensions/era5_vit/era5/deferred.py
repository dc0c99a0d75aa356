"""File for HDF5 that defers write errors."""

from __future__ import annotations

import io
import os
from typing import Any


class DeferredErrorFile(io.FileIO):
    """New file for libraries, such as HDF5, that crash on write errors: the error is raised when the context ends.

    After an error, further writes have no effect. The library must close the file before the context ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "w+")
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view, end = memoryview(data).cast("B"), self.tell() + memoryview(data).nbytes
        try:
            while self._error is None and (left := end - self.tell()):
                super().write(view[-left:])
        except OSError as error:
            self._error = error
        self.seek(end)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return self.tell() if size is None else size

    def __exit__(self, *details: object) -> None:
        self.close()
        if self._error is not None:
            raise self._error
