"""Damage of files: changed bytes, and changed values inside of formats that have a structure or checksums."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import json
import re
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import yaml
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

#: Text that is replaced by deeply nested brackets, which Python's own writers refuse.
DEEP = "@deep@"
#: Values that readers must expect in place of any other value.
TRAPS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**400, 1e308, 5e-324, -0.5, float("nan"), float("inf")),
    *(
        "",
        " ",
        "1",
        "NaN",
        "null",
        "no",
        "1e400",
        "1_000",
        "12:30",
        "2001-01-01",
        "../x",
        "~",
        "a" * 100_000,
        "ä\u202e",
    ),
    *("\0", "\ud800", "a\nb", "{x}", "%s", "=1+1", "https://u:p@h/x", [], {}, [[]], [None], {"": None}, {"a": 1}, DEEP),
)
#: Numbers that overwrite the bytes of sizes and offsets.
NUMBERS = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
DIGITS = (b"0", b"-1", b"65536", b"4294967295", b"1e999", b"9" * 30, b"9" * 5000, b"[" * 3000, b"null", b"''")


#: Errors of libraries that cannot write a value; the bytes are changed instead.
UNFIT = (ValueError, TypeError, KeyError, IndexError, OverflowError, OSError, sqlite3.Error, RuntimeError)


def damage(file: Path, other: bytes, random: Random) -> None:
    """Damage a file in place; `other` is the content of another file, parts of which may be spliced in."""
    change = next((FORMATS[part] for part in FORMATS if part in file.name), None)
    with contextlib.suppress(*UNFIT):
        if change and random.random() < 0.6:
            return change(file, random)
    file.write_bytes(scrambled(file.read_bytes(), other, random))


def scrambled(content: bytes, other: bytes, random: Random) -> bytes:
    """Return a file's content with some bytes changed, moved, overwritten, repeated, spliced or cut off.

    Most changes are in the first 2048 bytes of a large file, which contain offsets and sizes in most formats.
    """
    data = bytearray(content or b"\0")
    size = len(data) if random.random() < 0.5 else min(len(data), 2048)
    start = random.randrange(size)
    stop = min(len(data), start + random.randrange(1, 64))
    match random.randrange(11):
        case 0:
            del data[start:]
        case 1:
            at = random.randrange(len(data))
            data[start:stop], data[at : at + stop - start] = data[at : at + stop - start], data[start:stop]
        case 2:
            data[start:stop] = random.choice([b"\0", b"\xff"]) * (stop - start)
        case 3:
            data[start:start] = data[start:stop] * random.choice([1, 1, 100])
        case 4:
            at = random.randrange(len(other) + 1)
            data[start:stop] = other[at : at + random.choice([8, 64, len(other)])]
        case 5 | 6:
            width = random.choice([1, 2, 4, 8])
            number = random.choice(NUMBERS) % 2 ** (8 * width)
            data[start : start + width] = number.to_bytes(width, random.choice(["little", "big"]))
        case 7 if found := [*re.finditer(rb"\d+", data[:4096])]:
            data[slice(*random.choice(found).span())] = random.choice(DIGITS)
        case _:
            for _ in range(random.randrange(1, 9)):
                at = random.randrange(size)
                data[at] = random.randrange(256) if random.random() < 0.5 else data[at] ^ 1 << random.randrange(8)
    return bytes(data)


def changed(document: Any, random: Random) -> Any:
    """Return a document of mappings and lists with up to three changed values or keys."""
    root = [document]
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = _places(root)
        holder, key = random.choice(places)
        match random.randrange(9):
            case 0 if len(places) > 1 and holder is not root:
                del holder[key]
            case 1:
                elsewhere, there = random.choice(places)
                if elsewhere is not root and holder is not root and not isinstance(holder[key], dict | list):
                    holder[key] = elsewhere[there] if not isinstance(elsewhere[there], dict | list) else None
            case 2 if isinstance(key, str):
                holder[key[:-1] if random.random() < 0.5 else key + "x"] = holder.pop(key)
            case 3 if isinstance(holder[key], int | float):
                holder[key] *= random.choice([-1, 0, 1e9, 1e-9, 10**20, 1.5])
            case 4 if isinstance(holder[key], list):
                holder[key] = holder[key][:1] * random.choice([0, 2, 1000])
            case 5 if isinstance(holder[key], str):
                holder[key] = scrambled(holder[key].encode(), b"", random).decode(errors="replace")
            case _:
                holder[key] = random.choice(TRAPS)
    return root[0]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return holder and key of each value in a document."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def _document(parse: Callable[[str], Any], text: Callable[[Any], str]) -> Callable[[Path, Random], None]:
    """Return a function that changes the values in a text file."""

    def change(file: Path, random: Random) -> None:
        changed_text = re.sub(f"[\"']?{DEEP}[\"']?", "[" * 20_000, text(changed(parse(file.read_text()), random)))
        file.write_bytes(changed_text.encode(errors="surrogatepass"))

    return change


def _table(rows: Any, mark: str) -> str:
    return "\n".join(mark.join(map(str, row if isinstance(row, list) else [row])) for row in rows) + "\n"


def _zip(file: Path, random: Random) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice([*members])
    members[name] = scrambled(members[name], random.choice([*members.values()]), random)
    with zipfile.ZipFile(file, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for each in random.sample([*members], len(members)) if random.random() < 0.2 else members:
            archive.writestr(each, members[each])


def _gzip(file: Path, random: Random) -> None:
    file.write_bytes(gzip.compress(scrambled(gzip.decompress(file.read_bytes()), b"", random), 1))


def _npy(file: Path, random: Random) -> None:
    values, dtype = (
        np.load(file),
        random.choice(["f2", ">f8", "c16", "U3", "M8[s]", "?", "i8", "O", "V8", "f4,i4", "f4"]),
    )
    shape = random.choice([values.shape, (0, *values.shape), values.shape[::-1], (values.size,), (1, *values.shape)])
    changed_values = np.zeros(shape, dtype)
    if dtype == "f4":
        changed_values.flat[:1] = random.choice([np.nan, np.inf, -np.inf, 1e38, -1e-40])
    np.save(file, changed_values)


def _events(file: Path, random: Random) -> None:
    """Change one record of an event file, and write right checksums."""
    content, records = file.read_bytes(), list[bytes]()
    while content:
        length = 12 + int.from_bytes(content[:8], "little")
        records, content = [*records, content[12:length]], content[length + 4 :]
    at = random.randrange(len(records))
    records[at] = scrambled(records[at], random.choice(records), random)
    parts = [part for each in records for part in (len(each).to_bytes(8, "little"), each)]
    file.write_bytes(b"".join(part + masked_crc32c(part).to_bytes(4, "little") for part in parts))


def _sqlite(file: Path, random: Random) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        found = connection.execute("SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c")
        table, column = random.choice(found.fetchall())
        commands = [f"ALTER TABLE {table} RENAME COLUMN {column} TO x", f"DROP TABLE {table}"]
        commands += [
            f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {which}" for which in ("1", "rowid % 2", "rowid = 1")
        ]
        command = random.choice(commands)
        connection.execute(command, [random.choice([*NUMBERS[:-2], *TRAPS, b"\xff\0"])] if "?" in command else [])


def _hdf5(file: Path, random: Random) -> None:
    """Change a dataset or an attribute of an HDF5 file with the library itself."""
    with h5py.File(file, "r+") as content:
        found = list[str]()
        content.visititems(lambda name, it: found.append(name) if isinstance(it, h5py.Dataset) else None)
        name, other = random.choice(found), random.choice(found)
        values, attributes = np.atleast_1d(content[name][()]), random.choice([content, content[name]]).attrs
        match random.randrange(6):
            case 0:
                content.move(name, f"{name}x")
            case 1 | 2:
                del content[name]
                link = random.choice(
                    [h5py.SoftLink(f"/{other}"), h5py.ExternalLink("x.h5", "/x"), {}, values.T, values[:1]]
                )
                zeros = np.zeros(
                    random.choice([(0,), (), (1, *values.shape)]), random.choice(["f2", "f8", "i1", "S3", "c8"])
                )
                content[name] = random.choice([link, zeros])
            case 3 if values.dtype.kind == "f":
                values.flat[random.randrange(values.size)] = random.choice([np.nan, np.inf, 1e30, -1.0, 0.0])
                content[name][...] = values
            case 4 if attributes:
                del attributes[random.choice([*attributes])]
            case _:
                key = random.choice([*attributes, "units", "scale_factor", "calendar", "dimensions", "_FillValue"])
                attributes[key] = random.choice([*TRAPS[1:31], [], [1, 2], np.nan, "days since 1", b"\xff", [b"a"]])


#: Functions that change a file's content, by a part of the file's name.
FORMATS: dict[str, Callable[[Path, Random], None]] = {
    ".jsonl": _document(
        lambda text: [*map(json.loads, text.splitlines())], lambda rows: _table(map(json.dumps, rows), "")
    ),
    **dict.fromkeys(
        (".json", ".zarray", ".zattrs", ".zgroup", ".zmetadata", ".doing", ".window", "loader.", "status.", "report."),
        _document(json.loads, json.dumps),
    ),
    **dict.fromkeys((".yaml", ".cff"), _document(yaml.safe_load, functools.partial(yaml.safe_dump, sort_keys=False))),
    ".csv": _document(lambda text: [*csv.reader(text.splitlines())], lambda rows: _table(rows, ",")),
    **dict.fromkeys(
        (".log", ".folded", "timed.", "health.", "turns.", "printed"),
        _document(lambda text: [line.split(" ") for line in text.splitlines()], lambda rows: _table(rows, " ")),
    ),
    **dict.fromkeys((".npz", ".pt"), _zip),
    **dict.fromkeys((".h5", ".netcdf4", ".packed"), _hdf5),
    **{".npy": _npy, ".gz": _gzip, ".tfevents": _events, ".sqlite": _sqlite},
}
