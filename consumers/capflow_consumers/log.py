"""The log consumer: a line for each finished request and for each event of steering. It is small, to be copied."""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from capflow import (
    Answered,
    CaptureResult,
    CaptureSpec,
    Consumer,
    Frame,
    RequestDone,
    Site,
    Status,
    UsageError,
    explain,
    hookimpl,
)

logger = logging.getLogger("capflow.consumer.log")


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the log consumer.

    every: log one request in so many.
    positions: the positions to capture, at every `post_block` site that is tapped.
    events: log the events of steering: actions, gates, ends of leases.
    """

    every: int = 1
    positions: str = "last_prompt"
    events: bool = True


class LogConsumer(Consumer):
    """Logs how many rows a request had, at which sites, and their mean norm."""

    name = "log"
    Config = LogConfig

    def __init__(self, config: LogConfig) -> None:
        super().__init__(config)
        # Rows, sum of norms and sites, by engine and request.
        self.seen: dict[tuple[str, str], tuple[int, float, frozenset[Site]]] = {}
        self.finished = 0

    def check(self) -> None:
        """Raise UsageError when an option is out of range."""
        if self.config.every < 1:
            raise UsageError(explain(f"consumers.{self.instance}.every", got=self.config.every, expected="1 or more"))

    def spec(self) -> CaptureSpec:
        """Ask for the same positions of every request."""
        value = {"hooks": {"post_block": "all"}, "positions": self.config.positions}
        return CaptureSpec.parse(value, where=f"consumers.{self.instance}")

    def on_frame(self, frame: Frame) -> None:
        """Add up the norms; the rows are not kept."""
        norms_of = [(chunk, np.linalg.norm(chunk.rows.astype(np.float32), axis=-1)) for chunk in frame.chunks()]
        for chunk, norms in norms_of:  # nothing fails from here on: a frame is taken whole or not at all
            key = (frame.header.engine, chunk.request.id)
            rows, total, sites = self.seen.get(key, (0, 0.0, frozenset()))
            self.seen[key] = (rows + norms.size, total + float(norms.sum()), sites.union(chunk.sites))

    def on_action(self, answered: Answered) -> None:
        """Log an event."""
        if self.config.events:
            names = ["engine", "request", "kind", "asked_by", "step", "position", "score", "threshold", "label"]
            names += ["target", "scale", "reason", "incarnation", "outcome"]
            fields = {name: getattr(answered, name) for name in names}
            fields |= {"event": "steering", "sites": list(map(str, answered.sites))}
            target = f" of {answered.target}" if answered.target else ""
            target += f" to {answered.scale:g}" if answered.target and answered.scale is not None else ""
            where = "" if answered.position is None else f" at position {answered.position}"
            why = "" if answered.score is None else f", score {answered.score:.4g}"
            why += f": {answered.reason}" if answered.reason else ""
            logger.info(
                "%s: %s%s by %s%s%s",
                answered.request,
                answered.kind,
                target,
                answered.asked_by,
                where,
                why,
                extra=fields,
            )

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Log the line."""
        rows, total, sites = self.seen.pop((done.engine, done.request), (0, 0.0, frozenset()))
        mean = total / rows if rows else 0.0
        self.finished += 1
        if self.finished % self.config.every == 0:
            fields = {"event": "request", "request": done.request, "rows": rows, "sites": len(sites), "mean_norm": mean}
            line = "%s: %d rows at %d sites, mean norm %.4g"
            logger.info(line, done.request, rows, len(sites), mean, extra=fields)
        status: Status = "partial_error" if done.dropped else "ok"
        return CaptureResult(status, payload={"rows": rows, "sites": len(sites), "mean_norm": mean})


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the log consumer."""
    return [LogConsumer]
