"""The reward consumer: what a linear probe scores on a request's generated tokens, pooled, in the request's result.

What always holds: a reward is of every generated token that was an input of the model, or there is none.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from capflow import (
    CaptureResult,
    CaptureSpec,
    Consumer,
    Frame,
    ModelInfo,
    Probe,
    RequestDone,
    UsageError,
    explain,
    hookimpl,
)


class RewardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """probe: a probe file with one probe. pool: how the scores of a request's tokens make one reward."""

    probe: str
    pool: Literal["mean", "max", "last"] = "mean"


class Reward(Consumer):
    """Answers each request with a reward."""

    name = "reward"
    Config = RewardConfig
    reads_requests = False

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self.config: RewardConfig = config
        self.scores: dict[tuple[str, str], list[np.ndarray]] = {}  # by engine and request, until it is over

    @cached_property
    def probe(self) -> Probe:
        """The probe; raises UsageError when the file holds none, or several."""
        probe = Probe.load(self.config.probe)
        if len(probe.names) != 1:
            raise UsageError(explain(f"{probe.where}: weight", got=f"{len(probe.names)} probes", expected="one"))
        return probe

    def check(self) -> None:
        """Raise UsageError when there is no such probe."""
        self.spec()

    def spec(self) -> CaptureSpec:
        """Ask for the probe's site, at generated tokens."""
        return CaptureSpec({self.probe.site.hook: [self.probe.site.layer]}, positions="all_generated")

    def on_session(self, engine: str, model: ModelInfo) -> None:  # noqa: ARG002
        """Raise UsageError, which is logged, unless the probe fits the model."""
        self.probe.check(model.sites, model.hidden_size)

    def on_frame(self, frame: Frame) -> None:
        """Score the rows; what does not fit the probe raises, and the requests in the frame are told."""
        for chunk in list(frame.chunks()):
            if chunk.rows.shape[-1] != self.probe.hidden_size:
                expected = f"{self.probe.hidden_size}, the probe's width"
                raise UsageError(explain("rows", got=f"{chunk.rows.shape[-1]} wide", expected=expected))
            scores = self.probe.scores(chunk.rows[0])[:, 0]
            self.scores.setdefault((frame.header.engine, chunk.request.id), []).append(scores)

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Return the reward."""
        scores = np.concatenate([np.empty(0), *self.scores.pop((done.engine, done.request), [])])  # float64
        expected = max(done.computed_length - done.prompt_length, 0)
        if not expected or len(scores) != expected:
            what = "rows of generated tokens"
            return CaptureResult("error", explain(what, got=len(scores), expected=str(expected or "1 or more")))
        pooled = {"mean": scores.mean(), "max": scores.max(), "last": scores[-1]}[self.config.pool]
        return CaptureResult("ok", payload={"reward": float(pooled), "tokens": len(scores)})


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the reward consumer."""
    return [Reward]
