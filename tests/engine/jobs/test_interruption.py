"""How a signal ends the work of a child process: between two steps of its engine, or in one that does not end."""

import os
import signal
import threading
import time

import pytest

from capflow import limits
from capflow_engine.jobs.child import interrupted_between_steps


def terminate():
    """Send SIGTERM to this process; its handler has run when this returns."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_waits_for_the_end_of_a_step():
    handler = signal.getsignal(signal.SIGTERM)
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupted_between_steps() as check:  # noqa: PT012
        check()
        terminate()
        steps.append("whole")
        check()
        steps.append("not begun")
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_step_that_does_not_end_is_interrupted(monkeypatch):
    monkeypatch.setattr(limits, "GIVE_UP_S", 0.2)
    with pytest.raises(KeyboardInterrupt), interrupted_between_steps():  # noqa: PT012
        terminate()
        began = time.monotonic()
        threading.Event().wait(30)
    assert 0.1 < time.monotonic() - began < 20
