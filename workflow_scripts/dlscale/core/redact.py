"""Redact the secrets of external programs: `***secret.NAME***` replaces a secret in a command or environment.

The configuration has markers instead of secrets. Only the process that starts a program gets the secrets, in its
environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult

from dlscale.core.errors import UserError
from dlscale.core.urls import HIDDEN, IN_TEXT, LOGINS, MARKER, split

#: Words that mark a secret at the end of a name, such as `token` in HF_TOKEN. Exceptions are `_NOT_ALONE`, and `token`
#: or `pass` after a word in `_PLAIN`. Names that end with `key` are checked with `_KEYS`.
_NAMES = {
    *("password", "passwd", "passphrase", "passcode", "passwords", "sshpass", "storepass", "keypass", "pass", "pwd"),
    *("secret", "secrets", "credential", "credentials", "signature", "sig", "authorization", "auth", "cookie"),
    *("apikey", "authkey", "accesskey", "secretkey"),
    *("token", "bearer", "webhook", "pat", "jwt"),
}
#: Words of `_NAMES` that are harmless as complete names: a working folder (pwd), a pattern (pat), a model's signature.
_NOT_ALONE = {"pwd", "pat", "sig", "signature"}
#: Words before `key` that mark a secret. In an upper-case name, every word before KEY marks a secret, except the words
#: in `_PLAIN_KEYS`.
_KEYS = {
    *("api", "access", "secret", "private", "auth", "account", "shared", "signing", "encryption", "license", "licence"),
    *("service", "client", "storage", "master", "ssh", "deploy", "subscription", "app", "admin", "wandb", "openai"),
}
_PLAIN_KEYS = {"primary", "foreign", "sort", "public", "cache", "partition", "group", "index", "image", "label", "data"}
#: Words before `token` or `pass`; such a name means a part of a model or tokenizer instead of a secret.
_PLAIN = {
    *("pad", "eos", "bos", "unk", "mask", "cls", "sep", "class", "special", "image", "stop", "start", "end", "begin"),
    *("prefix", "suffix", "first", "last", "second", "next", "new", "per", "separator", "word", "decoder", "query"),
    *("forward", "backward", "single", "multi", "one", "two", "n", "by", "distill", "distillation", "register", "sub"),
}
#: Keys of the section `program` that may hold secrets.
_OF_PROGRAM = {"command", "resume", "values", "environment", "folder", "log", "repository", "image"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: Values that are never secrets: numbers, switches, special tokens, variables of a shell or of Python's `os.environ`.
_OPEN = re.compile(
    r"([\d.,:_+-]*+(e[+-]?\d+)?|true|false|yes|no|on|off|none|null|auto|default|<[^<>]*>|\[[a-z]+\]|\$\{?\w+\}?"
    r"|\$\([^()]*\)|[\s/@&=]*|os\.(environ|getenv)[\w.]*[(\[][\"'\w]+[)\]])[)\]},;]*+",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"(?<!\{)(\{[A-Za-z_][\w.-]*\})")
_SCHEME = r"(?:(?:bearer|basic|token|digest)\s+)?"
#: Pattern of a word after a secret's option that is another option; `-s3cret` is not an option, but the secret.
_IS_OPTION = r"(?:--[A-Za-z]|(?-i:-[A-Za-z][a-z_-]*)(?:[=\s\"']|\Z))"
_LOGIN = re.compile(
    r"(?<![^\s\"'])(-u\s*[\"']?|--(?:proxy-)?user[=\s]\s*[\"']?)([^\s:/]+:[^\s/\"'][^\s\"']*)", re.IGNORECASE
)
#: Marker, or name with the quote, the dashes or the word `setenv` before the name. `start` matches only at the start of
#: a text.
_NAMED = re.compile(
    rf"{MARKER.pattern}|(?P<start>\A[+~]{{0,2}})?(?P<quote>\\{{0,9}}[\"'])?"
    r"(?P<option>(?<![^\s\"'])-{1,2}|\bsetenv\s+|(?=\bbearer\s))?(?P<name>(?<!\w)\w[\w.-]*+)",
    re.IGNORECASE,
)
# Atomic groups, because possessive quantifiers of groups are wrong before Python 3.11.5 (gh-106052).
_STRING = "|".join(rf"\\*{quote}(?>(?:[^{quote}\\]|\\+[^{quote}\\])*)(?:\\*{quote}|\\*\Z)" for quote in "\"'")
_BRACKETS = rf"[(\[{{](?>(?:{_STRING}|\\+(?:[^\"'\\]|\Z)INNER|[^\"'\\)\]}}])*)(?:[)\]}}]|\Z)"
#: Value without spaces, except in strings, brackets and expressions: `f(a, b)`, `"a" + "b"`. A quote before a
#: space closes an earlier quote.
_VALUE = (
    rf"(?>(?:{_STRING})?)(?>(?:(?!\\*[\"'](?:[\s)\]}},;:&|]|\Z))(?:{_STRING})|\\+(?:[^\"'\\]|\Z)"
    rf"|{_BRACKETS.replace('INNER', '|' + _BRACKETS.replace('INNER', ''))}|[^\s\"'\\(\[{{&;]"
    rf"|(?:\s+(?:\|\s+None\s+)?(?:[+=%]|or)\s+)(?>(?:{_STRING})?))*)"
)
#: A secret's name with its value: the rest of the text or string after `NAME=` or `NAME:`; the next string, if only
#: punctuation is between; the next value after `=`, `:` or `<<<` (all values of a header `NAME: a=b; c=d`); the word
#: after an option.
_SECRET = re.compile(
    rf"""(?:{_NAMED.pattern})(?:
    (?(start)(?:=|:\s*){_SCHEME}(?P<rest>.+)|(?!))
    |(?(quote)\s*[=:]\s*{_SCHEME}(?P<quoted>(?>(?:(?!(?P=quote))(?:\\+[^\\]|[^\\]))+))|(?!))
    |(?>(?:\\*["'])?)(?>(?:\[[^\[\]]{{0,99}}\](?=\s*=))?)(?:
        (?>(?:(?![=:]\s*[\[({{]|{MARKER.pattern})[^\w;&|"'\\]|\\\s|or(?=\s))*)(?<![)\]}}])(?:[bfru]{{1,2}}(?=["']))?(?:
            (?P<mark>\\*(?:\"""|\'\'\'|["'])){_SCHEME}(?P<string>(?>(?:(?!(?P=mark))(?:\\+[^\\]|[^\\]))*))
            (?:(?P=mark)|\\*\Z)(?![^\s)\]}},;:&|]|\s+(?:[+=%]|or)\s)
            |(?=\\*["']|{MARKER.pattern})(?P<strings>{_VALUE}))
        |[)\]}}\s]*+(?:(?P<header>:\s*(?={_SCHEME}[\w.-]+=))|[+?!]?[=:]+>?|<<<)(?>(?:\s|\\\s)*){_SCHEME}
            (?P<words>{_VALUE}(?(header)(?>(?:;?\s+[\w.-]+={_VALUE})*)))
        |(?(option)(?>(?:\s|\\\s)+)(?!{_IS_OPTION}|[&;|]){_SCHEME}(?P<word>{_VALUE})|(?!))))""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
#: Pattern of secrets that have a known form, such as GitHub's access tokens.
_FORMS = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|sk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{20,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|(?<!-)eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"
    r"|(?:npm|r8)_[A-Za-z0-9]{30,}|dckr_pat_[\w-]{20,}|pypi-AgE[\w-]{40,}|dapi[0-9a-f]{32}|ya29\.[\w-]{20,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=discord\.com/api/webhooks/)[\w/-]+)"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]+"
)


def is_secret_name(name: str) -> bool:
    """Return whether a name ends like the name of a secret.

    For example, true for API_KEY, hf-token and password; false for key_dim and tokens.
    """
    name = re.sub(r"(?i)(password|passwd|passphrase|secret|token|credentials?)$", r"_\1", name.rstrip("0123456789_.-"))
    words = [word.lower() for word in _WORD.findall(name) if word.lower() not in ("base", "value", "string")]
    last, before = (words[-1] if words else ""), (words[-2] if len(words) > 1 else "")
    if last in ("key", "keys"):
        return before in _KEYS or (name.isupper() and bool(before) and before not in _PLAIN_KEYS)
    if last in _NOT_ALONE:
        return bool(before)
    return words[-3:] == ["access", "key", "id"] or (
        last in _NAMES and not (last in ("token", "pass") and before in _PLAIN)
    )


def redact(settings: Any, secrets: dict[str, str] | None = None) -> Any:
    """Return arguments, texts or variables with secrets replaced by markers.

    Add the replaced secrets to `secrets`: marker → secret.
    """
    return _Redaction({} if secrets is None else secrets).settings(settings)


def redact_programs(settings: Any, secrets: dict[str, str] | None = None) -> Any:
    """Return a configuration with the secrets of all programs replaced by markers.

    Add the replaced secrets to `secrets`: marker → secret. If a secret contains a placeholder, the value of the
    placeholder also counts as a secret.
    """
    known, names = {} if secrets is None else secrets, set[str]()
    while True:
        redaction = _Redaction(dict(known), names)
        found = redaction.programs(settings)
        if redaction.names == names:
            known.update(redaction.secrets)
            return found
        names = redaction.names


def has_marker(settings: Any) -> bool:
    """Return whether settings contain a marker of a secret."""
    return bool(MARKER.search(json.dumps(settings)))


def put_back(settings: Any, secrets: Mapping[str, str]) -> Any:
    """Return settings with markers replaced by `secrets`; raise a `UserError` for a missing secret."""
    if isinstance(settings, Mapping):
        return {key: put_back(value, secrets) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [put_back(value, secrets) for value in settings]

    def put(match: re.Match[str]) -> str:
        if match[0] not in secrets:
            raise UserError(
                f"{match[0]} stands for a secret, which this process does not have; start the program with snakemake, "
                "or let --config name a file that contains the secret"
            )
        return secrets[match[0]]

    return secrets.get(settings) or MARKER.sub(put, settings) if isinstance(settings, str) else settings


class _Redaction:
    """Replaces secrets by markers, and collects the secrets and the names of placeholders in secrets."""

    def __init__(self, secrets: dict[str, str], names: set[str] | None = None) -> None:
        self.secrets, self.names = secrets, set(names or ())
        self._markers = {whole: marker for marker, whole in secrets.items() if MARKER.fullmatch(marker)}

    def programs(self, settings: Any) -> Any:
        if isinstance(settings, list | tuple):
            return [self.programs(value) for value in settings]
        if not isinstance(settings, Mapping):
            return settings
        found = {}
        for key, value in settings.items():
            of_program = key == "program" and isinstance(value, Mapping) and value.keys() & _OF_PROGRAM
            first, _, rest = str(key).partition(".")  # a sweep has keys such as `program.values`
            of_program = of_program or (first == "program" and rest.partition(".")[0] in _OF_PROGRAM)
            found[key] = self.settings(value, str(key)) if of_program else self.programs(value)
        return found

    def settings(self, settings: Any, name: str = "") -> Any:
        if isinstance(settings, Mapping):
            kept = {"rate", "losses"} if name == "program" else ()  # patterns and names of metrics, not secrets
            return {key: value if key in kept else self.settings(value, str(key)) for key, value in settings.items()}
        if isinstance(settings, list | tuple):
            return self._secret_list(settings, name) if self._is_name(name) else self._words(settings)
        if not isinstance(settings, str):
            return settings
        return self._put(name, settings) if self._is_name(name) else self._text(settings)

    def _is_name(self, name: str) -> bool:
        return is_secret_name(name) or name.removeprefix("program.").removeprefix("values.") in self.names

    def _secret_list(self, values: Any, name: str) -> list[Any]:
        return [self._put(name, value) if isinstance(value, str) else value for value in values]

    def _words(self, words: Any) -> list[Any]:
        found = list[Any]()
        for before, word in zip([None, *words], words, strict=False):
            option = re.fullmatch(r"-{1,2}(\w[\w.-]*)", before) if isinstance(before, str) else None
            if not isinstance(word, str):
                found.append(self.settings(word))
            elif option and not re.match(_IS_OPTION, word) and is_secret_name(option[1]):
                found.append(self._put(option[1], word))
            elif _LOGIN.fullmatch(f"{before} {word}"):
                found.append(self._put("login", word))
            else:
                found.append(self._text(word))
        return found

    def _text(self, text: str) -> str:
        if (marker := self._markers.get(text)) and len(text) > 3:
            return marker
        text = IN_TEXT.sub(lambda match: self._address(match[0]), self._assignments(text))
        text = _LOGIN.sub(lambda match: match[1] + self._put("login", match[2]), text)
        return _FORMS.sub(lambda match: self._put("token", match[0]), text)

    def _assignments(self, text: str) -> str:
        found, place = list[str](), 0
        while named := _NAMED.search(text, place):
            match = _SECRET.match(text, named.start()) if is_secret_name(named["name"] or "") else None
            begin, end = match.span(match.lastgroup or 0) if match else (named.end(), named.end())
            found += text[place:begin], self._put(named["name"], text[begin:end])
            place = end
        return "".join(found) + text[place:]

    def _address(self, url: str) -> str:
        parts = split(url)
        if parts is None:
            return self._replaced("address", url) if "@" in url else url
        query = "&".join(map(self._query_word, parts.query.split("&"))) if parts.query else ""
        login, at, host = parts.netloc.rpartition("@")
        return _joined(url, parts, f"{self._replaced('login', login)}{at}{host}" if at else host, query)

    def _query_word(self, word: str) -> str:
        key, equals, value = word.partition("=")
        if equals and not (LOGINS.fullmatch(key) or is_secret_name(key)):
            return word
        return f"{key}={self._replaced(key, value)}" if equals else self._replaced("query", word)

    def _put(self, name: str, value: str) -> str:
        """Return the marker for a value, or the value itself if the value is clearly harmless (`_OPEN`)."""
        return value if _OPEN.fullmatch(value) else self._replaced(name, value)

    def _replaced(self, name: str, secret: str) -> str:
        parts = _PLACEHOLDER.split(secret)
        self.names |= {part[1:-1] for part in parts[1::2]}
        if not secret or HIDDEN.fullmatch(secret) or MARKER.search(secret) or "\0" in secret:
            return secret
        if len(parts) > 1:
            return "".join(part if _PLACEHOLDER.fullmatch(part) else self._put(name, part) for part in parts)
        known = re.sub(r"[^\w-]", "_", name.rstrip(".").rpartition(".")[2])
        marker, count = f"***secret.{known}***", 1
        while self.secrets.setdefault(marker, secret) != secret:
            count += 1
            marker = f"***secret.{known}.{count}***"
        self._markers[secret] = marker
        return marker


def _joined(url: str, parts: SplitResult, netloc: str, query: str) -> str:
    start = url.replace(parts.netloc, netloc, 1)
    return start.replace(f"?{parts.query}", f"?{query}", 1) if parts.query else start
