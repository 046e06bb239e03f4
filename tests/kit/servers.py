"""`capflow` commands as processes of their own, and the HTTP of a server that they start."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request


def environment(home, *, path=None, **more):
    """Return the variables of a command whose default hub is under `home`, and of the engine that it may start.

    path: a directory to import from, before those of this process.
    """
    kept = {name: value for name, value in os.environ.items() if name != "CAPFLOW_HUB"}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [path and str(path), kept.get("PYTHONPATH")])),
        "XDG_RUNTIME_DIR": str(home),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


@contextlib.contextmanager
def process(*arguments, environment, python=("-m", "capflow")):
    """Run a capflow command; it must be gone, by itself, when the block is over.

    python: how Python runs the command.
    """
    running = subprocess.Popen(
        [sys.executable, *python, *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = []
    try:
        yield running, lines
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        raise
    try:
        lines += running.communicate(timeout=60)[1].splitlines()
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        raise


def post(port, body, **headers):
    """Return the answer to a completion that is asked for."""
    headers |= {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def wait_until(condition, seconds, running):
    """Return when the condition holds; fail when it does not in time, or when the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None, "the process ended"
        assert time.monotonic() < deadline, "not in time"
        # The pause between two looks.
        time.sleep(0.1)


def healthy(port):
    """Return whether a server answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
