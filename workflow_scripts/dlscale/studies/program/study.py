"""Study `program`: any training program as it is; model, loss and samples are its own."""

from __future__ import annotations

from typing import Any, Literal

from dlscale.core.errors import Refused
from dlscale.core.schema import Strict
from dlscale.studies.base import SampleLoss, Study


class ItsOwn(Strict):
    """The program's own, of which nothing is known here."""

    kind: Literal["its_own"] = "its_own"


class ProgramStudy(Study):
    """The study `program`."""

    dataset = "files"
    Model, Loss = ItsOwn, ItsOwn
    programs = True

    def check(self, run: Any) -> None:
        if run.program is None:
            raise Refused("program is missing: the command, as `program: {command: [python, train.py]}`")

    def model(self, run: Any, manifest: Any) -> Any:
        raise NotImplementedError("a program has a model of its own")

    def loss(self, run: Any) -> SampleLoss:
        raise NotImplementedError("a program has a loss of its own")


STUDY = ProgramStudy()
