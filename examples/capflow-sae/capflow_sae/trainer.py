"""The training: a thread that takes batches from the buffer and learns from them, from `start` to `stop`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from capflow_sae.autoencoder import SparseAutoencoder
from capflow_sae.buffer import ShuffleBuffer

_SAVE_S = 30.0
# Points of the curve; above it, neighbours are averaged.
_POINTS_MAX = 4096


class Curve:
    """The loss by step, with a bounded number of points."""

    def __init__(self) -> None:
        # Each is the mean of `every` steps.
        self.losses: list[float] = []
        self.every = 1
        self.steps = 0
        self._sum = 0.0

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        self.steps += 1
        self._sum += loss
        if self.steps % self.every == 0:
            self.losses.append(self._sum / self.every)
            self._sum = 0.0
        if len(self.losses) == _POINTS_MAX:
            self.losses = [(a + b) / 2 for a, b in zip(self.losses[::2], self.losses[1::2], strict=True)]
            self.every *= 2

    def plot(self, path: Path, title: str) -> None:
        """Write a PNG file, which appears once it is whole."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        steps = [self.every * (point + 1) for point in range(len(self.losses))]
        axes.plot(steps, self.losses, linewidth=0.8)
        axes.set(xlabel="step", ylabel="variance not explained", title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        figure.savefig(partial, format="png", dpi=120)
        partial.replace(path)


class Trainer:
    """Learns from a buffer's rows; writes `sae.safetensors` and `loss.png` every 30 s and at the end."""

    def __init__(
        self,
        model: SparseAutoencoder,
        buffer: ShuffleBuffer,
        directory: Path,
        about: dict[str, object],
        *,
        batch: int,
        learning_rate: float,
    ) -> None:
        self.model, self.buffer, self.directory, self.about = model, buffer, directory, about
        self.batch = batch
        # The thread writes the next three fields.
        self.curve = Curve()
        # The loss of the last step.
        self.loss: float | None = None
        # Why the training ended early.
        self.error: str | None = None
        self._optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        self._thread = threading.Thread(target=self._run, name="capflow-sae-training", daemon=True)

    def start(self) -> None:
        """Start to learn."""
        self._thread.start()

    def stop(self) -> None:
        """Learn from the buffer's remaining rows, write the files, and end."""
        self.buffer.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._train()
        # The consumer raises the error for every later frame.
        except Exception as e:  # noqa: BLE001
            self.error = f"{type(e).__name__}: {e}"

    def _train(self) -> None:
        saved = time.monotonic()
        while (rows := self.buffer.take(self.batch)) is not None:
            self._step(rows)
            if time.monotonic() - saved >= _SAVE_S:
                self._save()
                saved = time.monotonic()
        self._save()

    def _step(self, rows: torch.Tensor) -> None:
        if not self.curve.steps:
            self.model.begin(rows)
        total, self.loss = self.model.loss(rows)
        self._optimizer.zero_grad()
        total.backward()
        self._optimizer.step()
        with torch.no_grad():
            self.model.decoder.div_(self.model.decoder.norm(dim=-1, keepdim=True).clamp_min(1e-12))
        self.curve.add(self.loss)

    def _save(self) -> None:
        if self.curve.steps:
            self.model.save(self.directory / "sae.safetensors", {**self.about, "steps": self.curve.steps})
            self.curve.plot(self.directory / "loss.png", f"{self.about['site']}, {self.curve.steps:,} steps")
