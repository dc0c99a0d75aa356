"""Compare the collective operations of all ranks by PyTorch's own analysis (`torch.distributed.flight_recorder`).

`supervisor.py` runs this module in a process of its own, because the analysis is private to PyTorch: it may fail, print
text, or never end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder.components.builder import build_db

from dlscale.extensions.hangs.inside import operation


def mismatches(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each process group, the first operation that differs between the group's ranks.

    `called` is the operation, `missing` lists the ranks that did not begin the operation, and `others` maps ranks to
    the operations that they began instead.

    Parameters
    ----------
    reports
        Reports of `inside.Reporter` with entries of the Flight Recorder.
    """
    dumps = {}
    for report in reports:
        entries = [{**entry, "process_group": tuple(entry["process_group"])} for entry in report["entries"]]
        # The recorder of gloo lacks the names of groups, so they come from the report.
        groups = {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, (description, ranks) in report["groups"].items()
        }
        own = {"rank": report["rank"], "entries": entries, "version": report["version"], "pg_config": groups}
        dumps[str(report["rank"])] = own
    options = argparse.Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=1)
    found = dict[str, dict[str, Any]]()
    for each in build_db(dumps, options, reports[0]["version"]).collectives:
        others = {str(rank): _called(other) for rank, other in (each.mismatch_collectives or {}).items()}
        if (others or each.missing_ranks) and each.group_id not in found:
            missing = sorted(each.missing_ranks or ())
            found[each.group_id] = {"called": _called(each), "missing": missing, "others": others}
    return list(found.values())


def _called(collective: Any) -> str:
    entry = {"profiling_name": collective.collective_name, "frames": collective.collective_frames}
    return operation({**entry, "collective_seq_id": collective.collective_seq_id})


if __name__ == "__main__":
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    print(json.dumps(mismatches([json.loads(text) for text in texts])))
