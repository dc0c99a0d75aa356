"""Probes, which ask commands and file systems, and their findings."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

from dlscale.core.errors import UserError

Answer = TypeVar("Answer")

Status = Literal["ok", "warn", "FAIL", "skip"]

#: Seconds that a probe may take.
LIMIT = 20.0


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` says what to do, where there is something to be done."""

    name: str
    status: Status
    text: str
    remedy: str = ""


class AbsentError(Exception):
    """A command that is not here: nothing to check."""


class FailedError(UserError):
    """A command that failed, or took too long."""


#: A name, and the check that it is of.
Probe = tuple[str, Callable[[], "Finding | list[Finding]"]]


def started(function: Callable[[], Answer]) -> Future[Answer]:
    """Run a function in a daemon thread: a file system that hangs holds the thread, and not us."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ask(probes: list[Probe]) -> list[Finding]:
    """Run all probes at once, and return in their order what they find; this neither raises nor hangs."""
    answers = [(name, started(probe)) for name, probe in probes]
    end = time.monotonic() + LIMIT + 5  # a command that is ended has a moment to go
    findings = list[Finding]()
    for name, answer in answers:
        try:
            found = answer.result(max(end - time.monotonic(), 0))
        except AbsentError as absent:
            found = Finding(name, "skip", f"{absent}: no such command here")
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            why = why if answer.done() else f"no answer within {LIMIT + 5:.0f} s; does a file system hang here?"
            found = Finding(name, "warn", f"cannot be checked: {why}", "ask it by hand")
        findings += found if isinstance(found, list) else [found]
    return findings


def said(words: list[str]) -> str:
    """Return what a command prints."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace")
    except (FileNotFoundError, PermissionError):
        raise AbsentError(words[0]) from None
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # what supervises a container takes it along
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=3)
        process.kill()
        raise FailedError(f"{words[0]} gives no answer within {LIMIT:.0f} s") from None
    if process.returncode:
        printed = (err or out).strip().splitlines()
        why = printed[-1].removeprefix(f"{words[0]}: ") if printed else process.returncode
        raise FailedError(f"{words[0]}: {why}")
    return out
