"""What a record is, and the one that all stages write: what they are doing.

Records of results are in `dlscale.core.records`, on which no stage depends that writes none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json


class Record(BaseModel):
    """A frozen record. Readers leave alone the keys that only later versions know."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def text(self) -> str:
        """Return the record as one line of JSON."""
        return self.model_dump_json(by_alias=True, exclude_none=False)

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, whole or not at all."""
        write_json(path, self.model_dump(mode="json", by_alias=True))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read what `write` wrote; anything else in the file is a `UserError`."""
        return cls.checked(read_json(path), str(path))

    @classmethod
    def checked(cls, values: Any, where: str) -> Self:
        """Return the record in `values`; `where` names the place in the message of the `UserError`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{where}: {key + ': ' if key else ''}{first['msg']}; not a {cls.__name__} record of this version: "
                "delete the file and run its stage again"
            ) from None


class Doing(Record):
    """How far a stage that runs is: a file beside its log (`dlscale.core.progress`)."""

    what: str
    part: bool = False  #: Whether it counts but a part of its stage, which others may follow.
    done: int = 0
    total: int | None = None  #: None: not known.
    unit: str = ""
    left: float | None = None  #: Seconds to the end, as far as one sees.
    values: dict[str, float] = {}  #: What goes with it by name: loss, samples/s.
    host: str = ""
    place: str = ""  #: Where its `pid` is a number: the host, and on Linux the name space.
    pid: int = 0
    job: str | None = None  #: Slurm's number.
    time: float = 0.0  #: When this was written, seconds since 1970-01-01 UTC.
