"""One engine that several commands start on this machine, as if each ran on a node of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.hubs import free_port, running_hub
from tests.kit.rows import Keeper
from tests.kit.servers import environment, healthy, wait_until

KIT = Path(__file__).parent
SIZES = ("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8", "--served-model-name", "tiny")
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

# Of a cluster of Ray's, whose workers would leave the processor to all other processes, by a niceness of 15.
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}


@pytest.fixture
def keeper():
    """A consumer on a hub that every node reaches, its address in `keeper.address`."""
    keeper = Keeper()
    keeper.address = f"tcp://127.0.0.1:{free_port()}"
    with running_hub(keeper.address, keeper):
        yield keeper


class Node:
    """One command of the engine: `port` is that of its HTTP server, if it has one; `log` is what it wrote."""

    def __init__(self, home, arguments, variables):
        home.mkdir(mode=0o700)
        self.port = free_port()
        self.serves = "--headless" not in arguments
        self._log = home / "log"
        mine = {"path": KIT / "gloo_experts", "XDG_STATE_HOME": str(home / "state"), **VARIABLES, **variables}
        command = [
            sys.executable,
            "-m",
            "capflow",
            "serve",
            *arguments,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(home, **mine), stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self):
        return self._log.read_text(errors="replace")

    @property
    def ready(self):
        return not self.serves or healthy(self.port)


@contextlib.contextmanager
def started(home, model, *each, **variables):
    """Start one command for each list of arguments; the commands are killed at the end, if they did not end.

    variables: of the environment of all of them; `path` as of `environment`.
    """
    nodes = []
    try:
        for number, arguments in enumerate(each):
            nodes.append(Node(home / f"node-{number}", [str(model), *SIZES, *arguments], variables))
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()


@contextlib.contextmanager
def running(home, model, *each, **variables):
    """As `started`, and wait until all serve; at the end, all are interrupted and must end by themselves, with 0."""
    with started(home, model, *each, **variables) as nodes:
        try:
            for node in nodes:
                wait_until(lambda node=node: node.ready, 300, node.process)
            yield nodes
            for node in nodes:
                node.process.send_signal(signal.SIGINT)
            begun = time.monotonic()
            assert [node.process.wait(90) for node in nodes] == [0] * len(nodes)
            assert time.monotonic() - begun < 60, "a worker was killed"
        except BaseException:
            for node in nodes:
                print("\n".join(node.log.splitlines()[-60:]))
            raise
