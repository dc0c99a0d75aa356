"""Acquisition, preprocessing, storage, sampling and loaders."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def _writable(folder: str) -> bool:
    path = Path(os.path.expanduser(folder))  # noqa: PTH111 - pathlib's raises where there is no home
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return os.access(nearest, os.W_OK)


# Numba keeps the code that it compiled beside a module, or in the user's cache. In an image there may be neither; then
# it gets a folder of this process's own: one that others can guess could hold the code of others.
if "NUMBA_CACHE_DIR" not in os.environ and not any(
    map(_writable, (str(Path(__file__).parent / "__pycache__"), "~/.cache/numba"))
):
    os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="dlscale-numba-")
    atexit.register(shutil.rmtree, os.environ["NUMBA_CACHE_DIR"], ignore_errors=True)
