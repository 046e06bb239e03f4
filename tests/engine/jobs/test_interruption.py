"""How a signal ends the work of a child process: between two steps of its engine, or in one that does not end."""

import os
import signal
import threading
import time

import pytest

import capflow
from capflow import limits
from capflow_engine.compat import engine as compat
from capflow_engine.jobs.child import interrupted_between_steps
from tests.kit.engines import GREEDY, LAYERS, engine, prompts


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
    monkeypatch.setattr(limits, "JOB_STEP_S_MAX", 0.2)
    with pytest.raises(KeyboardInterrupt), interrupted_between_steps():  # noqa: PT012
        terminate()
        began = time.monotonic()
        threading.Event().wait(30)
    assert 0.1 < time.monotonic() - began < 20


@pytest.mark.engine
def test_no_row_of_an_interrupted_step_is_promised(tiny, tmp_path):
    lengths, steps = (5, 9, 3), 6
    with engine(tiny, consumers=[f"filesystem:root={tmp_path / 'rows'},capture=all"]) as llm:
        vllm = llm.llm_engine
        for number, prompt in enumerate(prompts(lengths)):
            vllm.add_request(f"r{number}", prompt, capflow.sampling_params(max_tokens=40, **GREEDY))
        for _ in range(steps):
            vllm.step()
        layer = vllm.engine_core.engine_core.model_executor.driver_worker.worker.get_model().model.layers[1]

        def interrupted(*_):
            raise KeyboardInterrupt

        hook = layer.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            vllm.step()
        hook.remove()
        compat.abort_all(vllm)
    captures = {capture.sidecar.request.split("-")[0]: capture for capture in capflow.open(tmp_path / "rows")}
    assert set(captures) == {"r0", "r1", "r2"}
    for number, length in enumerate(lengths):
        capture = captures[f"r{number}"]
        assert (capture.sidecar.status, capture.sidecar.dropped) == ("abort", [])
        for layer in range(LAYERS):
            assert capture[f"post_block:{layer}"].positions.tolist() == list(range(length + steps - 1))
        assert capture.sidecar.computed_length == length + steps - 1
