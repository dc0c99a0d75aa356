"""Databases of given events, with the tables that `nsys export --type sqlite` writes according to NVIDIA.

Source: "SQLite Schema Reference" of https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html. A real database of
nsys 2022.4 has the same `NVTX_EVENTS`. A table exists only if it has a row.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Differences of each version of nsys. `names`: column with the names of NVTX ranges (`mixed`: both columns); `lacks`:
#: missing tables and columns; `more`: additional columns.
VERSIONS: dict[str, dict[str, Any]] = {
    "2020": {
        "names": "text",
        "lacks": {"CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "graphNodeId", "jsonText", "endGlobalTid"},
        "more": {},
    },
    "2022": {"names": "textId", "lacks": set(), "more": {}},
    "2025": {
        "names": "mixed",
        "lacks": {"jsonText"},
        "more": {"CUPTI_ACTIVITY_KIND_KERNEL": "greenContextId INTEGER, graphId INTEGER, clusterX INTEGER"},
    },
}
DEVICE = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,"
DEVICE += " streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,"
SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,"
    " color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,"
    " uint64Value INTEGER, jsonText TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{DEVICE} demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,"
    " gridX INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{DEVICE} bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER,"
    " dstKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{DEVICE} value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER,"
    " memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,"
    " globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{DEVICE} syncType INTEGER NOT NULL, eventId INTEGER NOT NULL",
}
PROCESS = 281605453119488  # globalPid of a real recording; a globalTid has the thread in its lower 24 bits
SYNC_CALLS = {1: "cudaEventSynchronize_v3020", 2: "cudaStreamWaitEvent_v3020", 3: "cudaStreamSynchronize_v3020"}
SYNC_CALLS[4] = "cudaDeviceSynchronize_v3020"


@dataclass
class Recording:
    """Recorded events of a process. Times are in ns, and threads are small numbers."""

    ranges: list[tuple[int, int, str, int, bool]] = field(default_factory=list)  #: start, end, name, thread, pushed
    calls: list[tuple[int, int, int, int, str]] = field(default_factory=list)  #: start, end, thread, correlation, name
    kernels: list[tuple[int, int, int, str]] = field(default_factory=list)  #: start, end, correlation, name
    #: start, end, correlation, bytes, copyKind, srcKind, dstKind
    copies: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    memsets: list[tuple[int, int, int]] = field(default_factory=list)  #: start, end, correlation
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)  #: start, end, syncType, thread

    def write(self, path: Path, version: str = "2022") -> Path:
        strings: dict[str, int] = {}
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMA}
        differs = VERSIONS[version]

        def text(value: str) -> int:
            return strings.setdefault(value, 100 + len(strings))

        def device(start: int, end: int, correlation: int, **more: Any) -> dict[str, Any]:
            shared = {"start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7}
            return {**shared, "correlationId": correlation, "globalPid": PROCESS, **more}

        for number, (start, end, name, thread, pushed) in enumerate(self.ranges):
            here = differs["names"] == "text" or (differs["names"] == "mixed" and number % 2)
            named = {"text": name} if here else {"textId": text(name)}
            row = {"start": start, "end": end, "eventType": 59 if pushed else 60, "globalTid": PROCESS + thread}
            tables["NVTX_EVENTS"].append(row | named)
        # Events that must not count as ranges: a domain, a mark, a range without end, and a library's range.
        tables["NVTX_EVENTS"].append({"start": 0, "eventType": 75, "text": "NCCL", "globalTid": PROCESS})
        tables["NVTX_EVENTS"].append({"start": 1, "eventType": 34, "text": "step", "globalTid": PROCESS})
        tables["NVTX_EVENTS"].append({"start": 2, "eventType": 59, "text": "step", "globalTid": PROCESS + 99})
        tables["NVTX_EVENTS"].append(
            {"start": 1, "end": 9, "eventType": 59, "text": "ncclAllReduce", "globalTid": PROCESS}
        )
        calls = [*self.calls, *((start, end, thread, 0, SYNC_CALLS[kind]) for start, end, kind, thread in self.waits)]
        for start, end, thread, correlation, name in calls:
            row = {"start": start, "end": end, "eventClass": 0, "globalTid": PROCESS + thread}
            named = {"correlationId": correlation, "nameId": text(name), "returnValue": 0}
            tables["CUPTI_ACTIVITY_KIND_RUNTIME"].append(row | named)
        for start, end, correlation, name in self.kernels:
            names = {"demangledName": text(name), "shortName": text(name.split("<")[0])}
            tables["CUPTI_ACTIVITY_KIND_KERNEL"].append(device(start, end, correlation, **names))
        for start, end, correlation, size, kind, source, target in self.copies:
            more = {"bytes": size, "copyKind": kind, "srcKind": source, "dstKind": target}
            tables["CUPTI_ACTIVITY_KIND_MEMCPY"].append(device(start, end, correlation, **more))
        for start, end, correlation in self.memsets:
            tables["CUPTI_ACTIVITY_KIND_MEMSET"].append(device(start, end, correlation, value=0, bytes=4))
        for start, end, kind, _ in self.waits:
            tables["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"].append(device(start, end, 0, syncType=kind, eventId=0))
        tables["StringIds"] = [{"id": number, "value": value} for value, number in strings.items()]

        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            for table, columns in SCHEMA.items():
                if not tables[table] or table in differs["lacks"]:
                    continue
                definitions = [one.strip() for one in columns.split(",")]
                definitions = [one for one in definitions if one.split()[0] not in differs["lacks"]]
                definitions += [differs["more"][table]] if table in differs["more"] else []
                connection.execute(f"CREATE TABLE {table} ({', '.join(definitions)})")
                for row in tables[table]:
                    names = ", ".join(row)
                    connection.execute(
                        f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", [*row.values()]
                    )
        connection.close()
        return path
