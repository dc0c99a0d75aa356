"""Base class of records, which stages write as JSON, and types of the values in records."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json

#: Number; NaN and infinities are null in JSON.
Number = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None, when_used="json"),
]

#: Measured rate or time, not a boolean. The bound only catches absurd values, not values in a wrong unit.
Measured = Annotated[float, Field(ge=0, le=1e15, strict=True, allow_inf_nan=False)]

#: Measured value above zero, so that its logarithm is finite.
Positive = Annotated[Measured, Field(ge=1e-15)]


def _time(text: str) -> str:
    if not (time := dt.datetime.fromisoformat(text)).tzinfo:
        raise ValueError(f"{text}: expected a time with a time zone")
    return time.astimezone(dt.UTC).isoformat(timespec="seconds")


#: Time in UTC, ISO 8601, to the second.
Time = Annotated[str, AfterValidator(_time)]


class Record(BaseModel):
    """Frozen record; unknown keys are ignored, because a later version may have written the file."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False)

    def text(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=False)

    def write(self, path: str | Path) -> None:
        write_json(path, self.model_dump(mode="json", by_alias=True))

    def sealed(self) -> Self:
        """Return a copy whose field `own` has the SHA-256 of all other fields; the class must have this field."""
        content = self.model_copy(update={"own": ""}).text()
        return self.model_copy(update={"own": hashlib.sha256(content.encode()).hexdigest()})

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record from a file; raise a `UserError` if the file does not contain such a record."""
        return cls.checked(read_json(path), str(path))

    @classmethod
    def checked(cls, values: Any, where: str) -> Self:
        """Validate `values` as a record of this class.

        Raise a `UserError` that begins with `where` if `values` are not such a record.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UserError(
                ": ".join(filter(None, (where, ".".join(map(str, first["loc"])), first["msg"])))
                + f"; not a {cls.__name__} record of this version; delete the file and run the stage again"
            ) from None
