"""Loaders: one module each, with the same `build`, over the one sample stream."""

import os
import tempfile
from pathlib import Path

# Numba keeps the code that it compiled for a module beside it. Where that cannot be written, as in an image, there may
# be no home to take its place, either.
if not os.access(Path(__file__).parent, os.W_OK):
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"dlscale-numba-{os.getuid()}"))
