"""The link to NATS: stores messages in one JetStream stream, with an event loop and thread of its own.

Invariant: when `store` returns, the server has acknowledged every message of each subject that the result does not
name. The messages of one subject are stored in order, each after the one before it is acknowledged; up to
`SUBJECTS_MAX` subjects are stored at the same time.

No method waits for a server that is away: it raises RetryError at most `ACK_S` after it asked, or `CONNECT_S` after it
began to connect. A message that is sent again has the same id, so the server stores it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors

from capflow.errors import CapflowError, RetryError, UsageError, explain
from capflow_consumers.nats.login import NatsLogin
from capflow_consumers.nats.messages import OVERHEAD_BYTES, PART_BYTES_MAX, Message

logger = logging.getLogger("capflow.consumer.nats")

CONNECT_S = 5.0
ACK_S = 5.0
# Subjects that are stored at the same time, with one message each.
SUBJECTS_MAX = 16
# Between attempts of the client to connect.
_PAUSE_S = 0.1
_CANCELS_MAX = 20
# The client's buffer while the server is away.
_BUFFER_BYTES = 2 * SUBJECTS_MAX * (PART_BYTES_MAX + OVERHEAD_BYTES)
# Of a stream that is created here: for how long the server remembers message ids.
_DUPLICATES_S = 600.0

_AWAY = (
    nats.errors.TimeoutError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    nats.errors.NoRespondersError,
    js_errors.NoStreamResponseError,
    js_errors.ServiceUnavailableError,
    OSError,
)

_T = TypeVar("_T")


class NatsRefusedError(CapflowError):
    """The server refuses a message."""


class _AwayError(Exception):
    """The server does not answer or the stream has no room; it may later.

    errno: the reason, as one of the `errno` constants.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.errno = code


class NatsLink:
    """One connection, from `open` to `close`. Its methods block and must be called on one thread.

    servers: URLs of the servers of one cluster.
    stream: the JetStream stream.
    give_up_s: for how long after the first RetryError further ones are raised; then CapflowError. None for ever.
    where: the consumer's name, for errors.
    """

    def __init__(
        self, servers: Iterable[str], stream: str, login: NatsLogin, *, give_up_s: float | None, where: str
    ) -> None:
        self._servers = list(servers)
        self._login = login
        self._stream = stream
        self._give_up_s = give_up_s
        self._where = where
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="capflow-nats-link", daemon=True)
        # Replaced when it has given up. This and the fields below are used on the loop's thread only.
        self._client = Client()
        self._js: JetStreamContext | None = None
        # The server's last error.
        self._error = ""
        # The server's last error of permissions or authorization.
        self._denied = ""
        # When the call that is being repeated first raised RetryError, on the monotonic clock.
        self._away_since: float | None = None
        self.reconnects = 0
        # Messages that the server acknowledged.
        self.stored = 0

    def open(self, subjects: str, *, create: bool) -> None:
        """Connect, and check or create the stream.

        subjects: `PREFIX.>`, which the stream must cover.
        create: whether to create the stream if it is missing.

        Raises UsageError for a stream that cannot be used, CapflowError when the server does not answer.
        """
        self._thread.start()
        try:
            self._call(self._open(subjects, create=create))
        except BaseException:
            self.close()
            raise

    def store(self, messages: Iterable[Message]) -> dict[str, str]:
        """Store messages; return, by subject, why a message will never be stored.

        After such a message, the later messages of its subject are not sent. A call that returns ends the time that
        `give_up_s` counts, also a call without messages.

        Raises RetryError while the server is away or the stream is full; some messages may be stored then.
        """
        return self._call(self._store(messages))

    def last(self, subject: str) -> dict[str, str] | None:
        """Return the headers of the last message on a subject; None if there is none.

        Raises RetryError while the server is away, CapflowError when it refuses or has been away for `give_up_s`.
        """
        return self._call(self._last(subject))

    def close(self) -> None:
        """Disconnect and end the thread."""
        with contextlib.suppress(Exception):
            self._call(_within(self._client.close(), CONNECT_S))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # The rest runs on the loop's thread.

    async def _open(self, subjects: str, *, create: bool) -> None:
        await self._connect()
        config = await self._stream_config(create, subjects)
        if not any(_covers(pattern, subjects) for pattern in config.subjects or []):
            raise self._wrong(
                "stream", f"{self._stream} with {', '.join(config.subjects or [])}", f"one with {subjects}"
            )
        if config.no_ack:
            raise self._wrong("stream", f"{self._stream}, which acknowledges no message", "one without no_ack")
        if config.storage == api.StorageType.MEMORY:
            logger.warning("stream %s is in memory: its messages are lost when the server ends", self._stream)
        if self._client.max_payload < PART_BYTES_MAX + OVERHEAD_BYTES:
            expected = f"{PART_BYTES_MAX + OVERHEAD_BYTES} or more"
            raise self._wrong("servers", f"a server with max_payload {self._client.max_payload}", expected)

    async def _connect(self) -> None:
        self._denied = self._error = ""
        try:
            self._client = await _within(
                nats.connect(
                    self._servers,
                    name="capflow",
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_PAUSE_S,
                    pending_size=_BUFFER_BYTES,
                    error_cb=self._on_error,
                    reconnected_cb=self._on_reconnected,
                    allow_reconnect=True,
                    **self._login.options(self._where),
                ),
                CONNECT_S,
            )
        except (TimeoutError, nats.errors.Error, OSError, ValueError) as e:
            got = self._denied or self._error or str(e) or "no answer"
            servers = ", ".join(map(_shown, self._servers))
            where = f"{self._where}.servers: {servers}"
            raise CapflowError(explain(where, got=got, expected="a NATS server that admits capflow")) from e
        self._js = self._client.jetstream(timeout=ACK_S)

    async def _stream_config(self, create: bool, subjects: str) -> api.StreamConfig:
        """Return the configuration of the stream, creating it if it is missing and `create` is set."""
        js = self._stream_api()
        info = None
        try:
            with contextlib.suppress(js_errors.NotFoundError):
                info = await js.stream_info(self._stream)
            if info is None and create:
                info = await js.add_stream(name=self._stream, subjects=[subjects], duplicate_window=_DUPLICATES_S)
        except js_errors.ServiceUnavailableError as e:
            expected = "a server with JetStream (nats-server --jetstream)"
            raise self._wrong("servers", _text_of(e), expected) from e
        except (nats.errors.Error, ValueError) as e:
            raise self._wrong("stream", f"{self._stream}: {self._denied or _text_of(e)}", "a usable stream") from e
        if info is None:
            raise self._wrong("stream", self._stream, "an existing stream; create it, or add create=true")
        return info.config

    async def _store(self, messages: Iterable[Message]) -> dict[str, str]:
        by_subject: dict[str, list[Message]] = {}
        for message in messages:
            by_subject.setdefault(message.subject, []).append(message)
        room = asyncio.Semaphore(SUBJECTS_MAX)

        async def store_all(subject: str) -> Exception | None:
            async with room:
                for message in by_subject[subject]:
                    try:
                        await self._store_one(message)
                    except (CapflowError, js_errors.NotFoundError, _AwayError) as e:
                        return e
            return None

        errors = dict(zip(by_subject, await asyncio.gather(*map(store_all, by_subject)), strict=True))
        away = next((error for error in errors.values() if isinstance(error, _AwayError)), None)
        given_up = None if away is None else self._give_up(away)
        self._away_since = None
        return {
            subject: str(given_up if isinstance(error, _AwayError) else error)
            for subject, error in errors.items()
            if error is not None
        }

    async def _store_one(self, message: Message) -> None:
        """Send a message; return when it is acknowledged. Raises _AwayError; CapflowError when it is refused."""
        await self._ask(
            lambda js: js.publish(message.subject, message.body, stream=self._stream, headers={**message.headers}),
            message.subject,
        )
        self.stored += 1

    async def _last(self, subject: str) -> dict[str, str] | None:
        try:
            message = await self._ask(lambda js: js.get_last_msg(self._stream, subject), subject)
        except js_errors.NotFoundError:
            return None
        except _AwayError as e:
            raise self._give_up(e) from e
        return dict(message.headers or {})

    async def _ask(self, ask: Callable[[JetStreamContext], Awaitable[_T]], subject: str) -> _T:
        """Ask the server once.

        Raises _AwayError when it may answer later, NatsRefusedError when it refuses, NotFoundError for what it lacks.
        """
        self._denied = ""
        if self._client.is_closed:
            try:
                await self._connect()
            except CapflowError as e:
                raise _AwayError(str(e), errno.ENOTCONN) from e
        # Without a connection the client would keep a copy of the message for each attempt.
        if not self._client.is_connected:
            raise _AwayError(self._error or "no connection", errno.ENOTCONN)
        try:
            return await ask(self._stream_api())
        except js_errors.NotFoundError:
            raise
        except _AWAY as e:
            if self._denied:
                raise NatsRefusedError(explain(subject, got=self._denied, expected="the permission to use it")) from e
            is_full = _text_of(e).startswith("maximum ")
            late = isinstance(e, TimeoutError | nats.errors.TimeoutError)
            code = errno.ENOSPC if is_full else errno.ETIMEDOUT if late else errno.ENOTCONN
            raise _AwayError(_text_of(e), code) from e
        except js_errors.APIError as e:
            raise NatsRefusedError(explain(f"stream {self._stream}", got=_text_of(e))) from e

    def _give_up(self, away: _AwayError) -> CapflowError:
        """Return the error of a server that has been away for `give_up_s`. Raises RetryError before that."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        away_s = now - self._away_since
        room = "raise the stream's limits, or let it discard old messages"
        do = room if away.errno == errno.ENOSPC else ""
        why = explain(f"stream {self._stream} took no message for {away_s:.1f} s", got=str(away), do=do)
        if self._give_up_s is None or away_s < self._give_up_s:
            raise RetryError(why) from OSError(away.errno, os.strerror(away.errno))
        # The next call has as much time.
        self._away_since = None
        return CapflowError(why)

    def _stream_api(self) -> JetStreamContext:
        assert self._js is not None
        return self._js

    async def _on_error(self, error: Exception) -> None:
        self._error = _text_of(error)
        # A violation of permissions or authorization.
        if "violation" in self._error.lower():
            self._denied = self._error

    async def _on_reconnected(self) -> None:
        self.reconnects += 1
        self._error = ""

    def _wrong(self, field: str, got: str, expected: str) -> UsageError:
        return UsageError(explain(f"{self._where}.{field}", got=got, expected=expected))


def _text_of(error: Exception) -> str:
    """Return the text of an error of the client."""
    text = getattr(error, "description", None) or str(error)
    return str(text) or type(error).__name__


def _shown(server: str) -> str:
    """Return a server's URL without user and password."""
    parts = urlsplit(server)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


async def _within(coroutine: Coroutine[Any, Any, _T], seconds: float) -> _T:
    """Return a coroutine's result; raise TimeoutError when it takes longer.

    `asyncio.wait_for` waits until a cancelled coroutine has ended (https://github.com/python/cpython/issues/86296). The
    client retries for ever and may ignore the cancellation.
    """
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait({task}, timeout=seconds)
    if task.done():
        return task.result()
    for _ in range(_CANCELS_MAX):
        task.cancel()
        await asyncio.wait({task}, timeout=_PAUSE_S)
        if task.done():
            break
    raise TimeoutError


def _covers(pattern: str, subjects: str) -> bool:
    """Return whether a stream's subject pattern covers all subjects of `PREFIX.>`."""
    have, want = pattern.split("."), subjects.split(".")
    for index, part in enumerate(have):
        if part == ">":
            return index < len(want)
        if index >= len(want) or want[index] == ">" or part not in ("*", want[index]):
            return False
    return False
