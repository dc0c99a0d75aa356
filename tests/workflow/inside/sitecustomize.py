"""Write the names of a stage's imported modules when the stage ends; Python imports this file at its start.

Only modules of dlscale and of the external study are written.
"""

import atexit
import json
import os
import sys
from pathlib import Path


def _write() -> None:
    found = sorted(name for name in sys.modules if name.split(".")[0] in ("dlscale", "waves", "waves_data"))
    if "dlscale.cli" in found and len(sys.argv) > 1:
        text = json.dumps(
            {"arguments": [word for word in sys.argv[1:] if not word.startswith("--study=")], "modules": found}
        )
        Path(os.environ["IMPORTS"], f"{os.getpid()}.json").write_text(text)


if "IMPORTS" in os.environ:
    atexit.register(_write)
