"""The nats consumer: publishes scores, the places of rows, and results to a NATS JetStream stream.

    capflow run --consumer nats:stream=CAPFLOW,create=true,probes=happy.safetensors,rows=/mnt/nas/rows

`capflow_consumers.nats.messages` defines the messages. A frame is handled once the server has acknowledged all of its
messages. Before the first message of a worker is sent, the consumer reads the worker's last message in the stream:
messages up to that one are not sent again, however long ago the hub that sent them was killed.

Invariant: the stream has the frames of each worker without a gap, from the first up to some frame.

While the server is away or the stream is full, methods raise RetryError and are called again. After a frame that cannot
be stored, no further frame of its worker is sent; the next hub continues with that frame.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, cast

import msgspec

from capflow.buffers.policy import WhenFull
from capflow.capture.frame import Chunk, Frame, FrameHeader, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone, Status
from capflow.capture.site import Site, layers_by_hook
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, RetryError, UsageError, explain
from capflow.plugins.consumer import Consumer, Context, hookimpl
from capflow.probes.kinds import load_probes
from capflow.probes.probe import Scorer
from capflow.steering.action import Answered
from capflow_consumers.nats.login import NatsLogin
from capflow_consumers.nats.messages import (
    ID_HEADER,
    Message,
    RowsPlace,
    action_message,
    done_message,
    opened_message,
    place_of,
    rows_messages,
    session_message,
    subject_of,
    vector_messages,
)

# Subjects whose last place is remembered; the stream is asked for the others.
_SUBJECTS_MAX = 1024
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,255}")


class NatsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer nats:`.

    stream: the JetStream stream.
    servers: servers of one cluster, each nats://[user:password@]host:port or tls://….
    creds: a credentials file, as `nsc` writes it.
    tls_ca: PEM file of the certificates that may sign the servers' ones; the system's if empty.
    tls_cert: PEM file of capflow's own certificate, for servers that ask for one.
    tls_key: PEM file of its key.
    create: whether to create the stream if it is missing.
    prefix: the beginning of every subject.
    probes: probe files whose scores are sent.
    sites: further sites to capture for every request.
    positions: which tokens to capture.
    vectors: whether to send the rows themselves too.
    rows: the path with which `capflow.open` finds the rows: the root of a `filesystem` consumer of the same hub.
    give_up_s: seconds for which a call is retried while the server is away; None for ever.
    """

    stream: str
    servers: list[str] = msgspec.field(default_factory=lambda: ["nats://127.0.0.1:4222"])
    creds: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    create: bool = False
    prefix: str = "capflow"
    probes: list[str] = []
    sites: list[str] = []
    positions: str = "all"
    vectors: bool = False
    rows: str = ""
    give_up_s: float | None = None


class _Request:
    """One request from its first frame to its result."""

    __slots__ = ("error", "latest", "rows")

    def __init__(self) -> None:
        # Its last frame, by worker.
        self.latest: dict[Rank, RowsPlace] = {}
        self.rows = 0
        # Why some of its messages were not sent.
        self.error: str | None = None


class NatsConsumer(Consumer):
    """Forwards scores, places of rows, and results to NATS JetStream."""

    name: ClassVar[str] = "nats"
    extra: ClassVar[str] = "nats"
    Config: ClassVar[type[msgspec.Struct]] = NatsConfig
    policy: ClassVar[str] = WhenFull.SPILL

    def __init__(self, config: NatsConfig) -> None:
        super().__init__(config)
        self.config: NatsConfig = config
        self._requests: dict[tuple[str, str], _Request] = {}
        # Why the rows of an engine cannot be scored, by engine.
        self._unfit: dict[str, str] = {}
        # Place of the last message in the stream, by subject.
        self._last: dict[str, RowsPlace | None] = {}
        # The reason why no further messages are sent, by subject.
        self._stuck: dict[str, str] = {}
        # Unique for each `open`; part of message ids.
        self._opening = ""
        # Sessions that were sent since `open`.
        self._sessions = 0
        self._context: Context | None = None
        # Set from `open` to `close`.
        self._link: Any = None

    @property
    def _login(self) -> NatsLogin:
        config = self.config
        return NatsLogin(config.creds, config.tls_ca, config.tls_cert, config.tls_key)

    @cached_property
    def _probes(self) -> list[Scorer]:
        return load_probes(self.config.probes, f"consumers.{self.instance}.probes")

    def spec(self) -> CaptureSpec | None:
        """Return a spec of the probes' sites and those of the option `sites`; None without either.

        Raises UsageError for probe files that cannot be used.
        """
        hooks = layers_by_hook(sorted({*(probe.site for probe in self._probes), *map(Site.parse, self.config.sites)}))
        if not hooks:
            return None
        return CaptureSpec.parse(
            {"hooks": hooks, "positions": self.config.positions}, where=f"consumers.{self.instance}"
        )

    def check(self) -> None:
        """Raise UsageError for invalid options."""
        if not _STREAM.fullmatch(self.config.stream):
            raise self._wrong("stream", self.config.stream or "nothing", "letters, digits, - and _")
        if not _PREFIX.fullmatch(self.config.prefix):
            raise self._wrong(
                "prefix", self.config.prefix or "nothing", "letters, digits, - and _, at most 64 between dots"
            )
        if not self.config.servers:
            raise self._wrong("servers", "none", "at least one")
        self._login.options(f"consumers.{self.instance}")
        if self.config.give_up_s is not None and not self.config.give_up_s > 0:
            raise self._wrong("give_up_s", str(self.config.give_up_s), "above 0; remove it to wait for ever")

    def claim(self) -> tuple[str, str]:
        """Return the stream and the prefix: two writers of one subject would use the same message ids."""
        return "prefix", f"{self.config.prefix} in stream {self.config.stream}"

    def open(self, context: Context) -> None:
        """Connect, check or create the stream, and send the first message.

        Raises UsageError for a stream that cannot be used, CapflowError when the server does not answer.
        """
        # Needs nats-py.
        from capflow_consumers.nats.link import NatsLink

        self._context = context
        self._requests, self._unfit, self._last, self._stuck = {}, {}, {}, {}
        self._opening, self._sessions = uuid.uuid4().hex, 0
        config = self.config
        where = f"consumers.{self.instance}"
        link = NatsLink(config.servers, config.stream, self._login, give_up_s=config.give_up_s, where=where)
        link.open(f"{config.prefix}.>", create=config.create)
        self._link = link
        probes = [name for probe in self._probes for name in probe.names]
        try:
            self._send(opened_message(config.prefix, probes, self._opening, vectors=config.vectors))
        except CapflowError as e:
            self.close()
            raise CapflowError(f"{where}.stream: {e}") from e

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Send the engine's model. Raise UsageError unless every probe fits; an unfit engine's frames are refused."""
        self._unfit.pop(engine, None)
        for subject in list(self._last)[:-_SUBJECTS_MAX]:
            del self._last[subject]
        try:
            for probe in self._probes:
                probe.check(model.sites, model.width_of(probe.site))
        except UsageError as e:
            self._unfit[engine] = str(e)
            raise
        finally:
            self._send(session_message(self.config.prefix, engine, model, f"{self._opening} {self._sessions}"))
            self._sessions += 1

    def on_engine_gone(self, engine: str) -> None:
        """Forget why the engine's frames are refused."""
        self._unfit.pop(engine, None)

    def on_frame(self, frame: Frame) -> None:
        """Send the frame's messages that the stream lacks; return when the server has acknowledged them.

        Raises RetryError while the server is away or the stream is full; the next call asks the stream again for its
        last message.
        """
        header = frame.header
        if header.engine in self._unfit:
            raise UsageError(self._unfit[header.engine])
        chunks = list(frame.chunks())
        if not chunks:
            return
        new = list(self._new(header, chunks))
        try:
            refused = self._store(new)
        except RetryError:
            for subject in self._subjects(header):
                self._last.pop(subject, None)
            raise
        self._stuck |= refused
        self._last |= {sent.subject: sent.place for sent in new if sent.subject not in refused}
        errors = [self._stuck[subject] for subject in self._subjects(header) if subject in self._stuck]
        if errors:
            self._count("frames_refused")
        for chunk in chunks:
            request = self._requests.setdefault((header.engine, chunk.request.id), _Request())
            request.rows += len(chunk.sites) * chunk.rows.shape[1]
            request.latest[header.rank] = RowsPlace.of(header, 0)
            if errors:
                request.error = request.error or errors[0]

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Send the result; return when the server has acknowledged it. Raises RetryError as `on_frame` does."""
        request = self._requests.get((done.engine, done.request)) or _Request()
        problems = done.problems
        if request.error is not None:
            problems.append(request.error)
        status: Status = "ok" if not problems else "partial_error" if request.rows and not request.error else "error"
        place = request.latest[min(request.latest)] if request.latest else None
        error = "; ".join(problems) or None
        outcome = {"rows": request.rows, "capture_status": status, "error": error}
        end = done_message(self.config.prefix, done, outcome, place, self.config.rows)
        try:
            last = self._link.last(end.subject)
            self._send(end, again=last is not None and last.get(ID_HEADER) == end.headers[ID_HEADER])
        except RetryError:
            raise
        except CapflowError as e:
            self._requests.pop((done.engine, done.request), None)
            return CaptureResult("error", str(e))
        self._requests.pop((done.engine, done.request), None)
        payload = {"stream": self.config.stream, "subject": end.subject, "rows": request.rows}
        return CaptureResult(status, error, payload)

    def on_action(self, answered: Answered) -> None:
        """Send the outcome of an action, once; return when the server has acknowledged it."""
        sent = action_message(self.config.prefix, answered)
        self._send(sent, again=self._link.last(sent.subject) is not None)

    def look(self) -> tuple[str, str]:
        """Return the stream, and a command that lists its messages."""
        return self.config.stream, f"nats stream view {self.config.stream}"

    def close(self) -> None:
        """Disconnect."""
        if self._link is not None:
            self._count("reconnects", self._link.reconnects)
            self._link.close()
            self._link = None

    def _send(self, sent: Message, *, again: bool = False) -> None:
        """Send a message; return when the server has acknowledged it.

        again: whether the stream already has it; then it is only counted.

        Raises RetryError while the server is away or the stream is full, CapflowError when the server refuses it.
        """
        if again:
            self._count("messages_again")
        if refused := self._store([] if again else [sent]):
            raise CapflowError(refused[sent.subject])

    def _store(self, messages: list[Message]) -> dict[str, str]:
        """Store messages as `NatsLink.store` does; count those that the server acknowledged."""
        before = self._link.stored
        try:
            return cast("dict[str, str]", self._link.store(messages))
        finally:
            self._count("messages", self._link.stored - before)

    def _subjects(self, header: FrameHeader) -> list[str]:
        """Return the subjects of a worker's messages."""
        kinds = ["rows", "vectors"] if self.config.vectors else ["rows"]
        return [subject_of(self.config.prefix, kind, header) for kind in kinds]

    def _new(self, header: FrameHeader, chunks: list[Chunk]) -> Iterator[Message]:
        """Yield the messages of a frame that the stream lacks and still takes."""
        for subject in self._subjects(header):
            if subject in self._last or subject in self._stuck:
                continue
            try:
                headers = self._link.last(subject)
            except RetryError:
                raise
            except CapflowError as e:
                self._stuck[subject] = str(e)
            else:
                self._last[subject] = place_of(headers) if headers is not None else None
        messages = rows_messages(self.config.prefix, header, chunks, self._scores, self.config.rows)
        if self.config.vectors:
            messages += vector_messages(self.config.prefix, header, chunks)
        for message in messages:
            if message.place is not None and message.place.is_behind(self._last.get(message.subject)):
                self._count("messages_again")
            elif message.subject not in self._stuck:
                yield message

    def _scores(self, chunk: Chunk) -> dict[str, list[float]]:
        """Return the scores of a chunk's tokens, by probe."""
        by_site = dict(zip(chunk.sites, chunk.rows, strict=True))
        scores: dict[str, list[float]] = {}
        for probe in self._probes:
            if probe.site in by_site:
                scores |= dict(zip(probe.names, probe.scores(by_site[probe.site]).T.tolist(), strict=True))
        return scores

    def _count(self, name: str, amount: int = 1) -> None:
        if self._context is not None and amount:
            self._context.count(name, amount)

    def _wrong(self, field: str, got: str, expected: str) -> UsageError:
        return UsageError(explain(f"consumers.{self.instance}.{field}", got=got, expected=expected))


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Return the nats consumer."""
    return [NatsConsumer]
