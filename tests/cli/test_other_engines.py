"""Engines that send to the address of a model job's hub, and are not the job's: they change nothing of its outcome."""

import io
import json
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from capflow.capture.spec import CaptureSpec
from capflow.cli.engine import job as jobs
from capflow.cli.engine.job import ModelJob
from capflow.cli.engine.prompts import Prompt
from capflow.cli.hub.running import HubRun
from capflow.errors import UsageError
from capflow.hub.counts import EngineCounts
from capflow.transport.address import private_address
from tests.hub.test_hub import send_request
from tests.kit.frames import make_hello, make_model
from tests.kit.hubs import Recorder, configured, worker_link
from tests.kit.waiting import eventually

# A layer that the small model of the doubles has not: its engine is refused.
NOT_THERE = CaptureSpec({"post_block": [99]})
ROWS = 6


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def run(out):
    def make(spec):
        consumer = configured(Recorder(spec=spec))
        return HubRun(private_address("others"), [consumer], console=Console(file=out, width=200), ends=True)

    return make


def made_job():
    return ModelJob("model", [Prompt("a", "x")], ("post_block",), 3)


def watched(running, job, until):
    """Watch a job whose child runs until something is so."""
    job._reader = threading.Thread(target=lambda: eventually(until))
    job._reader.start()
    try:
        jobs._watch(running, job)
    finally:
        job._reader.join()


def hello_of(job, name):
    return make_hello(job.engine_id if name == "own" else name)


def test_a_job_goes_on_when_another_engine_is_refused(run):
    job = made_job()
    with run(NOT_THERE) as running, worker_link(running.hub.address, hello_of(job, "other"), wait=False) as link:
        watched(running, job, lambda: link.refusal and running.refusals)
        assert running.refusals == [("other", link.refusal)]


def test_a_job_ends_when_its_own_engine_is_refused(run):
    job = made_job()
    with (
        run(NOT_THERE) as running,
        worker_link(running.hub.address, hello_of(job, "other"), wait=False),
        worker_link(running.hub.address, hello_of(job, "own"), wait=False) as link,
        pytest.raises(UsageError, match="got layer 99"),
    ):
        watched(running, job, lambda: link.refusal and len(running.refusals) == 2 and not link.connected)


def test_only_rows_of_its_own_engine_are_counted(run):
    job = made_job()
    job.info = make_model()
    job.done = [{"id": "a", "prompt_tokens": 4, "tokens": 3, "steering_applied": None}]
    with run(CaptureSpec({"post_block": [0]})) as running:
        for name in ("other", "own"):
            hello = hello_of(job, name)
            with worker_link(running.hub.address, hello) as link:
                send_request(link, "a", engine=hello.engine, prompt=4, generated=3)
        eventually(lambda: running.hub.snapshot().requests_done == 2)
        assert running.hub.snapshot().rows == 2 * ROWS
        own = running.hub.received_of(job.engine_id)
        assert own.rows == ROWS
        assert running.hub.received_of("other") == own
        assert running.hub.received_of("none") == EngineCounts()
        lines = [line for line in jobs._missing(running, job, {}) if line.startswith("rows received")]
        assert lines == []
        job.done[0]["tokens"] = 4
        assert f"rows received: got {ROWS}, expected {ROWS + 1}" in jobs._missing(running, job, {})[-1]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_job_beside_an_engine_that_sends_and_one_that_is_refused(tiny_with_words, tmp_path):
    """The refused engine has no tap where the consumer wants rows."""
    prompts, address = tmp_path / "prompts.jsonl", f"ipc://{tmp_path}/hub.sock"
    prompts.write_text(json.dumps({"id": "a", "prompt": "w5 w6 w7 w8"}) + "\n")
    command = [sys.executable, "-m", "capflow", "run", "--model", tiny_with_words, "--prompts", str(prompts)]
    command += ["--address", address, "--max-tokens", "3", "--consumer", f"filesystem:root={tmp_path}/rows,layers=0"]
    command += ["--engine-arg", "enforce_eager=true", "--engine-arg", "dtype=float32"]
    command += ["--engine-arg", "max_model_len=256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        odd = make_hello("odd", "b2", model=make_model(hooks=["mlp_in"]))
        with worker_link(address, make_hello("other")) as link, worker_link(address, odd, wait=False) as refused:
            send_request(link, "a", engine="other", prompt=4, generated=3)
            eventually(lambda: refused.refusal)
            printed = process.communicate(timeout=500)[0]
        assert process.returncode == 0, printed
    assert f"{ROWS} rows came from other engines" in printed
