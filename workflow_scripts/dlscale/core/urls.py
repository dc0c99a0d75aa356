"""Redact addresses, and pass the full addresses to the stage that fetches.

Addresses are redacted when a configuration is read, so that pages, records, command lines and params contain no
secrets. Of all stages, only stages that fetch files or start a program with secrets get the full addresses, in their
environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dlscale.core.errors import UserError

#: Environment variable with a JSON object: redacted address → full address, marker → secret of a program.
VARIABLE = "DLSCALE_URLS"
#: Query keys for logins and for signatures of presigned addresses; their values may change although the file does not.
LOGINS = re.compile(
    r"x-(amz|goog|ms)-.*|.*(token(?!s|iz)|secret|signature|passw(or)?d|credential).*|sig|pw|pwd|pass|auth|authorization"
    r"|expires|(api|access|aws)[-_]?(access)?[-_]?key([-_]?id)?|googleaccessid|key-pair-id|key|policy|s[etpvr]|spr|sip|"
    r"sk(oid|tid|[tesv])",
    re.IGNORECASE,
)
#: Marker that replaces a secret of a program: `***secret.NAME***`.
MARKER = re.compile(r"\*\*\*secret\.[\w-]+(?:\.\d+)?\*\*\*")
#: Text that replaces a query value or a program's secret.
HIDDEN = re.compile(rf"\*\*\*|~[0-9a-f]{{8}}|{MARKER.pattern}")
IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>]+")


def hidden(url: str) -> str:
    """Return an address without its login, its fragment, and the values in its query.

    The query value of a login key (`LOGINS`) becomes `***`. Any other query value becomes `~` and the first eight
    digits of its SHA-256, so that different files have different addresses. Login keys get no digits, because a
    short secret could be guessed from its digits. A redacted address does not change. Other texts become `***` if they
    contain `@`, `?` or `#`, because they may be malformed addresses; otherwise they do not change.
    """
    parts = split(url)
    if parts is None:
        return "***" if set(url) & set("@?#") else url
    query = "&".join(map(_hidden_value, parts.query.split("&"))) if parts.query else ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query, fragment="").geturl()


def split(url: str) -> SplitResult | None:
    """Return the parts of a well-formed address that has a host; None for other texts."""
    try:
        parts = urlsplit(url)
        # Raises for an invalid port: in `https://user:pa/ss@host`, urlsplit takes `pa` for the port.
        _ = parts.port
    except ValueError:
        return None
    return parts if parts.hostname else None


def _hidden_value(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        key, value = "", key
    if not value or HIDDEN.fullmatch(value):
        return word
    digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:8]
    return f"{key}{equals}{'***' if LOGINS.fullmatch(key) else f'~{digest}'}"


def has_secret(settings: Any) -> bool:
    """Return whether an address in settings has a login or a secret in its query.

    A query value is a secret if its key is a login key (`LOGINS`), or if it has no key.
    """
    if isinstance(settings, Mapping):
        return any(map(has_secret, settings.values()))
    if isinstance(settings, list | tuple):
        return any(map(has_secret, settings))
    found = [split(match[0]) for match in IN_TEXT.finditer(settings)] if isinstance(settings, str) else []
    logins = [parts.netloc.rpartition("@")[0] for parts in found if parts]
    words = [word for parts in found if parts for word in parts.query.split("&") if _hidden_value(word) != word]
    return any(login and not MARKER.search(login) for login in logins) or any(
        "=" not in word or LOGINS.fullmatch(word.partition("=")[0]) for word in words
    )


def hidden_in(text: str) -> str:
    """Return a text with all addresses redacted."""
    return IN_TEXT.sub(lambda match: hidden(match[0]), text)


def hide(settings: Any, where: str, secrets: dict[str, str] | None = None) -> Any:
    """Return settings with redacted addresses; add the full addresses to `secrets` by redacted address.

    Raise a `UserError` for a malformed address. The message begins with `where` and the path of the key.
    """
    if isinstance(settings, Mapping):
        return {key: hide(value, f"{where}.{key}", secrets) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [hide(value, f"{where}.{number}", secrets) for number, value in enumerate(settings)]
    if not isinstance(settings, str) or not ("://" in settings or re.match("https?:", settings)):
        return settings
    found = hidden(settings)
    if found == "***":
        raise UserError(
            f"{where}: malformed address; expected SCHEME://HOST/PATH; in a user name or password, write %40 for @, "
            "%3A for :, %2F for /, %3F for ?, %23 for #"
        )
    if found != settings and secrets is not None:
        secrets[found] = settings
    return found


def publish(secrets: Mapping[str, str]) -> None:
    """Put full addresses and secrets into the environment of this process.

    The command of a stage that needs no secrets unsets `VARIABLE` again.
    """
    os.environ.pop(VARIABLE, None)
    text = json.dumps(secrets)
    if len(text) > 100_000:  # Linux starts no process if a variable has more than 131,072 bytes
        raise UserError(
            f"configuration: {len(secrets)} secrets of programs and addresses with logins or queries have "
            f"{len(text):,} characters; expected at most 100,000; put logins into ~/.netrc, or fetch the files yourself"
        )
    if secrets:
        os.environ[VARIABLE] = text


def exchanged(text: str, addresses: Mapping[str, str]) -> str:
    """Return a JSON text in which each key of `addresses` is replaced by its value."""
    for old, new in addresses.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    return text


def full_url(url: str) -> str:
    """Return the full address for a redacted address.

    Raise a `UserError` if this process does not have the redacted query values.
    """
    found: str = json.loads(os.environ.get(VARIABLE, "{}")).get(url, url)
    parts = split(found)
    if parts and any(_hidden_value(word) == word and word[-1:] != "=" for word in parts.query.split("&") if word):
        raise UserError(
            f"{url}: this process does not have the secret values of the query; fetch the file with snakemake, or let "
            "--config name a file that contains the full address"
        )
    return found
