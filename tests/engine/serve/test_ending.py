"""How `capflow serve` ends: a real server, its hub, and clients that are being answered when the signal comes."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

import capflow
from capflow.capture.site import Site
from tests.kit import nodes
from tests.kit.fronts import end_during_a_step
from tests.kit.hubs import configured, free_port, running_hub
from tests.kit.rows import SlowKeeper
from tests.kit.servers import environment, healthy, wait_until
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

CAPTURE = {"hooks": {"post_block": [1]}, "positions": "all"}
SITE = Site(1, "post_block")
LAYERS = 4
LENGTH = 15_000
"""So many tokens take a minute."""


@dataclasses.dataclass
class Command:
    """A capflow command in a process group of its own. log: what it wrote."""

    process: subprocess.Popen
    path: pathlib.Path

    @property
    def log(self):
        return self.path.read_text(errors="replace")


@contextlib.contextmanager
def command(home, name, *arguments, **more):
    """Run a command; all of its processes are gone when the block is over."""
    path = home / f"{name}.log"
    variables = environment(home, VLLM_LOGGING_LEVEL="INFO", **more)
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "capflow", *arguments], env=variables, stdout=log, stderr=log, process_group=0
        )
    try:
        yield Command(process, path)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@dataclasses.dataclass
class Served:
    """A server that answers. root: where its hub writes."""

    server: Command
    port: int
    root: pathlib.Path
    hub: Command | None = None

    def post(self, **body):
        """Return the status and the body of the answer to a completion."""
        body = {"model": "tiny", "prompt": "w5 w77 w123", "temperature": 0, "ignore_eos": True, **body}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def stream(self, **body):
        """Yield the chunks of the answer to a completion."""
        body = {"model": "tiny", "prompt": "w5 w77 w123", "temperature": 0, "ignore_eos": True, "stream": True, **body}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def requests_running(self):
        """Return how many requests the engine computes."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running{"))

    def get(self, path):
        """Return the status of a GET."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as e:
            return e.code


@contextlib.contextmanager
def served(model, home, *arguments, beside=True):
    """Run a server with a hub beside it, or in the same command."""
    root, port = home / "rows", free_port()
    consumer = ("--consumer", f"filesystem:root={root},capture=requests")
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(command(home, "hub", "run", *consumer)) if beside else None
        server = stack.enter_context(
            command(
                home,
                "server",
                "serve",
                model,
                "--port",
                str(port),
                "--dtype",
                "float32",
                "--enforce-eager",
                "--served-model-name",
                "tiny",
                "--max-model-len",
                str(LENGTH + 100),
                "--hf-overrides",
                json.dumps({"max_position_embeddings": LENGTH + 100}),
                *(() if beside else consumer),
                *arguments,
            )
        )
        wait_until(lambda: healthy(port), 300, server.process)
        yield Served(server, port, root, hub)


def processes_below(process):
    """Return the processes that a command started, by id: those of the session that the server is in."""
    (child,) = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    result = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[3] == child:
                result.append(int(path.parent.name))
    assert result
    return result


def gone(processes):
    """Whether none of these processes runs."""
    for process in processes:
        with contextlib.suppress(OSError):
            if pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


def running(at, **body):
    """Return a future of the answer to a request that runs by the time this returns."""
    before = at.requests_running()
    future = concurrent.futures.ThreadPoolExecutor(1).submit(at.post, **body)
    eventually(lambda: at.requests_running() > before, 60)
    assert not future.done()
    return future


def check_prefix(capture):
    """A capture has the rows of all that was computed, from the first position on."""
    assert capture[SITE].positions.tolist() == list(range(capture.computed_length))
    assert capture.computed_length > 3


LONG = {"max_tokens": LENGTH, "capture": CAPTURE, "capture_wait": True}


@pytest.mark.long
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_requests_end_or_are_aborted_new_ones_are_refused_and_every_row_reaches_the_hub(
    tiny_with_words, tmp_path, beside
):
    with served(tiny_with_words, tmp_path, "--shutdown-timeout", "8", beside=beside) as at:
        long = [
            running(at, **LONG, prompt=["w5 w6"] * 8, capture_id="long"),
            running(at, **LONG, capture_id="one"),
        ]
        short = at.stream(max_tokens=20, capture=CAPTURE, capture_wait=True, capture_id="short")
        chunks = [next(short) for _ in range(10)]
        if beside:
            at.server.process.send_signal(signal.SIGTERM)
        else:
            os.killpg(at.server.process.pid, signal.SIGINT)  # as a terminal does
        eventually(lambda: at.get("/health") == 503)
        status, refusal = at.post(max_tokens=2)
        assert status == 503
        assert "shutting down" in refusal["error"]["message"]
        chunks += short
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
        assert chunks[-1]["capture_results"]["filesystem"]["status"] == "ok"
        for answer in long:
            status, body = answer.result(30)
            assert status == 200
            assert {choice["finish_reason"] for choice in body["choices"]} == {"abort"}
            assert body["capture_results"]["filesystem"]["status"] == "ok"
        assert at.server.process.wait(100) == 0
        data = capflow.open(at.root)
        assert data["short"].computed_length == 22
        for name in ("one", "long#0", "long#7"):
            check_prefix(data[name])
        log = at.server.log
        assert log.count("shutting down:") == 1
        assert log.count("9 requests were aborted") == 1
        assert "Traceback" not in log
        if beside:
            at.hub.process.send_signal(signal.SIGINT)
            assert at.hub.process.wait(60) == 0
            log = at.hub.log
        assert "10 requests" in log
        assert "unfinished" not in log
        assert "silent" not in log


@pytest.mark.long
def test_a_second_signal_ends_everything_at_once(tiny_with_words, tmp_path):
    with served(tiny_with_words, tmp_path, beside=False) as at:
        answer = running(at, **LONG)
        below = processes_below(at.server.process)
        os.killpg(at.server.process.pid, signal.SIGINT)
        eventually(lambda: at.get("/health") == 503)
        os.killpg(at.server.process.pid, signal.SIGINT)
        began = time.monotonic()
        assert at.server.process.wait(20) == 130
        assert time.monotonic() - began < 10
        assert gone(below)
        with pytest.raises(OSError):
            answer.result(10)
        assert "Traceback" not in at.server.log.rpartition("shutting down")[2]


@pytest.mark.long
def test_a_hub_that_is_gone_holds_up_no_end(tiny_with_words, tmp_path):
    with served(tiny_with_words, tmp_path, "--shutdown-timeout", "2") as at:
        answer = running(at, **LONG)
        at.hub.process.kill()
        at.server.process.terminate()
        status, body = answer.result(30)
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "abort"
        assert body["capture_results"]["hub"]["status"] == "error"
        assert at.server.process.wait(60) == 0


@pytest.mark.long
def test_a_server_whose_command_or_engine_was_killed_leaves_no_process(tiny_with_words, tmp_path):
    for number, victim in enumerate(("command", "engine")):
        home = tmp_path / str(number)
        home.mkdir()
        with served(tiny_with_words, home, "--shutdown-timeout", "2", beside=False) as at:
            answer = running(at, **LONG)
            below = processes_below(at.server.process)
            if victim == "command":
                at.server.process.kill()
                assert answer.result(30)[0] == 200
            else:
                (engine,) = [p for p in below if "EngineCore" in pathlib.Path(f"/proc/{p}/cmdline").read_text()]
                os.kill(engine, signal.SIGKILL)
                assert at.server.process.wait(100) == 1
            eventually(lambda: gone(below), 60)  # noqa: B023


@pytest.mark.long
def test_two_ranks_send_what_they_have(tiny_with_words, tmp_path):
    with served(
        tiny_with_words, tmp_path, "--shutdown-timeout", "2", "--tensor-parallel-size", "2", beside=False
    ) as at:
        answer = running(at, **LONG, capture_id="one")
        os.killpg(at.server.process.pid, signal.SIGINT)
        status, body = answer.result(60)
        assert status == 200
        assert body["capture_results"]["filesystem"]["status"] == "ok"
        assert at.server.process.wait(100) == 0
        check_prefix(capflow.open(at.root)["one"])
        assert "silent" not in at.server.log


@pytest.mark.long
def test_an_engine_that_is_told_to_end_with_its_server_loses_no_rows(tiny_with_words, reference, tmp_path):
    keeper = SlowKeeper()
    keeper.address = f"tcp://127.0.0.1:{free_port()}"
    arguments = ["--hub", keeper.address, "--tensor-parallel-size", "2", "--enforce-eager"]
    with running_hub(keeper.address, configured(keeper, "block", queue_bytes_max=1)):
        with nodes.running(tmp_path, tiny_with_words, arguments) as (front,):
            asked = end_during_a_step(front, keeper)
        keeper.hold("r1", asked.result(), reference)
        assert keeper.done["r1"].status == "length"


SLOW = """
import threading
import capflow

class Slow(capflow.Consumer):
    name = "slow"

    def spec(self):
        return capflow.CaptureSpec({"post_block": "all"})

    def on_frame(self, frame):
        threading.Event().wait(0.2)

@capflow.hookimpl
def capflow_consumers():
    return [Slow]
"""


@pytest.fixture
def slow_consumer(tmp_path):
    """A directory with a plugin, as pip leaves it, whose consumer takes 0.2 s for each frame."""
    site = tmp_path / "site"
    package = site / "slow-1.0.dist-info"
    package.mkdir(parents=True)
    (site / "slow.py").write_text(SLOW)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[capflow]\nslow = slow\n")
    return site


@pytest.mark.long
def test_a_job_that_is_interrupted_while_it_sends_sends_all(tiny_with_words, tmp_path, slow_consumer):
    """All tokens are generated then; most of their frames wait in the engine, because the consumer's queue is short."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "one", "prompt": "w5 w6"}\n')
    with command(
        tmp_path, "job", "run", "--model", tiny_with_words, "--prompts", str(prompts), "--max-tokens", "250",
        "--sampling", "ignore_eos=true", "--consumer", "slow:queue_bytes_max=20000", "--log-format", "json",
        "--engine-arg", "dtype=float32", "--engine-arg", "enforce_eager=true", path=slow_consumer,
    ) as job:  # fmt: skip
        wait_until(lambda: '"stage": "done"' in job.log, 300, job.process)
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.process.wait(150) == 128 + signal.SIGTERM
        (end,) = [line for line in map(json.loads, job.log.splitlines()) if line["event"] == "stopped"]
        assert end["requests_failed"] == 0
        assert end["consumers"]["slow"]["rows"] >= 250 * LAYERS


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_interrupted_says_so_and_keeps_what_was_captured(tiny_with_words, tmp_path, number):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": "w5 w6"}) + "\n" for n in range(3)))
    arguments = {
        "dtype": "float32", "enforce_eager": "true", "max_model_len": LENGTH + 100,
        "hf_overrides": json.dumps({"max_position_embeddings": LENGTH + 100}),
    }  # fmt: skip
    with command(
        tmp_path, "job", "run", "--model", tiny_with_words, "--prompts", str(prompts), "--max-tokens", str(LENGTH),
        "--sampling", "ignore_eos=true", "--consumer", f"filesystem:root={tmp_path}/rows", "--drain-s", "60",
        *(word for name, value in arguments.items() for word in ("--engine-arg", f"{name}={value}")),
        TMPDIR=str(tmp_path),
    ) as job:  # fmt: skip
        wait_until(lambda: re.search(r"capflow: running, .* [1-9]\d* rows/s", job.log), 300, job.process)
        below = processes_below(job.process)
        os.killpg(job.process.pid, number)
        assert job.process.wait(100) == 128 + number
        assert "interrupted; what was captured until then is complete" in job.log
        assert "unfinished" not in job.log
        progress = [int(seconds) for seconds in re.findall(r"^capflow: .+, (\d+) s\b", job.log, re.MULTILINE)]
        assert all(later - earlier >= 9 for earlier, later in itertools.pairwise(progress))
        assert gone(below)
        data = capflow.open(tmp_path / "rows")
        for n in range(3):
            check_prefix(data[f"p{n}"])
        assert not list(tmp_path.glob("capflow-engine-*.log"))
