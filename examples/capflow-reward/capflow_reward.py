"""The reward consumer: returns the pooled score of a linear probe on a request's generated tokens with its result.

Invariant: a reward is computed from every generated token that was an input of the model, or there is none.
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
    """The options of `--consumer reward:`.

    probe: a probe file with one probe.
    pool: how the scores of a request's tokens are combined into one reward.
    """

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
        # The scores of each request, by engine and id, until it ends.
        self.scores: dict[tuple[str, str], list[np.ndarray]] = {}

    @cached_property
    def probe(self) -> Probe:
        """The probe. Raises UsageError when the file has none or several."""
        probe = Probe.load(self.config.probe)
        if len(probe.names) != 1:
            raise UsageError(explain(f"{probe.where}: weight", got=f"{len(probe.names)} probes", expected="one"))
        return probe

    def spec(self) -> CaptureSpec:
        """Return a spec of the probe's site at generated tokens."""
        return CaptureSpec({self.probe.site.hook: [self.probe.site.layer]}, positions="all_generated")

    def on_session(self, engine: str, model: ModelInfo) -> None:  # noqa: ARG002
        """Raise UsageError, which the hub logs, unless the probe fits the model."""
        self.probe.check(model.sites, model.width_of(self.probe.site))

    def on_frame(self, frame: Frame) -> None:
        """Score the rows. Raises UsageError for rows of another width; the results of their requests report it."""
        for chunk in list(frame.chunks()):
            if chunk.rows.shape[-1] != self.probe.hidden_size:
                expected = f"{self.probe.hidden_size}, the probe's width"
                raise UsageError(explain("rows", got=f"{chunk.rows.shape[-1]} wide", expected=expected))
            scores = self.probe.scores(chunk.rows[0])[:, 0]
            self.scores.setdefault((frame.header.engine, chunk.request.id), []).append(scores)

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Return the reward."""
        # The empty array makes the result float64, also without scores.
        scores = np.concatenate([np.empty(0), *self.scores.pop((done.engine, done.request), [])])
        expected = max(done.computed_length - done.prompt_length, 0)
        if not expected or len(scores) != expected:
            error = explain("rows of generated tokens", got=len(scores), expected=str(expected or "1 or more"))
            return CaptureResult("error", error)
        pooled = {"mean": scores.mean(), "max": scores.max(), "last": scores[-1]}[self.config.pool]
        return CaptureResult("ok", payload={"reward": float(pooled), "tokens": len(scores)})


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Return the reward consumer."""
    return [Reward]
