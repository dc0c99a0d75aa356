"""Exceptions, and helpers for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A user's mistake in configuration, arguments or data; exit status 2.

    The message is printed without a traceback. It states the problem, the file or key with the problem, the expected
    value, and the remedy.
    """

    def __init__(self, message: str) -> None:
        # PyTorch puts the traceback of a loader's worker before the message; only the message is kept. Long messages
        # are cut, because a damaged file may contain a name of megabytes.
        super().__init__(cut(message.rpartition(f"{__name__}.UserError: ")[2].rstrip("\n"), 1_000))


class Refused(ValueError):
    """Settings that exclude each other; the message begins with the key at fault."""


class Stopped(Exception):
    """A stage ended on request after it saved its state; the same command continues the stage."""


class PeerLost(Exception):
    """Another process of the run ended, hangs, or sends wrong values."""


def brief(error: BaseException) -> str:
    """Return an exception's message in one line, cut to about 300 characters."""
    return cut(" ".join(str(error).split()), 300)


def cut(text: str, most: int = 200) -> str:
    """Cut the middle of a text that is longer than `most` characters.

    The end stays, because a message ends with the remedy.
    """
    return text if len(text) <= most else f"{text[: most * 2 // 3 - 3]} … {text[-most // 3 :]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `known` names.

    Return an empty string if no name is close.
    """
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def of_another(file: Path) -> str:
    """Return advice for a name that is missing in the configuration although its result `file` exists.

    Return an empty string if the file is missing, too.
    """
    return (
        f"; {file} was made from another configuration; name that configuration with --configfile"
        if file.exists()
        else ""
    )


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Return the message for a name that does not exist."""
    known, name = sorted(known), cut(str(name))
    close = nearest(name, known)
    listed = f"; there are: {cut(', '.join(known), 600) or 'none'}" if not close or len(known) <= 20 else ""
    return f"no {what} is called '{name}'{close}{listed}"
