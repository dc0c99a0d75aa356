"""Probes, which ask commands and file systems, and their findings."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from dlscale.core.errors import UserError

Status = Literal["ok", "warn", "FAIL", "skip"]

#: Timeout of a command, s.
LIMIT = 20.0
#: Timeout of a probe, which may ask several commands, s.
PROBE_LIMIT = 3 * LIMIT


@dataclass(frozen=True)
class Finding:
    """Result of one check; `remedy` says how to mend it."""

    name: str
    status: Status
    text: str
    remedy: str = ""


class AbsentError(Exception):
    """A command that is not here: nothing to check."""


class FailedError(UserError):
    """A command that failed, or took too long."""


#: Name of a check, and its function.
Probe = tuple[str, Callable[[], "Finding | list[Finding]"]]


def _started(probe: Callable[[], Finding | list[Finding]]) -> Future[Finding | list[Finding]]:
    """Run a probe in a daemon thread, which a file system that hangs cannot keep from ending."""
    future: Future[Finding | list[Finding]] = Future()

    def run() -> None:
        try:
            future.set_result(probe())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ask(probes: list[Probe]) -> list[Finding]:
    """Run all probes at once and return their findings in order; this neither raises nor hangs."""
    answers = [(name, _started(probe)) for name, probe in probes]
    end = time.monotonic() + PROBE_LIMIT
    findings = list[Finding]()
    for name, answer in answers:
        try:
            found = answer.result(max(end - time.monotonic(), 0))
        except AbsentError as absent:
            found = Finding(name, "skip", f"{absent}: no such command here")
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            why = why if answer.done() else f"no answer within {PROBE_LIMIT:.0f} s; does a file system hang here?"
            found = Finding(name, "warn", f"cannot be checked: {why}", "ask it by hand")
        findings += found if isinstance(found, list) else [found]
    return findings


def said(words: list[str]) -> str:
    """Return the output of a command."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=LIMIT, check=False
        )
    except (FileNotFoundError, PermissionError):
        raise AbsentError(words[0]) from None
    except subprocess.TimeoutExpired:
        raise FailedError(f"{words[0]} gives no answer within {LIMIT:.0f} s") from None
    if done.returncode:
        printed = (done.stderr or done.stdout).strip().splitlines()
        why = printed[-1].removeprefix(f"{words[0]}: ") if printed else done.returncode
        raise FailedError(f"{words[0]}: {why}")
    return done.stdout
