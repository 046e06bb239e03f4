"""The rules that every consumer is to keep, as a test class that pytest collects."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from capflow.consumer import Consumer
from capflow.errors import UsageError
from capflow.frame import DTYPES, Frame
from capflow.message import ModelInfo
from capflow.queue import Overload
from capflow.spec import CaptureSpec
from capflow.testing.checks import check_plain, compare, open_below
from capflow.testing.frames import make_model
from capflow.testing.hub import Engine
from capflow.testing.killed import killed
from capflow.testing.trial import Subject, Trial, outcome, trial


def conformance(
    consumer: type[Consumer],
    options: Mapping[str, Any] | None = None,
    *,
    model: ModelInfo | None = None,
    kept: Callable[[], Mapping[str, Any]] | None = None,
    handle_s_max: float = 5.0,
) -> type[Conformance]:
    """Return a test class with a test for each rule; a module of tests gives it a name that begins with `Test`.

    options: as of `--consumer NAME:…`; each test has a current directory of its own, so relative paths are fine. model: what the engines
    run; by default one of 4 layers, tapped at every hook, with rows of 8 float32. kept: returns, after the consumer is closed, what it keeps of
    each request, by id, in a form that can be compared; with it the rules look there too. handle_s_max: how long 100 small frames may take.
    """
    subject = Subject(consumer, dict(options or {}), model or make_model(), kept, handle_s_max)
    return type("Conformance", (Conformance,), {"subject": subject})


class Conformance:
    """The rules. Where results are compared, those of the same request in another setting are meant: they must not differ."""

    subject: ClassVar[Subject]

    # What it is.

    def test_unknown_options_are_refused(self, tmp_path: Path) -> None:
        """`Config` is frozen and forbids unknown fields, so that a misspelt option is an error however it is given."""
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
        raise AssertionError("an option that there is not was taken")

    def test_nothing_happens_before_open(self, tmp_path: Path) -> None:
        """Making and checking a consumer changes no file and starts no thread: a wrong option of another stops the start."""
        with contextlib.chdir(tmp_path):
            threads = set(threading.enumerate())
            made = self.subject.configured()
            left = sorted(path.name for path in tmp_path.iterdir())
            started = set(threading.enumerate()) - threads
            del made
        assert not left, f"__init__ or check made {', '.join(left)}: that is open's to do"
        assert not started, f"__init__ or check started {started}: that is open's to do"

    def test_spec_is_the_same_whenever_it_is_asked_for(self, tmp_path: Path) -> None:
        """`spec` returns a CaptureSpec or None, the same each time, and the model has what it names."""
        with contextlib.chdir(tmp_path):
            made = self.subject.configured().consumer
            spec = made.spec()
            assert spec is None or isinstance(spec, CaptureSpec), f"spec() returned {spec!r}"
            assert made.spec() == spec, f"spec() returned {spec!r}, and then {made.spec()!r}"
            if spec is not None:
                spec.resolve(self.subject.model.sites, num_layers=self.subject.model.num_layers)

    # Order.

    def test_rows_come_in_any_number_of_frames(self, tmp_path: Path) -> None:
        """A prompt may come whole, in parts or token by token."""
        alone = self._alone(tmp_path)
        for name, cuts in (("tokens", range(7)), ("parts", (0, 1, 3, 6))):
            with trial(self.subject, tmp_path / name) as run:
                engine = run.engine()
                for start, stop in zip(cuts, [*cuts[1:], 6], strict=True):
                    if stop > start:
                        engine.step([("r1", 4, start, stop - start)], texts=True)
                engine.finish("r1")
                self._same(alone, run, f"rows in {name}")
            self._kept_same(tmp_path, name)

    def test_requests_come_interleaved(self, tmp_path: Path) -> None:
        """Frames hold rows of several requests, each at another position; they begin and end in any order."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "crowd") as run:
            engine = run.engine()
            engine.step([("r0", 3, 0, 3), ("r1", 4, 0, 4)], texts=True)
            engine.step([("r2", 9, 0, 5), ("r1", 4, 4, 1), ("r0", 3, 3, 1)], texts=True)
            engine.finish("r0")
            engine.step([("r1", 4, 5, 1), ("r2", 9, 5, 4)], texts=True)
            engine.finish("r2")
            engine.finish("r1")
            self._same(alone, run, "a request among others")
        self._kept_same(tmp_path, "crowd")

    def test_engines_may_use_the_same_ids(self, tmp_path: Path) -> None:
        """A request is known by engine and id; two engines may both have an `r1`."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "engines") as run:
            other, one = run.engine("engine-2"), run.engine("engine-1")
            other.step([("r1", 7, 0, 3)], texts=True)
            other.settle()
            self._whole(one)
            self._same(alone, run, "a request while another engine has one of that id")
            other.step([("r1", 7, 3, 4)], texts=True)
            other.finish("r1")
            other.settle()

    def test_stages_of_a_pipeline_come_apart(self, tmp_path: Path) -> None:
        """Rows of a request's sites come in frames of their own from each pipeline stage, in any order."""
        alone = self._alone(tmp_path)
        model = msgspec.structs.replace(self.subject.model, stages=2)
        half = len(model.sites) // 2
        with trial(self.subject, tmp_path / "stages") as run:
            first = run.engine(model=model, sites=model.sites[:half])
            second = run.engine(model=model, sites=model.sites[half:], stage=1)
            for engines, start, length in (((second, first), 0, 4), ((first, second), 4, 1), ((second, first), 5, 1)):
                for engine in engines:
                    engine.step([("r1", 4, start, length)], texts=True)
            for engine in (first, second):
                engine.finish("r1")
            self._same(alone, run, "rows of two pipeline stages")
        self._kept_same(tmp_path, "stages")

    # What comes less often.

    def test_texts_may_be_missing(self, tmp_path: Path) -> None:
        """`chunk.texts` is empty when the engine has no tokenizer."""
        with trial(self.subject, tmp_path / "bare") as run:
            engine = run.engine()
            engine.step([("r1", 4, 0, 4)], texts=False)
            engine.step([("r1", 4, 4, 2)], texts=False)
            engine.finish("r1")
            self._ok(run, "r1")

    def test_rows_have_any_dtype(self, tmp_path: Path) -> None:
        """Rows come in the model's dtype: bfloat16, float16 or float32."""
        for dtype in DTYPES:
            with trial(self.subject, tmp_path / dtype) as run:
                engine = run.engine(model=msgspec.structs.replace(self.subject.model, dtype=dtype))
                self._whole(engine)
                self._ok(run, "r1")

    def test_rows_may_hold_nan_and_infinity(self, tmp_path: Path) -> None:
        """Numbers that are none are data, too."""
        with trial(self.subject, tmp_path / "odd") as run:
            engine = run.engine()
            frame = engine.made([("r1", 4, 0, 4)], texts=True)
            rows = np.frombuffer(frame.payload, DTYPES[frame.header.dtype]).copy()
            rows[::3], rows[1::7] = math.nan, math.inf
            engine.send(Frame.seal(frame.header, rows.view(np.uint8)))
            engine.finish("r1")
            run.result("r1")

    def test_a_request_may_have_no_rows(self, tmp_path: Path) -> None:
        """`on_request_done` comes also of requests that were never in a frame."""
        with trial(self.subject, tmp_path / "empty") as run:
            engine = run.engine()
            engine.finish("r1", status="abort")
            run.result("r1")
            engine.finish("r1", status="abort")
            run.result("r1")

    def test_rows_may_have_been_lost(self, tmp_path: Path) -> None:
        """`done.dropped` says which; the rest is the consumer's all the same."""
        with trial(self.subject, tmp_path / "lossy") as run:
            engine = run.engine()
            engine.step([("r1", 9, 0, 2)], texts=True)
            engine.step([("r1", 9, 7, 2)], texts=True)
            engine.finish("r1", lost=[(5 * len(engine.sites), "queue_full")])
            status = run.result("r1").status
            assert status in ("partial_error", "error"), f"rows were lost, and the result says {status}"

    def test_a_request_is_forgotten_when_it_is_over(self, tmp_path: Path) -> None:
        """An engine that dies leaves requests half done; one of the same id afterwards is a new one."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "again") as run:
            engine = run.engine()
            engine.step([("r1", 9, 0, 5)], texts=True)
            engine.settle()
            engine.lose()
            assert run.result("r1").status in ("partial_error", "error"), "half a request was called whole"
            self._whole(run.engine(boot="boot-2"))
            self._same(alone, run, "a request after one of the same id was cut off")

    def test_an_engine_may_come_back_with_another_model(self, tmp_path: Path) -> None:
        """`on_session` comes again, and what it says holds from then on."""
        model = self.subject.model
        more = tuple(
            site._replace(layer=model.num_layers) for site in model.sites if site.layer == model.num_layers - 1
        )
        larger = msgspec.structs.replace(
            model, name="larger", num_layers=model.num_layers + 1, sites=tuple(sorted((*model.sites, *more)))
        )
        with trial(self.subject, tmp_path / "models") as run:
            engine = run.engine()
            self._whole(engine)
            run.result("r1")
            engine.lose()
            self._whole(run.engine(model=larger, boot="boot-2"), "r2")
            self._ok(run, "r2")

    def test_results_are_plain(self, tmp_path: Path) -> None:
        """`on_request_done` returns None, or a CaptureResult whose payload is plain JSON values: it travels."""
        with trial(self.subject, tmp_path / "plain") as run:
            self._whole(run.engine())
            check_plain(run.result("r1"))

    # Time, ends and beginnings.

    def test_slow_it_is_not(self, tmp_path: Path) -> None:
        """100 small frames are handled in `handle_s_max`, through a queue that has room for a few."""
        with trial(self.subject, tmp_path / "many", queue_bytes_max=4096) as run:
            engine = run.engine()
            began = time.monotonic()
            for step in range(100):
                engine.step([("r1", 50, step, 1), ("r2", 100, step, 1)], texts=True)
            engine.finish("r1")
            engine.finish("r2")
            statuses = {run.result(request).status for request in ("r1", "r2")}
            took_s = time.monotonic() - began
            limit_s = self.subject.handle_s_max
            assert took_s <= limit_s, f"100 frames took {took_s:.1f} s, expected at most {limit_s:g} s"
            if run.hub.lanes[0].policy in (Overload.BLOCK, Overload.SPILL):
                assert statuses == {"ok"}, f"every row was given, and the results say {statuses}"

    def test_closing_gives_everything_back(self, tmp_path: Path) -> None:
        """The hub may stop while requests run: `close` comes all the same, once, and leaves no thread and no open file."""
        threads = set(threading.enumerate())
        with trial(self.subject, tmp_path / "closed") as run:
            engine = run.engine()
            engine.step([("r1", 9, 0, 5), ("r2", 4, 0, 4)], texts=True)
            engine.finish("r2")
            run.result("r2")
        gc.collect()
        deadline = time.monotonic() + 2
        while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left, f"threads that run on after close: {', '.join(thread.name for thread in left)}"
        held = open_below(tmp_path)
        assert not held, f"files that are open after close: {', '.join(held)}"

    def test_what_is_given_again_is_kept_once(self, tmp_path: Path) -> None:
        """After a restart a hub may give a request again that was done with: the same frames, by engine, boot, rank and seq."""
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
        """The process may die at any moment: what was answered with `ok` is kept, and the next one opens, takes the rest and goes on."""
        (tmp_path / "killed").mkdir()
        told = killed(self.subject, tmp_path / "killed")
        with trial(self.subject, tmp_path / "killed") as run:
            engine = run.engine(seq=told["seq"])
            engine.promise("r2", 4, 0, 4)
            engine.step([("r2", 4, 4, 2)], texts=True)
            engine.finish("r2")
            status = run.result("r2").status
            if run.hub.hub.consumers[0].spill is not None:
                assert status == "ok", f"every row was given, some again, and the result says {run.result('r2')}"
            self._whole(engine, "r3")
            self._ok(run, "r3")
        if self.subject.kept is not None and told["status"] == "ok":
            self._alone(tmp_path)
            kept = self._kept(tmp_path / "killed").get("r1")
            compare(self._kept(tmp_path / "alone").get("r1"), kept, "what was kept before the process died")

    # How the rules look.

    def _whole(self, engine: Engine, request: str = "r1") -> None:
        """Run the request that others are compared with: 4 tokens of prompt and 2 more."""
        engine.step([(request, 4, 0, 4)], texts=True)
        engine.step([(request, 4, 4, 1)], texts=True)
        engine.step([(request, 4, 5, 1)], texts=True)
        engine.finish(request)

    def _alone(self, directory: Path) -> Any:
        with trial(self.subject, directory / "alone") as run:
            self._whole(run.engine())
            self._ok(run, "r1")
            return outcome(run, "r1")

    def _ok(self, run: Trial, request: str) -> None:
        result = run.result(request)
        assert result.status == "ok", f"every row was given, and the result says {result.status}: {result.error}"

    def _same(self, alone: Any, run: Trial, what: str) -> None:
        compare(alone, outcome(run, "r1"), what)

    def _kept(self, directory: Path) -> Mapping[str, Any]:
        with contextlib.chdir(directory):
            return self.subject.read()

    def _kept_same(self, directory: Path, name: str) -> None:
        if self.subject.kept is not None:
            alone, here = (self._kept(directory / at).get("r1") for at in ("alone", name))
            compare(alone, here, f"what is kept of a request ({name})")
