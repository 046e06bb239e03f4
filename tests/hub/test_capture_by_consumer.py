"""A request may ask for other rows for each consumer, by name, and tag them: each gets its own and nothing else."""

from __future__ import annotations

import msgspec
import pytest

import capflow
from capflow import limits
from capflow.capture.frame import RequestRows
from capflow.capture.result import CaptureResult, joined
from capflow.capture.site import Site
from capflow.capture.spec import CaptureByConsumer, CaptureSpec, parse_capture
from capflow.errors import UsageError
from capflow.plugins.configure import configure_all, load_plugins
from capflow.testing import MemoryHub
from tests.kit.captured import LAYOUTS
from tests.kit.frames import make_frame, make_model
from tests.kit.hubs import Recorder, configured
from tests.kit.waiting import eventually

PROMPT, COMPUTED = 5, 9
LAST = {"hooks": {"post_block": [3]}, "positions": "last_prompt", "tag": "last"}
ANSWER = {"hooks": {"post_block": [1, 3]}, "positions": "all_generated"}


def reader(name, policy="block", spec=None):
    return configured(Recorder(name, spec, reads_requests=True), policy)


def run(hub, capture, request="r1", sites=None):
    """Send all rows that `capture` asks for, a prompt in two parts and tokens one by one; return the results."""
    engine = hub.engine(f"engine-{request}", boot=f"boot-{request}", capture=capture, sites=sites)
    engine.step([(request, PROMPT, 0, 3)])
    engine.step([(request, PROMPT, 3, PROMPT - 3)])
    for position in range(PROMPT, COMPUTED):
        engine.step([(request, PROMPT, position, 1)])
    engine.finish(request)
    return hub.results(request)


def rows_of(consumer):
    return sorted((str(site), position) for _, site, position in consumer.positions)


class TestWhatIsWritten:
    def test_the_single_form_stays_and_is_every_readers(self):
        spec = parse_capture({"hooks": {"post_block": "all"}, "tag": "x"})
        assert spec == CaptureSpec({"post_block": "all"}, tag="x")
        assert spec.of("filesystem") is spec.of("anyone") is spec
        assert msgspec.msgpack.encode(parse_capture({"hooks": {"post_block": [1]}})) == msgspec.msgpack.encode(
            {"hooks": {"post_block": [1]}}
        )  # as earlier versions say it

    def test_a_spec_for_each_name(self):
        capture = parse_capture({"filesystem": LAST, "duckdb@cold": CaptureSpec({"post_block": [0]})})
        assert capture.of("filesystem") == CaptureSpec.parse(LAST)
        assert capture.of("duckdb@cold") == CaptureSpec({"post_block": [0]})
        assert capture.of("duckdb") is None
        assert parse_capture(capture) is capture

    @pytest.mark.parametrize("capture", [parse_capture({"a": LAST, "b@c": ANSWER}), parse_capture(ANSWER), None])
    def test_it_travels(self, capture):
        part = RequestRows("r", 3, 0, (), capture=capture)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=RequestRows) == part

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"filesystem": {"hooks": {"post_blok": [0]}}}, "capture.filesystem.hooks: got post_blok, expected a hook"),
            ({"filesystem": {"positions": "all"}}, "capture.filesystem.hooks: expected a mapping like"),
            ({"filesystem": LAST, "duckdb": 3}, "capture.duckdb: got 3, expected a mapping"),
            ({"file system": LAST}, "capture: got file system, expected a consumer's name, such as filesystem or"),
            ({"a@b@c": LAST}, "capture: got a@b@c, expected a consumer's name"),
            ({3: LAST}, "capture: got 3, expected a consumer's name"),
            ({f"c{n}": LAST for n in range(65)}, "capture: got 65 consumers, expected at most 64"),
            ({**LAST, "tag": "a\nb"}, "capture.tag: got a b, expected at most 256 printable characters"),
            ({**LAST, "tag": "x" * 257}, "capture.tag: got "),
            ({**LAST, "tag": 7}, "capture.tag: got 7, expected at most 256 printable characters"),
            ({"a": {**LAST, "tag": "\x1b[2J"}}, "capture.a.tag: got "),
            ({}, "capture.hooks: expected a mapping like"),
            ({"hook": {"post_block": [0]}}, "capture.hook: expected one of hooks, positions, max_rows, dtype, tag"),
        ],
    )
    def test_what_is_wrong_is_refused_by_its_path(self, value, message):
        with pytest.raises(UsageError) as error:
            parse_capture(value)
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)

    def test_what_no_client_checked_is_refused_where_it_is_resolved(self):
        model = make_model()
        for capture in (
            CaptureSpec({"post_block": [0]}, tag="\x1b[2J"),
            CaptureByConsumer({"a\nb": CaptureSpec({"post_block": [0]})}),
            CaptureByConsumer({"a": CaptureSpec({"post_block": [0]}, tag="\n")}),
            CaptureByConsumer({"a": CaptureSpec({"post_block": [99]})}),
        ):
            with pytest.raises(UsageError):
                capture.resolve(model.sites, num_layers=model.num_layers)

    def test_a_tag_on_the_wire_is_bounded(self):
        part = msgspec.msgpack.encode({"hooks": {}, "tag": "x" * (limits.TAG_LENGTH_MAX + 1)})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(part, type=CaptureSpec)


class TestTheHub:
    @pytest.mark.parametrize("policy", ["block", "drop", "skip", "spill"])
    def test_each_consumer_gets_exactly_what_was_asked_for_it(self, policy):
        a, b, c = reader("a", policy), reader("b", policy), reader("c", policy)
        with MemoryHub(a, b, c) as hub:
            results = run(hub, parse_capture({"a": LAST, "b": ANSWER}), sites=[Site(n, "post_block") for n in (1, 3)])
        assert rows_of(a.consumer) == [("post_block:3", PROMPT - 1)]
        answer = [(f"post_block:{layer}", position) for layer in (1, 3) for position in range(PROMPT, COMPUTED)]
        assert rows_of(b.consumer) == answer
        assert rows_of(c.consumer) == []
        assert {name: (result.status, result.tag) for name, result in results.items()} == {
            "a": ("ok", "last"),
            "b": ("ok", ""),
            "c": ("not_requested", ""),
        }
        assert (a.consumer.done["r1"].rows, b.consumer.done["r1"].rows) == (1, len(answer))
        assert (a.consumer.done["r1"].tag, b.consumer.done["r1"].tag) == ("last", "")
        assert "r1" not in c.consumer.done

    def test_a_consumer_keeps_its_own_spec_beside_what_a_request_asks_for_others(self):
        own = reader("own", spec=CaptureSpec({"mlp_out": [0]}))
        other = reader("other")
        with MemoryHub(own, other) as hub:
            results = run(hub, parse_capture({"other": LAST}))
        assert rows_of(own.consumer) == [("mlp_out:0", position) for position in range(COMPUTED)]
        assert rows_of(other.consumer) == [("post_block:3", PROMPT - 1)]
        assert [result.tag for result in results.values()] == ["", "last"]

    def test_instances_of_one_consumer_are_told_apart(self):
        plain, cold = reader("keep"), reader("keep@cold")
        with MemoryHub(plain, cold) as hub:
            run(hub, parse_capture({"keep@cold": LAST}))
        assert rows_of(plain.consumer) == []
        assert rows_of(cold.consumer) == [("post_block:3", PROMPT - 1)]

    def test_a_name_that_no_consumer_has_is_answered_with_an_error_and_costs_the_others_nothing(self):
        keep, shows = reader("keep"), configured(Recorder("shows", None))  # reads no requests
        with MemoryHub(keep, shows) as hub:
            results = run(hub, parse_capture({"keep": LAST, "kept": ANSWER, "shows": ANSWER}))
            assert hub.hub.status()["requests"]["done"] == 1
        assert (results["keep"].status, results["kept"].status) == ("ok", "error")
        assert results["kept"].error == "capture: got consumer kept, expected one of this hub's: keep"
        assert results["shows"].status == "error"
        assert rows_of(keep.consumer) == [("post_block:3", PROMPT - 1)]
        assert rows_of(shows.consumer) == []

    def test_a_loss_is_that_consumers_alone(self):
        slow = Recorder("slow", None, held=True, reads_requests=True)
        fast = reader("fast")
        with MemoryHub(configured(slow, "drop", 1), fast) as hub:
            engine = hub.engine(capture=parse_capture({"slow": ANSWER, "fast": LAST}))
            eventually(lambda: ("session", "engine-1") in slow.events)
            engine.step([("r1", PROMPT, 0, PROMPT)])
            engine.step([("r1", PROMPT, PROMPT, 1)])
            assert slow.waiting.wait(60)  # it holds one frame; of the others there is room for one at most
            for position in range(PROMPT + 1, COMPUTED):
                engine.step([("r1", PROMPT, position, 1)])
            hub.asked(lambda: None)
            slow.go.set()
            engine.finish("r1")
            results = hub.results("r1")
        assert (results["slow"].status, results["fast"].status) == ("partial_error", "ok")
        lost = sum(dropped.rows for dropped in results["slow"].dropped)
        assert lost == 2 * (COMPUTED - PROMPT) - slow.rows["r1"] > 0
        assert results["fast"].dropped == ()
        assert {site for dropped in results["slow"].dropped for gap in dropped.gaps for site in gap.sites} <= {
            "post_block:1",
            "post_block:3",
        }

    def test_requests_of_one_frame_may_ask_for_different_consumers_and_tags(self):
        a, b = reader("a"), reader("b")
        with MemoryHub(a, b) as hub:
            engine = hub.engine()
            captures = {
                "r1": parse_capture({"a": LAST}),
                "r2": parse_capture({"b": {**LAST, "tag": "two"}}),
                "r3": parse_capture({**LAST, "tag": "three"}),
                "r4": None,
            }
            engine.step([(name, PROMPT, 0, PROMPT) for name in captures], captures=captures)
            for name in captures:
                engine.finish(name)
            status = {name: hub.results(name) for name in ("r1", "r2", "r3")}
        assert sorted(a.consumer.rows) == ["r1", "r3"]
        assert sorted(b.consumer.rows) == ["r2", "r3"]
        tags = {name: {c: r.tag for c, r in results.items()} for name, results in status.items()}
        assert tags == {
            "r1": {"a": "last", "b": ""},
            "r2": {"a": "", "b": "two"},
            "r3": {"a": "three", "b": "three"},
        }

    def test_tags_do_not_part_requests_that_want_the_same(self):
        """A frame goes to a consumer whole, without a count per row, if all of its requests want the same."""
        with MemoryHub(reader("a")) as hub:
            index = hub.hub.index
            engine = hub.engine()
            captures = {f"r{n}": CaptureSpec({"post_block": "all"}, tag=f"tag {n}") for n in range(3)}
            engine.step([(name, 4, 0, 2) for name in captures], captures=captures)
            shares = hub.asked(lambda: [index.named(name)[0].shares for name in captures])
            assert shares[0] is shares[1] is shares[2]


class TestWhereTheTagLands:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_in_sidecars_and_parquet(self, tmp_path, layout):
        filesystem = configure_all(
            [f"filesystem:root={tmp_path},capture=requests,layout={layout}"], None, load_plugins()
        )[0]
        with MemoryHub(*filesystem) as hub:
            results = run(hub, parse_capture({"filesystem": LAST}))
            run(hub, parse_capture({**LAST, "tag": ""}), "untagged")
        assert results["filesystem"].tag == "last"
        dataset = capflow.open(tmp_path)
        dataset.verify()
        assert (dataset["r1"].tag, dataset["untagged"].tag) == ("last", "")
        rows, positions, _ = dataset["r1"]["post_block:3"]
        assert (rows.shape[0], positions.tolist()) == (1, [PROMPT - 1])
        if layout == "sharded":
            import duckdb

            result = duckdb.sql(f"SELECT DISTINCT request, tag FROM '{tmp_path}/*.parquet' ORDER BY 1").fetchall()
            assert result == [("r1", "last"), ("untagged", "")]

    def test_in_duckdb(self, tmp_path):
        import duckdb

        path = tmp_path / "store.db"
        consumers = configure_all([f"duckdb:path={path},site=post_block:3,vectors=true"], None, load_plugins())[0]
        with MemoryHub(*consumers) as hub:
            run(hub, parse_capture({"duckdb": LAST}))
            run(hub, None, "r2")
        with duckdb.connect(str(path), read_only=True) as store:
            assert store.sql("SELECT request_id, tag FROM requests ORDER BY 1").fetchall() == [
                ("r1", "last"),
                ("r2", None),
            ]

    def test_a_database_of_an_earlier_version_is_opened_and_keeps_its_rows(self, tmp_path):
        import duckdb

        path = tmp_path / "store.db"
        consumers = configure_all([f"duckdb:path={path},site=post_block:3"], None, load_plugins())[0]
        with MemoryHub(*consumers) as hub:
            run(hub, None, "old")
        with duckdb.connect(str(path)) as store:
            for column in ("tag", "adapter", "weights", "weights_label"):
                store.execute(f"ALTER TABLE requests DROP COLUMN {column}")
        for name in ("r1", "r2"):  # added once, then there
            consumers = configure_all([f"duckdb:path={path},site=post_block:3"], None, load_plugins())[0]
            with MemoryHub(*consumers) as hub:
                run(hub, parse_capture({"duckdb": {**LAST, "tag": name}}), name)
        with duckdb.connect(str(path), read_only=True) as store:
            result = store.sql("SELECT request_id, rows, tag FROM requests ORDER BY capture").fetchall()
        assert result == [("old", COMPUTED, None), ("r1", COMPUTED, "r1"), ("r2", COMPUTED, "r2")]

    def test_in_what_nats_says_of_the_end(self):
        from capflow.capture.result import RequestDone
        from capflow_consumers.nats.messages import done_message

        done = RequestDone("e", "r1", "stop", 3, 4, 4, 4, (), tag="mine")
        assert msgspec.json.decode(done_message("p", done, {}, None, "").body)["tag"] == "mine"
        untagged = msgspec.structs.replace(done, tag="")
        assert "tag" not in msgspec.json.decode(done_message("p", untagged, {}, None, "").body)

    def test_in_the_joined_result_of_samples(self):
        each = {f"r#{n}": {"a": CaptureResult("ok", tag="mine")} for n in range(2)}
        assert joined(each)["a"].tag == "mine"


class TestReplay:
    def test_a_data_set_is_asked_for_again_with_its_tags(self, tmp_path):
        from capflow.replay.dataset import entries_of

        consumers = configure_all([f"filesystem:root={tmp_path},capture=requests"], None, load_plugins())[0]
        with MemoryHub(*consumers) as hub:
            run(hub, parse_capture(LAST))
        frames = [message for message in entries_of(capflow.open(tmp_path), ask=True) if hasattr(message, "header")]
        assert {part.capture.tag for frame in frames for part in frame.header.requests} == {"last"}

    def test_frames_of_a_spool_that_an_earlier_version_wrote_are_read(self):
        frame = make_frame([("r1", 4, 0, 4)], captures={"r1": CaptureSpec({"post_block": [0]})})
        header = msgspec.msgpack.decode(frame.encode()[0])
        assert header["requests"][0]["capture"] == {"hooks": {"post_block": [0]}}
