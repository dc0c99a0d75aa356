"""Study `program`: any external training program, unchanged, with its own model, loss and samples."""

from __future__ import annotations

from typing import Any, Literal

from dlscale.core.errors import Refused
from dlscale.core.schema import Strict
from dlscale.studies.base import SampleLoss, Study


class ItsOwn(Strict):
    """Model or loss of an external program; dlscale does not configure it."""

    kind: Literal["its_own"] = "its_own"


class ProgramStudy(Study):
    """The study `program`."""

    dataset = "files"
    Model, Loss = ItsOwn, ItsOwn
    programs = True

    def check(self, run: Any) -> None:
        if run.program is None:
            raise Refused("program is missing; give the command, as in `program: {command: [python, train.py]}`")

    def model(self, run: Any, manifest: Any) -> Any:
        raise NotImplementedError("an external program has its own model")

    def loss(self, run: Any) -> SampleLoss:
        raise NotImplementedError("an external program has its own loss")


STUDY = ProgramStudy()
