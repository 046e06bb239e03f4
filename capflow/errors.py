"""The errors that capflow raises, and the one form their messages take.

An error message is one line: what is wrong; what came; what was expected; what to do. `explain`
builds it. `UsageError` is the user's to mend (exit code 2), every other `CapflowError` is a failure
(exit code 1). `LocalProtocolError` says that this side broke the session protocol,
`RemoteProtocolError` that the peer did.

An error of a consumer is of one of three kinds; `kind_of` names it. Retry: the same call is made again later. Fatal: the
consumer is closed and opened again. Poison: the frame or the request can never be handled, and is set aside.
"""

from __future__ import annotations

import errno
from typing import Any, Literal

_GOT_LENGTH_MAX = 120

ErrorKind = Literal["retry", "poison", "fatal"]

RETRY_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
        errno.EROFS,
        errno.EAGAIN,
        errno.ENOMEM,
        errno.EBUSY,
        errno.ENOLCK,
        errno.ENOBUFS,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
"""The `errno` values of errors that may go away: no room, no descriptors, no memory, a device that fails, a locked file."""


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


class RetryError(CapflowError):
    """A consumer cannot do this now: it has taken nothing of what it was given, and is given it again later."""


class FatalError(CapflowError):
    """A consumer cannot go on as it is: it is closed, opened again, and given again what it has not stored."""


class RoomError(CapflowError):
    """A hub has no room for what a peer asks for: the peer has done nothing wrong, and may ask again."""


class ProtocolError(CapflowError):
    """The session protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the session's state does not allow; a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow; its message is not used."""


class HubUnreachableError(CapflowError):
    """No hub answers at the address within the time allowed."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an exception that a consumer raised.

    `RetryError`, MemoryError and an OSError whose `errno` is in `RETRY_ERRNOS` are `retry`; `FatalError` and what is no
    `Exception`, such as SystemExit, are `fatal`; every other exception is `poison`.
    """
    if isinstance(error, RetryError | MemoryError):
        return "retry"
    if isinstance(error, OSError) and error.errno in RETRY_ERRNOS:
        return "retry"
    if isinstance(error, FatalError) or not isinstance(error, Exception):
        return "fatal"
    return "poison"
