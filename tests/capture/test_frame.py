"""The frame: its bytes are pinned, every corruption is refused, and narrowing agrees with a naive loop."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from capflow import limits
from capflow.capture import frame_cost
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import (
    Acted,
    Block,
    Dropped,
    Frame,
    FrameHeader,
    Rank,
    RequestRows,
    Span,
    Weights,
    mask_of,
    runs_of,
)
from capflow.capture.positions import Positions
from capflow.capture.site import HOOKS, Site
from capflow.capture.spec import CaptureSpec, Want
from capflow.errors import RemoteProtocolError
from tests.kit.frames import assert_rows, make_finished, make_frame, row_of
from tests.kit.selectors_model import budgets, forms, meant

GOLDEN_HEADER = (
    "de0011a474797065a56672616d65a776657273696f6e01a6656e67696e65a8656e67696e652d31a4626f6f74a6626f6f"
    "742d31a472616e6b93000000"
)


GOLDEN_WEIGHTS = Weights(2, "step-2")


def golden(
    steered: tuple[int, ...] | None = (3, 4), adapter: str = "lora", weights: Weights | None = GOLDEN_WEIGHTS
) -> Frame:
    end = make_finished("r0", 3, 4, dropped=(Dropped(1, "queue_full"),))
    if weights is not None:
        end = replace(end, adapter=adapter, weights=(Weights(1), replace(weights, start=3)))
    header = FrameHeader(
        engine="e",
        boot="b",
        rank=Rank(1, 2, 0),
        seq=7,
        step=9,
        time_ns=1_700_000_000_000_000_000,
        dtype="float16",
        hidden_size=2,
        requests=(
            RequestRows(
                "r1",
                3,
                2,
                (5, 6),
                ("x", "é"),
                CaptureSpec({"post_block": [1]}, {"last": 2}, 9),
                steered=steered,
                adapter=adapter,
            ),
        ),
        blocks=(Block((Site(1, "post_block"),), 2, (Span(0, 2, 2, 0),)),),
        finished=(end,),
        step_tokens=4,
        step_requests=2,
        weights=weights,
    )
    return Frame.seal(header, np.array([[1, 2], [3, 4]], np.float16).view(np.uint8))


EARLIER_HEADER_HEX = (
    "de0012a474797065a56672616d65a776657273696f6e01a6656e67696e65a165a4626f6f74a162a472616e6b93010200a373"
    "657107a47374657009a774696d655f6e73cf17979cfe362a0000a56474797065a7666c6f61743136ab68696464656e5f7369"
    "7a6502a872657175657374739187a26964a27231ad70726f6d70745f6c656e67746803a5737461727402a9746f6b656e5f69"
    "6473920506a5746578747392a178a2c3a9a76361707475726583a5686f6f6b7381aa706f73745f626c6f636b9101a9706f73"
    "6974696f6e7381a46c61737402a86d61785f726f777309ab696e6361726e6174696f6ea0a6626c6f636b739193919201aa70"
    "6f73745f626c6f636b02919400020200a866696e69736865649189a26964a27230a6737461747573a473746f70ad70726f6d"
    "70745f6c656e67746803af636f6d70757465645f6c656e67746804a4726f777304a764726f707065649182a4726f777301a6"
    "726561736f6eaa71756575655f66756c6ca763617074757265c0a5616374656490ab696e6361726e6174696f6ea0a5616374"
    "656490ab737465705f746f6b656e7304ad737465705f726571756573747302ad7061796c6f61645f627974657308a4787868"
    "33cf41c67facec6b5567"
)
STEERED_HEADER_HEX = (
    "de0012a474797065a56672616d65a776657273696f6e01a6656e67696e65a165a4626f6f74a162a472616e6b93010200a373"
    "657107a47374657009a774696d655f6e73cf17979cfe362a0000a56474797065a7666c6f61743136ab68696464656e5f7369"
    "7a6502a872657175657374739188a26964a27231ad70726f6d70745f6c656e67746803a5737461727402a9746f6b656e5f69"
    "6473920506a5746578747392a178a2c3a9a76361707475726583a5686f6f6b7381aa706f73745f626c6f636b9101a9706f73"
    "6974696f6e7381a46c61737402a86d61785f726f777309ab696e6361726e6174696f6ea0a773746565726564920304a6626c"
    "6f636b739193919201aa706f73745f626c6f636b02919400020200a866696e69736865649189a26964a27230a67374617475"
    "73a473746f70ad70726f6d70745f6c656e67746803af636f6d70757465645f6c656e67746804a4726f777304a764726f7070"
    "65649182a4726f777301a6726561736f6eaa71756575655f66756c6ca763617074757265c0a5616374656490ab696e636172"
    "6e6174696f6ea0a5616374656490ab737465705f746f6b656e7304ad737465705f726571756573747302ad7061796c6f6164"
    "5f627974657308a478786833cf41c67facec6b5567"
)
HEADER_HEX = (
    "de0013a474797065a56672616d65a776657273696f6e01a6656e67696e65a165a4626f6f74a162a472616e6b93010200a373"
    "657107a47374657009a774696d655f6e73cf17979cfe362a0000a56474797065a7666c6f61743136ab68696464656e5f7369"
    "7a6502a872657175657374739189a26964a27231ad70726f6d70745f6c656e67746803a5737461727402a9746f6b656e5f69"
    "6473920506a5746578747392a178a2c3a9a76361707475726583a5686f6f6b7381aa706f73745f626c6f636b9101a9706f73"
    "6974696f6e7381a46c61737402a86d61785f726f777309ab696e6361726e6174696f6ea0a773746565726564920304a76164"
    "6170746572a46c6f7261a6626c6f636b739193919201aa706f73745f626c6f636b02919400020200a866696e697368656491"
    "8ba26964a27230a6737461747573a473746f70ad70726f6d70745f6c656e67746803af636f6d70757465645f6c656e677468"
    "04a4726f777304a764726f707065649182a4726f777301a6726561736f6eaa71756575655f66756c6ca763617074757265c0"
    "a5616374656490ab696e6361726e6174696f6ea0a761646170746572a46c6f7261a7776569676874739281a776657273696f"
    "6e0183a776657273696f6e02a56c6162656ca6737465702d32a5737461727403a5616374656490ab737465705f746f6b656e"
    "7304ad737465705f726571756573747302a77765696768747382a776657273696f6e02a56c6162656ca6737465702d32ad70"
    "61796c6f61645f627974657308a478786833cf41c67facec6b5567"
)
EVENT_HEX = (
    "85a26279af636f6e74726f6c6c65722067617465a46b696e64a57374656572a57369746573919202aa706f73745f626c6f63"
    "6ba47374657005a774696d655f6e7307"
)
WHOLE_EVENT_HEX = (
    "89a26279a9676174652072756465a46b696e64a467617465a57369746573919202aa706f73745f626c6f636ba47374657005"
    "a774696d655f6e7307a8706f736974696f6e29a573636f7265cb3ff8000000000000a97468726573686f6c64cb3ff0000000"
    "000000a56c6162656ca472756465"
)
PAYLOAD_HEX = "003c004000420044"


class TestTheWire:
    def test_header_bytes_are_pinned(self):
        header, payload = golden().encode()
        assert header.hex() == HEADER_HEX
        assert bytes(payload).hex() == PAYLOAD_HEX

    def test_pinned_bytes_decode(self):
        frame = Frame.decode(bytes.fromhex(HEADER_HEX), bytes.fromhex(PAYLOAD_HEX))
        assert frame.header == golden().header
        assert [(c.request.id, c.start, c.rows.shape) for c in frame.chunks()] == [("r1", 2, (1, 2, 2))]

    def test_bytes_of_earlier_versions_decode(self):
        frame = Frame.decode(bytes.fromhex(EARLIER_HEADER_HEX), bytes.fromhex(PAYLOAD_HEX))
        assert frame.header == golden(steered=None, adapter="", weights=None).header
        assert [chunk.steered for chunk in frame.chunks()] == [None]
        frame = Frame.decode(bytes.fromhex(STEERED_HEADER_HEX), bytes.fromhex(PAYLOAD_HEX))
        assert frame.header == golden(adapter="", weights=None).header

    def test_a_chunk_says_which_of_its_positions_were_steered(self):
        frame = make_frame([("a", 3, 0, 6), ("b", 3, 2, 2)], steered={"a": (1, 3, 5, 6)})
        again = Frame.decode(*frame.encode())
        wants = {Site(0, "post_block"): Want(Positions.parse([2, 3, 5]))}
        assert [chunk.steered.tolist() for chunk in again.chunks()] == [[0, 1, 1, 0, 0, 1], [0, 0]]
        narrowed = [(c.start, c.steered.tolist()) for c in again.narrowed(lambda _: wants).chunks()]
        assert narrowed == [(2, [1, 0]), (5, [1]), (2, [0, 0])]

    @given(st.lists(st.booleans(), min_size=1), st.integers(0, 99))
    def test_runs_of_a_mask_give_it_back(self, mask, start):
        runs = runs_of(np.array(mask), start)
        assert mask_of(runs, start, start + len(mask)).tolist() == mask

    def test_the_bytes_of_an_event_are_pinned_and_earlier_ones_decode(self):
        sites = (Site(2, "post_block"),)
        plain = Acted("controller gate", "steer", sites, 5, 7)
        whole = Acted("gate rude", "gate", sites, 5, 7, 41, 1.5, 1.0, "rude")
        for event, golden_hex in ((plain, EVENT_HEX), (whole, WHOLE_EVENT_HEX)):
            assert msgspec.msgpack.encode(event).hex() == golden_hex
            assert msgspec.msgpack.decode(bytes.fromhex(golden_hex), type=Acted) == event
        assert plain.position is None

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_round_trip(self, dtype):
        frame = make_frame(
            [("a", 3, 0, 3), ("b", 5, 2, 4)],
            [(0, "post_block"), (3, "mlp_in")],
            dtype=dtype,
            texts=True,
            captures={"a": CaptureSpec({"post_block": [0]}, "last_prompt")},
            finished=[make_finished(dropped=(Dropped(2, "queue_full"),))],
        )
        again = Frame.decode(*frame.encode())
        assert again.header == frame.header
        chunks = list(again.chunks())
        assert sum(assert_rows(chunk, dtype) for chunk in chunks) == 14
        assert all(chunk.texts == tuple(f" {token}" for token in chunk.token_ids) for chunk in chunks)
        assert all(chunk.rows.dtype == DTYPES[dtype] for chunk in chunks)

    def test_a_frame_without_rows(self):
        frame = Frame.decode(*make_frame([], finished=[make_finished()]).encode())
        assert list(frame.chunks()) == []
        assert (frame.nbytes, frame.header.finished) == (0, (make_finished(),))

    def test_rows_are_views_that_cannot_be_written(self):
        header, payload = make_frame().encode()
        frame = Frame.decode(header, bytes(payload))
        (chunk,) = frame.chunks()
        assert not chunk.rows.flags.writeable
        assert not chunk.rows.flags.owndata


def changed(**fields):
    """Return the parts of a valid frame with fields of its header replaced."""
    frame = make_frame([("r1", 4, 2, 3)], [(0, "post_block"), (1, "post_block")])
    return [msgspec.msgpack.encode(msgspec.structs.replace(frame.header, **fields)), frame.payload]


SITES = (Site(0, "post_block"), Site(1, "post_block"))
REQUEST = make_frame([("r1", 4, 2, 3)]).header.requests[0]
OTHER = msgspec.structs.replace(REQUEST, id="r2")
WHOLE = (Span(0, 2, 3, 0),)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"version": 2}, "version: got 2, expected 1"),
            ({"requests": (msgspec.structs.replace(REQUEST, steered=(2, 6)),)}, "steered positions: got \\(2, 6\\)"),
            ({"requests": (msgspec.structs.replace(REQUEST, steered=(3, 4, 3, 5)),)}, "steered positions: got \\(3, 5"),
            ({"requests": (msgspec.structs.replace(REQUEST, steered=(3,)),)}, "steered positions: got \\(3, -1"),
            ({"dtype": "int8"}, "dtype: got int8"),
            ({"hidden_size": 0}, "hidden_size"),
            ({"hidden_size": -8}, "hidden_size"),
            ({"hidden_size": limits.HIDDEN_SIZE_MAX + 1}, "hidden_size"),
            ({"hidden_size": 4}, "payload"),
            ({"payload_bytes": 1}, "payload"),
            ({"xxh3": 1}, "payload checksum"),
            ({"requests": ()}, "span"),
            ({"requests": (REQUEST,) * (limits.REQUESTS_PER_FRAME_MAX + 1)}, r"header: .* `\$\.requests`"),
            ({"requests": (msgspec.structs.replace(REQUEST, id="x" * 600),)}, r"header: .*\$\.requests\[0\]\.id"),
            ({"requests": (msgspec.structs.replace(REQUEST, token_ids=(5, 2**40, 7)),)}, r"header: .*token_ids"),
            ({"requests": (msgspec.structs.replace(REQUEST, prompt_length=-1),)}, r"header: .*prompt_length"),
            ({"rank": Rank(-1, 0, 0)}, r"header: .*rank"),
            ({"seq": -1}, r"header: .*seq"),
            ({"step_tokens": 2**63}, r"header: .*step_tokens"),
            ({"finished": (make_finished(rows=-4),)}, r"header: .*finished"),
            ({"finished": (make_finished(dropped=((-1, "x"),)),)}, r"header: .*finished"),
            ({"requests": (msgspec.structs.replace(REQUEST, start=-1),)}, r"header: .*start"),
            ({"requests": (msgspec.structs.replace(REQUEST, start=3),)}, "span"),
            ({"requests": (msgspec.structs.replace(REQUEST, token_ids=(1, 2)),)}, "span"),
            ({"requests": (msgspec.structs.replace(REQUEST, texts=("a",)),)}, "texts"),
            ({"blocks": (Block((), 3, ()),)}, "block sites"),
            ({"blocks": (Block((SITES[0], SITES[0]), 3, ()),)}, "block sites"),
            ({"blocks": (Block((Site(0, "elsewhere"), SITES[1]), 3, ()),)}, "site"),
            ({"blocks": (Block((Site(-1, "mlp_in"), SITES[1]), 3, ()),)}, "site"),
            ({"blocks": (Block((Site(limits.LAYERS_MAX, "mlp_in"), SITES[1]), 3, ()),)}, "site"),
            ({"blocks": (Block(SITES, -1, ()),)}, "block rows"),
            ({"blocks": (Block(SITES, limits.ROWS_PER_FRAME_MAX + 1, ()),)}, "block rows"),
            ({"blocks": (Block(SITES, 4, (Span(0, 2, 3, 0),)),)}, "payload"),
            ({"blocks": (Block(SITES, 3, ()),)}, "requests: got 1, 0 of them with spans"),
            ({"blocks": ()}, "requests: got 1, 0 of them with spans"),
            ({"requests": (REQUEST, REQUEST)}, "requests: got an id twice"),
            ({"requests": (REQUEST, OTHER)}, "requests: got 2, 1 of them with spans"),
            ({"blocks": (Block(SITES, 3, (Span(0, 2, 3, 0),) * 2),)}, r"spans: got \(0, 2, 3, 0\) and \(0, 2, 3, 0\)"),
            ({"blocks": (Block(SITES, 3, (Span(0, 3, 2, 0), Span(0, 2, 2, 1))),)}, "spans: got .* each row of a block"),
            ({"blocks": (Block(SITES, 3, (Span(0, 2, 2, 1), Span(0, 4, 2, 0))),)}, "span"),
            (
                {"blocks": (Block(SITES, 3, (Span(0, 2, 2, 0), Span(0, 3, 1, 2))),)},
                "spans: got position 3 of request r1",
            ),
            (
                {"blocks": (Block(SITES[:1], 3, WHOLE), Block(SITES[:1], 3, WHOLE))},
                "spans: got position 2 of request r1 at",
            ),
            (
                {"blocks": (Block(SITES, 3, WHOLE), Block(SITES[1:], 3, WHOLE))},
                "spans: got position 2 of request r1 at",
            ),
            ({"blocks": (Block(SITES, limits.ROWS_PER_FRAME_MAX // 2 + 1, WHOLE),)}, "rows: got .* at most"),
            ({"blocks": (Block(SITES, 3, (Span(1, 2, 3, 0),)),)}, "span"),
            ({"blocks": (Block(SITES, 3, (Span(-1, 2, 3, 0),)),)}, "span"),
            ({"blocks": (Block(SITES, 3, (Span(0, 1, 3, 0),)),)}, "span"),
            ({"blocks": (Block(SITES, 3, (Span(0, 2, 4, 0),)),)}, "span"),
            ({"blocks": (Block(SITES, 3, (Span(0, 2, 0, 0),)),)}, "span"),
            ({"blocks": (Block(SITES, 3, (Span(0, 2, 3, 1),)),)}, "span"),
            ({"blocks": (Block(SITES, 3, (Span(0, 2, 1, -1),)),)}, "span"),
        ],
    )
    def test_headers_that_do_not_hold_together(self, fields, message):
        with pytest.raises(RemoteProtocolError, match=f"frame {message}"):
            Frame.decode(*changed(**fields))

    def test_unchanged_is_not_refused(self):
        Frame.decode(*changed())

    @pytest.mark.parametrize(
        "blocks",
        [
            (Block(SITES, 3, (Span(0, 4, 1, 2), Span(0, 2, 2, 0))),),
            (Block(SITES, 3, (Span(0, 4, 1, 2),)),),
            (Block(SITES[:1], 3, WHOLE), Block(SITES[1:], 3, WHOLE)),
            (Block(SITES[:1], 2, (Span(0, 2, 2, 0),)), Block(SITES, 2, (Span(0, 4, 1, 0),))),
        ],
        ids=["in any order", "rows that are nobody's", "a block for each site", "a site in two blocks"],
    )
    def test_spans_that_tile_are_not_refused(self, blocks):
        payload = bytes(4 * 8 * sum(len(block.sites) * block.rows for block in blocks))
        sealed = Frame.seal(msgspec.structs.replace(make_frame().header, requests=(REQUEST,), blocks=blocks), payload)
        Frame.decode(*sealed.encode())

    def test_a_small_frame_that_would_be_written_thousands_of_times(self):
        frame = make_frame([("r1", 2000, 0, 2000)])
        (block,) = frame.header.blocks
        repeated = msgspec.structs.replace(frame.header, blocks=(block._replace(spans=block.spans * 2000),))
        with pytest.raises(RemoteProtocolError, match="each row of a block in one span"):
            Frame.decode(*Frame(repeated, frame.payload).encode())

    @given(st.data())
    def test_any_flipped_bit_of_the_payload(self, data):
        header, payload = make_frame().encode()
        flipped = bytearray(payload)
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(RemoteProtocolError, match="checksum"):
            Frame.decode(header, flipped)

    @given(st.data())
    def test_or_takes_any_damaged_header_without_failing_otherwise(self, data):
        header, payload = make_frame(texts=True, finished=[make_finished()]).encode()
        damaged = bytearray(header)
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        try:
            frame = Frame.decode(bytes(damaged), payload)
        except RemoteProtocolError:
            return
        for chunk in frame.chunks():
            assert chunk.rows.shape[1] == len(chunk.token_ids)

    def test_a_header_that_is_too_large(self):
        with pytest.raises(RemoteProtocolError, match="frame header"):
            Frame.decode(bytes(limits.HEADER_BYTES_MAX + 1), b"")


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=4),
    sites=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(HOOKS[:3])), min_size=1, max_size=5, unique=True),
    data=st.data(),
)
def test_narrowing_yields_what_a_naive_loop_does(requests, sites, data):
    asked = [(f"r{n}", prompt, start, length) for n, (prompt, start, length) in enumerate(requests)]
    chosen = {
        request: {Site(*site): (data.draw(forms), data.draw(budgets)) for site in sites if data.draw(st.booleans())}
        for request, *_ in asked
    }
    wanted = {
        request: {site: Want(Positions.parse(form, max_rows=rows)) for site, (form, rows) in sets.items()}
        for request, sets in chosen.items()
    }
    expected = {
        (request, site, position)
        for request, prompt, start, length in asked
        for site, (form, rows) in chosen[request].items()
        for position in meant(form, prompt, start + length, rows)
        if position >= start
    }
    frame = Frame.decode(*make_frame(asked, sites).encode()).narrowed(lambda request: wanted[request.id])
    got = []
    for chunk in frame.chunks():
        assert_rows(chunk)
        got += [
            (chunk.request.id, site, chunk.start + offset)
            for site in chunk.sites
            for offset in range(chunk.rows.shape[1])
        ]
    assert len(got) == len(set(got))
    assert set(got) == expected


def test_a_header_with_more_spans_than_the_payload_has_rows_is_not_read(monkeypatch):
    frame = make_frame([("r", 4, 0, 4)], [(0, "post_block"), (1, "post_block")])
    monkeypatch.setattr(frame_cost, "_SMALL_BYTES", 0)
    Frame.decode(*frame.encode())
    (block,) = frame.header.blocks
    header = msgspec.structs.replace(frame.header, blocks=(block._replace(spans=block.spans * 10),), dtype="float16")
    rows = frame.nbytes // (2 * header.hidden_size)
    with pytest.raises(RemoteProtocolError, match=f"frame rows of spans: got 20, expected at most {rows}"):
        Frame.decode(msgspec.msgpack.encode(header), frame.payload)


def test_rows_are_counted_by_request_whether_the_frame_was_checked_or_not():
    frame = make_frame([("a", 4, 0, 3), ("b", 4, 0, 1)], [(0, "post_block"), (1, "post_block")])
    (block,) = frame.header.blocks
    more = Block((Site(2, "post_block"),), 2, (Span(1, 0, 1, 1), Span(0, 1, 1, 0)))
    header = msgspec.structs.replace(frame.header, blocks=(block, more))
    payload = bytes(frame.payload) + bytes(2 * header.hidden_size * DTYPES[header.dtype].itemsize)
    made = Frame.seal(header, payload)
    read = Frame.decode(*(bytes(part) for part in made.encode()))
    assert list(made.counts) == list(read.counts) == [7, 3]


def test_the_builder_gives_each_place_a_row_of_its_own():
    site = Site(0, "post_block")
    rows = {row_of("r1", site, position).tobytes() for position in range(50)}
    assert len(rows) == 50


@pytest.mark.parametrize("part", ["spans", "tokens", "texts"])
def test_what_a_header_would_cost_is_counted_before_it_is_read(part):
    frame = make_frame()
    header = frame.header
    count = limits.SPANS_PER_FRAME_MAX + 1 if part == "spans" else limits.TOKENS_PER_FRAME_MAX + 1
    if part == "spans":
        half = tuple(header.blocks[0].spans * (count // 2 + 1))
        header = msgspec.structs.replace(
            header, blocks=tuple(b._replace(spans=half) for b in (*header.blocks, *header.blocks))
        )
    else:
        (request,) = header.requests
        field = "token_ids" if part == "tokens" else "texts"
        more = msgspec.structs.replace(request, **{field: ((1,) if part == "tokens" else ("",)) * count})
        header = msgspec.structs.replace(header, requests=(more,))
    encoded = msgspec.msgpack.encode(header)
    assert len(encoded) <= limits.FRAME_HEADER_BYTES_MAX
    with pytest.raises(RemoteProtocolError, match=f"frame {part}: got .* expected at most"):
        Frame.decode(encoded, frame.payload)


SHAPED = make_frame(sites=((0, "heads"), (1, "heads")), shape=(3, 4))


def test_rows_of_another_shape_come_back_as_they_are():
    frame = Frame.decode(*SHAPED.encode())
    (chunk,) = frame.chunks()
    assert chunk.shape == (3, 4)
    assert chunk.rows.shape == (2, 4, 12)
    assert np.array_equal(chunk.rows[1, 2], row_of("r1", (1, "heads"), 2, 12))
    assert frame.header.hidden_size == 8
    assert frame.bytes_of(3) == 3 * 12 * 4


def test_a_frame_of_the_streams_rows_alone_names_no_shape():
    assert b"shapes" not in make_frame().encode()[0]
    assert Frame.decode(*make_frame().encode()).header.block_shapes == ((),)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ((), "frame shapes: got 0, expected 1, one for each block"),
        (((3, 4), ()), "frame shapes: got 2, expected 1"),
        (((3, 5),), "frame payload: got 384 bytes, expected 480 as the blocks say"),
        (((),), "frame payload: got 384 bytes, expected 256 as the blocks say"),
        (((60_000, 2),), "frame shape of a row: got 120000 numbers, expected at most 65536"),
        (((3, 2, 2),), "frame header"),
        (((0,),), "frame header"),
        (((-3, -4),), "frame header"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, words):
    header = msgspec.structs.replace(SHAPED.header, shapes=shapes)
    with pytest.raises(RemoteProtocolError, match=f"^{words}"):
        Frame.decode(msgspec.msgpack.encode(header), SHAPED.payload)
