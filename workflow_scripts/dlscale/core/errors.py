"""Exceptions, and the words of messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A user's mistake in configuration, arguments or data: one line, printed without a traceback, with exit status 2.

    The message names the fault and its place, what was expected, and what to do. Any other exception is a defect.
    """


class Refused(ValueError):
    """Settings that do not go together; the message begins with the key at fault."""


class Stopped(Exception):
    """A stage ended on request, with all saved; the same command goes on from there."""


class PeerLost(Exception):
    """Another process of the run ended, hangs, or sends wrong values."""


def brief(error: BaseException) -> str:
    """Return an exception's message in one line of some 300 characters at most."""
    return cut(" ".join(str(error).split()), 300)


def cut(text: str, most: int = 200) -> str:
    """Return a text of at most `most` characters, without its middle: a message's end says what to do."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {text[-most // 3 :]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `known` names, or an empty string."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def of_another(file: Path) -> str:
    """Return advice where an unknown name has results in `file`; nothing where that does not exist."""
    return f"; {file} was made from another configuration: name its file with --configfile" if file.exists() else ""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Return the message for a name that does not exist."""
    known, name = sorted(known), cut(str(name))
    close = nearest(name, known)
    listed = f"; there are: {cut(', '.join(known), 2_000)}" if not close or len(known) <= 20 else ""
    return f"no {what} is called '{name}'{close}{listed}"
