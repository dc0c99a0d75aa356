"""Downloads from a local server that misbehaves, through real sockets, and secrets in addresses."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from dlscale.core import urls
from dlscale.core.errors import UserError
from dlscale.data.acquire import download
from tests.conftest import served

MIB = 2**20
BODY = random.Random(0).randbytes(2 * MIB + 3)
SECRETS = ("s3cr3t-password", "t0k3n-value", "a-user-name")


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@dataclass
class Request:
    path: str
    headers: dict[str, str]


@dataclass
class Remote:
    """A file on a server, and a misbehaviour for each of the next requests."""

    address: str = ""
    body: bytes = BODY
    etag: str | None = '"one"'
    script: list[Callable[[Answer], None]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)  # set to end a stalled response

    @property
    def url(self) -> str:
        return f"http://{self.address}/data.bin"

    def ranges(self) -> list[str | None]:
        return [request.headers.get("Range") for request in self.requests]


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    remote: Remote

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.remote.requests.append(Request(self.path, dict(self.headers)))
        misbehave = self.remote.script.pop(0) if self.remote.script else behave
        with contextlib.suppress(ConnectionError):
            misbehave(self)

    def start(self, status: int, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        if self.remote.etag:
            self.send_header("ETag", self.remote.etag)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send(self, body: bytes) -> None:
        self.wfile.write(body)

    def offset(self) -> int:
        """Return the offset of the requested bytes. By RFC 9110, a range counts only if If-Range matches."""
        wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if wanted is None or condition not in (None, self.remote.etag):
            return 0
        first, last = wanted.removeprefix("bytes=").split("-")
        assert last == "", "only open-ended ranges may be requested"
        return int(first)

    def open(self) -> bytes:
        """Send status and headers; return the body that follows."""
        offset, size = self.offset(), len(self.remote.body)
        if offset >= size > 0:
            self.start(416, 0, Content_Range=f"bytes */{size}")
            return b""
        if offset:
            self.start(206, size - offset, Content_Range=f"bytes {offset}-{size - 1}/{size}")
        else:
            self.start(200, size)
        return self.remote.body[offset:]


def behave(answer: Answer) -> None:
    answer.send(answer.open())


def cut(at: int, stalls: bool = False) -> Callable[[Answer], None]:
    """Return a misbehaviour: announce the full length, send `at` bytes, then hang up, or stall until the test ends."""

    def misbehave(answer: Answer) -> None:
        answer.send(answer.open()[:at])
        if stalls:
            answer.remote.released.wait(60)
        answer.close_connection = True

    return misbehave


def status(code: int, **headers: str) -> Callable[[Answer], None]:
    return lambda answer: answer.start(code, 0, **headers)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    with served(type("Bound", (Answer,), {"remote": remote})) as remote.address:
        yield remote
        remote.released.set()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "data.bin"


def fetch(remote: Remote, target: Path, **options: object) -> str:
    defaults: dict[str, object] = {"timeout_s": 20.0, "backoff_s": 0.01}
    return download(remote.url, target, **(defaults | options))  # type: ignore[arg-type]


def partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.download")


def only(target: Path) -> bool:
    """Return whether `target` is complete and the download left only its lock."""
    return target.read_bytes() == BODY and not left(target)


def left(target: Path) -> list[str]:
    """Return the names of the files next to `target`, except its lock."""
    return [path.name for path in target.parent.iterdir() if path.name not in (target.name, f".{target.name}.lock")]


# ---------------------------------------------------------------------------------------- the plain case


def test_a_download_is_complete_and_leaves_no_other_file(remote: Remote, tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "data.bin"
    assert fetch(remote, target, sha256=digest(BODY)) == digest(BODY)
    assert only(target)
    assert remote.ranges() == [None]
    assert remote.requests[0].headers["Accept-Encoding"] == "identity"


def test_nothing_is_written_through_a_link(remote: Remote, tmp_path: Path) -> None:
    """A link at the path of the partial file is not followed, because another user of the group may have made it."""
    target, victim = tmp_path / "data.bin", tmp_path / "victim"
    victim.write_text("mine")
    partial(target).symlink_to(victim)
    fetch(remote, target)
    assert victim.read_text() == "mine" and not target.is_symlink()


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("at", [1, 2, MIB - 1, MIB, MIB + 1, len(BODY) - 1])
def test_an_interrupted_download_resumes_at_the_exact_byte(remote: Remote, target: Path, at: int) -> None:
    remote.script = [cut(at)]
    fetch(remote, target, sha256=digest(BODY))
    assert only(target)
    assert remote.ranges() == [None, f"bytes={at}-"]
    assert remote.requests[1].headers["If-Range"] == '"one"'


def test_a_second_call_resumes_a_failed_download(remote: Remote, target: Path) -> None:
    remote.script = [cut(1000)]
    with pytest.raises(UserError, match=r"run the workflow again.*resumes"):
        fetch(remote, target, attempts=1)
    assert not target.exists()
    fetch(remote, target)
    assert only(target)
    assert remote.ranges() == [None, "bytes=1000-"]


def test_a_changed_file_is_downloaded_from_the_beginning(remote: Remote, target: Path) -> None:
    def old(answer: Answer) -> None:
        remote.body = bytes(len(BODY))
        cut(1000)(answer)
        remote.body, remote.etag = BODY, '"two"'

    remote.script = [old]
    fetch(remote, target)
    assert only(target)
    assert remote.requests[1].headers["If-Range"] == '"one"'


def lying(start: int = 0, etag: str | None = None, named: bool = True) -> Callable[[Answer], None]:
    """Return a misbehaviour: status 206 with a shifted (`start`) or missing Content-Range, or with another ETag."""

    def misbehave(answer: Answer) -> None:
        offset, size = answer.offset() + start, len(BODY)
        answer.remote.etag, right = etag or answer.remote.etag, answer.remote.etag
        span = {"Content_Range": f"bytes {offset}-{size - 1}/{size}"} if named else {}
        answer.start(206, size - offset, **span)
        answer.remote.etag = right
        answer.send(bytes(size - offset))

    return misbehave


@pytest.mark.parametrize(
    "answer",
    [lying(start=1), lying(start=-1), lying(etag='"two"'), lying(named=False)],
    ids=["late", "early", "other", "nameless"],
)
def test_a_partial_answer_that_does_not_fit_is_not_appended(
    remote: Remote, target: Path, answer: Callable[[Answer], None]
) -> None:
    remote.script = [cut(1000), answer]
    fetch(remote, target)
    assert only(target)
    assert remote.ranges() == [None, "bytes=1000-", None]


@pytest.mark.parametrize("note", [None, "{", '{"address": "x", "version": "y"}'])
def test_a_partial_without_a_valid_note_is_not_trusted(remote: Remote, target: Path, note: str | None) -> None:
    partial(target).write_bytes(b"from elsewhere")
    if note:
        target.with_name(".data.bin.download.json").write_text(note)
    fetch(remote, target)
    assert only(target)
    assert remote.ranges() == [None]


# ------------------------------------------------------------------------------------- retries and refusals


@pytest.mark.parametrize(
    ("script", "options", "words", "requests"),
    [
        ([status(503)] * 9, {"attempts": 3}, "attempt 3 of 3 failed: HTTP status 503; .*again later", 3),
        ([status(401)] * 2, {}, "HTTP status 401 .*check the address", 1),
        ([status(404)] * 2, {}, "HTTP status 404 .*check the address", 1),
        ([], {"sha256": digest(b"another file")}, f"{digest(BODY)}, expected {digest(b'another file')}", 1),
    ],
    ids=["down", "login", "missing", "digest"],
)
def test_a_failed_download_gives_one_message(
    remote: Remote, target: Path, script: list[Any], options: dict[str, Any], words: str, requests: int
) -> None:
    """A failed download ends with one message and leaves no file.

    Requests that end in server errors are repeated. A refusal or a wrong digest is final.
    """
    remote.script = list(script)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:.*data\.bin: .*{words}"):
        fetch(remote, target, **options)
    assert len(remote.requests) == requests
    assert left(target) == []


# ------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/b.nc", "https://host/a/b.nc"),
        ("https://host:8443/a@b/c", "https://host:8443/a@b/c"),
        ("https://user:pass@host:8443/a", "https://host:8443/a"),
        ("https://user:p@ss@host/a?file=value&x=#part", "https://host/a?file=~cd42404d&x="),
        ("https://host/a?bare-token", "https://host/a?~d300834f"),
        ("https://host/a?id=1&X-Amz-Signature=2&se=3", "https://host/a?id=~6b86b273&X-Amz-Signature=***&se=***"),
        ("https://host/a?key=1&monkey=1", "https://host/a?key=***&monkey=~6b86b273"),
        ("https://host/a?access_key=1&sig", "https://host/a?access_key=***&~a543997d"),
        ("https://[::1]:80/a", "https://[::1]:80/a"),
        ("ftp://user:pass@host/a", "ftp://host/a"),
        ("user:pass@host/a", "***"),
        ("https://user:pa/ss@host/a", "***"),
        ("https://user:pa?ss@host/a", "***"),
        ("https:/host/a?token=x", "***"),
        ("some/path", "some/path"),
        ("", ""),
    ],
)
def test_hidden(url: str, shown: str) -> None:
    assert urls.hidden(url) == shown
    assert urls.hidden(shown) == shown, "a redacted address must stay unchanged"


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("https://host/x.h5?download=1", False),
        ("https://host/a#part", False),
        ("HTTPS://Host.org/a", False),
        ("https://host/a?id=~6b86b273&sig=***&~a543997d&x=", False),
        ("see https://host/x?y=1", False),
        ("a/path?sig", False),
        ("https://user@host/a", True),
        ("https://host/a?id=1&X-Amz-Signature=2", True),
        ("https://host/a?bare-token", True),
    ],
)
def test_secrets_in_addresses_are_recognised(url: str, secret: bool) -> None:
    assert urls.has_secret({"a": {"b": [url]}, "c": 1, "d": None}) == secret


@pytest.mark.parametrize(
    "script",
    [
        [status(404)],
        [status(302, Location="file:///x?token=t0k3n-value")],
        [status(302, Location="http://a-user-name:s3cr3t-password@127.0.0.1:1/?t0k3n-value")] * 2,
        [cut(1000), cut(10, stalls=True)],
        [lambda answer: setattr(answer, "close_connection", True)] * 2,
        [behave],
    ],
    ids=["refusal", "scheme", "redirection", "stall", "silence", "digest"],
)
def test_no_secret_in_messages_logs_or_files(
    remote: Remote,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    script: list[Callable[[Answer], None]],
) -> None:
    user, token = f"{SECRETS[2]}:{SECRETS[0]}", SECRETS[1]
    remote.script = list(script)
    url = f"http://{user}@{remote.address}/data.bin?token={token}"
    with caplog.at_level(logging.DEBUG), pytest.raises(UserError) as caught:
        download(url, tmp_path / "data.bin", sha256="0" * 64, attempts=2, timeout_s=0.5, backoff_s=0.01)
    assert remote.requests[0].headers["Authorization"].startswith("Basic ")
    assert remote.requests[0].path == f"/data.bin?token={token}"
    files = [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    shown = "".join([caplog.text, *traceback.format_exception(caught.value), *files])
    assert f"http://{remote.address}/data.bin?token=***" in str(caught.value)
    assert [secret for secret in SECRETS if secret in shown] == []
