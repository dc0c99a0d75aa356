"""Settings of the loader `dali`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlscale.core.schema import Few, Workers
from dlscale.data.loaders import Reading


class DaliLoader(Reading):
    """NVIDIA DALI (`pip install dlscale[dali]`)."""

    kind: Literal["dali"]
    reader: Literal["h5py", "numpy"] = Field(
        "h5py",
        description="Reader of samples on grids. h5py: processes read the files. numpy: DALI's threads read boxes of "
        "`.npy` mirrors of volumes, which are made once if they are missing (docs/ladder.md).",
    )
    workers: Annotated[Workers, Field(ge=1)] = Field(
        2,
        description="Number of threads of the pipeline. For samples on grids with `reader: h5py`, also number of "
        "processes that read.",
    )
    prefetch: Few = Field(2, description="Batches that the loader keeps ready.")
