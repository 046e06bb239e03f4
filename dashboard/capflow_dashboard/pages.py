"""Pages: answers HTTP requests with the page's files, or refuses them. It does no I/O once `PageFiles` is made.

A request is admitted by these rules. Its Host header must name a loopback address: this refuses foreign names that
resolve to this machine. The page's files are public parts of the package. `/session` exchanges the token, which the
page has from the fragment of its address and sends as a bearer token (RFC 6750), for a cookie that no script can read
and no other site's request carries (`HttpOnly`, `SameSite=Strict`, RFC 6265bis). So the token stands in no request's
path, and in no history. The live socket needs the cookie, and this page's Origin. Exports need the cookie, and no
script of another site can read them (`Cross-Origin-Resource-Policy`). Tokens are compared in constant time.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
from collections.abc import Iterator
from http import HTTPStatus
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple
from urllib.parse import urlsplit

from websockets.datastructures import Headers, MultipleValuesError
from websockets.http11 import Request, Response

LIVE_PATH = "/live"
SESSION_PATH = "/session"
API_PATH = "/api/"
LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")

# Files of the page, by the end of their names; others, such as licences, are not served.
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Marks the lines of index.html that load what a page without the right to steer does not need.
_RIGHT = b'data-right="steer"'
_NO_SESSION = "no session; open the link that capflow prints"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class _Body(NamedTuple):
    content: bytes
    packed: bytes
    kind: str
    tag: str


class PageFiles:
    """The page's files, read once.

    token: what `/session` and the live socket need.
    steers: whether pages may steer: then they load the kill switch with the page.
    """

    def __init__(self, token: str, *, steers: bool = False) -> None:
        self._token = token.encode()
        # Cookies do not depend on the port, so two dashboards of one host need two names.
        self._cookie = "capflow-" + hashlib.sha256(self._token).hexdigest()[:12]
        self._bodies = dict(_bodies(resources.files("capflow_dashboard") / "web", "/"))
        if not steers:
            lines = self._bodies["/index.html"].content.splitlines(keepends=True)
            self._bodies["/index.html"] = _body(b"".join(line for line in lines if _RIGHT not in line), _KINDS[".html"])
        self._bodies["/"] = self._bodies["/index.html"]

    def answer(self, request: Request) -> Response | None:
        """Return the response to a request; None for the live socket and for what is below `API_PATH`, if admitted."""
        try:
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
            bearer = request.headers.get("Authorization")
            match = request.headers.get("If-None-Match", "")
            packs = "gzip" in request.headers.get("Accept-Encoding", "")
        except MultipleValuesError:
            return _refusal(HTTPStatus.BAD_REQUEST, "a header is repeated")
        path = urlsplit(request.path).path
        if not is_loopback(host):
            return _refusal(HTTPStatus.FORBIDDEN, "this page is served to loopback addresses only")
        if path == SESSION_PATH:
            return self._session(request, bearer)
        if path == LIVE_PATH:
            if not self._has_cookie(request):
                return _refusal(HTTPStatus.FORBIDDEN, _NO_SESSION)
            if origin != f"http://{host}":
                return _refusal(HTTPStatus.FORBIDDEN, "the Origin is not this page")
            return None
        if path.startswith(API_PATH):
            return None if self._has_cookie(request) else _refusal(HTTPStatus.FORBIDDEN, _NO_SESSION)
        body = self._bodies.get(path)
        if body is None:
            return _refusal(HTTPStatus.NOT_FOUND, "no such page")
        headers = {"Content-Type": body.kind, "Cache-Control": "no-cache", "ETag": body.tag, "Vary": "Accept-Encoding"}
        if match == body.tag:
            return _response(HTTPStatus.NOT_MODIFIED, b"", headers)
        if packs:
            return _response(HTTPStatus.OK, body.packed, headers | {"Content-Encoding": "gzip"})
        return _response(HTTPStatus.OK, body.content, headers)

    def _session(self, request: Request, bearer: str | None) -> Response:
        """Give a cookie for the token; without a token, say whether the cookie is right."""
        if bearer is None:
            if self._has_cookie(request):
                return _response(HTTPStatus.NO_CONTENT, b"", {"Cache-Control": "no-store"})
            return _refusal(HTTPStatus.FORBIDDEN, _NO_SESSION)
        if not bearer.startswith("Bearer ") or not self._is_token(bearer.removeprefix("Bearer ")):
            return _refusal(HTTPStatus.FORBIDDEN, "the token is wrong; open the link that capflow prints")
        cookie = f"{self._cookie}={self._token.decode()}; HttpOnly; SameSite=Strict; Path=/"
        return _response(HTTPStatus.NO_CONTENT, b"", {"Cache-Control": "no-store", "Set-Cookie": cookie})

    def _has_cookie(self, request: Request) -> bool:
        for header in request.headers.get_all("Cookie"):
            for part in header.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self._cookie and self._is_token(value):
                    return True
        return False

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self._token)


def _bodies(folder: Traversable, path: str) -> Iterator[tuple[str, _Body]]:
    for entry in folder.iterdir():
        kind = _KINDS.get("." + entry.name.rpartition(".")[2])
        if entry.is_dir():
            yield from _bodies(entry, f"{path}{entry.name}/")
        elif kind is not None:
            yield path + entry.name, _body(entry.read_bytes(), kind)


def _body(content: bytes, kind: str) -> _Body:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return _Body(content, gzip.compress(content, mtime=0), kind, tag)


def no_such_export() -> Response:
    """Return the answer for an export that does not exist."""
    return _refusal(HTTPStatus.NOT_FOUND, "no such export: the request is not kept, or the format cannot be written")


def head_of(name: str, kind: str) -> bytes:
    """Return the status and the headers of an export, whose body follows in chunks (RFC 9112, 7.1)."""
    headers = Headers(_SECURITY)
    headers["Content-Type"] = kind
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    headers["Cache-Control"] = "no-store"
    headers["Transfer-Encoding"] = "chunked"
    headers["Connection"] = "close"
    return b"HTTP/1.1 200 OK\r\n" + headers.serialize()


def is_loopback(host: str) -> bool:
    """Return whether a Host header names a loopback address, with any port or none."""
    try:
        parts = urlsplit(f"//{host}")
        # Raises ValueError for a port that is no number.
        _ = parts.port
    except ValueError:
        return False
    return parts.hostname in LOOPBACK_NAMES and "@" not in host and not (parts.path or parts.query or parts.fragment)


def _refusal(status: HTTPStatus, why: str) -> Response:
    headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
    return _response(status, f"capflow: {why}\n".encode(), headers)


def _response(status: HTTPStatus, body: bytes, more: dict[str, str]) -> Response:
    headers = Headers(_SECURITY | more)
    headers["Content-Length"] = str(len(body))
    headers["Connection"] = "close"
    return Response(status.value, status.phrase, headers, body)
