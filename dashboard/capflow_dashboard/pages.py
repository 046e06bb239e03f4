"""Pages: answers HTTP requests with the page's files, or refuses them. It does no I/O once `PageFiles` is made.

A request is admitted by these rules. Its Host header must name a loopback address: this refuses foreign names that
resolve to this machine. The page and the live socket need the token, which is compared in constant time. The live
socket needs this page's Origin. The other files need no token: they are public parts of the package.
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
# plotly.js writes style attributes. Scripts come only from this server's files.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
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


class PageFiles:
    """The page's files, read once.

    token: what the page and the live socket need.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        web = resources.files("capflow_dashboard") / "web"
        self._bodies = {path: ((web / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
        plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
        self._bodies[_PLOTLY_PATH] = (plotly.read_bytes(), "text/javascript; charset=utf-8")

    def answer(self, request: Request) -> Response | None:
        """Return the response to a request; None for the live socket if it is admitted."""
        try:
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        except MultipleValuesError:
            return _refusal(HTTPStatus.BAD_REQUEST, "the Host or Origin header is repeated")
        url = urlsplit(request.path)
        if not is_loopback(host):
            return _refusal(HTTPStatus.FORBIDDEN, "this page is served to loopback addresses only")
        if url.path in ("/", LIVE_PATH) and not self._is_allowed(url.query):
            return _refusal(HTTPStatus.FORBIDDEN, "the token is missing or wrong; open the address that capflow prints")
        if url.path == LIVE_PATH:
            if origin != f"http://{host}":
                return _refusal(HTTPStatus.FORBIDDEN, "the Origin is not this page")
            return None
        if url.path not in self._bodies:
            return _refusal(HTTPStatus.NOT_FOUND, "no such page")
        body, kind = self._bodies[url.path]
        caching = "private, max-age=3600" if url.path == _PLOTLY_PATH else "no-store"
        return _response(HTTPStatus.OK, kind, body, caching)

    def _is_allowed(self, query: str) -> bool:
        try:
            tokens = parse_qs(query, max_num_fields=8).get("token", [])
        except ValueError:
            return False
        return len(tokens) == 1 and hmac.compare_digest(tokens[0].encode(), self._token)


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
    return _response(status, "text/plain; charset=utf-8", f"capflow: {why}\n".encode(), "no-store")


def _response(status: HTTPStatus, kind: str, body: bytes, caching: str) -> Response:
    headers = Headers(_SECURITY)
    headers["Content-Type"] = kind
    headers["Content-Length"] = str(len(body))
    headers["Cache-Control"] = caching
    headers["Connection"] = "close"
    return Response(status.value, status.phrase, headers, body)
