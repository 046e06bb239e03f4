"""What a model job shows: lines of progress where there is no terminal, and a summary whose commands can be copied."""

import io
import re
import shlex
import threading
import time

import pytest
from rich.console import Console

from capflow.cli.engine import job as jobs
from capflow.cli.engine.job import ModelJob
from capflow.cli.engine.prompts import Prompt
from capflow.cli.engine.summary import print_summary
from capflow.cli.hub import running as runs
from capflow.cli.hub.running import HubRun
from capflow.hub.counts import EngineCounts
from capflow.plugins.configure import configure_all, load_plugins
from capflow.transport.address import private_address
from tests.kit.frames import make_frame
from tests.kit.hubs import worker_link
from tests.kit.waiting import eventually

DONE = {"id": "a", "prompt_tokens": 5, "tokens": 3, "steering_applied": None}


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def run(out):
    """Return a function that makes a hub run with consumers, which prints to `out`, 40 columns wide."""

    def make(*consumers):
        configured, _ = configure_all(consumers, None, load_plugins())
        return HubRun(private_address("summary"), configured, console=Console(file=out, width=40))

    return make


def made_job(**fields):
    return ModelJob("model", [Prompt("a", "x")], ("post_block",), 3, **fields)


def test_each_command_is_whole_and_on_a_line_of_its_own(run, out, tmp_path):
    roots = [tmp_path / "a root with blanks and a name that is longer than a line", tmp_path / "plain"]
    with run(f"filesystem:root={roots[0]}", f"filesystem@two:root={roots[1]}") as running:
        print_summary(running, [DONE], 2.0, {}, EngineCounts(7, 28))
    lines = out.getvalue().splitlines()
    begin = lines.index("to see the result:")
    assert [shlex.split(line) for line in lines[begin + 1 : begin + 3]] == [
        ["capflow", "inspect", str(root)] for root in roots
    ]
    title = " ".join(out.getvalue().partition("┏")[0].split())
    assert "1 requests, 5 prompt and 3 generated tokens in 2.0 s (2 generated tok/s on average), 7 rows" in title


def test_a_command_has_the_path_of_a_program_that_the_shell_does_not_find(run, out, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["a dir/.venv/bin/capflow", "run"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with run(f"filesystem:root={tmp_path / 'rows'}") as running:
        print_summary(running, [DONE], 2.0, {}, EngineCounts(7, 28))
    lines = out.getvalue().splitlines()
    command = shlex.split(lines[lines.index("to see the result:") + 1])
    assert command == ["a dir/.venv/bin/capflow", "inspect", str(tmp_path / "rows")]


def test_a_consumer_without_a_command_has_none(run, out):
    with run("log") as running:
        print_summary(running, [DONE], 2.0, {}, EngineCounts(7, 28))
    assert "to see the result" not in out.getvalue()


def test_a_line_of_progress_comes_once_in_a_while_and_says_something_new(run, out, monkeypatch):
    every_s, stages = 0.3, 40
    monkeypatch.setattr(jobs, "_PLAIN_S", every_s)
    job = made_job(notices=jobs.deque(["this is slow"]))

    def child():
        for number in range(stages):
            job.stage = f"stage {number // 20}"
            # The child's pace: the stages change faster than lines come, and some last for several lines.
            time.sleep(0.05)

    with run("log") as running:
        job._reader = threading.Thread(target=child)
        begun = time.monotonic()
        job._reader.start()
        jobs._watch(running, job)
        lasted_s = time.monotonic() - begun
        job._reader.join()
    lines = [line for line in out.getvalue().splitlines() if re.match(r"capflow: stage", line)]
    assert 2 <= len(lines) <= lasted_s / every_s + 1
    assert out.getvalue().count("capflow: this is slow\n") == 1


def test_the_rates_of_a_job_are_those_of_the_last_seconds(run, monkeypatch):
    monkeypatch.setattr(runs, "_RATE_S", 0.5)
    job = made_job()
    with run("log") as running, worker_link(running.hub.address) as link:
        assert jobs._rates(running, job) == []
        job.ready = True
        frame = make_frame(step_tokens=10**9)
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: re.match(r"[1-9]\d+ tok/s", jobs._rates(running, job)[0]))
        eventually(lambda: jobs._rates(running, job)[:3] == ["0 tok/s", "0 rows/s", "0 B/s"])


@pytest.mark.parametrize("width", [50, 80])
def test_the_progress_of_a_job_is_not_cut_on_a_narrow_terminal(out, width):
    configured, _ = configure_all(["log"], None, load_plugins())
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    job = made_job(ready=True, stage="running")
    with HubRun(private_address("summary"), configured, console=console) as running:
        ended = threading.Event()
        job._reader = threading.Thread(target=ended.wait)
        job._reader.start()
        watching = threading.Thread(target=jobs._watch, args=(running, job))
        watching.start()
        eventually(lambda: "spilled 0" in out.getvalue())
        ended.set()
        watching.join()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out.getvalue()).splitlines()
    assert any(re.search(r"running +0/1 +\d:\d\d:\d\d", line) for line in lines)
    assert not any("…" in line for line in lines if "/1 " in line or "tok/s" in line)
    assert max(len(line) for line in lines if "tok/s" in line) <= width
