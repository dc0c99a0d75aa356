"""The one exception that reaches a user as a message, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A mistake in what was asked for: configuration, arguments or data.

    The message says what is wrong and where, what was expected, and what to do. The command line
    prints it on one line and exits with status 2; any other exception is a defect of dlscale.
    """


class Refused(ValueError):
    """Settings that do not go together: a message that begins with the key at fault."""


class Stopped(Exception):
    """A stage was asked to end and has saved what it did; the same command goes on from there."""


class PeerLost(Exception):
    """Another process of the run ended, hangs, or sends wrong values: this one cannot go on."""


def brief(error: BaseException) -> str:
    """Return the message of an exception in a short line: those of other libraries may fill pages."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:299] + "…"


def cut(text: str, most: int = 200) -> str:
    """Return a text without its middle if it is longer than `most`: the end of a long message says what to do."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {text[-most // 3 :]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question, ` (did you mean 'x'?)`, for the closest of `known` names, or an empty string."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def of_another(file: Path) -> str:
    """Return what to do where a name that is not known has results in `file`; nothing where there is no such file."""
    return f"; {file} was made from another configuration: name its file with --configfile" if file.exists() else ""


#: So many names are listed beside the nearest one.
LISTED = 20


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Return the message for a reference to something that is not there."""
    known, name = sorted(known), cut(str(name))
    close = nearest(name, known)
    listed = f"; there are: {cut(', '.join(known), 2_000)}" if not close or len(known) <= LISTED else ""
    return f"no {what} is called '{name}'{close}{listed}"
