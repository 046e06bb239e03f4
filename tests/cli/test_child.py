"""How the command line runs a child that does an engine's work: what it makes of each way in which that ends."""

import os
import time

import pytest

from capflow.cli.model.child import last_event
from capflow.errors import CapflowError, UsageError

MODULE = """
import atexit, os, sys, time
from capflow.errors import CapflowError, UsageError
from capflow_engine.jobs.child import work_for_parent
atexit.register(lambda: print("hint of a library: set X=1", file=sys.stderr))
def work(tell):
    print("vLLM prints this")
    tell("stage", stage="one")
    {body}
sys.exit(work_for_parent(work))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(body, still_s=60):
        (tmp_path / "work_of_a_child.py").write_text(MODULE.format(body=body))
        return last_event("work_of_a_child", [], "done", "the work", still_s=still_s)

    yield run
    monkeypatch.setattr("tempfile.tempdir", None)


def logs(tmp_path):
    return [path.read_text() for path in tmp_path.glob("capflow-*.log")]


def test_the_last_event_is_the_result(run, tmp_path):
    assert run('tell("done", rows=3)') == {"event": "done", "rows": 3}
    assert logs(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('raise RuntimeError("the cause")', r"^the engine failed: got RuntimeError: the cause; see /"),
        ('raise CapflowError("rows differ")', r"^rows differ; see /"),
        ("os._exit(7)", r"^the work: got the process ended with exit code 7; see /"),
        ("os.kill(os.getpid(), 9)", r"^the work: got the process ended with signal 9; see /"),
        ("sys.exit(0)", r"^the work: got the process ended with exit code 0; see /"),
    ],
    ids=["error", "failure", "exit", "killed", "no result"],
)
def test_a_failure_has_its_cause_and_keeps_the_log(run, tmp_path, body, words):
    with pytest.raises(CapflowError, match=words) as error:
        run(body)
    assert "hint" not in str(error.value)
    assert str(error.value).endswith(".log")
    assert ["vLLM prints this" in log for log in logs(tmp_path)] == [True]


def test_a_build_that_breaks_what_imports_it_is_named(run, tmp_path):
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    words = (
        r"^torchvision: got operator torchvision::nms does not exist, expected a build for torch 2.*; pip uninstall "
    )
    with pytest.raises(CapflowError, match=words):
        run("import no_such_module")


def test_what_was_asked_for_wrongly_is_an_error_of_use_without_a_log(run, tmp_path):
    with pytest.raises(UsageError, match=r"^--sites: got x$"):
        run('raise UsageError("--sites: got x")')
    assert logs(tmp_path) == []


def test_a_child_that_does_not_end_is_named(run):
    with pytest.raises(CapflowError, match=r"the work: got no progress for 3 s; see "):
        # What this child is: stuck.
        run("time.sleep(60)", still_s=3)


def test_a_child_that_uses_the_cpu_is_waited_for(run):
    began = time.monotonic()
    # It is busy for longer than it may be still.
    body = (
        'until = time.process_time() + 2; any(time.process_time() > until for _ in iter(int, 1)); tell("done", rows=3)'
    )
    assert run(body, still_s=1) == {"event": "done", "rows": 3}
    assert time.monotonic() - began > 1
