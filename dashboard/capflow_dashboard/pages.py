"""Pages: answers HTTP requests with the files of the page, or says why not. It does no I/O after `PageFiles` is made.

Who may come in: a request must name a loopback host in its Host header, which shuts out other people's names that
resolve to this machine; the page and the live socket want the token, compared in constant time; the live socket wants
the Origin of this very page. The other files hold nothing that is not in the package.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers, MultipleValuesError
from websockets.http11 import Request, Response

LIVE_PATH = "/live"
LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
} | {
    f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
    for name in ("app", "charts", "feed", "keys", "requests", "scale", "tokens")
}
_PLOTLY_PATH = "/plotly.js"
_POLICY = (  # plotly.js writes style attributes; scripts are files of ours only
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageFiles:
    """The files, read once, and the token that the page wants."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        web = resources.files("capflow_dashboard") / "web"
        self._bodies = {path: ((web / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
        plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
        self._bodies[_PLOTLY_PATH] = (plotly.read_bytes(), "text/javascript; charset=utf-8")

    def answer(self, request: Request) -> Response | None:
        """Return the response to a request; None for the live socket, when it may be opened."""
        try:
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        except MultipleValuesError:
            return _refusal(HTTPStatus.BAD_REQUEST, "a header came twice")
        url = urlsplit(request.path)
        if not is_loopback(host):
            return _refusal(HTTPStatus.FORBIDDEN, "this page is for loopback addresses only")
        if url.path in ("/", LIVE_PATH) and not self._is_allowed(url.query):
            return _refusal(HTTPStatus.FORBIDDEN, "no or another token; open the address that capflow prints")
        if url.path == LIVE_PATH:
            if origin != f"http://{host}":
                return _refusal(HTTPStatus.FORBIDDEN, "another page's Origin")
            return None
        found = self._bodies.get(url.path)
        if found is None:
            return _refusal(HTTPStatus.NOT_FOUND, "no such page")
        body, kind = found
        caching = "private, max-age=3600" if url.path == _PLOTLY_PATH else "no-store"
        return _response(HTTPStatus.OK, kind, body, caching)

    def _is_allowed(self, query: str) -> bool:
        try:
            tokens = parse_qs(query, max_num_fields=8).get("token", [])
        except ValueError:
            return False
        return len(tokens) == 1 and hmac.compare_digest(tokens[0].encode(), self._token)


def is_loopback(host: str) -> bool:
    """Return whether a Host header, with any port, names this machine for itself."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises unless it is a number or absent
    except ValueError:
        return False
    return parts.hostname in LOOPBACK_NAMES and "@" not in host and not (parts.path or parts.query or parts.fragment)


def _refusal(status: HTTPStatus, why: str) -> Response:
    return _response(status, "text/plain; charset=utf-8", f"capflow: {why}\n".encode(), "no-store")


def _response(status: HTTPStatus, kind: str, body: bytes, caching: str) -> Response:
    headers = Headers(_SECURITY)
    headers["Content-Type"] = kind
    headers["Content-Length"] = str(len(body))
    headers["Cache-Control"] = caching
    headers["Connection"] = "close"
    return Response(status.value, status.phrase, headers, body)
