"""Access to the page: its token, its link, and the file with the link; and the key of the server that it may ask.

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
from collections.abc import Callable
from pathlib import Path

from capflow.errors import UsageError, explain
from capflow.files import read_regular, write_whole
from capflow.system.runtime import runtime_directory
from capflow_dashboard import limits

# The name of the variable, not a token.
TOKEN_VARIABLE = "CAPFLOW_DASHBOARD_TOKEN"  # noqa: S105
KEY_VARIABLE = "VLLM_API_KEY"


def read_token(token_file: str | None) -> str | None:
    """Return the token in a file, or else in the environment; None if there is neither.

    Raises UsageError for a file that cannot be read or that others can read, and for what is no token. The error does
    not repeat the token.
    """
    return _read_secret(token_file, "token", TOKEN_VARIABLE, _checked)


def read_key(key_file: str | None) -> str | None:
    """Return the key of a server with OpenAI's routes, read as `read_token` does, from vLLM's variable."""
    return _read_secret(key_file, "server_key", KEY_VARIABLE, _checked_key)


def _read_secret(file: str | None, name: str, variable: str, checked: Callable[[str, str], str]) -> str | None:
    if file is None:
        secret = os.environ.get(variable)
        return None if secret is None else checked(secret, variable)
    path, where = Path(file), f"consumers.dashboard.{name}_file"
    expected = f"a file with a {name.rpartition('_')[2]}"
    try:
        content = read_regular(path, limits.TOKEN_FILE_BYTES_MAX)
        mode = path.stat().st_mode
    except OSError as e:
        raise UsageError(explain(where, got=f"{path}: {e.strerror}", expected=expected)) from e
    if mode & 0o077:
        do = f"chmod 600 {path}"
        raise UsageError(explain(where, got=f"{path}, which others can read", expected="a file of mode 600", do=do))
    return checked(content.decode("ascii", errors="replace").strip(), where)


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


def _checked_key(key: str, where: str) -> str:
    if not re.fullmatch(rf"[!-~]{{1,{limits.KEY_LENGTH_MAX}}}", key):
        expected = f"1 to {limits.KEY_LENGTH_MAX} printable ASCII characters without spaces"
        raise UsageError(explain(where, got=f"{len(key)} characters", expected=expected))
    return key
