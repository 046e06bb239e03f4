"""The errors that capflow raises, and the one form their messages take.

An error message is one line: what is wrong; what came; what was expected; what to do. `explain`
builds it. `UsageError` is the user's to mend (exit code 2), every other `CapflowError` is a failure
(exit code 1). `LocalProtocolError` says that this side broke the session protocol,
`RemoteProtocolError` that the peer did.
"""

from __future__ import annotations

from typing import Any

_GOT_LENGTH_MAX = 120


def explain(what: str, *, got: Any = None, expected: str = "", do: str = "") -> str:
    """Return the message `what: got G, expected E; do`, leaving out the parts not given.

    A text is shown as it is, a blank one in quotes.
    """
    parts = []
    if got is not None:
        text = got if isinstance(got, str) and got.strip() else _shown(got)
        parts.append(f"got {text if len(text) <= _GOT_LENGTH_MAX else text[:_GOT_LENGTH_MAX] + '…'}")
    if expected:
        parts.append(f"expected {expected}")
    message = ": ".join(filter(None, (what, ", ".join(parts))))
    return " ".join(f"{message}; {do}".splitlines()) if do else " ".join(message.splitlines())


def _shown(got: Any) -> str:
    try:
        return repr(got)
    except RecursionError:
        return f"a {type(got).__name__}, nested too deeply"


class CapflowError(Exception):
    """Something failed that was asked for correctly. The command line exits with 1."""


class UsageError(CapflowError, ValueError):
    """What was asked for is wrong: an option, a spec, a vector, a file. The command line exits with 2."""


class ProtocolError(CapflowError):
    """The session protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the session's state does not allow; a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow; its message is not used."""


class HubUnreachableError(CapflowError):
    """No hub answers at the address within the time allowed."""
