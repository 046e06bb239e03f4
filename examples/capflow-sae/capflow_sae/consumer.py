"""The sae consumer: passes the rows of one site to a training loop and never waits for it.

Rows without room in the buffer are skipped and counted (`rows_skipped`), and so are rows with NaN or infinity
(`rows_not_finite`). The first position of each request is skipped too, unless `first=true`: models have a huge vector
there that does not depend on the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch

from capflow import (
    CaptureResult,
    CaptureSpec,
    Consumer,
    Context,
    Frame,
    ModelInfo,
    RequestDone,
    Site,
    UsageError,
    explain,
    hookimpl,
)
from capflow_sae.autoencoder import SparseAutoencoder
from capflow_sae.buffer import ShuffleBuffer
from capflow_sae.trainer import Trainer


class SaeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer sae:`.

    out: the directory for `sae.safetensors` and `loss.png`; created if missing.
    site: the site whose rows to learn from.
    features: how many directions to learn.
    active: how many of them represent one row.
    batch: rows of a training step.
    learning_rate: of the training.
    buffer_rows: how many rows may wait for the training; they are shuffled.
    threads: torch's threads in the hub.
    first: whether to learn from the first positions of requests too.
    seed: of the initial weights and the shuffling.
    """

    out: str
    site: str
    features: int = 4096
    active: int = 32
    batch: int = 256
    learning_rate: float = 1e-3
    buffer_rows: int = 16_384
    threads: int = 1
    first: bool = False
    seed: int = 0


class Sae(Consumer):
    """Trains a sparse autoencoder on the rows of one site while the model runs."""

    name = "sae"
    Config = SaeConfig
    reads_requests = False

    def __init__(self, config: SaeConfig) -> None:
        super().__init__(config)
        self.config: SaeConfig = config
        # Set when the first engine connects.
        self.trainer: Trainer | None = None
        # The first engine's.
        self.hidden_size = 0
        self.context: Context | None = None

    def check(self) -> None:
        """Raise UsageError for options out of range and for an `out` that is a file."""
        config = self.config
        for field in ("features", "active", "batch", "threads", "learning_rate"):
            if not getattr(config, field) > 0:
                raise UsageError(explain(f"consumers.sae.{field}", got=getattr(config, field), expected="above 0"))
        if config.active > config.features:
            expected = f"at most {config.features}, the number of features"
            raise UsageError(explain("consumers.sae.active", got=config.active, expected=expected))
        if config.buffer_rows < 2 * config.batch:
            expected = f"at least two batches, {2 * config.batch}"
            raise UsageError(explain("consumers.sae.buffer_rows", got=config.buffer_rows, expected=expected))
        if Path(config.out).exists() and not Path(config.out).is_dir():
            raise UsageError(explain("consumers.sae.out", got=f"{config.out}, which is a file", expected="a directory"))

    def spec(self) -> CaptureSpec:
        """Return a spec of the site at every position."""
        layer, hook = Site.parse(self.config.site)
        return CaptureSpec({hook: [layer]}, positions="all")

    def open(self, context: Context) -> None:
        """Create the directory."""
        self.context = context
        Path(self.config.out).mkdir(parents=True, exist_ok=True)

    def on_session(self, engine: str, model: ModelInfo) -> None:  # noqa: ARG002
        """Start the training when the first engine connects: its model has the width of the rows."""
        if self.trainer is not None:
            return
        config = self.config
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.hidden_size = model.hidden_size
        self.trainer = Trainer(
            SparseAutoencoder(model.hidden_size, config.features, config.active),
            ShuffleBuffer(config.buffer_rows, model.hidden_size, config.seed),
            Path(config.out),
            {"site": config.site, "model": model.name},
            batch=config.batch,
            learning_rate=config.learning_rate,
        )
        self.trainer.start()

    def on_frame(self, frame: Frame) -> None:
        """Copy the rows into the buffer.

        Raises UsageError for rows of another width, RuntimeError when the training has failed.
        """
        # An engine connects before it sends frames.
        trainer = cast("Trainer", self.trainer)
        if frame.header.hidden_size != self.hidden_size:
            expected = f"{self.hidden_size}, the width of the first engine's rows"
            raise UsageError(explain("rows", got=f"{frame.header.hidden_size} wide", expected=expected))
        if trainer.error is not None:
            raise RuntimeError(f"the training ended: {trainer.error}")
        for chunk in list(frame.chunks()):
            skip = 1 if chunk.start == 0 and not self.config.first else 0
            rows = chunk.rows[0, skip:].astype(np.float32)
            finite = np.isfinite(rows).all(-1)
            self._count("rows_not_finite", int((~finite).sum()))
            self._count("rows_skipped", trainer.buffer.put(torch.from_numpy(rows[finite])))

    def on_request_done(self, done: RequestDone) -> CaptureResult:  # noqa: ARG002
        """Return the training's steps and its latest loss."""
        trainer = cast("Trainer", self.trainer)
        return CaptureResult("ok", payload={"steps": trainer.curve.steps, "loss": trainer.loss})

    def look(self) -> tuple[str, str]:
        """Return the directory of weights and plot, and a command that lists it."""
        return self.config.out, f"ls -l {self.config.out}"

    def close(self) -> None:
        """Learn from the remaining rows; write weights and plot."""
        if self.trainer is not None:
            self.trainer.stop()
            if self.trainer.error is not None:
                raise RuntimeError(f"the training ended: {self.trainer.error}")

    def _count(self, name: str, amount: int) -> None:
        if amount and self.context is not None:
            self.context.count(name, amount)


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Return the sae consumer."""
    return [Sae]
