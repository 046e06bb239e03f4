"""The rules for every consumer, as a test class that pytest collects; `rowrules` has the rules about rows."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from capflow.buffers.policy import WhenFull
from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, FatalError, UsageError
from capflow.plugins.consumer import Consumer
from capflow.testing.checks import check_given_back, compare
from capflow.testing.frames import make_model
from capflow.testing.hub import MemoryHub
from capflow.testing.killed import killed
from capflow.testing.rowrules import RowRules
from capflow.testing.trial import Short, Subject, Torn, outcome, trial

# How often a consumer may try to be fast enough.
_TRIES = 3


def conformance(
    consumer: type[Consumer],
    options: Mapping[str, Any] | None = None,
    *,
    model: ModelInfo | None = None,
    kept: Callable[[], Mapping[str, Any]] | None = None,
    handle_s_max: float = 5.0,
) -> type[Conformance]:
    """Return a test class with a test for each rule; a module of tests gives it a name that begins with `Test`.

    options: as in `--consumer NAME:…`. Each test has a current directory of its own, so relative paths work.
    model: the engines' model; by default 4 layers, tapped at every hook, with rows of 8 float32.
    kept: returns the stored data of each request by id, in a form that can be compared. The rules call it after the
        consumer is closed.
    handle_s_max: the time in seconds that 100 small frames may take.
    """
    subject = Subject(consumer, dict(options or {}), model or make_model(), kept, handle_s_max)
    return type("Conformance", (Conformance,), {"subject": subject})


class Conformance(RowRules):
    """The rules about options, errors, start and end, and those about rows."""

    # Options and spec.

    def test_unknown_options_are_refused(self, tmp_path: Path) -> None:
        """`Config` is frozen and forbids unknown fields, so a misspelt option is an error wherever it is given."""
        config = self.subject.consumer.Config.__struct_config__
        assert config.frozen, (
            "Config is not frozen: class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True)"
        )
        assert config.forbid_unknown_fields, "Config takes unknown fields: add forbid_unknown_fields=True"
        with contextlib.chdir(tmp_path):
            try:
                self.subject.configured(no_such_option="1")
            except UsageError:
                return
        raise AssertionError("an unknown option was accepted")

    def test_nothing_happens_before_open(self, tmp_path: Path) -> None:
        """Making and checking a consumer changes no file and starts no thread: the start may still be refused."""
        with contextlib.chdir(tmp_path):
            threads = set(threading.enumerate())
            made = self.subject.configured()
            left = sorted(path.name for path in tmp_path.iterdir())
            started = set(threading.enumerate()) - threads
            del made
        assert not left, f"__init__ or check made {', '.join(left)}: do it in open"
        assert not started, f"__init__ or check started {started}: do it in open"

    def test_spec_is_the_same_whenever_it_is_asked_for(self, tmp_path: Path) -> None:
        """`spec` returns a CaptureSpec or None, the same each time, and the model has what it names."""
        with contextlib.chdir(tmp_path):
            made = self.subject.configured().consumer
            spec = made.spec()
            assert spec is None or isinstance(spec, CaptureSpec), f"spec() returned {spec!r}"
            assert made.spec() == spec, f"spec() returned {spec!r}, and then {made.spec()!r}"
            if spec is not None:
                spec.resolve(self.subject.model.sites, num_layers=self.subject.model.num_layers)

    # Errors.

    def test_an_open_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        """If a resource disappears after `check`, `open` raises, and leaves no thread and no open file."""
        threads = set(threading.enumerate())
        gone = tmp_path / "gone"
        gone.mkdir()
        with contextlib.chdir(gone):
            hub = MemoryHub(self.subject.configured(spool=str(tmp_path / "spool")))
            shutil.rmtree(gone)
            with contextlib.suppress(CapflowError):
                hub.hub.start()
                hub.stop()
        del hub
        check_given_back(threads, tmp_path, "an open that failed")

    def test_an_exception_costs_the_requests_of_its_frame(self, tmp_path: Path) -> None:
        """If `on_frame` raises in the middle of a frame, the next frames come, and their other requests are whole."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "torn", errors_max=1) as run:
            consumer = run.hub.hub.consumers[0].consumer
            handle = consumer.on_frame

            def on_frame(frame: Frame) -> None:
                torn = any(part.id == "r0" for part in frame.header.requests)
                handle(Torn(frame.header, frame.payload, frame.wants) if torn else frame)

            consumer.on_frame = on_frame  # type: ignore[method-assign]
            engine = run.engine()
            engine.step([("r0", 4, 0, 4)], texts=True)
            engine.finish("r0")
            self._whole(engine)
            run.result("r0")
            self._same(alone, run, "a request that was not in a frame at which on_frame raised")
        self._kept_same(tmp_path, "torn")

    def test_a_retry_takes_nothing_of_its_frame(self, tmp_path: Path) -> None:
        """If memory is short in the middle of a frame, the frame comes again; the result is as after one call."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "short") as run:
            lane = run.hub.lanes[0]
            consumer = run.hub.hub.consumers[0].consumer
            handle = consumer.on_frame
            failed: set[int] = set()

            def on_frame(frame: Frame) -> None:
                if frame.header.seq not in failed:
                    failed.add(frame.header.seq)
                    frame = Short(frame.header, frame.payload, frame.wants)
                handle(frame)

            consumer.on_frame = on_frame  # type: ignore[method-assign]
            self._whole(run.engine())
            run.result("r1")
            is_whole = lane.durable or not lane.restarts  # a restart ends requests whose rows are only in memory
            if is_whole:
                self._same(alone, run, "a request of which each frame was retried")
        if is_whole:
            self._kept_same(tmp_path, "short")

    def test_a_consumer_opens_again_after_a_fatal_error(self, tmp_path: Path) -> None:
        """After `FatalError` the consumer is opened again. Repeated frames are stored once, later requests whole."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "fatal") as run:
            consumer = run.hub.hub.consumers[0].consumer
            handle = consumer.on_frame
            raised: list[FatalError] = []

            def on_frame(frame: Frame) -> None:
                handle(frame)
                if not raised:
                    raised.append(FatalError("this opening is over"))
                    raise raised[0]

            consumer.on_frame = on_frame  # type: ignore[method-assign]
            engine = run.engine()
            engine.step([("r0", 4, 0, 4)], texts=True)
            engine.finish("r0")
            status = run.result("r0").status
            if run.hub.hub.consumers[0].spill is not None:
                assert status == "ok", f"every row was given, some again; the result is {run.result('r0')}"
            self._whole(engine)
            self._same(alone, run, "a request after the consumer was opened again")
        self._kept_same(tmp_path, "fatal")

    # Time, start and end.

    def test_slow_it_is_not(self, tmp_path: Path) -> None:
        """100 small frames are handled in `handle_s_max`, through a queue with room for a few."""
        # The fastest try counts, because the machine may be busy.
        limit_s, took_s = self.subject.handle_s_max, math.inf
        for number in range(_TRIES):
            took_s = min(took_s, self._handle_100(tmp_path / f"many-{number}"))
            if took_s <= limit_s:
                return
        raise AssertionError(f"100 frames took {took_s:.1f} s, expected at most {limit_s:g} s")

    def _handle_100(self, path: Path) -> float:
        """Have the consumer handle 100 frames; return the time that they took."""
        with trial(self.subject, path, queue_bytes_max=4096) as run:
            engine = run.engine()
            began = time.monotonic()
            for step in range(100):
                engine.step([("r1", 50, step, 1), ("r2", 100, step, 1)], texts=True)
            engine.finish("r1")
            engine.finish("r2")
            statuses = {run.result(request).status for request in ("r1", "r2")}
            took_s = time.monotonic() - began
            if run.hub.lanes[0].policy in (WhenFull.BLOCK, WhenFull.SPILL):
                assert statuses == {"ok"}, f"every row was given; the results are {statuses}"
        return took_s

    def test_closing_gives_everything_back(self, tmp_path: Path) -> None:
        """The hub may stop while requests run: `close` still comes once, and leaves no thread and no open file."""
        threads = set(threading.enumerate())
        with trial(self.subject, tmp_path / "closed") as run:
            engine = run.engine()
            engine.step([("r1", 9, 0, 5), ("r2", 4, 0, 4)], texts=True)
            engine.finish("r2")
            run.result("r2")
        check_given_back(threads, tmp_path, "close")

    def test_what_is_given_again_is_kept_once(self, tmp_path: Path) -> None:
        """After a restart a hub may repeat a finished request: the same frames, by engine, boot, rank and seq."""
        before: list[Any] = []
        after: list[Any] = []
        for results, spool in ((before, "spool"), (after, "another")):
            with trial(self.subject, tmp_path / "twice", spool=spool) as run:
                self._whole(run.engine())
                results.append(outcome(run, "r1"))
            if self.subject.kept is not None:
                results.append(self._kept(tmp_path / "twice").get("r1"))
        compare(before, after, "a request that was given again")

    def test_a_killed_one_is_gone_on_with(self, tmp_path: Path) -> None:
        """A process may die at any moment: requests with result `ok` are stored, and the next one does the rest."""
        (tmp_path / "killed").mkdir()
        report = killed(self.subject, tmp_path / "killed")
        with trial(self.subject, tmp_path / "killed") as run:
            engine = run.engine(seq=report["seq"])
            engine.promise("r2", 4, 0, 4)
            engine.step([("r2", 4, 4, 2)], texts=True)
            engine.finish("r2")
            status = run.result("r2").status
            if run.hub.hub.consumers[0].spill is not None:
                assert status == "ok", f"every row was given, some again; the result is {run.result('r2')}"
            self._whole(engine, "r3")
            self._ok(run, "r3")
        if self.subject.kept is not None and report["status"] == "ok":
            self._alone(tmp_path)
            kept = self._kept(tmp_path / "killed").get("r1")
            compare(self._kept(tmp_path / "alone").get("r1"), kept, "data stored before the process died")
