"""Work in a child process: its result, its errors, and when it is given up."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from capflow.errors import CapflowError, UsageError
from capflow_engine.compat import child

STILL_S = 1.0


@pytest.fixture(params=[child.Fork.SAFE, child.Fork.IMPOSSIBLE], ids=["forked", "fresh"])
def either(request, monkeypatch):
    """Both kinds of children."""
    monkeypatch.setattr(child, "fork", lambda: request.param)


def result_of(work, still_s_max=STILL_S):
    return child.result_of(work, "the work", still_s_max=still_s_max)


def where(say):
    return {"pid": os.getpid(), "path": sys.path}


def dies(say):
    say("making it")
    os.kill(os.getpid(), signal.SIGKILL)


def fails(error, say):
    raise error


@pytest.mark.usefixtures("either")
def test_the_result_comes_back():
    result = result_of(where, 60)
    assert result["pid"] != os.getpid()
    assert set(filter(None, sys.path)) <= set(result["path"])


def test_a_child_that_says_what_it_is_at_is_waited_for():
    def work(say):
        for number in range(6):
            # What this child is: alive, and slow.
            time.sleep(0.5)
            say(f"part {number}")
        return "done"

    assert result_of(work) == "done"


def test_a_child_that_computes_is_waited_for():
    def work(say):
        used = time.process_time()
        while time.process_time() - used < 2.5:
            pass
        return "done"

    assert result_of(work) == "done"


def test_a_child_whose_own_child_computes_is_waited_for():
    code = "import time\nwhile time.process_time() < 2.5: pass"

    def work(say):
        return subprocess.run([sys.executable, "-c", code], check=False).returncode

    assert result_of(work) == 0


def test_a_child_in_which_nothing_moves_is_given_up_with_what_it_was_at():
    def work(say):
        say("reading layer 3 of 4")
        # What this child is: stuck.
        time.sleep(30)

    begun = time.monotonic()
    with pytest.raises(CapflowError, match=r"^the work: got no progress for 1 s while reading layer 3 of 4; try again"):
        result_of(work)
    assert time.monotonic() - begun < 15


def test_a_child_that_hangs_while_a_thread_of_it_looks_around_is_given_up():
    def work(say):
        for _ in range(40):
            # What this child is: stuck, but for what a thread does now and then.
            time.sleep(0.5)
            begun = time.process_time()
            while time.process_time() < begun + 0.002:
                pass

    with pytest.raises(CapflowError, match="got no progress for 6 s while starting"):
        result_of(work, 6.0)


@pytest.mark.usefixtures("either")
def test_a_child_that_is_killed_is_named():
    with pytest.raises(CapflowError, match=r"the work: got exit code -9 of its process while making it"):
        result_of(dies, 30)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (UsageError("--sites: got x"), UsageError, "--sites: got x"),
        (CapflowError("it failed"), CapflowError, "it failed"),
        (KeyError("name"), CapflowError, "the work: got KeyError: 'name'"),
    ],
    ids=["usage", "failure", "other"],
)
@pytest.mark.usefixtures("either")
def test_the_child_s_error_is_raised_here(error, kind, words):
    with pytest.raises(CapflowError) as raised:
        result_of(functools.partial(fails, error), 30)
    assert type(raised.value) is kind
    assert str(raised.value) == words


def crashes():
    os.kill(os.getpid(), signal.SIGKILL)


def spins():
    while True:
        pass


def tried(fault, say):
    forked = multiprocessing.current_process().name == "capflow-forked"
    if forked and fault is not None:
        fault()
    return os.getppid(), forked


@pytest.mark.parametrize("fault", [None, crashes, spins])
def test_a_fork_that_fails_where_it_was_only_tried_is_followed_by_a_new_interpreter(monkeypatch, fault):
    monkeypatch.setattr(child, "fork", lambda: child.Fork.TRIED)
    monkeypatch.setattr(child, "TRIED_S_MAX", 1.0)
    assert result_of(functools.partial(tried, fault), 60) == (os.getpid(), fault is None)


def test_work_that_cannot_be_sent_is_named(monkeypatch):
    monkeypatch.setattr(child, "fork", lambda: child.Fork.IMPOSSIBLE)
    with pytest.raises(CapflowError, match=r"the work: got something that cannot be sent to a process.*before"):
        result_of(lambda say: None, 60)


def test_an_error_of_a_fork_that_was_only_tried_is_the_result(monkeypatch):
    monkeypatch.setattr(child, "fork", lambda: child.Fork.TRIED)

    def work(say):
        raise UsageError(multiprocessing.current_process().name)

    with pytest.raises(UsageError, match="capflow-forked"):
        result_of(work, 60)


IN_USE = """
import asyncio, sys, threading, grpc
from vllm.engine.arg_utils import EngineArgs
from capflow_engine.compat import child, model

def call():
    async def main():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async def again():
            while True:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    try:
                        await channel.unary_unary("/nothing/here")(b"")
                    except grpc.aio.AioRpcError:
                        called.set()
        await asyncio.gather(again(), again())
    asyncio.run(main())

print(child.fork().name)
called = threading.Event()
threading.Thread(target=call, daemon=True).start()
called.wait(60)
print(child.fork().name)
print(len(model.structures(EngineArgs(model=sys.argv[1]))), flush=True)
"""


@pytest.mark.timeout(300)
def test_a_model_is_read_while_grpc_is_in_use(tiny):
    command = [sys.executable, "-c", IN_USE, tiny]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.split() == ["SAFE", "TRIED", "4"], done.stderr[-2000:]


@pytest.mark.parametrize(("work", "ended"), [("sum(range(150_000_000))", True), ("input()", False)])
def test_a_process_that_ends_is_waited_for_while_it_uses_the_cpu(work, ended):
    """For longer than it may be without."""
    process = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE)
    begun = time.monotonic()
    try:
        assert child.wait_while_busy(process, STILL_S) == ended
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - begun > STILL_S
