"""The command line as a user meets it: every error one line, every exit code right, Ctrl-C drains."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import safetensors.numpy

from capflow.steering.action import ActionApplied, Rejected, Steer
from capflow.transport.client import Client
from tests.kit.answers import answering
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import address, free_port, scheduler_link, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]

LIMIT_S = 60

SIGNALLED = """
import sys
from capflow.cli.hub.running import HubRun
from capflow.plugins.consumer import Consumer
from capflow.plugins.configure import ConfiguredConsumer

class Nothing(Consumer):
    name = "nothing"
    def spec(self):
        return None
    def on_frame(self, frame):
        pass

with HubRun(sys.argv[1], [ConfiguredConsumer.of(Nothing(None))]) as running:
    for _ in range(12000):
        running.wait()
        running.stopped.clear()
    print("through", file=sys.stderr)
    sys.stdin.read()
"""

PLUGIN = '''
import os, threading, time
import msgspec
import capflow
from capflow import CaptureSpec

class Keep(capflow.Consumer):
    """Writes the rows that it is given to a file."""
    name = "keep"

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Where to.

        path: the file.
        slow_s: how long each
            frame takes.
        fail, fails: what to fail at.
        """
        path: str
        slow_s: float = 0.0
        fail: str = ""
        fails: list[str] = []

    def spec(self):
        return CaptureSpec({"post_block": "all"})

    def check(self):
        if self.config.fail == "check":
            raise capflow.UsageError("consumers.keep.fail: got check")

    def open(self, context):
        if self.config.fail == "open":
            raise OSError("no\\nroom")
        self.file = open(self.config.path, "a", buffering=1)

    def on_frame(self, frame):
        # What this consumer is: slow.
        time.sleep(self.config.slow_s)
        if self.config.fail == "hang":
            threading.Event().wait()
        if self.config.fail == "frame":
            raise ValueError("bad frame")
        self.file.write(f"{frame.header.seq}\\n")

    def on_request_done(self, done):
        self.file.write(f"done {done.request} {done.status}\\n")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()

@capflow.hookimpl
def capflow_consumers():
    return [Keep]
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory with an installed plugin, as pip leaves one."""
    directory = tmp_path_factory.mktemp("site")
    (directory / "keeper.py").write_text(PLUGIN)
    info = directory / "keeper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keeper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[capflow]\nkeeper = keeper\n")
    return directory


@pytest.fixture
def environment(site, tmp_path):
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CAPFLOW_")}
    return {**kept, "PYTHONPATH": str(site), "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "200"}


@pytest.fixture
def capflow(environment):
    """Run a command to its end."""

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "capflow", *map(str, arguments)],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    return run


@pytest.fixture
def hub(environment, address):
    """Start `capflow run` and wait until it listens."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, address=address):
            process = subprocess.Popen(
                [sys.executable, "-m", "capflow", "run", "--address", address, *map(str, arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            line = process.stderr.readline()
            assert line == f"capflow: listening at {address}\n", line + process.stderr.read()
            return process

        yield start


def end(process, *signals):
    """Send signals and return the exit code and what was written."""
    for number in signals:
        process.send_signal(number)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in errors
    return process.returncode, (output or "") + errors


def refused(result, code, message):
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("capflow: ")
    assert message in lines[0]
    assert result.stdout == ""


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["nope"], 2, "No such command 'nope'; `capflow --help` lists the commands"),
            (["Runn"], 2, "No such command 'Runn'; did you mean run?"),
            (["spool", "verfy", "d"], 2, "No such command 'verfy'. Did you mean 'verify'?"),
            (["--nope"], 2, "No such option"),
            (["--verson"], 2, "No such option '--verson'. Did you mean '--version'?"),
            (["run"], 2, "--consumer: got none, expected at least one"),
            (["run", "--nope"], 2, "No such option"),
            (["run", "--consumr", "log"], 2, "No such option '--consumr'. (Did you mean one of: '--consumer', "),
            (["run", "extra", "--consumer", "log"], 2, "unexpected extra argument"),
            (["run", "--consumer", "nope"], 2, "--consumer: got nope, expected one of"),
            (["run", "--consumer", "keeep:path=x"], 2, "; did you mean keep? see `capflow plugins`"),
            (["run", "--consumer", "keep,path=x"], 2, "; did you mean keep? see `capflow plugins`"),
            (["run", "--consumer", "keep:pth=x"], 2, "; did you mean path? see `capflow plugins keep`"),
            (["plugins", "keeep"], 2, "NAME: got keeep, expected one of "),
            (["plugins", "keeep"], 2, "; did you mean keep? `capflow plugins` lists them"),
            (["run", "--consumer", "keep"], 2, "consumers.keep.path: got nothing, expected str, required"),
            (["run", "--consumer", "keep:path"], 2, "consumers.keep: got path, expected key=value"),
            (["run", "--consumer", "keep:path=x,size=3"], 2, "consumers.keep.size: got an unknown option"),
            (["run", "--consumer", "keep:path=x,slow_s=long"], 2, "consumers.keep.slow_s: got long, expected float"),
            (["run", "--consumer", "keep:path=x,policy=none"], 2, "consumers.keep.policy: got none"),
            (["run", "--consumer", "keep:path=x,queue_bytes_max=-1"], 2, "queue_bytes_max: got -1, expected 1.."),
            (["run", "--consumer", "keep:path=x", "--consumer", "keep:path=y"], 2, "got the consumer twice"),
            (["run", "--consumer", "keep:path=x,fail=check"], 2, "consumers.keep.fail: got check"),
            (["run", "--consumer", "keep:path=/dev/null,fail=open"], 1, "cannot be opened: got OSError: no room"),
            (["run", "--consumer", "keep:path=x", "--address", "http://x"], 2, "--address: got http://x"),
            (["run", "--consumer", "keep:path=x", "--address", "tcp://0.0.0.0:1"], 2, "expected a loopback or ipc"),
            (
                ["run", "--consumer", "keep:path=x", "--address", "ipc:///no/such/x"],
                2,
                "--address: got ipc:///no/such/x",
            ),
            (
                ["run", "--consumer", "keep:path=x", "--config", "/no/such.toml"],
                2,
                "--config /no/such.toml: got No such file",
            ),
            (["run", "--consumer", "keep:path=x", "--drain-s", "-1"], 2, "Invalid value for '--drain-s'"),
            (["run", "--consumer", "keep:path=x", "--model", "m"], 2, "--model: got no --prompts"),
            (["run", "--consumer", "keep:path=x", "--prompts", "p"], 2, "--prompts: got no --model"),
            (
                ["run", "--consumer", "keep:path=x", "--policy", "drop"],
                2,
                "--policy: got no --model, expected it beside",
            ),
            (
                ["run", "--consumer", "keep:path=x", "--model", "m", "--prompts", "p", "--spool-dir", "d"],
                2,
                "--spool-dir: got no --policy spill, expected it beside",
            ),
            (["status", "--address", "nowhere"], 2, "address: got nowhere, expected ipc://"),
            (["steer"], 2, "Missing argument 'REQUEST'"),
            (["steer", "r1"], 2, "steer: got neither, expected --vector with --site"),
            (
                ["steer", "r1", "--vector", "/no/such", "--site", "post_block:1"],
                2,
                "--vector /no/such: got no such file",
            ),
            (["steer", "r1", "--vector", "x", "--site", "nope"], 2, "site: got nope, expected HOOK:LAYER"),
            (
                ["steer", "r1", "--vector", "x", "--site", "post_block:1", "--scale", "big"],
                2,
                "'big' is not a valid float",
            ),
            (["abort"], 2, "Missing argument 'REQUEST'"),
            (["unsteer", "a", "b"], 2, "unexpected extra argument"),
        ],
        ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
    )
    def test_in_one_line(self, capflow, arguments, code, message):
        refused(capflow(*arguments), code, message)

    @pytest.mark.parametrize("command", [["status"], ["abort", "r1"]])
    def test_a_hub_that_is_not_there(self, capflow, command, address):
        refused(
            capflow(*command, "--address", address), 1, f"no hub answers at {address}; start one with `capflow run`"
        )

    def test_a_plugin_that_cannot_be_imported(self, capflow, tmp_path):
        info = tmp_path / "broken-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[capflow]\nbroken = no_such_module\n")
        result = capflow("run", "--consumer", "log", PYTHONPATH=str(tmp_path))
        refused(result, 1, "plugin broken (no_such_module) cannot be loaded: got ModuleNotFoundError")

    @pytest.mark.parametrize("content", ["[[consumer]]\nname = 'keep'\n", "consumer = 3", "[[consumer]\n"])
    def test_a_config_file(self, capflow, tmp_path, content):
        path = tmp_path / "hub.toml"
        path.write_text(content)
        refused(capflow("run", "--config", path), 2, "")

    def test_what_is_not_expected_without_a_traceback_unless_asked_for(self, capflow, address, tmp_path):
        (tmp_path / "rich").mkdir()  # a broken library
        (tmp_path / "rich" / "__init__.py").write_text("raise ZeroDivisionError('broken')")
        result = capflow("status", "--json", "--address", address, PYTHONPATH=str(tmp_path))
        refused(result, 1, "no hub answers")  # not needed for JSON
        result = capflow("run", "--consumer", "log", PYTHONPATH=str(tmp_path))
        refused(result, 1, "unexpected ZeroDivisionError: broken; set CAPFLOW_TRACEBACK=1 to see where")
        result = capflow("run", "--consumer", "log", PYTHONPATH=str(tmp_path), CAPFLOW_TRACEBACK="1")
        assert "Traceback" in result.stderr

    @pytest.mark.parametrize("kind", ["ipc", "tcp"])
    def test_an_address_in_use(self, capflow, environment, address, tmp_path, kind):
        taken = address if kind == "ipc" else f"tcp://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "capflow", "run", "--address", taken, "--consumer", f"keep:path={tmp_path}/x"]
        first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            first.stderr.readline()
            result = capflow("run", "--address", taken, "--consumer", f"keep:path={tmp_path}/y")
            refused(result, 1, f"address {taken} is in use; stop the hub that listens there")
            assert not (tmp_path / "y").exists()
        finally:
            end(first, signal.SIGINT)


class TestRun:
    def test_waits_for_engines_and_ends_on_ctrl_c(self, hub, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept")
        with worker_link(address) as link, Client(address) as client:
            for step in range(10):
                frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                assert link.send(frame.header, frame.payload) is None
            frame = make_frame([], finished=[make_finished(computed_length=40)])
            link.send(frame.header, frame.payload)
            assert client.results(["r1"], timeout=20)["r1"]["keep"].status == "ok"
            link.close(20)
        code, output = end(process, signal.SIGINT)
        assert code == 0
        assert "1 requests, 40 tokens, 40 rows" in output
        assert (tmp_path / "kept").read_text().split("\n") == [*map(str, range(1, 11)), "done r1 stop", "closed", ""]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_drains_what_consumers_have_before_it_ends(self, hub, address, tmp_path, number):
        process = hub("--consumer", f"keep:path={tmp_path}/kept,slow_s=0.05")
        with worker_link(address) as link:
            for step in range(20):
                frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                link.send(frame.header, frame.payload)
            with Client(address) as client:
                eventually(lambda: client.status()["frames"] == 20)
            code, output = end(process, number)
        assert code == 0
        assert "draining" in output
        assert (tmp_path / "kept").read_text().split()[-4:] == ["done", "r1", "error", "closed"]
        assert (tmp_path / "kept").read_text().split()[:20] == [str(n) for n in range(1, 21)]

    def test_a_drain_is_bounded_and_what_it_lost_is_told(self, hub, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept,slow_s=0.3", "--drain-s", "0.1")
        with worker_link(address) as link:
            for step in range(200):
                frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                link.send(frame.header, frame.payload)
            with Client(address) as client:
                eventually(lambda: client.status()["frames"] == 200)
            code, output = end(process, signal.SIGINT)
        assert code == 1
        assert "rows lost: " in output
        assert "shutdown" in output
        assert (tmp_path / "kept").read_text().endswith("closed\n")

    def test_ends_within_ten_seconds_beside_a_consumer_that_hangs_whatever_its_policy(self, hub, address, tmp_path):
        def start(policy):
            options = f",spool_dir={tmp_path}/spool" if policy == "spill" else ""
            consumer = f"keep:path={tmp_path}/{policy},fail=hang,policy={policy}{options}"
            return hub("--consumer", consumer, address=f"{address}-{policy}")

        policies = ("block", "drop", "skip", "spill")
        processes = {policy: start(policy) for policy in policies}
        for policy in policies:
            with worker_link(f"{address}-{policy}") as link, Client(f"{address}-{policy}") as client:
                for step in range(20):
                    frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                    assert link.send(frame.header, frame.payload) is None
                eventually(lambda: client.status()["frames"] == 20)
        begun = time.monotonic()
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            code, output = end(process)
            assert time.monotonic() - begun < 10
            assert code == 1
            assert "consumer keep does not stop; it is left behind" in output

    def test_a_consumer_that_spills_and_gets_on_is_left_to_the_next_hub(self, hub, address, tmp_path):
        consumer = f"keep:path={tmp_path}/kept,slow_s=0.1,policy=spill,spool_dir={tmp_path}/spool"
        process = hub("--consumer", consumer)
        with worker_link(address) as link, Client(address) as client:
            for step in range(200):
                frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                assert link.send(frame.header, frame.payload) is None
            eventually(lambda: client.status()["frames"] == 200)
            eventually(lambda: not link.counters["unacked_frames"])
            begun = time.monotonic()
            code, output = end(process, signal.SIGINT)
        assert time.monotonic() - begun < 10
        assert code == 0
        assert "frames wait; the next hub with this consumer goes on with them" in output

    def test_a_run_that_ends_because_all_is_done_has_handled_everything(self, environment, address, tmp_path):
        consumer = f"keep:path={tmp_path}/kept,slow_s=0.1,policy=spill,spool_dir={tmp_path}/spool"
        command = ["run", "--address", address, "--until-eof", "--consumer", consumer]
        with subprocess.Popen(
            [sys.executable, "-m", "capflow", *command], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr.readline() == f"capflow: listening at {address}\n".encode()
            with worker_link(address) as link, Client(address) as client:
                for step in range(60):
                    frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                    assert link.send(frame.header, frame.payload) is None
                eventually(lambda: client.status()["frames"] == 60)
                process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert (tmp_path / "kept").read_text().split() == [*map(str, range(1, 61)), "closed"]

    def test_a_second_ctrl_c_is_in_a_hurry(self, hub, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept,slow_s=0.3")
        with worker_link(address) as link:
            for step in range(200):
                frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                link.send(frame.header, frame.payload)
            with Client(address) as client:
                eventually(lambda: client.status()["frames"] == 200)
            process.send_signal(signal.SIGINT)
            assert any("draining" in line for line in iter(process.stderr.readline, ""))
            code, _ = end(process, signal.SIGINT)
        assert code == 1
        assert (tmp_path / "kept").read_text().endswith("closed\n")

    def test_says_so_when_a_consumer_fails(self, hub, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept,fail=frame")
        with worker_link(address) as link, Client(address) as client:
            frame = make_frame(finished=[make_finished()])
            link.send(frame.header, frame.payload)
            assert client.results(["r1"], timeout=20)["r1"]["keep"].status == "error"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "consumer keep: on_frame failed" in errors

    def test_shows_how_things_go_on_a_terminal(self, environment, address, tmp_path):
        terminal, end_of_it = os.openpty()
        command = [
            sys.executable,
            "-m",
            "capflow",
            "run",
            "--address",
            address,
            "--consumer",
            f"keep:path={tmp_path}/x",
        ]
        process = subprocess.Popen(
            command, env={**environment, "TERM": "xterm"}, stdin=end_of_it, stdout=end_of_it, stderr=end_of_it
        )
        os.close(end_of_it)
        shown = ""

        def reads(text):
            nonlocal shown
            with contextlib.suppress(OSError):
                shown += os.read(terminal, 65536).decode()
            return text in shown

        try:
            eventually(lambda: reads("0 sessions"))
            with worker_link(address) as link:
                frame = make_frame(finished=[make_finished()])
                link.send(frame.header, frame.payload)
                eventually(lambda: reads("requests 1 done, 0 open"))
            process.send_signal(signal.SIGINT)
            eventually(lambda: reads("1 requests, 4 tokens, 4 rows, 128 B"))
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)

    @pytest.mark.parametrize("ignored", [False, True])
    def test_a_terminal_that_closes_ends_it_as_a_signal_does_unless_it_is_told_to_stay(
        self, environment, address, tmp_path, ignored
    ):
        consumer = f"keep:path={tmp_path}/kept,slow_s=0.05"
        command = ["capflow", "run", "--address", address, "--consumer", consumer]
        child, terminal = pty.fork()
        if child == 0:
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            os.execve(sys.executable, [sys.executable, "-m", *command], {**environment, "TERM": "xterm"})  # noqa: S606
        try:
            with worker_link(address, wait=False) as link:
                eventually(lambda: os.read(terminal, 65536) and link.connected)
                for step in range(20):
                    frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                    link.send(frame.header, frame.payload)
                with Client(address) as client:
                    eventually(lambda: client.status()["frames"] == 20)
                    os.close(terminal)
                    if ignored:
                        # Nothing may happen in this time.
                        time.sleep(1)
                        assert client.status()["frames"] == 20
                        os.kill(child, signal.SIGTERM)
                    else:
                        # Nothing shows that the kernel's signal has come.
                        time.sleep(0.2)
                        os.kill(child, signal.SIGHUP)  # as a shell's, beside the kernel's
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        assert code == 0
        assert (tmp_path / "kept").read_text().split()[:20] == [str(n) for n in range(1, 21)]
        assert (tmp_path / "kept").read_text().split()[-4:] == ["done", "r1", "error", "closed"]

    def test_reads_a_config_file(self, hub, address, tmp_path):
        config = tmp_path / "hub.toml"
        config.write_text(f"[[consumer]]\nname = 'keep'\npath = '{tmp_path}/kept'\n")
        process = hub("--config", config)
        with Client(address) as client:
            assert list(client.status()["consumers"]) == ["keep"]
        assert end(process, signal.SIGINT)[0] == 0

    def test_listens_at_the_users_own_address_by_default(self, environment, tmp_path):
        command = [sys.executable, "-m", "capflow", "run", "--consumer", f"keep:path={tmp_path}/kept"]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        line = process.stderr.readline()
        assert line == f"capflow: listening at ipc://{environment['XDG_RUNTIME_DIR']}/capflow/hub.sock\n"
        assert end(process, signal.SIGINT)[0] == 0

    def test_a_signal_never_stops_the_hub_in_its_own_lock(self, environment, address, tmp_path):
        """A handler that took a lock would wait for itself when it interrupts the main thread where that holds it."""
        process = subprocess.Popen(
            [sys.executable, "-c", SIGNALLED, address],
            env=environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr.readline() == f"capflow: listening at {address}\n"
        through = []
        reader = threading.Thread(target=lambda: through.append(process.stderr.readline()))
        reader.start()
        deadline = time.monotonic() + LIMIT_S
        while reader.is_alive() and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            # The pace of the signals.
            time.sleep(0.0002)
        if through != ["through\n"]:
            process.kill()
        reader.join()
        assert through == ["through\n"]
        assert end(process)[0] == 0


class TestOtherCommands:
    def test_status(self, hub, capflow, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept")
        status = json.loads(capflow("status", "--json", "--address", address).stdout)
        assert status["consumers"]["keep"]["policy"] == "block"
        table = capflow("status", CAPFLOW_HUB=address)
        assert table.returncode == 0
        assert "keep" in table.stdout
        end(process, signal.SIGINT)

    def test_steer(self, hub, capflow, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept")
        safetensors.numpy.save_file(
            {"happy": np.array([1, -2], np.float32), "sad": np.ones(2)}, tmp_path / "v.safetensors"
        )
        with scheduler_link(address) as link:
            acts = []

            def run():
                eventually(lambda: acts.extend(link.actions()) or acts)
                link.outcome(ActionApplied(acts[0].id, 41))

            thread = threading.Thread(target=run)
            thread.start()
            options = ["--site", "post_block:3", "--scale", "2", "--address", address]
            result = capflow("steer", "r1", "--vector", f"{tmp_path}/v.safetensors:happy", *options)
            thread.join(LIMIT_S)
            assert (result.returncode, result.stdout) == (0, "applied in step 41\n")
            action = acts[0].action
            assert isinstance(action, Steer)
            assert (str(action.vectors[0].site), action.vectors[0].array().tolist()) == ("post_block:3", [2, -4])
            result = capflow("steer", "r1", "--vector", f"{tmp_path}/v.safetensors", *options)
            refused(result, 2, "got 2 tensors, expected :KEY, one of happy, sad")
            result = capflow("steer", "r1", "--vector", f"{tmp_path}/v.safetensors:angry", *options)
            refused(result, 2, "got no tensor angry, expected one of happy, sad")
            (tmp_path / "junk").write_bytes(b"junk")
            refused(capflow("steer", "r1", "--vector", tmp_path / "junk", *options), 2, "expected a safetensors file")
        eventually(lambda: not link.connected)
        refused(capflow("abort", "r1", "--address", address), 1, "action: no engine is connected to this hub")
        end(process, signal.SIGINT)

    def test_an_action_that_one_engine_rejects_fails_and_names_it(self, hub, capflow, address, tmp_path):
        process = hub("--consumer", f"keep:path={tmp_path}/kept")
        hellos = [make_hello(name, f"s-{name}", role="scheduler") for name in ("one", "two")]
        with scheduler_link(address, hellos[0]) as one, scheduler_link(address, hellos[1]) as two:
            threads = [
                answering(one, [lambda act: ActionApplied(act.id, 41)]),
                answering(two, [lambda act: Rejected(act.id, "busy")]),
            ]
            result = capflow("freeze", "--address", address)
            for thread in threads:
                thread.join(LIMIT_S)
        assert (result.returncode, result.stdout) == (1, "applied in step 41\n")
        assert result.stderr == "capflow: not applied by every engine: two: busy\n"
        end(process, signal.SIGINT)

    def test_plugins(self, capflow):
        table = capflow("plugins")
        assert table.returncode == 0
        assert "slow_s: float = 0.0" in table.stdout
        listed = {plugin["name"]: plugin for plugin in json.loads(capflow("plugins", "--json").stdout)}
        assert listed["keep"]["doc"] == "Writes the rows that it is given to a file."
        path = {"name": "path", "type": "str", "required": True, "default": None, "meaning": "the file."}
        assert listed["keep"]["options"][0] == {**path, "of_every_consumer": False}
        assert listed["log"]["options"][-1]["of_every_consumer"]

    def test_plugins_shows_one_in_full(self, capflow):
        shown = capflow("plugins", "keep", COLUMNS="60").stdout
        assert shown.startswith("keep  consumer  keeper 1.0\nkeeper\n\nWrites the rows that it is given to a file.\n")
        assert (
            "\n  path: str, required\n      the file.\n  slow_s: float = 0.0\n      how long each frame takes.\n"
            in shown
        )
        assert "\n  fail: str\n  fails: list of str\n      what to fail at.\n" in shown
        assert (
            "\n  policy: block or drop or skip or spill = block\n      what its queue does when it is full\n" in shown
        )
        assert shown.endswith("\n  capflow run --consumer keep:path=PATH\n")
        one = json.loads(capflow("plugins", "keep", "--json").stdout)
        assert [one] == [each for each in json.loads(capflow("plugins", "--json").stdout) if each["name"] == "keep"]
        assert capflow("plugins", "gate").stdout.startswith("gate  controller  capflow ")
        assert "every consumer" not in capflow("plugins", "gate").stdout

    def test_version(self, capflow):
        assert capflow("--version").stdout == f"capflow {importlib.metadata.version('capflow')}\n"

    def test_help_imports_none_of_what_commands_need(self, environment):
        code = textwrap.dedent("""
            import sys
            from capflow.cli import main
            sys.argv = ["capflow", "--help"]
            try:
                main()
            finally:
                print(sorted({m.partition(".")[0] for m in sys.modules} & {"zmq", "rich", "torch", "vllm", "duckdb"}))
        """)
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        assert result.stdout.endswith("[]\n")
        assert "Capture and serve:" in result.stdout

    @pytest.mark.parametrize(
        ("consumer", "needs"),
        [("log", []), (f"duckdb:path={{0}}/d,probes={ROOT}/examples/code.safetensors", ["duckdb", "pyarrow"])],
    )
    def test_a_hub_imports_nothing_that_only_other_consumers_or_engines_need(
        self, environment, tmp_path, consumer, needs
    ):
        code = textwrap.dedent("""
            import sys
            from capflow.cli import main
            _, directory, consumer = sys.argv
            sys.argv = ["capflow", "run", "--consumer", consumer, "--address", f"ipc://{directory}/hub", "--until-eof"]
            try:
                main()
            finally:
                print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv_heavy.split())))
        """)
        heavy = "torch vllm transformers triton duckdb pyarrow pandas isal nats sklearn matplotlib datasets websockets"
        code = code.replace("sys.argv_heavy", repr(heavy))
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), consumer.format(tmp_path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        assert "listening at" in result.stderr
        assert result.stdout.endswith(f"{needs}\n")

    @pytest.mark.parametrize("command", ["run", "plugins", "status", "steer", "unsteer", "abort", "doctor"])
    def test_each_has_help(self, capflow, command):
        result = capflow(command, "--help")
        assert result.returncode == 0
        assert result.stdout.startswith("Usage: ")
