"""The rules about rows: their order, and the less frequent cases."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo, grouped
from capflow.capture.site import Site
from capflow.testing.checks import check_plain, compare
from capflow.testing.hub import Engine
from capflow.testing.trial import Subject, Trial, outcome, trial

# Each hook in a layer of its own. No width divides another, or goes with the 8 numbers of a row of the stream.
_SHAPES = {"heads": (3, 5), "k": (1, 5), "neurons": (17,), "router": (3,)}


class RowRules:
    """The rules about rows.

    Invariant: a request has the same result in every setting as when it runs alone.
    """

    subject: ClassVar[Subject]

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
        """Frames hold rows of several requests at different positions; requests start and end in any order."""
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
        """Engine and id identify a request; two engines may both have an `r1`."""
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
        """Each pipeline stage sends the rows of its sites in frames of its own, in any order."""
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

    # Less frequent cases.

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

    def test_rows_have_any_shape(self, tmp_path: Path) -> None:
        """A frame may have rows of several widths, in blocks of their own; `chunk.shape` is the shape of a row."""
        subject = dataclasses.replace(self.subject, model=_shaped(self.subject.model))
        apart = [*_by_shape(subject.model)]
        with _named("rows of several widths"):
            with trial(subject, tmp_path / "apart") as run:
                engine = run.engine()
                for start, length in ((0, 4), (4, 1), (5, 1)):
                    for sites in apart:
                        engine.step([("r1", 4, start, length)], sites=sites, texts=True)
                engine.finish("r1")
                self._ok(run, "r1")
                one_each = outcome(run, "r1")
            with trial(subject, tmp_path / "shapes") as run:
                self._whole(run.engine())
                self._ok(run, "r1")
                got = outcome(run, "r1")
                assert got == one_each, f"got {got}, expected {one_each}, as with one width in each frame"
            if self.subject.kept is not None:
                kept, expected = (self._kept(tmp_path / at).get("r1") for at in ("shapes", "apart"))
                assert kept == expected, f"stored {kept}, expected {expected}, as with one width in each frame"

    def test_rows_may_hold_nan_and_infinity(self, tmp_path: Path) -> None:
        """NaN and infinity are data."""
        with trial(self.subject, tmp_path / "odd") as run:
            engine = run.engine()
            frame = engine.made([("r1", 4, 0, 4)], texts=True)
            rows = np.frombuffer(frame.payload, DTYPES[frame.header.dtype]).copy()
            rows[::3], rows[1::7] = math.nan, math.inf
            engine.send(Frame.seal(frame.header, rows.view(np.uint8)))
            engine.finish("r1")
            run.result("r1")

    def test_a_request_may_have_no_rows(self, tmp_path: Path) -> None:
        """`on_request_done` also comes for requests that were never in a frame."""
        with trial(self.subject, tmp_path / "empty") as run:
            engine = run.engine()
            engine.finish("r1", status="abort")
            run.result("r1")
            engine.finish("r1", status="abort")
            run.result("r1")

    def test_rows_may_have_been_lost(self, tmp_path: Path) -> None:
        """`done.dropped` counts the lost rows; the other rows are still the consumer's."""
        with trial(self.subject, tmp_path / "lossy") as run:
            engine = run.engine()
            engine.step([("r1", 9, 0, 2)], texts=True)
            engine.step([("r1", 9, 7, 2)], texts=True)
            engine.finish("r1", lost=[(5 * len(engine.sites), "queue_full")])
            status = run.result("r1").status
            assert status in ("partial_error", "error"), f"rows were lost; the result is {status}"

    def test_a_request_is_forgotten_when_it_is_over(self, tmp_path: Path) -> None:
        """A request of a dead engine is cut off; a later request with the same id is a new one."""
        alone = self._alone(tmp_path)
        with trial(self.subject, tmp_path / "again") as run:
            engine = run.engine()
            engine.step([("r1", 9, 0, 5)], texts=True)
            engine.settle()
            engine.lose()
            assert run.result("r1").status in ("partial_error", "error"), "the result of half a request is ok"
            self._whole(run.engine(boot="boot-2"))
            self._same(alone, run, "a request after one of the same id was cut off")

    def test_an_engine_may_come_back_with_another_model(self, tmp_path: Path) -> None:
        """`on_session` comes again with the new model, which is valid from then on."""
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
        """`on_request_done` returns None, or a CaptureResult whose payload is plain JSON: clients get it."""
        with trial(self.subject, tmp_path / "plain") as run:
            self._whole(run.engine())
            check_plain(run.result("r1"))

    # Helpers of the rules.

    def _whole(self, engine: Engine, request: str = "r1") -> None:
        """Run the request to compare with: 4 prompt tokens and 2 generated ones."""
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
        assert result.status == "ok", f"every row was given; the result is {result.status}: {result.error}"

    def _same(self, alone: Any, run: Trial, where: str) -> None:
        compare(alone, outcome(run, "r1"), where)

    def _kept(self, directory: Path) -> Mapping[str, Any]:
        with contextlib.chdir(directory):
            return self.subject.read()

    def _kept_same(self, directory: Path, name: str) -> None:
        if self.subject.kept is not None:
            alone, here = (self._kept(directory / at).get("r1") for at in ("alone", name))
            compare(alone, here, f"the stored data of a request ({name})")


def _shaped(model: ModelInfo) -> ModelInfo:
    """Return a model with further sites, whose rows have shapes of their own."""
    shapes = {Site(number % model.num_layers, hook): shape for number, (hook, shape) in enumerate(_SHAPES.items())}
    own = shapes | dict(model.own_shapes)
    return msgspec.structs.replace(model, sites=tuple(sorted({*model.sites, *own})), shapes=grouped(own))


def _by_shape(model: ModelInfo) -> Iterator[list[Site]]:
    """Yield the sites of each shape."""
    for shape in dict.fromkeys(map(model.shape_of, model.sites)):
        yield [site for site in model.sites if model.shape_of(site) == shape]


@contextlib.contextmanager
def _named(cases: str) -> Iterator[None]:
    """Name the case of a failed assertion."""
    try:
        yield
    except AssertionError as e:
        raise AssertionError(f"{cases}: {e}") from e
