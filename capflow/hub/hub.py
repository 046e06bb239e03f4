"""The hub: binds an address, takes frames from workers, and gives each consumer what it wants of them.

One thread owns the socket and the exchange, and never waits for a consumer; each consumer has a lane. What other
threads want of the hub's thread they `post`. A frame holds its worker's credit until every consumer with policy `block`
has handled it, with up to `limits.SLICE_FRAMES` of its message, and every one with policy `spill` has it on disk, and
is acknowledged then; what `drop` and `skip` consumers hold is bounded by their own queues.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import capflow
from capflow import limits
from capflow.buffers.policy import WhenFull
from capflow.capture.frame import Frame
from capflow.errors import UsageError, explain
from capflow.hub.cache_reads import notice
from capflow.hub.counts import EngineCounts, Snapshot, age_s
from capflow.hub.dispatch import Dispatch
from capflow.hub.effects import Tell
from capflow.hub.health import HubState, problems
from capflow.hub.lanes import leftover
from capflow.hub.lanes.lane import Lane
from capflow.hub.peers.guard import Guard
from capflow.hub.peers.turns import Turns
from capflow.plugins.configure import ConfiguredConsumer, ConfiguredController
from capflow.protocol.message import Beat, encode
from capflow.protocol.session import Parts
from capflow.steering.action import Answered
from capflow.system import runtime
from capflow.transport.address import check_address, held, hub_key, is_local, with_key
from capflow.transport.keys import AllowList, find_key, read_key
from capflow.transport.sockets import Router

logger = logging.getLogger("capflow.hub")

_TICK_S = limits.HEARTBEAT_S / 4  # a key that is revoked is refused by one tick and cut off by the next


class Hub:
    """A hub with its consumers, from `start` to `stop`. `address` is where it listens, once started.

    consumers and controllers come from `capflow.plugins.configure.configure`.

    key: the hub's key for TCP, by name or path. Only keys in the list beside it may connect, and all traffic is
        encrypted.
    insecure: allow TCP off loopback without a key.
    on_refused: called on the hub's thread with an engine that was refused and the reason, once for each reason.
    memory_bytes_max: the memory for what peers send, as in `capflow.hub.peers.budget`; None for a part of the
        machine's.
    log_lines_dropped: returns the number of log lines that nobody read.
    """

    def __init__(
        self,
        address: str,
        consumers: Sequence[ConfiguredConsumer],
        controllers: Sequence[ConfiguredController] = (),
        *,
        key: str | None = None,
        insecure: bool = False,
        message_bytes_max: int = limits.PAYLOAD_BYTES_MAX,
        on_refused: Callable[[str, str], None] | None = None,
        memory_bytes_max: int | None = None,
        log_lines_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self.address = check_address(address, insecure=insecure or key is not None)
        if hub_key(address) is not None or (key is not None and not address.startswith("tcp://")):
            expected = "tcp://HOST:PORT with a key, or ipc:///PATH without"
            raise UsageError(explain("address to listen at", got=address, expected=expected))
        self._key = None if key is None else read_key(find_key(key))
        self._guard = Guard(local=is_local(address))
        if key is not None and self._key is not None:
            self._guard = Guard(self._key.public, AllowList(find_key(key).parent))
        self.consumers = tuple(consumers)
        self.message_bytes_max = message_bytes_max
        # Only the hub's thread uses it; `status` and `snapshot` read copies of its state.
        self._dispatch = Dispatch(
            consumers,
            controllers,
            send=self._send,
            post=self.post,
            status=self.status,
            guard=self._guard,
            on_refused=on_refused,
            memory_bytes_max=memory_bytes_max,
        )
        self.lanes = self._dispatch.lanes
        self._exchange = exchange = self._dispatch.exchange
        self.counts, self.index, self.roster = exchange.counts, exchange.index, exchange.roster
        self.relay, self.watchers = exchange.actions.relay, exchange.watchers
        self.log_lines_dropped = log_lines_dropped
        # Only the hub's thread uses it.
        self._turns = Turns(self._dispatch.handle)
        specs = (wish.spec for wish in self.index.wishes)
        costs = [notice(c.name, c.consumer, spec) for c, spec in zip(consumers, specs, strict=True)]
        costs += [notice(c.name, c.kind, each) for c in controllers for each in c.captures]
        # Costs of consumers that a user may not expect.
        self.notices = tuple(dict.fromkeys(cost for cost in costs if cost is not None))
        self.state = HubState.STARTING
        self._tick_at = 0.0
        # The result of `stop`.
        self._stopped_well = False
        # Set by `stop`: the thread says Bye and ends.
        self._ended = False
        # Calls for the thread; any thread appends.
        self._posted: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="capflow-hub", daemon=True)
        # The address's lock and the router, from `start` to `stop`.
        self._open = contextlib.ExitStack()
        # Set by `start`.
        self._router: Router | None = None
        # Peers in this process, until they are detached.
        self._attached: dict[bytes, Callable[[Parts], None]] = {}
        # How long messages were handled in the last turn; the thread's.
        self._handled_s = 0.0
        # The time of the start.
        self._started = 0.0
        # The time of the thread's last turn; written by the thread.
        self._turned_at = 0.0

    # From start to stop; called by the owner's thread.

    def start(self) -> None:
        """Bind the address, open the consumers and begin.

        Raises CapflowError when the address is in use or a consumer cannot be opened.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(held(self.address))
            router = Router(
                self.address, message_bytes_max=self.message_bytes_max, key=self._key, admit=self._guard.admits
            )
            undo.callback(router.close)
            with contextlib.ExitStack() as opened:  # `stop` has its own way to close them
                for lane in self.lanes:
                    lane.open()
                    opened.callback(lane.join)
                    opened.callback(lane.close)
                opened.pop_all()
            self._open = undo.pop_all()
        self._router = router
        self._collect()
        self.address = router.address if self._key is None else with_key(router.address, self._key.public)
        self._started = self._turned_at = time.monotonic()
        self._thread.start()
        self.state = HubState.RUNNING

    def _collect(self) -> None:
        """Remove what killed hubs left and nobody needs: inboxes without frames, and sockets."""
        roots = {consumer.spill.root for consumer in self.consumers if consumer.spill is not None}
        with contextlib.suppress(OSError):  # a directory that cannot be read; a later start tries again
            inboxes = [path for root in sorted(roots) for path in leftover.collect(root)]
            if inboxes:
                event = {"event": "inbox_removed", "directories": list(map(str, inboxes))}
                logger.info("removed %d inboxes of earlier hubs, in which nothing waits", len(inboxes), extra=event)
            if self.address.startswith("ipc://"):
                runtime.collect(Path(self.address.removeprefix("ipc://")).parent)

    def hand_over(self) -> None:
        """Have engines send new requests to their other hubs. `handed_over` says when no request is left here."""
        self.state = HubState.HANDING_OVER
        self.post(self._dispatch.hand_over)

    @property
    def handed_over(self) -> bool:
        """Whether the handover is done: every request of this hub is over, and its rows are here."""
        return self._exchange.handover.done

    def stop(self, drain_s: float = limits.DRAIN_S_MAX, *, leave: bool = False) -> bool:
        """Let the consumers handle what they have, for at most `drain_s` seconds, close them and end.

        A consumer that is in one call for `limits.HANG_S_MAX` is not waited for any longer. Frames that come meanwhile
        stay with their workers.

        Open requests end with status `error`, except for consumers that spill: these go on with them under the next
        hub. Return whether everything was handled and every consumer closed.

        leave: after `limits.LEAVE_S`, frames of consumers that spill wait in their inboxes for the next hub.
        """
        if self.state is HubState.STOPPED:
            return self._stopped_well
        self.state = HubState.DRAINING
        deadline = time.monotonic() + drain_s
        for lane in self.lanes:
            lane.ends_at = deadline
        drained = threading.Event()

        def drain() -> None:
            self._dispatch.drain()
            drained.set()

        self.post(drain)
        drained.wait(limits.SILENCE_S_MAX)
        leave_at = min(deadline, time.monotonic() + limits.LEAVE_S)
        for lane in self.lanes:
            if leave and not _drained(lane, leave_at):
                lane.leave()
        in_time = [_drained(lane, deadline) for lane in self.lanes]
        for lane in self.lanes:
            lane.discard()
        give_up_at = time.monotonic() + limits.GIVE_UP_S
        closed = [lane.join(0 if _hangs(lane) else give_up_at - time.monotonic()) for lane in self.lanes]
        for lane, is_closed in zip(self.lanes, closed, strict=True):
            if not is_closed:
                event = {"event": "consumer_left_behind", "consumer": lane.name}
                logger.error("consumer %s does not stop; it is left behind", lane.name, extra=event)

        def end() -> None:
            self._ended = True

        self.post(end)
        self._thread.join(limits.SILENCE_S_MAX)
        self._open.close()
        self.state = HubState.STOPPED
        self._stopped_well = all(in_time) and all(closed)
        return self._stopped_well

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Any thread may call the following methods.

    def post(self, call: Callable[[], None]) -> None:
        """Have the hub's thread call something soon."""
        self._posted.append(call)
        if self._router is not None:
            self._router.waker.wake()

    def attach(self, peer: bytes, take: Callable[[Parts], None]) -> None:
        """Send a connection's messages to a peer in this process, on the hub's thread; it answers by `receive`."""
        self._attached[peer] = take

    def detach(self, peer: bytes) -> None:
        """Forget a peer in this process, once it said Bye."""
        self.post(functools.partial(self._detach, peer))

    def receive(self, peer: bytes, parts: Parts) -> None:
        """Take a message of a peer in this process; those of one thread are taken in order."""
        self.post(functools.partial(self._dispatch.receive, peer, parts))

    def take(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Take frames of a worker in this process as `receive` does. They are its own, measured and checked.

        They are checked against the model of its Hello, too.
        """
        self.post(functools.partial(self._dispatch.take, peer, frames))

    def tell(self, answered: Answered) -> None:
        """Tell each consumer an event of steering, behind what the same thread gave before."""
        self.post(functools.partial(self._dispatch.do, [Tell(answered)]))

    def memory(self) -> dict[str, dict[str, int]]:
        """Return how much memory each part of the budget takes, and its bound."""
        queues = (lane.queue.nbytes for lane in self.lanes if lane.policy in (WhenFull.DROP, WhenFull.SKIP))
        return self._exchange.budget.status(sum(queues), self.index.kept)

    def uptime_s(self, now: float) -> float:
        """Return how many seconds ago the hub began; 0 when it has not."""
        return max(0.0, now - self._started) if self._started else 0.0

    def stuck(self, now: float) -> bool:
        """Return whether the hub's thread has ended before its time, or stands still."""
        if self.state not in (HubState.RUNNING, HubState.HANDING_OVER, HubState.DRAINING):
            return False
        return not self._thread.is_alive() or now - self._turned_at > limits.SILENCE_S_MAX

    @property
    def log_lines_left_out(self) -> int:
        """How many lines about peers were not logged, because there were too many."""
        return self._dispatch.log.left_out

    def snapshot(self) -> Snapshot:
        """Return how things stand."""
        index = self.index
        dropped = Counter(index.dropped)
        for lane in self.lanes:
            dropped.update(dict(lane.dropped))
        return Snapshot(
            requests_done=index.requests_done,
            requests_open=index.requests_open,
            requests_failed=index.requests_failed,
            tokens=self.counts.tokens,
            frames=self.counts.frames,
            rows=self.counts.rows,
            bytes=self.counts.bytes,
            queued_bytes=sum(lane.queue.nbytes for lane in self.lanes),
            dropped_rows=dict(dropped),
            sessions=len(self.roster.peers),
            engines=self.roster.engines_connected(),
            refused=sum(self.counts.refused.values()),
            errors=sum(lane.errors for lane in self.lanes),
            spilled=self.roster.frames_spilled(),
        )

    def received_of(self, engine: str) -> EngineCounts:
        """Return the rows and bytes that came from an engine, by its id."""
        return self.counts.received.get(engine, EngineCounts())

    @property
    def limited_actions(self) -> dict[str, int]:
        """The number of actions that were refused for their rate, by `sender` and `request`."""
        return self._exchange.actions.rates.limited

    def engine_troubles(self) -> list[str]:
        """Return why controllers do not do what they are there for, as the engines that run them say."""
        return self.roster.troubles()

    def status(self) -> dict[str, Any]:
        """Return every counter of the hub, its sessions and its consumers, as plain JSON values."""
        counts, index, relay, roster = self.counts, self.index, self.relay, self.roster
        now = time.monotonic()
        return {
            "version": capflow.__version__,
            "address": self.address,
            "uptime_s": round(self.uptime_s(now), 3),
            "problems": problems(self, now),
            "notices": list(self.notices),
            "frames": counts.frames,
            "rows": counts.rows,
            "bytes": counts.bytes,
            "tokens": counts.tokens,
            "last_frame_age_s": age_s(counts.frame_at, now),
            "duplicate_frames": counts.duplicates,
            "steering_events": counts.events,
            "steering_events_lost": counts.events_lost,
            "protocol_errors": counts.protocol_errors,
            "ignored_messages": counts.ignored,
            "log_lines_left_out": self.log_lines_left_out,
            "log_lines_dropped": self.log_lines_dropped(),
            "sessions_lost": counts.sessions_lost,
            "sessions_resumed": roster.resumed,
            "refused": dict(counts.refused),
            "requests": {
                "open": index.requests_open,
                "done": index.requests_done,
                "failed": index.requests_failed,
                "gapped": index.requests_gapped,
            },
            "running_requests": index.running(list(roster.engines.values()), now),
            "memory": {"bytes_max": self._exchange.budget.bytes_max, "parts": self.memory()},
            "dropped_rows": dict(index.dropped),
            "spilled": roster.frames_spilled(),
            "actions": {
                "applied": relay.applied,
                "rejected": relay.rejected,
                "unknown": relay.unknown,
                "waiting": len(relay),
            },
            "limited_actions": dict(self.limited_actions),
            "taps": self.watchers.status(),
            "sessions": [peer.status(now) for peer in list(roster.peers.values())],
            "consumers": {lane.name: lane.status() for lane in self.lanes},
            "controllers": [controller.name for controller in roster.controllers],
            "determinism": roster.determinism(),
        }

    # The thread.

    def _run(self) -> None:
        router = self._router
        assert router is not None
        while not self._ended:
            if not self._safely(functools.partial(self._listen, router)):
                time.sleep(_TICK_S)  # what failed once may fail at each turn
            self._call_posted()
            self._safely(self._dispatch.acknowledge)  # before messages of other peers are handled
            self._safely(functools.partial(self._read, router))
            began = time.monotonic()
            self._safely(functools.partial(self._turns.run, limits.TURN_S))
            self._safely(self._dispatch.acknowledge)
            now = self._turned_at = time.monotonic()
            self._handled_s = now - began
            if now >= self._tick_at:
                self._tick_at = now + _TICK_S
                self._safely(functools.partial(self._tick, router, now))
        self._safely(self._dispatch.goodbye)
        # Not for clients: they may read nothing until they are called.
        engines = [peer for peer, member in self.roster.peers.items() if member.hello.role != "client"]
        self._safely(functools.partial(router.wait_gone, engines))

    def _listen(self, router: Router) -> None:
        router.poll(0 if self._turns.waiting or self._posted else _TICK_S)
        router.waker.clear()

    def _call_posted(self) -> None:
        """Call what other threads posted, for as long as messages were handled before: each half has its time."""
        until = time.monotonic() + max(limits.TURN_S, self._handled_s)
        while self._posted:
            self._safely(self._posted.popleft())
            if time.monotonic() >= until:
                return

    def _read(self, router: Router) -> None:
        """Read what peers sent; cut off who has sent too much at once."""
        until = time.monotonic() + limits.TURN_S
        while time.monotonic() < until:
            if (received := router.receive()) is None:
                return
            peer = received.peer
            if not self._turns.put(*received, *self._exchange.share_bytes(peer)):
                self._turns.drop(peer)
                self._dispatch.overrun(peer)
                router.connections.cut(peer)

    def _tick(self, router: Router, now: float) -> None:
        router.sweep(
            self._exchange.sessions.settled, self._guard.allows
        )  # whom the tick before refused has heard it by now
        for peer in self._attached.keys() & self.roster.peers.keys():  # who is in this process is alive
            self._dispatch.receive(peer, [encode(Beat())])
        self._dispatch.tick(now, self._turns)

    def _detach(self, peer: bytes) -> None:
        self._attached.pop(peer, None)

    def _safely(self, call: Callable[[], None]) -> bool:
        """Call something; return whether it went well."""
        try:
            call()
        except Exception:
            logger.exception("the hub failed at something and goes on", extra={"event": "hub_failed"})
            return False
        return True

    def _send(self, peer: bytes, parts: Parts) -> None:
        if (take := self._attached.get(peer)) is not None:
            take(parts)
            return
        assert self._router is not None
        if not self._router.send(peer, parts):
            self.post(functools.partial(self._dispatch.give_up, peer))


def _drained(lane: Lane, deadline: float) -> bool:
    """Wait until a consumer is closed, the time is over or a call hangs; return whether it is closed."""
    while not lane.join(min(limits.IDLE_S, deadline - time.monotonic())):
        if time.monotonic() >= deadline or _hangs(lane):
            return False
    return True


def _hangs(lane: Lane) -> bool:
    return lane.pace.call_s(time.monotonic()) > limits.HANG_S_MAX
