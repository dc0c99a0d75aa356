"""Which container image a stage runs in."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """The container image of a stage, as the workflow's first process found it.

    It travels in the environment, `DLSCALE_IMAGE`, to all that this process starts: nodes may know of no image.
    """

    engine: str
    name: str
    identity: str

    @staticmethod
    def read() -> Image | None:
        """Return the one in the environment, if there is one."""
        name, _, identity = os.environ.get("DLSCALE_IMAGE", "").partition("=")
        engine, _, image = name.partition(":")
        return Image(engine, image, identity) if engine and image and identity else None

    def write(self) -> None:
        """Put it into the environment."""
        os.environ["DLSCALE_IMAGE"] = f"{self.engine}:{self.name}={self.identity}"
