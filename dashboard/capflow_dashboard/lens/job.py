"""The process that computes lenses: reads tasks from standard input and writes answers to standard output.

Each task is answered, errors too, with one line. The process ends when standard input does, even while it computes:
its parent, however it ends, cannot leave it behind. It runs at low priority on one thread; its memory, besides mapped
files, is limited by the kernel.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from capflow.errors import CapflowError, UsageError, explain
from capflow.lenses.file import LensFile
from capflow.lenses.lens import Lens, LensPart
from capflow.lenses.model_files import file_identity, open_model
from capflow_dashboard import limits
from capflow_dashboard.lens.messages import LENGTH, LensTask, LensTokens, Token


class LensWorker:
    """Answers tasks; keeps the last lens open."""

    def __init__(self) -> None:
        # What the last lens was read from, and this lens.
        self._signature: tuple[Any, ...] | None = None
        self._lens: Lens | None = None

    def answer(self, task: LensTask) -> LensTokens:
        """Return the most likely tokens of a task's rows, or the reason why there are none."""
        try:
            return LensTokens(self._rows(task))
        except CapflowError as e:
            return LensTokens(error=str(e))
        except MemoryError:
            got = f"more than {limits.LENS_BYTES_MAX // limits.MIB} MiB"
            return LensTokens(error=explain(f"lens of {task.model}: memory", got=got))
        # Files may be damaged in ways that nobody foresees.
        except Exception as e:  # noqa: BLE001
            text = " ".join(f"{type(e).__name__}: {e}".split())
            return LensTokens(error=explain(f"lens of {task.model}: failed", got=text))

    def _rows(self, task: LensTask) -> list[list[Token]]:
        lens = self._open(task)
        rows = np.frombuffer(task.rows, np.float32).reshape(-1, 1, task.hidden_size)
        sites = [lens.check(layer) for layer in task.layers]
        parts = [LensPart(site, row) for site, row in zip(sites, rows, strict=True)]
        return [
            [
                (token, None if text is None else text[: limits.TEXT_LENGTH_MAX], float(f"{probability:.6g}"))
                for token, text, probability in zip(
                    reading.ids[0].tolist(), reading.texts[0], reading.probabilities[0].tolist(), strict=True
                )
                if token >= 0
            ]
            for reading in lens.read(parts, limits.LENS_TOKENS)
        ]

    def _open(self, task: LensTask) -> Lens:
        """Return the task's lens. Raises UsageError if its files are of another model."""
        files = open_model(task.model)
        signature = (files.signature, task.lens, task.other_weights, file_identity(Path(task.lens)))
        if self._lens is None or signature != self._signature:
            # Two models are never open at once.
            self._lens = None
            file = LensFile(task.lens) if task.lens else None
            self._lens = Lens(files, file, other_weights=task.other_weights)
            self._signature = signature
        lens = self._lens
        layers, width = lens.num_layers, lens.hidden_size
        fits = layers == task.num_layers or (layers > task.num_layers and not task.whole)
        if not fits or width != task.hidden_size:
            got = f"{layers} layers of width {width}"
            least = "" if task.whole else " or more"
            expected = f"those of the engine's model: {task.num_layers}{least} of width {task.hidden_size}"
            raise UsageError(explain(f"lens: {files.directory}", got=got, expected=expected))
        return lens


def write(stream: BinaryIO, message: LensTokens) -> None:
    """Write a message."""
    content = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def main() -> None:
    """Answer tasks until standard input ends. The argument is the limit of memory in bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not stand between answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(OSError, ValueError):
        os.nice(10)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), int(sys.argv[1])))
    tasks: queue.SimpleQueue[LensTask] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, tasks), daemon=True).start()
    worker = LensWorker()
    while True:
        write(answers, worker.answer(tasks.get()))


def _read(stream: BinaryIO, tasks: queue.SimpleQueue[LensTask]) -> None:
    """Put each message into the queue; end the process at the end of the stream."""
    try:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            tasks.put(msgspec.msgpack.decode(stream.read(length), type=LensTask))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
