"""The table of a hub's metrics: name, kind, meaning and how each is read.

A `Part` of the table has one kind of subject: the hub, a consumer, a worker. A `Row` is a metric that each subject of
the part has. To add a metric, add its row, and renew the table in the docs as `capflow.hub.monitor.metrics` says.

Names end in their unit. No label has a value for each request. The values of a label are bounded: consumers by the
configuration, workers by those connected, the rest by `limits.REASONS_MAX`. A worker's metrics are there while it is
connected.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

import capflow
from capflow import limits
from capflow.capture.frame import Rank
from capflow.hub.health import problems
from capflow.hub.hub import Hub
from capflow.hub.lanes.lane import Lane, LaneFiles
from capflow.hub.lanes.notes import KINDS
from capflow.hub.peers.roster import Peer
from capflow.protocol.message import ControllerCounts, WorkerCounts
from capflow.steering.action import FROZEN_TROUBLE
from capflow.system.cpu import thread_times_ns

Labels = tuple[str, ...]
Value = float | Mapping[Any, float] | None
"""A number; numbers by the value of the row's own label, or the values of several; None for no number now."""


class Row(NamedTuple):
    """A metric.

    read: its value, given a subject of the part.
    labels: those that it has beside the part's.
    """

    name: str
    kind: type[CounterMetricFamily | GaugeMetricFamily]
    meaning: str
    read: Callable[[Any], Value]
    labels: Labels


class Part(NamedTuple):
    """Metrics of one kind of subject.

    find: the subjects that a hub has now, with the values of their labels.
    """

    labels: Labels
    find: Callable[[Hub], Iterable[tuple[Labels, Any]]]
    rows: Sequence[Row]


def counter(name: str, meaning: str, read: str | Callable[[Any], Value], *labels: str) -> Row:
    """Return a row.

    read: what returns the value of a subject, or the attribute of the subject that it is.
    """
    return Row(name, CounterMetricFamily, meaning, attrgetter(read) if isinstance(read, str) else read, labels)


def gauge(name: str, meaning: str, read: str | Callable[[Any], Value], *labels: str) -> Row:
    """Return a row, as `counter` does."""
    return Row(name, GaugeMetricFamily, meaning, attrgetter(read) if isinstance(read, str) else read, labels)


def _key(name: str) -> Callable[[Mapping[str, float]], Value]:
    return lambda status: status.get(name)


def _wall(at: float | None) -> float | None:
    """Return a moment of the monotonic clock as Unix time."""
    return None if at is None else round(time.time() - (time.monotonic() - at), 3)


def _memory(key: str) -> Callable[[Hub], Value]:
    return lambda hub: {part: each[key] for part, each in hub.memory().items()}


def _sessions(hub: Hub) -> Value:
    roles = Counter(peer.hello.role for peer in list(hub.roster.peers.values()))
    return {role: roles[role] for role in ("worker", "scheduler", "client")}


def _actions(hub: Hub) -> Value:
    return {outcome: getattr(hub.relay, outcome) for outcome in ("applied", "rejected", "unknown")}


def _frozen(hub: Hub) -> Value:
    return sum(trouble.endswith(FROZEN_TROUBLE) for trouble in hub.engine_troubles())


def _limited(hub: Hub) -> Value:
    return dict(hub.limited_actions)


def _threads(hub: Hub) -> Value:
    del hub  # one in a process
    return {thread: spent / 1e9 for thread, spent in thread_times_ns().items()}


HUB = (
    gauge("build_info", "Always 1; the version of capflow.", lambda _: {capflow.__version__: 1}, "version"),
    gauge("ready", "1 when `/readyz` says so, else 0.", lambda hub: not problems(hub, time.monotonic())),
    gauge("frozen_engines", "Engines that `capflow freeze` froze.", _frozen),
    gauge("uptime_seconds", "Time since the hub began to listen.", lambda hub: hub.uptime_s(time.monotonic())),
    counter("received_frames", "Frames taken from workers, each once.", "counts.frames"),
    counter("received_rows", "Rows in them.", "counts.rows"),
    counter("received_bytes", "Bytes of these rows.", "counts.bytes"),
    counter("computed_tokens", "Tokens of the steps that frames come from, captured or not.", "counts.tokens"),
    gauge(
        "last_frame_timestamp_seconds",
        "When the last frame was taken; none before.",
        lambda hub: _wall(hub.counts.frame_at),
    ),
    counter("duplicate_frames", "Frames that came again after a reconnect, not delivered.", "counts.duplicates"),
    counter("steering_events", "Events of requests' steering that workers sent.", "counts.events"),
    counter("lost_steering_events", "Events that had no room in their worker.", "counts.events_lost"),
    counter(
        "lost_rows",
        "Rows lost before the hub, and those that each consumer lost; rows that live consumers skip are not lost.",
        lambda hub: hub.snapshot().rows_lost,
    ),
    counter(
        "dropped_rows", "Rows that did not reach the hub; counted when their request ends.", "index.dropped", "reason"
    ),
    gauge("open_requests", "Requests that run.", "index.requests_open"),
    counter("done_requests", "Requests that are over.", "index.requests_done"),
    counter("failed_requests", "Of these, those whose engine went away.", "index.requests_failed"),
    counter("gapped_requests", "Of these, those with rows that did not reach the hub.", "index.requests_gapped"),
    gauge("sessions", "Peers that are connected.", _sessions, "role"),
    gauge(
        "engines", "Engines of which a worker or scheduler is connected.", lambda hub: hub.roster.engines_connected()
    ),
    counter("resumed_sessions", "Workers that came back with the boot that they had.", "roster.resumed"),
    counter("lost_sessions", "Workers and schedulers that fell silent.", "counts.sessions_lost"),
    counter(
        "refused_sessions",
        "Peers that were refused; the log says why.",
        lambda hub: sum(dict(hub.counts.refused).values()),
    ),
    counter("protocol_errors", "Peers that were cut off for what they sent.", "counts.protocol_errors"),
    counter("log_left_out_lines", "Lines about peers that were too many for the log.", "log_lines_left_out"),
    counter("log_dropped_lines", "Lines of the log that nobody read in time.", lambda hub: hub.log_lines_dropped()),
    counter("actions", "Actions that are over, by outcome; unknown if the engine did not answer.", _actions, "outcome"),
    gauge(
        "steering_consistent",
        "1 while the ranks of an engine steer alike, by their checksums; else 0.",
        lambda hub: {engine: report["consistent"] for engine, report in hub.roster.determinism().items()},
        "engine",
    ),
    counter("limited_actions", "Actions refused for their rate: of a sender, or for a request.", _limited, "rate"),
    gauge("waiting_actions", "Actions that engines have not answered.", lambda hub: len(hub.relay)),
    gauge("credit_window_bytes", "What each worker may have under way now.", "roster.pool.window_bytes"),
    gauge(
        "credit_committed_bytes", "What all workers may send, and what is held of it.", "roster.pool.committed_bytes"
    ),
    gauge("credit_limit_bytes", "The bound of that.", "roster.pool.bytes_max"),
    gauge("memory_bytes", "Estimated memory for what peers send, by part of the budget.", _memory("bytes"), "part"),
    gauge("memory_limit_bytes", "The bound of that: parts of `--memory-bytes-max`.", _memory("bytes_max"), "part"),
    counter(
        "thread_cpu_seconds",
        "Processor time of the hub's threads; that of a consumer has its name.",
        _threads,
        "thread",
    ),
    gauge("taps", "Hubs that tap this one.", lambda hub: len(hub.watchers)),
    counter("tap_frames", "Copies of frames that were sent to taps.", "watchers.frames"),
    counter("tap_bytes", "Bytes of these copies.", "watchers.bytes"),
    counter("tap_skipped_frames", "Frames that a tap had no room for.", "watchers.skipped_frames"),
)

CONSUMER = (
    gauge(
        "consumer_up",
        "1 while the consumer works, 0 when it is closed, hangs or fails.",
        lambda lane: lane.trouble(time.monotonic()) is None,
    ),
    counter("consumer_frames", "Frames given to the consumer.", "frames"),
    counter("consumer_rows", "Rows in them that it wants.", "rows"),
    counter("consumer_bytes", "Bytes of these rows.", "bytes"),
    counter("consumer_dropped_rows", "Rows that reached the hub, not this consumer.", "dropped", "reason"),
    counter("consumer_errors", "Exceptions that the consumer raised.", "errors"),
    gauge(
        "consumer_retrying",
        "1 while the consumer cannot go on and is tried again, else 0.",
        lambda lane: lane.backoff.since is not None,
    ),
    counter("consumer_retries", "Calls made again because the one before could not be done.", "backoff.retries"),
    counter("consumer_restarts", "Times that the consumer was closed and opened again.", "restarts"),
    counter("consumer_results", "Requests that it is done with.", "results", "status"),
    gauge(
        "consumer_queued_items",
        "Items in its queue: ends of requests, and frames, of which several may be one.",
        lambda lane: len(lane.queue),
    ),
    gauge("consumer_queued_bytes", "Bytes in its queue.", "queue.nbytes"),
    gauge("consumer_queue_peak_bytes", "The most that were in it since the hub began.", "queue.bytes_peak"),
    gauge("consumer_queue_limit_bytes", "Its `queue_bytes_max`.", "queue.bytes_max"),
    gauge("consumer_note_bytes", "Estimated bytes of ends, engines and answers that wait for it.", "notes.nbytes"),
    gauge("consumer_note_limit_bytes", "The bound of that.", lambda _: limits.NOTES_BYTES_MAX),
    counter(
        "consumer_lost_notes",
        "Of these, those that had no room.",
        lambda lane: {kind: lane.notes.lost[kind] for kind in KINDS},
        "kind",
    ),
    gauge(
        "consumer_lag_seconds",
        "How long the hub has had the frame that the consumer handles; else 0.",
        lambda lane: lane.pace.lag_s(time.monotonic()),
    ),
    counter(
        "consumer_busy_seconds",
        "Time that it spent in calls; 1 in a second is all.",
        lambda lane: lane.pace.busy_so_far_s(time.monotonic()),
    ),
    gauge(
        "consumer_backlog_items",
        "What it has stored and not delivered yet: shards that wait for their upload.",
        "backlog.items",
    ),
    gauge("consumer_backlog_bytes", "Their size.", "backlog.nbytes"),
    counter("consumer_counts", "What the consumer counts itself, by its names.", "counts", "name"),
)

INBOX = (
    gauge("consumer_spool_records", "Frames and notes in its inbox, done with or not.", _key("records")),
    gauge("consumer_spool_unread_records", "Of these, those that it was not given.", _key("unread")),
    gauge("consumer_spool_bytes", "The size of its inbox on disk.", _key("bytes")),
    gauge("consumer_spool_limit_bytes", "Its `spool_bytes`.", _key("bytes_max")),
    counter("consumer_spooled_frames", "Frames that went to its inbox.", _key("frames_spilled")),
    counter("consumer_spool_lost_frames", "Of these, those that could not be read again.", _key("frames_lost")),
    counter("consumer_spool_errors", "Times that its disk failed.", _key("failures")),
)

DURABLE = (
    gauge("consumer_dead_letters", "Frames and ends of requests in its dead letters.", "letters"),
    counter(
        "consumer_unkept_requests",
        "Requests longer than its inbox: a hub that ends while they run loses rows of them.",
        "requests_unkept",
    ),
)

WORKER = (
    gauge(
        "worker_info",
        "Always 1; what the worker runs.",
        lambda peer: {(peer.hello.model.name, peer.hello.model.dtype): 1} if peer.hello.model else None,
        "model",
        "dtype",
    ),
    counter("worker_received_frames", "Frames taken from the worker.", "source.frames"),
    counter("worker_received_rows", "Rows in them.", "source.rows"),
    counter("worker_received_bytes", "Bytes of these rows.", "source.bytes"),
    gauge(
        "worker_last_frame_timestamp_seconds",
        "When its last frame was taken.",
        lambda peer: _wall(peer.source.frame_at),
    ),
    gauge("worker_credit_bytes", "What it may still send.", "source.intake.credit_bytes"),
    gauge("worker_held_bytes", "Its frames that are held here and not acknowledged.", "source.intake.held_bytes"),
    gauge(
        "worker_held_peak_bytes",
        "The most that were; at most what `capflow_credit_window_bytes` was.",
        "source.intake.held_bytes_peak",
    ),
)

# What a worker counts on its own side; at most a few seconds old.
WORKER_COUNTS = (
    counter("worker_sent_frames", "Frames that the worker took for the hub.", "sent_frames"),
    counter("worker_sent_bytes", "Bytes of their rows.", "sent_bytes"),
    counter("worker_dropped_rows", "Rows that the worker dropped, at once.", "dropped_rows", "reason"),
    gauge("worker_queued_frames", "Frames in its outbound queue.", "queued_frames"),
    gauge("worker_queued_bytes", "Bytes in its outbound queue.", "queued_bytes"),
    gauge("worker_queue_peak_bytes", "The most that were in it since the worker began.", "queue_bytes_peak"),
    gauge("worker_queue_limit_bytes", "The bound of its outbound queue.", "queue_bytes_max"),
    gauge("worker_unacknowledged_frames", "Frames that it keeps until the hub acknowledges them.", "unacked_frames"),
    gauge("worker_unacknowledged_bytes", "Bytes of these frames.", "unacked_bytes"),
    gauge("worker_unacknowledged_peak_bytes", "The most that were since the worker began.", "unacked_bytes_peak"),
    gauge("worker_staged_bytes", "Its host memory for rows, from the step to the acknowledgement.", "staged_bytes"),
    gauge("worker_staging_limit_bytes", "The bound of that; steps under way come on top.", "staged_bytes_max"),
    counter("worker_reconnects", "Connections to a hub that it lost.", "reconnects"),
)

WORKER_CPU = (
    counter(
        "worker_measured_steps",
        "Steps in which the time of capflow's code on the thread of the steps was measured: one in 16.",
        lambda counts: {part: spent.steps for part, spent in counts.cpu.items() if spent.steps},
        "part",
    ),
    counter(
        "worker_step_cpu_seconds",
        "Processor time of that code in these steps, in the worker and in the scheduler of its process.",
        lambda counts: {part: spent.ns / 1e9 for part, spent in counts.cpu.items() if spent.steps},
        "part",
    ),
    counter(
        "worker_thread_cpu_seconds",
        "Processor time of capflow's threads in the worker's process.",
        lambda counts: {thread: spent.ns / 1e9 for thread, spent in counts.cpu.items() if not spent.steps},
        "thread",
    ),
)

WORKER_SPOOL = (
    gauge("worker_spool_frames", "Frames in its spool that no hub has acknowledged.", _key("records")),
    gauge("worker_spool_bytes", "The size of its spool on disk.", _key("bytes")),
    gauge("worker_spool_limit_bytes", "Its `--spool-bytes`.", _key("bytes_max")),
    counter("worker_spooled_frames", "Frames that went to its spool.", _key("frames_spilled")),
    counter("worker_spool_lost_frames", "Of these, those that could not be read again.", _key("frames_lost")),
    counter("worker_spool_errors", "Times that its disk failed.", _key("failures")),
)

CONTROLLER = (
    counter("controller_calls", "Steps that a controller was shown in a worker.", "calls"),
    counter("controller_seconds", "Time that it took for them.", "seconds"),
    counter("controller_actions", "Its actions that were applied.", "actions"),
    counter("controller_refused_actions", "Its actions that were not.", "refused"),
    counter("controller_errors", "Exceptions that it raised.", "failed"),
)


_CONSUMER: Labels = ("consumer",)
_WORKER: Labels = ("engine", "rank")


def rank_name(rank: Sequence[int]) -> str:
    """Return a rank as it is shown: `pp0-dp0-tp0`."""
    return "-".join(f"{axis}{place}" for axis, place in zip(Rank._fields, rank, strict=True))


def _lanes(hub: Hub) -> Iterator[tuple[Labels, Lane]]:
    return (((lane.name,), lane) for lane in hub.lanes)


def _durable(hub: Hub) -> Iterator[tuple[Labels, LaneFiles]]:
    return (((lane.name,), stored) for lane in hub.lanes if (stored := lane.stored()) is not None)


def _inboxes(hub: Hub) -> Iterator[tuple[Labels, Mapping[str, Any]]]:
    return ((labels, stored.status) for labels, stored in _durable(hub) if stored.status is not None)


def _workers(hub: Hub) -> Iterator[tuple[Labels, Peer]]:
    peers = list(hub.roster.peers.values())
    return (((peer.hello.engine, rank_name(peer.hello.rank)), peer) for peer in peers if peer.source is not None)


def _worker_counts(hub: Hub) -> Iterator[tuple[Labels, WorkerCounts]]:
    counted = ((labels, peer.source.reported if peer.source else None) for labels, peer in _workers(hub))
    return ((labels, counts) for labels, counts in counted if counts is not None)


def _worker_spools(hub: Hub) -> Iterator[tuple[Labels, Mapping[str, int]]]:
    return ((labels, counts.spool) for labels, counts in _worker_counts(hub) if counts.spool is not None)


def _controllers(hub: Hub) -> Iterator[tuple[Labels, ControllerCounts]]:
    for labels, peer in _workers(hub):
        for name, counts in dict(peer.source.controllers if peer.source else {}).items():
            yield (*labels, name), counts


TABLE = (
    Part((), lambda hub: [((), hub)], HUB),
    Part(_CONSUMER, _lanes, CONSUMER),
    Part(_CONSUMER, _inboxes, INBOX),
    Part(_CONSUMER, _durable, DURABLE),
    Part(_WORKER, _workers, WORKER),
    Part(_WORKER, _worker_counts, WORKER_COUNTS),
    Part(_WORKER, _worker_counts, WORKER_CPU),
    Part(_WORKER, _worker_spools, WORKER_SPOOL),
    Part((*_WORKER, "controller"), _controllers, CONTROLLER),
)
"""Every metric of a hub, in order."""
