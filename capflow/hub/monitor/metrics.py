"""The metrics of a hub, for Prometheus: what it counts anyway, read when someone asks.

Names are `capflow_<name>_<unit>`, counters end in `_total`. No label has a value for each request, and each label's values are
bounded: consumers by the configuration, workers by those connected, reasons by `limits.REASONS_MAX`. A worker's metrics are
there while it is connected. `docs/operations.md` has the table; a test holds it against a scrape.

A part is a function that yields families; what is new gets a part of its own, in `_PARTS`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

import capflow
from capflow import limits
from capflow.capture.frame import Rank
from capflow.hub.health import problems
from capflow.hub.hub import Hub
from capflow.hub.lanes.durable import SpillingLane
from capflow.hub.lanes.lane import Lane
from capflow.hub.lanes.notes import KINDS
from capflow.hub.peers.roster import Peer, Source

_OTHER = "other"  # the label of reasons and names beyond those that are shown
_CONSUMER = ("consumer",)
_WORKER = ("engine", "rank")

Samples = Iterable[tuple[Sequence[str], float]]
"""Values with those of their labels."""


def registry_of(hub: Hub) -> CollectorRegistry:
    """Return what gives a hub's metrics, and its process's, at each scrape."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(HubCollector(hub))
    ProcessCollector(registry=registry)
    return registry


class HubCollector(Collector):
    """Reads a hub's counters; from any thread, without the hub's noticing."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def collect(self) -> Iterator[Metric]:
        """Yield every family, also those that have no value now."""
        for part in _PARTS:
            yield from part(self.hub)


def _counter(name: str, meaning: str, value: float | Samples, labels: Sequence[str] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"capflow_{name}", meaning, labels=labels), value)


def _gauge(name: str, meaning: str, value: float | Samples, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"capflow_{name}", meaning, labels=labels), value)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, value: float | Samples
) -> CounterMetricFamily | GaugeMetricFamily:
    values: dict[tuple[str, ...], float] = {}  # each series once, or nobody can read any of them
    for labels, sample in [((), value)] if isinstance(value, int | float) else value:
        key = tuple(labels)
        values[key] = values.get(key, 0) + sample
    for key, sample in values.items():
        family.add_metric(key, sample)
    return family


def _named(counts: Mapping[str, int], before: Sequence[str] = ()) -> Samples:
    """Return a sample for each name, the largest first; those beyond the bound are one, `other`."""
    found = Counter(dict(counts)).most_common()
    shown = {name: n for name, n in found[: limits.REASONS_MAX] if name != _OTHER}
    rest = sum(n for name, n in found if name not in shown)
    return [((*before, name), n) for name, n in shown.items()] + ([((*before, _OTHER), rest)] if rest else [])


def _wall(at: float) -> float:
    """Return a moment of the monotonic clock as Unix time."""
    return round(time.time() - (time.monotonic() - at), 3)


def _hub(hub: Hub) -> Iterator[Metric]:
    now, counts, ledger, roster, relay = time.monotonic(), hub.counts, hub.ledger, hub.roster, hub.relay
    yield _gauge("build_info", "Always 1; the version of capflow.", [((capflow.__version__,), 1)], ["version"])
    yield _gauge("ready", "1 when `/readyz` says so, else 0.", not problems(hub, now))
    yield _gauge("uptime_seconds", "Time since the hub began to listen.", hub.uptime_s(now))
    yield _counter("received_frames", "Frames taken from workers, each once.", counts.frames)
    yield _counter("received_rows", "Rows in them.", counts.rows)
    yield _counter("received_bytes", "Bytes of these rows.", counts.bytes)
    yield _counter("computed_tokens", "Tokens of the steps that frames tell of, captured or not.", counts.tokens)
    last = [] if counts.frame_at is None else [((), _wall(counts.frame_at))]
    yield _gauge("last_frame_timestamp_seconds", "When the last frame was taken, as Unix time; none before.", last)
    yield _counter("duplicate_frames", "Frames that came again after a reconnect, not delivered.", counts.duplicates)
    text = (
        "All rows that were lost, here or before; twice where two consumers did. What live consumers skip is no loss."
    )
    yield _counter("lost_rows", text, hub.snapshot().rows_lost)
    yield _counter(
        "dropped_rows",
        "Rows that did not reach the hub, known when their request ends.",
        _named(ledger.dropped),
        ["reason"],
    )
    yield _gauge("open_requests", "Requests that run.", ledger.requests_open)
    yield _counter("done_requests", "Requests that are over.", ledger.requests_done)
    yield _counter("failed_requests", "Of these, those whose engine went away.", ledger.requests_failed)
    yield _counter("gapped_requests", "Of these, those with rows that did not reach the hub.", ledger.requests_gapped)
    roles = Counter(known.hello.role for known in list(roster.peers.values()))
    connected = [((role,), roles[role]) for role in ("worker", "scheduler", "client")]
    yield _gauge("sessions", "Peers that are connected.", connected, ["role"])
    yield _gauge("engines", "Engines with a worker or a scheduler that is connected.", roster.engines_connected())
    yield _counter("resumed_sessions", "Workers that came back with the boot that they had.", roster.resumed)
    yield _counter("lost_sessions", "Workers and schedulers that fell silent.", counts.sessions_lost)
    yield _counter("refused_sessions", "Peers that were refused; the log says why.", sum(dict(counts.refused).values()))
    yield _counter("protocol_errors", "Peers that were cut off for what they sent.", counts.protocol_errors)
    yield _counter("log_left_out_lines", "Lines about peers that were too many for the log.", hub.log_lines_left_out)
    yield _counter("log_dropped_lines", "Lines of the log that nobody read in time.", hub.log_lines_dropped())
    actions = [(("applied",), relay.applied), (("rejected",), relay.rejected), (("unknown",), relay.unknown)]
    yield _counter("actions", "Actions that engines answered.", actions, ["outcome"])
    yield _gauge("waiting_actions", "Actions that engines have not answered.", len(relay))
    pool = roster.pool
    yield _gauge("credit_window_bytes", "What each worker may have under way now.", pool.window_bytes)
    yield _gauge("credit_committed_bytes", "What all workers may send and what is held of them.", pool.committed_bytes)
    yield _gauge("credit_limit_bytes", "The bound of that.", pool.bytes_max)
    memory = hub.memory()
    text = "Memory for what peers send, by part of the budget, as it is weighed."
    yield _gauge("memory_bytes", text, [((part,), each["bytes"]) for part, each in memory.items()], ["part"])
    bounds = [((part,), each["bytes_max"]) for part, each in memory.items()]
    yield _gauge("memory_limit_bytes", "The bound of that: parts of `--memory-bytes-max`.", bounds, ["part"])
    taps = hub.taps
    yield _gauge("taps", "Hubs that tap this one.", len(taps))
    yield _counter("tap_frames", "Copies of frames that were sent to taps.", taps.frames)
    yield _counter("tap_bytes", "Bytes of these copies.", taps.bytes)
    yield _counter("tap_skipped_frames", "Frames that a tap had no room for.", taps.skipped_frames)


def _consumers(hub: Hub) -> Iterator[Metric]:
    now, lanes = time.monotonic(), hub.lanes

    def each(read: Callable[[Lane], float]) -> Samples:
        return [((lane.name,), read(lane)) for lane in lanes]

    def by(read: Callable[[Lane], Mapping[str, int]]) -> Samples:
        return [sample for lane in lanes for sample in _named(read(lane), (lane.name,))]

    up = each(lambda lane: lane.trouble(now) is None)
    yield _gauge("consumer_up", "1 while the consumer gets on, 0 when it is closed, hangs or fails.", up, _CONSUMER)
    frames, rows, nbytes = each(lambda x: x.frames), each(lambda x: x.rows), each(lambda x: x.bytes)
    yield _counter("consumer_frames", "Frames given to the consumer.", frames, _CONSUMER)
    yield _counter("consumer_rows", "Rows in them that it wants.", rows, _CONSUMER)
    yield _counter("consumer_bytes", "Bytes of these rows.", nbytes, _CONSUMER)
    dropped = by(lambda lane: lane.dropped)
    yield _counter(
        "consumer_dropped_rows", "Rows that reached the hub, not this consumer.", dropped, (*_CONSUMER, "reason")
    )
    errors = each(lambda lane: lane.errors)
    yield _counter("consumer_errors", "Exceptions that the consumer raised.", errors, _CONSUMER)
    waits = each(lambda lane: 0 if lane.backoff.since is None else 1)
    yield _gauge("consumer_retrying", "1 while the consumer cannot go on and is tried again, else 0.", waits, _CONSUMER)
    retries, restarts = each(lambda lane: lane.backoff.retries), each(lambda lane: lane.restarts)
    yield _counter("consumer_retries", "Calls made again because the one before could not be done.", retries, _CONSUMER)
    yield _counter("consumer_restarts", "Times that the consumer was closed and opened again.", restarts, _CONSUMER)
    results = by(lambda lane: lane.results)
    yield _counter("consumer_results", "Requests that it is done with.", results, (*_CONSUMER, "status"))
    queued = each(lambda lane: len(lane.queue))
    yield _gauge("consumer_queued_items", "Frames and ends of requests in its queue.", queued, _CONSUMER)
    held, bound = each(lambda x: x.queue.nbytes), each(lambda x: x.queue.bytes_max)
    yield _gauge("consumer_queued_bytes", "Bytes in its queue.", held, _CONSUMER)
    peak = each(lambda lane: lane.queue.bytes_peak)
    yield _gauge("consumer_queue_peak_bytes", "The most that were in it since the hub began.", peak, _CONSUMER)
    yield _gauge("consumer_queue_limit_bytes", "Its `queue_bytes_max`.", bound, _CONSUMER)
    noted = each(lambda lane: lane.notes.nbytes)
    yield _gauge("consumer_note_bytes", "Ends, engines and answers that wait for it, by weight.", noted, _CONSUMER)
    yield _gauge("consumer_note_limit_bytes", "The bound of that.", each(lambda _: limits.NOTES_BYTES_MAX), _CONSUMER)
    unnoted = [((lane.name, kind), lane.notes.lost[kind]) for lane in lanes for kind in KINDS]
    yield _counter("consumer_lost_notes", "Of these, those that had no room.", unnoted, (*_CONSUMER, "kind"))
    lag = each(lambda lane: lane.pace.lag_s(now))
    yield _gauge("consumer_lag_seconds", "How long the hub has had the frame that it is at; else 0.", lag, _CONSUMER)
    busy = each(lambda lane: lane.pace.busy_so_far_s(now))
    yield _counter("consumer_busy_seconds", "Time that it spent in calls; 1 in a second is all.", busy, _CONSUMER)
    own = by(lambda lane: lane.counts)
    yield _counter("consumer_counts", "What the consumer counts itself, by its names.", own, (*_CONSUMER, "name"))


def _workers(hub: Hub) -> Iterator[Metric]:
    """What the hub has of each worker that is connected."""
    peers = [known for known in list(hub.roster.peers.values()) if known.source is not None]

    def each(read: Callable[[Source], float]) -> Samples:
        return [(_worker(known), read(known.source)) for known in peers if known.source is not None]

    models = [
        ((*_worker(known), known.hello.model.name, known.hello.model.dtype), 1)
        for known in peers
        if known.hello.model is not None
    ]
    yield _gauge("worker_info", "Always 1; what the worker runs.", models, (*_WORKER, "model", "dtype"))
    frames, rows, nbytes = each(lambda x: x.frames), each(lambda x: x.rows), each(lambda x: x.bytes)
    yield _counter("worker_received_frames", "Frames taken from the worker.", frames, _WORKER)
    yield _counter("worker_received_rows", "Rows in them.", rows, _WORKER)
    yield _counter("worker_received_bytes", "Bytes of these rows.", nbytes, _WORKER)
    last = [
        (_worker(known), _wall(known.source.frame_at))
        for known in peers
        if known.source is not None and known.source.frame_at is not None
    ]
    yield _gauge("worker_last_frame_timestamp_seconds", "When its last frame was taken, as Unix time.", last, _WORKER)
    credit = each(lambda source: source.intake.credit_bytes)
    yield _gauge("worker_credit_bytes", "What it may still send.", credit, _WORKER)
    held = each(lambda source: source.intake.held_bytes)
    yield _gauge("worker_held_bytes", "Its frames that are held here and not acknowledged.", held, _WORKER)
    held_peak = each(lambda source: source.intake.held_bytes_peak)
    yield _gauge(
        "worker_held_peak_bytes",
        "The most that were; what `capflow_credit_window_bytes` was bounds it.",
        held_peak,
        _WORKER,
    )


def _worker_counts(hub: Hub) -> Iterator[Metric]:
    """What each worker that is connected says of its own side; at most a few seconds old."""
    told = [
        (_worker(known), known.source.told)
        for known in list(hub.roster.peers.values())
        if known.source is not None and known.source.told is not None
    ]

    def each(field: str) -> Samples:
        return [(labels, getattr(counts, field)) for labels, counts in told]

    def counter(name: str, meaning: str, field: str) -> Metric:
        return _counter(f"worker_{name}", meaning, each(field), _WORKER)

    def gauge(name: str, meaning: str, field: str) -> Metric:
        return _gauge(f"worker_{name}", meaning, each(field), _WORKER)

    yield counter("sent_frames", "Frames that the worker took for the hub.", "sent_frames")
    yield counter("sent_bytes", "Bytes of their rows.", "sent_bytes")
    reasons = [sample for labels, counts in told for sample in _named(counts.dropped_rows, labels)]
    yield _counter("worker_dropped_rows", "Rows that the worker dropped, at once.", reasons, (*_WORKER, "reason"))
    yield gauge("queued_frames", "Frames in its outbound queue.", "queued_frames")
    yield gauge("queued_bytes", "Bytes in its outbound queue.", "queued_bytes")
    yield gauge("queue_peak_bytes", "The most that were in it since the worker began.", "queue_bytes_peak")
    yield gauge("queue_limit_bytes", "The bound of its outbound queue.", "queue_bytes_max")
    yield gauge("unacknowledged_frames", "Frames that it keeps until the hub acknowledges them.", "unacked_frames")
    yield gauge("unacknowledged_bytes", "Bytes of these frames.", "unacked_bytes")
    yield gauge("unacknowledged_peak_bytes", "The most that were since the worker began.", "unacked_bytes_peak")
    yield gauge("staged_bytes", "Its host memory for rows, from the step to the acknowledgement.", "staged_bytes")
    yield gauge("staging_limit_bytes", "The bound of that; steps under way come on top.", "staged_bytes_max")
    yield counter("reconnects", "Connections to a hub that it lost.", "reconnects")


def _spools(hub: Hub) -> Iterator[Metric]:
    """What each spool counts: the consumers' inboxes, and those of the workers that are connected, as they tell."""
    inboxes = [
        ((lane.name,), lane.inbox.status())
        for lane in hub.lanes
        if isinstance(lane, SpillingLane)
        if lane.inbox.is_open
    ]

    def of_each(key: str) -> Samples:
        return [(labels, status[key]) for labels, status in inboxes]

    yield _gauge(
        "consumer_spool_records", "Frames and notes in its inbox, done with or not.", of_each("records"), _CONSUMER
    )
    yield _gauge(
        "consumer_spool_unread_records", "Of these, those that it was not given.", of_each("unread"), _CONSUMER
    )
    yield _gauge("consumer_spool_bytes", "The size of its inbox on disk.", of_each("bytes"), _CONSUMER)
    yield _gauge("consumer_spool_limit_bytes", "Its `spool_bytes`.", of_each("bytes_max"), _CONSUMER)
    kept, damaged = of_each("frames_spilled"), of_each("frames_lost")
    yield _counter("consumer_spooled_frames", "Frames that went to its inbox.", kept, _CONSUMER)
    yield _counter("consumer_spool_lost_frames", "Of these, those that could not be read again.", damaged, _CONSUMER)
    yield _counter("consumer_spool_errors", "Times that its disk failed.", of_each("failures"), _CONSUMER)
    letters = [((lane.name,), lane.dead.letters) for lane in hub.lanes if isinstance(lane, SpillingLane)]
    yield _gauge("consumer_dead_letters", "Frames and ends of requests in its dead letters.", letters, _CONSUMER)
    unkept = [((lane.name,), lane.requests_unkept) for lane in hub.lanes if isinstance(lane, SpillingLane)]
    meaning = "Requests too long for its inbox: a hub that ends while they run loses rows of them."
    yield _counter("consumer_unkept_requests", meaning, unkept, _CONSUMER)
    told: list[tuple[tuple[str, str], Mapping[str, int]]] = [
        (_worker(known), known.source.told.spool)
        for known in list(hub.roster.peers.values())
        if known.source is not None and known.source.told is not None and known.source.told.spool is not None
    ]

    def each(key: str) -> Samples:
        return [(labels, spool[key]) for labels, spool in told if key in spool]

    yield _gauge("worker_spool_frames", "Frames in its spool that no hub has acknowledged.", each("records"), _WORKER)
    yield _gauge("worker_spool_bytes", "The size of its spool on disk.", each("bytes"), _WORKER)
    yield _gauge("worker_spool_limit_bytes", "Its `--spool-bytes`.", each("bytes_max"), _WORKER)
    spilled, lost = each("frames_spilled"), each("frames_lost")
    yield _counter("worker_spooled_frames", "Frames that went to its spool.", spilled, _WORKER)
    yield _counter("worker_spool_lost_frames", "Of these, those that could not be read again.", lost, _WORKER)
    yield _counter("worker_spool_errors", "Times that its disk failed.", each("failures"), _WORKER)


def _worker(known: Peer) -> tuple[str, str]:
    return known.hello.engine, rank_name(known.hello.rank)


def rank_name(rank: Sequence[int]) -> str:
    """Return a rank as it is shown: `pp0-dp0-tp0`."""
    return "-".join(f"{axis}{place}" for axis, place in zip(Rank._fields, rank, strict=True))


_PARTS: tuple[Callable[[Hub], Iterator[Metric]], ...] = (_hub, _consumers, _workers, _worker_counts, _spools)
"""Everything that there is, in order."""
