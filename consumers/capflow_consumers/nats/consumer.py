"""The nats consumer: what rows score, where they lie, and what became of requests, in a NATS JetStream stream.

    capflow run --consumer nats:stream=CAPFLOW,create=true,probes=happy.safetensors,rows=/mnt/nas/rows

`capflow_consumers.nats.messages` says what the messages are. A frame counts as handled when the server acknowledged every message of it. Before
the first message of a worker is sent, the last one that the stream has of it is looked at: what is there is not sent again, however long ago
the hub that sent it was killed.

Invariant: of each worker the stream has its first frames, all of them up to some frame. While the server is away or the stream is full, methods raise
RetryError and are called again. A frame that cannot be stored is the last that is tried of its worker; the next hub goes on with it.
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
from capflow.probes.kinds import load_probe
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

_SUBJECTS_MAX = 1024  # whose last message is remembered; it is looked up again when it is not
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,255}")


class NatsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer nats:`.

    stream: the JetStream stream; `create` makes it when it is missing.
    servers: of one cluster, as nats://[user:password@]host:port, or tls://.
    creds: a credentials file, as `nsc` writes it.
    tls_ca: certificates that may vouch for the servers, the system's unless given.
    tls_cert, tls_key: capflow's own, for servers that ask for one.
    prefix: what every subject begins with.
    probes: probe files, whose scores are sent.
    sites: also capture these of every request.
    positions: which tokens.
    vectors: also send the rows themselves.
    rows: what `capflow.open` takes to find them, the root of a `filesystem` consumer beside this one.
    give_up_s: for how long a call is retried while the server is away; None: for ever.
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
        # Its last frame of each worker.
        self.latest: dict[Rank, RowsPlace] = {}
        self.rows = 0
        # Why some of it was not sent.
        self.error: str | None = None


class NatsConsumer(Consumer):
    """Forwards scores, references and ends of requests to NATS JetStream."""

    name: ClassVar[str] = "nats"
    Config: ClassVar[type[msgspec.Struct]] = NatsConfig
    policy: ClassVar[str] = WhenFull.SPILL

    def __init__(self, config: NatsConfig) -> None:
        super().__init__(config)
        self.config: NatsConfig = config
        self._requests: dict[tuple[str, str], _Request] = {}
        # Why no rows of an engine can be scored.
        self._unfit: dict[str, str] = {}
        # Of the last message that the stream has, by subject.
        self._last: dict[str, RowsPlace | None] = {}
        # Why nothing more is sent, by subject.
        self._stuck: dict[str, str] = {}
        # Identifies this opening in the ids of messages.
        self._opening = ""
        # Messages of sessions that were sent in this opening.
        self._sessions = 0
        self._context: Context | None = None
        # From `open` to `close`.
        self._link: Any = None

    @property
    def _login(self) -> NatsLogin:
        config = self.config
        return NatsLogin(config.creds, config.tls_ca, config.tls_cert, config.tls_key)

    @cached_property
    def _probes(self) -> dict[Site, list[Scorer]]:
        probes: dict[Site, list[Scorer]] = {}
        for path in self.config.probes:
            probe = load_probe(path)
            probes.setdefault(probe.site, []).append(probe)
        return probes

    def spec(self) -> CaptureSpec | None:
        """Return the sites of the probes and the option `sites`; None when there are none."""
        hooks = layers_by_hook(sorted({*self._probes, *map(Site.parse, self.config.sites)}))
        if not hooks:
            return None
        return CaptureSpec.parse(
            {"hooks": hooks, "positions": self.config.positions}, where=f"consumers.{self.instance}"
        )

    def check(self) -> None:
        """Raise UsageError for options that cannot work, and when nats-py is not installed."""
        try:
            import cryptography  # noqa: F401
            import nats  # noqa: F401
        except ImportError as e:
            do = "pip install 'capflow[nats]'"
            raise UsageError(
                explain("consumers.nats", got=f"no {e.name}", expected="nats-py and cryptography", do=do)
            ) from e
        self.spec()
        names = [name for probes in self._probes.values() for probe in probes for name in probe.names]
        for name in names:
            if names.count(name) > 1:
                raise self._wrong("probes", f"{name} twice", "different names")
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
        """Return the stream and the prefix: two writers of the same subjects would repeat each other's message ids."""
        return "prefix", f"{self.config.prefix} in stream {self.config.stream}"

    def open(self, context: Context) -> None:
        """Connect; see that the stream is there, and that it may be written."""
        from capflow_consumers.nats.link import NatsLink  # needs nats-py

        self._context = context
        self._requests, self._unfit, self._last, self._stuck = {}, {}, {}, {}
        self._opening, self._sessions = uuid.uuid4().hex, 0
        config = self.config
        where = f"consumers.{self.instance}"
        link = NatsLink(config.servers, config.stream, self._login, give_up_s=config.give_up_s, where=where)
        link.open(f"{config.prefix}.>", create=config.create)
        self._link = link
        probes = [name for probes in self._probes.values() for probe in probes for name in probe.names]
        try:
            self._send(opened_message(config.prefix, probes, self._opening, vectors=config.vectors))
        except CapflowError as e:
            self.close()
            raise CapflowError(f"{where}.stream: {e}") from e

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Send what the engine runs. Raise UsageError unless every probe fits it; if not, every frame of the engine is refused."""
        self._unfit.pop(engine, None)
        for subject in list(self._last)[:-_SUBJECTS_MAX]:
            del self._last[subject]
        try:
            for probes in self._probes.values():
                for probe in probes:
                    probe.check(model.sites, model.hidden_size)
        except UsageError as e:
            self._unfit[engine] = str(e)
            raise
        finally:
            self._send(session_message(self.config.prefix, engine, model, f"{self._opening} {self._sessions}"))
            self._sessions += 1

    def on_engine_gone(self, engine: str) -> None:
        """Forget why its frames are refused."""
        self._unfit.pop(engine, None)

    def on_frame(self, frame: Frame) -> None:
        """Send the frame's messages that the stream does not have, and wait until it has them.

        Raises RetryError while the server is away or the stream is full: the next call asks the stream anew what it has.
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
        """Send what became of the request, and wait until the stream has it. Raises RetryError as `on_frame` does."""
        request = self._requests.get((done.engine, done.request)) or _Request()
        problems = done.problems
        if request.error is not None:
            problems.append(request.error)
        status: Status = "ok" if not problems else "partial_error" if request.rows and not request.error else "error"
        place = request.latest[min(request.latest)] if request.latest else None
        error = "; ".join(problems) or None
        became = {"rows": request.rows, "capture_status": status, "error": error}
        end = done_message(self.config.prefix, done, became, place, self.config.rows)
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
        """Send what came of an action, once, and wait until the stream has it."""
        sent = action_message(self.config.prefix, answered)
        self._send(sent, again=self._link.last(sent.subject) is not None)

    def look(self) -> tuple[str, str]:
        """Return the stream, and a command that lists what is in it."""
        return self.config.stream, f"nats stream view {self.config.stream}"

    def close(self) -> None:
        """Leave the server."""
        if self._link is not None:
            self._count("reconnects", self._link.reconnects)
            self._link.close()
            self._link = None

    def _send(self, sent: Message, *, again: bool = False) -> None:
        """Send a message and wait until the stream has it.

        again: it has. Raises RetryError, and CapflowError when it never will.
        """
        if again:
            self._count("messages_again")
        if refused := self._store([] if again else [sent]):
            raise CapflowError(refused[sent.subject])

    def _store(self, messages: list[Message]) -> dict[str, str]:
        """Store messages as `NatsLink.store` does, and count those that the server acknowledged."""
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
        """Yield the messages of a frame that the stream does not have and may still take."""
        for subject in self._subjects(header):
            if subject in self._last or subject in self._stuck:
                continue
            try:
                found = self._link.last(subject)
            except RetryError:
                raise
            except CapflowError as e:
                self._stuck[subject] = str(e)
            else:
                self._last[subject] = place_of(found) if found is not None else None
        messages = rows_messages(self.config.prefix, header, chunks, self._scores, self.config.rows)
        if self.config.vectors:
            messages += vector_messages(self.config.prefix, header, chunks)
        for made in messages:
            if made.place is not None and made.place.is_behind(self._last.get(made.subject)):
                self._count("messages_again")
            elif made.subject not in self._stuck:
                yield made

    def _scores(self, chunk: Chunk) -> dict[str, list[float]]:
        """Return what the probes score on a chunk's tokens, by name."""
        found: dict[str, list[float]] = {}
        for site, rows in zip(chunk.sites, chunk.rows, strict=True):
            for probe in self._probes.get(site, []):
                found |= dict(zip(probe.names, probe.scores(rows).T.tolist(), strict=True))
        return found

    def _count(self, name: str, amount: int = 1) -> None:
        if self._context is not None and amount:
            self._context.count(name, amount)

    def _wrong(self, field: str, got: str, expected: str) -> UsageError:
        return UsageError(explain(f"consumers.{self.instance}.{field}", got=got, expected=expected))


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the nats consumer."""
    return [NatsConsumer]
