"""A consumer that keeps every rule of `capflow.testing`, and for each rule one that breaks it and no other."""

import contextlib
import json
import struct
import threading
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from capflow import CaptureResult, CaptureSpec, Consumer


class Counting(Consumer):
    """Counts each request's rows and tokens, and keeps the counts as lines of JSON, each request's once."""

    name = "counting"
    policy = "spill"
    reads_requests = False

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        path: str

    def __init__(self, config):
        super().__init__(config)
        self.rows = {}
        self.kept = {}
        self.file = None

    def spec(self):
        return CaptureSpec({"post_block": "all"})

    def open(self, context):
        self.file = Path(self.config.path).open("a+", encoding="utf-8")  # noqa: SIM115  open until `close`
        self.file.seek(0)
        self.kept = {(line["engine"], line["request"]): line for line in map(json.loads, self.file)}

    def on_frame(self, frame):
        for chunk in list(frame.chunks()):
            self.take(frame, chunk)

    def key(self, frame, chunk):
        return frame.header.engine, chunk.request.id

    def take(self, frame, chunk):
        count, total = self.rows.get(self.key(frame, chunk), (0, 0))
        length = chunk.rows.shape[1]
        self.rows[self.key(frame, chunk)] = (
            count + length * len(chunk.sites),
            total + sum(chunk.token_ids) * len(chunk.sites),
        )

    def on_request_done(self, done):
        rows, tokens = self.rows.pop((done.engine, done.request), (0, 0))
        return self.keep(done, rows, tokens)

    def keep(self, done, rows, tokens):
        line = {"engine": done.engine, "request": done.request, "rows": rows, "tokens": tokens}
        if self.kept.get((done.engine, done.request)) != line:
            self.kept[done.engine, done.request] = line
            print(json.dumps(line), file=self.file, flush=True)
        return CaptureResult("ok", payload={"rows": rows, "tokens": tokens})

    def close(self):
        self.file.close()


def lines():
    """Return the lines of each request that `Counting` kept."""
    kept = {}
    for line in Path("counts.jsonl").read_text(encoding="utf-8").splitlines():
        kept.setdefault(json.loads(line)["request"], []).append(line)
    return kept


class LaxOptions(Counting):
    class Config(msgspec.Struct, frozen=True):
        path: str


class EagerOpener(Counting):
    def __init__(self, config):
        super().__init__(config)
        Path("eager").write_text("made before open")


class FickleSpec(Counting):
    def spec(self):
        self.asked = not getattr(self, "asked", False)
        return CaptureSpec({"post_block": [0 if self.asked else 1]})


class PromptsComeWhole(Counting):
    def take(self, frame, chunk):
        if chunk.start + chunk.rows.shape[1] >= chunk.request.prompt_length:
            super().take(frame, chunk)


class OneAtATime(Counting):
    current = None

    def take(self, frame, chunk):
        if self.current != self.key(frame, chunk):
            self.current = self.key(frame, chunk)
            self.rows.pop(self.current, None)
        super().take(frame, chunk)


class IdsAreUnique(Counting):
    def key(self, frame, chunk):
        return "any engine", chunk.request.id

    def on_request_done(self, done):
        rows, tokens = self.rows.pop(("any engine", done.request), (0, 0))
        return self.keep(done, rows, tokens)


class StagesComeTogether(Counting):
    def take(self, frame, chunk):
        if 0 in [site.layer for site in chunk.sites]:
            super().take(frame, chunk)
        elif len({site.layer for site in chunk.sites}) == 2:
            raise ValueError("where is layer 0?")


class TextsAreThere(Counting):
    def take(self, frame, chunk):
        dict(zip(range(chunk.rows.shape[1]), chunk.texts, strict=True))
        super().take(frame, chunk)


class FloatsOnly(Counting):
    def take(self, frame, chunk):
        np.frombuffer(chunk.rows.tobytes(), np.float32).reshape(chunk.rows.shape)
        super().take(frame, chunk)


class OneWidth(Counting):
    reads_requests = True

    def spec(self):
        return None

    def on_frame(self, frame):
        rows = [chunk.rows for chunk in frame.chunks()]
        np.concatenate([each.reshape(-1, each.shape[-1]) for each in rows] or [np.zeros((0, 8))])
        super().on_frame(frame)


class AllOfTheStream(Counting):
    def on_frame(self, frame):
        for block, rows in frame.blocks():
            rows.reshape(len(block.sites), block.rows, frame.header.hidden_size)
        super().on_frame(frame)


class FiniteOnly(Counting):
    def take(self, frame, chunk):
        struct.pack("<q", int(chunk.rows.astype(np.float64).sum()))
        super().take(frame, chunk)


class RowsAlwaysCome(Counting):
    def on_request_done(self, done):
        assert done.rows, "a request has rows"
        return super().on_request_done(done)


class NothingIsLost(Counting):
    def on_request_done(self, done):
        assert not done.dropped, "rows are missing"
        return super().on_request_done(done)


class NeverForgets(Counting):
    def on_request_done(self, done):
        return self.keep(done, *self.rows.get((done.engine, done.request), (0, 0)))


class OneModel(Counting):
    model = None

    def on_session(self, engine, model):
        assert self.model in (None, model), "there is one model"
        self.model = model


class ArraysInResults(Counting):
    def keep(self, done, rows, tokens):
        super().keep(done, rows, tokens)
        return CaptureResult("ok", payload={"rows": np.int64(rows)})


class Slow(Counting):
    def on_frame(self, frame):
        # What this consumer is: slow.
        time.sleep(0.012)
        super().on_frame(frame)


class ThreadsStay(Counting):
    # Set by the tests.
    over = threading.Event()

    def open(self, context):
        super().open(context)
        threading.Thread(target=self.over.wait, name="left-behind", daemon=True).start()


class FilesStay(Counting):
    left: ClassVar[list[object]] = []

    def close(self):
        self.left.append(self.file)


class RaisesInClose(Counting):
    def close(self):
        super().close()
        assert not (self.rows and self.kept), "requests are open"


class KeepsTwice(Counting):
    def open(self, context):
        super().open(context)
        self.kept.clear()


class OpensOnce(Counting):
    def open(self, context):
        Path("lock").touch(exist_ok=False)
        super().open(context)

    def close(self):
        super().close()
        Path("lock").unlink()


class KeepsTooLate(Counting):
    """Says `ok` before what it says it of is with the kernel."""

    def open(self, context):
        super().open(context)
        self.late = []

    def keep(self, done, rows, tokens):
        line = {"engine": done.engine, "request": done.request, "rows": rows, "tokens": tokens}
        if self.kept.get((done.engine, done.request)) != line:
            self.late.append(json.dumps(line))
        return CaptureResult("ok", payload={"rows": rows, "tokens": tokens})

    def close(self):
        print(*self.late, sep="\n", end="\n" if self.late else "", file=self.file)
        super().close()


class OpensTooSoon(Counting):
    """Starts what only `close` ends before it has what can fail."""

    def open(self, context):
        self.ended = threading.Event()
        threading.Thread(target=self.run, name="too-soon", daemon=True).start()
        super().open(context)

    def run(self):
        while not (self.ended.wait(0.01) or ThreadsStay.over.is_set()):
            pass

    def close(self):
        super().close()
        self.ended.set()


class NeverLetsGo(Counting):
    busy = False

    def on_frame(self, frame):
        assert not self.busy, "one frame at a time"
        self.busy = True
        with contextlib.suppress(MemoryError):
            super().on_frame(frame)
            self.busy = False
            return
        self.busy = False
        raise MemoryError


class TakesAsItReads(Counting):
    def on_frame(self, frame):
        for chunk in frame.chunks():
            self.take(frame, chunk)


class OpensNoMore(Counting):
    def open(self, context):
        if self.file is None:
            super().open(context)


BROKEN = {
    TakesAsItReads: ("test_a_retry_takes_nothing_of_its_frame", "each frame was retried"),
    OpensNoMore: ("test_a_consumer_opens_again_after_a_fatal_error", "closed file"),
    LaxOptions: ("test_unknown_options_are_refused", "forbid_unknown_fields"),
    EagerOpener: ("test_nothing_happens_before_open", "made eager"),
    FickleSpec: ("test_spec_is_the_same_whenever_it_is_asked_for", "and then"),
    OpensTooSoon: ("test_an_open_that_fails_leaves_nothing", "too-soon"),
    NeverLetsGo: ("test_an_exception_costs_the_requests_of_its_frame", "one frame at a time"),
    PromptsComeWhole: ("test_rows_come_in_any_number_of_frames", "rows in "),
    OneAtATime: ("test_requests_come_interleaved", "a request among others"),
    IdsAreUnique: ("test_engines_may_use_the_same_ids", "another engine has one of that id"),
    StagesComeTogether: ("test_stages_of_a_pipeline_come_apart", "two pipeline stages"),
    TextsAreThere: ("test_texts_may_be_missing", "on_frame: ValueError: zip"),
    FloatsOnly: ("test_rows_have_any_dtype", "cannot reshape"),
    OneWidth: ("test_rows_have_any_shape", "dimensions except for the concatenation axis"),
    AllOfTheStream: ("test_rows_have_any_shape", "cannot reshape array of size 60"),
    FiniteOnly: ("test_rows_may_hold_nan_and_infinity", "on_frame: ValueError: cannot convert float NaN"),
    RowsAlwaysCome: ("test_a_request_may_have_no_rows", "AssertionError: a request has rows"),
    NothingIsLost: ("test_rows_may_have_been_lost", "AssertionError: rows are missing"),
    NeverForgets: ("test_a_request_is_forgotten_when_it_is_over", "was cut off"),
    OneModel: ("test_an_engine_may_come_back_with_another_model", "there is one model"),
    ArraysInResults: ("test_results_are_plain", "cannot be sent"),
    Slow: ("test_slow_it_is_not", "100 frames took"),
    ThreadsStay: ("test_closing_gives_everything_back", "left-behind"),
    FilesStay: ("test_closing_gives_everything_back", "counts.jsonl"),
    RaisesInClose: ("test_closing_gives_everything_back", "close: AssertionError: requests are open"),
    KeepsTwice: ("test_what_is_given_again_is_kept_once", "given again"),
    OpensOnce: ("test_a_killed_one_is_gone_on_with", "FileExistsError"),
    KeepsTooLate: ("test_a_killed_one_is_gone_on_with", "before the process died"),
}
"""Each with the rule that it breaks, and some of what it is told."""
