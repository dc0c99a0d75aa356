"""Runs in which an external program replaces dlscale's training.

The extension `programs` provides a subclass. Without this extension, no run has a program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dlscale.config.run import Run
from dlscale.rules.commands import Commands
from dlscale.rules.context import Context, Params, Wildcards


@dataclass
class Programs:
    """Files and command-line arguments of a run's external program; empty for other runs."""

    context: Context
    commands: Commands

    def params(self, stage: str, run: Run) -> Params:
        """Return the parameters of a stage, for a run with a program; a change repeats the stage."""
        raise AssertionError("without the extension `programs`, no run has a program")

    def launch(self, paths: Iterable[str], run: Run, secrets: bool = False) -> tuple[list[str], list[str]]:
        """Return the command of a stage, for a run with a program, and the arguments before the program's command."""
        raise AssertionError("without the extension `programs`, no run has a program")

    def with_fetched_folder(self, run: Run) -> Run:
        return run

    def checkout(self, wildcards: Wildcards) -> list[str]:
        return []

    def files(self, wildcards: Wildcards) -> list[str]:
        return []

    def start(self, wildcards: Wildcards, input: Any) -> list[str]:
        return []

    def tune_candidates(self, wildcards: Wildcards, input: Any) -> list[str]:
        return []
