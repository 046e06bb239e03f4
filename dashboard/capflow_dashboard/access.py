"""Access to the page: its token, its link, and the file with the link.

Whoever has the token sees the texts of all requests. So it stands in no log, no command line, no environment of
another process and no result: only on a terminal, and in a file that this user alone can read. The file is an HTML page
that leads to the dashboard, so that a browser can be given its path instead of the link.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import secrets
from pathlib import Path

from capflow.errors import UsageError, explain
from capflow.files import read_regular, write_whole
from capflow.system.runtime import runtime_directory
from capflow_dashboard import limits

# The name of the variable, not a token.
TOKEN_VARIABLE = "CAPFLOW_DASHBOARD_TOKEN"  # noqa: S105
_FILE = "consumers.dashboard.token_file"


def read_token(token_file: str | None) -> str | None:
    """Return the token in a file, or else in the environment; None if there is neither.

    Raises UsageError for a file that cannot be read or that others can read, and for what is no token. The error does
    not repeat the token.
    """
    if token_file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        return None if token is None else _checked(token, TOKEN_VARIABLE)
    path = Path(token_file)
    expected = "a file with a token"
    try:
        content = read_regular(path, limits.TOKEN_FILE_BYTES_MAX)
        mode = path.stat().st_mode
    except OSError as e:
        raise UsageError(explain(_FILE, got=f"{path}: {e.strerror}", expected=expected)) from e
    if mode & 0o077:
        do = f"chmod 600 {path}"
        raise UsageError(explain(_FILE, got=f"{path}, which others can read", expected="a file of mode 600", do=do))
    return _checked(content.decode("ascii", errors="replace").strip(), _FILE)


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(24)


def link_to(address: str, token: str) -> str:
    """Return the link with which a browser is admitted. Browsers do not send what stands behind the `#`."""
    return f"{address}#token={token}"


class LinkFile:
    """A file with the link, from its making to `remove`.

    path: its path; None if it could not be written.
    """

    def __init__(self, port: int, link: str) -> None:
        target = html.escape(link, quote=True)
        page = (
            '<!doctype html><meta charset="utf-8"><title>capflow</title>'
            f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{html.escape(link)}</a>\n'
        )
        self.path: Path | None = runtime_directory() / f"dashboard-{port}.html"
        try:
            write_whole(self.path, page.encode())
        except OSError:
            self.path = None

    def remove(self) -> None:
        """Remove the file."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _checked(token: str, where: str) -> str:
    if not re.fullmatch(rf"[\w.~-]{{{limits.TOKEN_LENGTH_MIN},{limits.TOKEN_LENGTH_MAX}}}", token, re.ASCII):
        expected = f"{limits.TOKEN_LENGTH_MIN} to {limits.TOKEN_LENGTH_MAX} letters, digits, '.', '_', '~' and '-'"
        raise UsageError(explain(where, got=f"{len(token)} characters", expected=expected))
    return token
