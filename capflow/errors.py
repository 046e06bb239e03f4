"""The errors of capflow, and the form of their messages.

An error message is one line: the subject; what it got; what was expected; what to do. `explain` builds it. The user can
correct a `UsageError` (exit code 2); every other `CapflowError` is a failure (exit code 1). `LocalProtocolError` means
that this side broke the session protocol, `RemoteProtocolError` that the peer did.

`kind_of` sorts the errors of a consumer into three kinds. Retry: the same call is made again later. Fatal: the consumer
is closed and opened again. Poison: the frame or the request can never be handled, and is set aside.
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
"""The `errno` values of errors that may pass.

They are for lack of room, descriptors or memory, a failing device, and a locked file.
"""


def explain(subject: str, *, got: Any = None, expected: str = "", do: str = "") -> str:
    """Return the message `SUBJECT: got G, expected E; DO`, without the parts that are not given.

    subject: the wrong field or thing.
    got: its value. Text is shown unchanged, blank text in quotes, anything else by its repr.
    expected: the expected value.
    do: what to do about it.
    """
    parts = []
    if got is not None:
        text = got if isinstance(got, str) and got.strip() else _shown(got)
        parts.append(f"got {text if len(text) <= _GOT_LENGTH_MAX else text[:_GOT_LENGTH_MAX] + '…'}")
    if expected:
        parts.append(f"expected {expected}")
    message = ": ".join(filter(None, (subject, ", ".join(parts))))
    return " ".join(f"{message}; {do}".splitlines()) if do else " ".join(message.splitlines())


def _shown(got: Any) -> str:
    try:
        return repr(got)
    except RecursionError:
        return f"a {type(got).__name__}, nested too deeply"


class CapflowError(Exception):
    """A correct request failed. The command line exits with 1."""


class UsageError(CapflowError, ValueError):
    """An option, a spec, a vector, a file or another input is wrong. The command line exits with 2."""


class RetryError(CapflowError):
    """A consumer cannot do this now. It has taken nothing of this call; the call is made again later."""


class FatalError(CapflowError):
    """A consumer cannot continue. It is closed, opened again, and given again what it has not stored."""


class RoomError(CapflowError):
    """A hub has no room for a peer's request. The peer did nothing wrong and may ask again."""


class ProtocolError(CapflowError):
    """A side broke the session protocol."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the session's state does not allow: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow; its message is ignored."""


class HubUnreachableError(CapflowError):
    """No hub answers at the address within the allowed time."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an exception that a consumer raised.

    `RetryError`, MemoryError and an OSError with an `errno` of `RETRY_ERRNOS` are `retry`. `FatalError` and exceptions
    that are not an `Exception`, such as SystemExit, are `fatal`. Every other exception is `poison`.
    """
    if isinstance(error, RetryError | MemoryError):
        return "retry"
    if isinstance(error, OSError) and error.errno in RETRY_ERRNOS:
        return "retry"
    if isinstance(error, FatalError) or not isinstance(error, Exception):
        return "fatal"
    return "poison"
