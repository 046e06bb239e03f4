"""One completion that a server streams, read on a thread of its own until it ends or is stopped.

Invariant: `stop` ends it at once for the page, and closes the connection, at which the server aborts the request. What
the server sends is bounded by event and in all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, cast

import msgspec

from capflow.errors import CapflowError, RemoteProtocolError, explain
from capflow_dashboard import limits
from capflow_dashboard.again.address import CompletionServer
from capflow_dashboard.again.events import EventReader

STEERED_HEADER = "X-Capflow-Steering"
"""The header of an answer to a request that brings steering."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | str | None = None


class _Refusal(msgspec.Struct):
    error: _Error | str | None = None
    detail: Any = None


_models = msgspec.json.Decoder(_Models)
_chunk = msgspec.json.Decoder(_Chunk)
_refusal = msgspec.json.Decoder(_Refusal)


class CompletionStream:
    """A completion, from `start` until it is over.

    request: its id at the hub.
    model: the model that the server must have.
    steered: whether the server must answer that it steers.
    on_change: called on any thread when there is news.
    """

    def __init__(
        self,
        server: CompletionServer,
        request: str,
        model: str,
        body: dict[str, Any],
        *,
        steered: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.request = request
        self._server = server
        self._model = model
        self._body = body | {"model": model, "capture_id": request, "stream": True, "return_token_ids": True}
        self._steered = steered
        self._on_change = on_change
        # Guards the fields below: the thread of the stream writes them, any thread stops it.
        self._lock = threading.Lock()
        # Pieces that were not taken yet, each with its token ids and its text.
        self._pieces: list[tuple[Sequence[int], str]] = []
        self._finish: str | None = None
        self._error = ""
        self._over = False
        # Whether the last of it was taken.
        self._taken = False
        # The socket in use, from its making until the thread ends.
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="capflow-again", daemon=True)

    def start(self) -> None:
        """Begin to run it."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether no more news comes of it."""
        with self._lock:
            return self._over

    @property
    def running(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread.is_alive()

    def stop(self, reason: str) -> None:
        """End it now, if it is not over."""
        self._end(reason)
        with self._lock:
            if self._socket is not None:
                # It may be closed already. The thread, which may read from it, closes it.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def news(self) -> dict[str, Any] | None:
        """Return what has not been taken yet; None if there is nothing.

        `pieces`: `[token ids, text]` of each; `finish`: why it ended, once it has; `error`: why it failed, or empty.
        """
        with self._lock:
            if self._taken or not (self._pieces or self._over):
                return None
            pieces, self._pieces = self._pieces, []
            self._taken = self._over
            return {
                "request": self.request,
                "pieces": pieces,
                "over": self._over,
                "finish": self._finish,
                "error": self._error,
            }

    # The rest runs on the thread of the stream.

    def _run(self) -> None:
        connection = self._server.connection()
        try:
            self._read(connection)
            self._end("")
        except CapflowError as e:
            self._end(str(e))
        except TimeoutError:
            self._end(explain(self._server.url, got=f"nothing for {limits.AGAIN_SILENT_S_MAX:g} s", expected="tokens"))
        # A connection that is shut down while it is used may also fail in other ways.
        except (OSError, HTTPException, ValueError, AttributeError) as e:
            self._end(explain(self._server.url, got=f"{type(e).__name__}: {e}", expected="a running `capflow serve`"))
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _read(self, connection: HTTPConnection) -> None:
        """Read the whole stream. Raises CapflowError when the server refuses or breaks the rules."""
        with self._sent(connection, "GET", "/v1/models") as answer:
            self._check_model(answer)
        body = msgspec.json.encode(self._body)
        with self._sent(connection, "POST", "/v1/completions", body) as answer:
            kind = answer.getheader("Content-Type", "").partition(";")[0]
            if kind != "text/event-stream":
                raise RemoteProtocolError(explain("the server's answer", got=kind, expected="text/event-stream"))
            if self._steered and answer.getheader(STEERED_HEADER) is None:
                got = f"an answer without {STEERED_HEADER}"
                raise RemoteProtocolError(explain(self._server.url, got=got, expected="`capflow serve`, which steers"))
            self._read_events(answer)

    def _read_events(self, answer: HTTPResponse) -> None:
        events, received = EventReader(), 0
        while data := answer.read1(limits.AGAIN_READ_BYTES):
            received += len(data)
            if received > limits.AGAIN_STREAM_BYTES_MAX:
                expected = f"at most {limits.AGAIN_STREAM_BYTES_MAX} bytes"
                raise RemoteProtocolError(explain("the server's stream", got="more", expected=expected))
            for event in events.feed(data):
                if event == "[DONE]":
                    return
                self._take(event)
        raise RemoteProtocolError(explain("the server's stream", got="an end without [DONE]", expected="all tokens"))

    def _take(self, event: str) -> None:
        try:
            chunk = _chunk.decode(event)
        except msgspec.MsgspecError as e:
            got = f"{event[:80]}: {e}"
            raise RemoteProtocolError(explain("the server's stream", got=got, expected="parts of a completion")) from e
        if chunk.error is not None:
            raise RemoteProtocolError(explain("the server's stream", got=_text_of(chunk.error)))
        with self._lock:
            if self._over:
                return
            for choice in chunk.choices:
                if choice.text or choice.token_ids:
                    self._pieces.append((choice.token_ids or (), choice.text))
                self._finish = choice.finish_reason or self._finish
        self._on_change()

    def _check_model(self, answer: HTTPResponse) -> None:
        try:
            models = [model.id for model in _models.decode(answer.read(limits.AGAIN_ANSWER_BYTES_MAX)).data]
        except msgspec.MsgspecError as e:
            got, expected = f"{self._server.url}/v1/models: {e}", "a list of models"
            raise RemoteProtocolError(explain("the server", got=got, expected=expected)) from e
        if self._model not in models:
            got, expected = ", ".join(models)[: limits.AGAIN_ERROR_LENGTH_MAX], f"{self._model}, the request's"
            raise RemoteProtocolError(explain("the server's model", got=got or "none", expected=expected))

    @contextlib.contextmanager
    def _sent(
        self, connection: HTTPConnection, method: str, route: str, body: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request and yield its answer. Raises CapflowError for any other status than 200."""
        if connection.sock is None:
            connection.connect()
        made = cast("socket.socket", connection.sock)
        made.settimeout(limits.AGAIN_SILENT_S_MAX)
        with self._lock:
            if self._over:
                raise CapflowError("stopped")
            self._socket = made
        connection.request(method, self._server.path + route, body, self._server.headers())
        with connection.getresponse() as answer:
            if answer.status != 200:
                got = f"HTTP {answer.status}: {_message_of(answer)}"
                raise RemoteProtocolError(explain(f"{method} {self._server.url}{route}", got=got))
            yield answer

    def _end(self, error: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over, self._error = True, error[: limits.AGAIN_ERROR_LENGTH_MAX]
        self._on_change()


def _message_of(answer: HTTPResponse) -> str:
    """Return the message of an error, as vLLM or FastAPI write it, or else the start of the body."""
    if 300 <= answer.status < 400:
        return "a redirect, which is not followed"
    body = answer.read(limits.AGAIN_ANSWER_BYTES_MAX)
    try:
        refusal = _refusal.decode(body)
    except msgspec.MsgspecError:
        return body[: limits.AGAIN_ERROR_LENGTH_MAX].decode(errors="replace") or answer.reason
    return _text_of(refusal.error or refusal.detail or answer.reason)


def _text_of(error: Any) -> str:
    return error.message if isinstance(error, _Error) else str(error)
