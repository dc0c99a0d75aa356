"""Records: a typed class for each file that a stage writes, for its writer and its readers."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json

#: A number; JSON's null stands for one that is not finite.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None, when_used="json"),
]

#: A rate or a time that was measured: no mistaken unit makes it so great, and `true` is none.
Measured = Annotated[float, Field(ge=0, le=1e15, strict=True, allow_inf_nan=False)]

#: A number with a logarithm.
Positive = Annotated[Measured, Field(ge=1e-15)]


def _time(text: str) -> str:
    if not (time := dt.datetime.fromisoformat(text)).tzinfo:
        raise ValueError(f"{text}: expected a time with its zone")
    return time.astimezone(dt.UTC).isoformat(timespec="seconds")


#: A time in UTC, ISO 8601, to the second.
Time = Annotated[str, AfterValidator(_time)]


class Record(BaseModel):
    """A frozen record; keys of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def text(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=False)

    def write(self, path: str | Path) -> None:
        write_json(path, self.model_dump(mode="json", by_alias=True))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record's file; anything else in it is a `UserError`."""
        return cls.checked(read_json(path), str(path))

    @classmethod
    def checked(cls, values: Any, where: str) -> Self:
        """Return the record in `values`; `where` begins the message of a `UserError`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{where}: {key + ': ' if key else ''}{first['msg']}; not a {cls.__name__} record of this version: "
                "delete the file and run its stage again"
            ) from None
