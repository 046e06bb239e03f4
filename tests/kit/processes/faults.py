"""A hub with a good consumer and a bad one: `faults.py ADDRESS KIND POLICY QUEUE_BYTES [SPOOL_DIR]`.

KIND is how the second consumer handles a frame, see `Bad`; `none` leaves it out. SIGTERM stops the hub as `capflow run`
does; then it prints how long that took, in seconds.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

from capflow import limits
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from tests.kit.hubs import EVERYTHING

SLOW_S = 0.02
HOG_S = 0.01
HOG_LITTLE_S = 0.000_2  # as long as a frame takes the others


class Good(Consumer):
    """Reads every row."""

    name = "good"

    def spec(self):
        return EVERYTHING

    def on_frame(self, frame):
        for chunk in frame.chunks():
            chunk.rows.sum()


class Bad(Good):
    """Sleeps, raises, hangs, dies, or does well; or takes the processor from all others for a while."""

    name = "bad"

    def on_frame(self, frame):
        getattr(self, self.config)(frame)

    def sleeps(self, _):
        # What this consumer is: slow.
        time.sleep(SLOW_S)

    def raises(self, _):
        raise ValueError("no")

    def hangs(self, _):
        threading.Event().wait()

    def takes(self, frame):
        super().on_frame(frame)

    def hogs(self, _):
        self._hog(HOG_S)

    def hogs_a_little(self, _):
        self._hog(HOG_LITTLE_S)

    @staticmethod
    def _hog(seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    def dies(self, _):
        sys.exit("no more")


def main():
    address, kind, policy, queue_bytes = sys.argv[1:5]
    made = [ConfiguredConsumer.of(Good(None), policy="block", queue_bytes_max=int(queue_bytes))]
    if kind != "none":
        options = {"spool_dir": Path(sys.argv[5])} if policy == "spill" else {}
        made.append(ConfiguredConsumer.of(Bad(kind), policy=policy, queue_bytes_max=int(queue_bytes), **options))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    hub = Hub(address, made)
    hub.start()
    print("ready", flush=True)
    # Another thread may be given the signal, which does not wake this one.
    while not stopped.wait(limits.IDLE_S):
        pass
    begun = time.monotonic()
    hub.stop(limits.DRAIN_S_DEFAULT, leave=True)
    print(f"{time.monotonic() - begun:.3f}", flush=True)


if __name__ == "__main__":
    main()
