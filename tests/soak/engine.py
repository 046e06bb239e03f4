"""Runs a real engine for a long time, and checks its memory, descriptors and threads, and those of the hub.

    make soak-engine          (or: python -m tests.soak.engine [--minutes N])

`capflow serve` runs a tiny model behind HTTP, and `capflow run` with small caches (`tests.soak.hub`) writes the rows to
files. Four clients send requests without pause: plain, captured, steered by vectors that nobody sent before, and both.
Every result is checked: each captured request has all of its rows. Samples of the hub, the API and the engine's
processes count once the hub keeps its maximum number of results, and after `WARM_MINUTES`. The bounds are those of
`tests.soak`. The exit code is 1 if a bound is passed or a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.run import Options
from tests.kit.engines import SHAPE, save_tiny, save_words
from tests.kit.hubs import free_port
from tests.kit.servers import environment, healthy, post, process, wait_until
from tests.soak import hub as soak_hub
from tests.soak.__main__ import EVERY_S, Watched, judge

WARM_MINUTES = 10.0
CLIENTS = 4
# vLLM's worker on a CPU grows by about 2 MB for each new number of tokens of a step, with capflow and without it.
# Prompts of few lengths make few such numbers, and all of them come before the samples count.
LENGTHS = (1, 7, 40)
SITES = [f"post_block:{layer}" for layer in range(SHAPE["num_hidden_layers"])]


class Client(threading.Thread):
    """Sends requests one after another, and counts them and their rows."""

    def __init__(self, port: int, seed: int, root: Path, ended: threading.Event) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._port, self._random, self._root, self._ended = port, random.Random(seed), root, ended
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._name = f"c{seed}"

    def run(self) -> None:
        """Send until told to end."""
        for number in itertools.count():
            if self._ended.is_set():
                return
            try:
                self._ask(f"{self._name}-{number}")
            except (OSError, urllib.error.URLError, KeyError, TypeError) as e:
                if not self._ended.is_set():
                    self.troubles.append(f"{self._name}-{number}: {e!r}")
                    self._ended.wait(1.0)

    def _ask(self, name: str) -> None:
        rng = self._random
        captured, steered = rng.random() < 0.6, rng.random() < 0.5
        prompt, length = [rng.randrange(5, 290) for _ in range(rng.choice(LENGTHS))], rng.randint(1, 30)
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": length, "ignore_eos": True}
        if captured:
            body |= {"capture": {"hooks": {"post_block": "all"}}, "capture_id": name, "capture_wait": True}
        if steered:
            vector = [rng.gauss(0, 0.1) for _ in range(SHAPE["hidden_size"])]
            body["steering_vectors"] = {"post_block": {str(rng.randrange(len(SITES))): vector}}
        answer = post(self._port, body)
        self.counts["requests"] += 1
        self.counts["steered"] += steered
        if captured:
            result = answer["capture_results"]["filesystem"]
            rows = len(SITES) * (len(prompt) + length - 1)
            if (result["status"], result["payload"].get("rows")) != ("ok", rows):
                self.troubles.append(f"{name}: got {result}, expected ok with {rows} rows")
            self.counts["rows"] += rows
            for path in self._root.glob(f"{name}*"):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def running(home: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Run a hub and a server; yield the server's port, and the ids of the processes by name."""
    model = Path(save_tiny(home / "model"))
    save_words(model)
    port, variables = free_port(), environment(home)
    wrapped = {"python": (soak_hub.__file__,), "environment": variables}
    consumer = f"filesystem:root={home}/rows,capture=requests"
    serve = ("serve", str(model), "--port", str(port), "--dtype", "float32", "--enforce-eager")
    more = ("--max-model-len", "256", "--served-model-name", "tiny", "--disable-uvicorn-access-log")
    # All of it is used within minutes. With a large one, each block that is used for the first time looks like growth.
    more += ("--kv-cache-memory-bytes", str(16 << 20))
    with (
        process("run", "--consumer", consumer, **wrapped) as (hub, _),
        process(*serve, *more, environment=variables) as (server, lines),
    ):
        try:
            wait_until(lambda: healthy(port), 400, server)
            yield port, {"hub": hub.pid, **processes_of(server.pid)}
        finally:
            server.terminate()
            hub.terminate()
    assert not any("Traceback" in line for line in lines), lines


def processes_of(server: int) -> dict[str, int]:
    """Return the processes of a server by name: that of the API, and those that vLLM named itself."""
    below = psutil.Process(server).children(recursive=True)
    titles = {each.pid: " ".join(each.cmdline()).strip() for each in below}
    engine = {title.removeprefix("VLLM::"): pid for pid, title in titles.items() if title.startswith("VLLM::")}
    return {"API": max(set(titles) - set(engine.values()), key=resident), **engine}


def resident(pid: int) -> int:
    """Return the resident pages of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])


def run(minutes: float, home: Path) -> bool:
    """Run for so long; return whether all bounds are kept."""
    options = Options(tell=lambda text: print(text, flush=True))
    with running(home) as (port, pids):
        ended, begun = threading.Event(), time.monotonic()
        clients = [Client(port, seed, home / "rows", ended) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        watched: dict[str, Watched] = {}
        while (now := time.monotonic()) < begun + 60 * minutes:
            done = sum(client.counts["requests"] for client in clients)
            if not watched and done > 2 * soak_hub.RESULTS_KEPT_MAX and now > begun + 60 * WARM_MINUTES:
                watched = {name: Watched(pid) for name, pid in pids.items()}
                options.tell(f"samples count after {(now - begun) / 60:.1f} minutes and {done} requests")
            for one in watched.values():
                one.note(now)
            ended.wait(EVERY_S)
        ended.set()
        for client in clients:
            client.join(120)
        counts = sum((client.counts for client in clients), Counter[str]())
        troubles = [trouble for client in clients for trouble in client.troubles]
        for name, value in counts.items():
            options.tell(f"| {name} | {value} |")
        kept = [judge(name, one, options) for name, one in watched.items()]
        if not watched:
            options.tell("the caches were never full: run it for longer")
    for trouble in troubles[:20]:
        options.tell(trouble)
    return bool(kept) and all(kept) and not troubles


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Run an engine for long; watch memory and descriptors.")
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        return 0 if run(arguments.minutes, Path(directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
