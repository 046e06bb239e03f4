"""Several specs together, from plan to consumer: captured once, counted exactly, split into each spec's rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.buffers.shares import Shares
from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.capture.spec import join
from capflow.hub.lanes.tally import Tallies, Tally
from capflow.hub.requests.index import RequestIndex, Wish
from capflow.hub.requests.request import KnownEngine
from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.sender import Computed, Sender, Way
from tests.kit.frames import BOOT, FIRST
from tests.kit.selectors_model import meant, specs

LAYERS = 4
SITES = tuple(Site(layer, hook) for layer in range(LAYERS) for hook in ("mlp_in", "post_block"))
INDEX = {site: number for number, site in enumerate(SITES)}
INFO = ModelInfo("m", LAYERS, 2, "float32", SITES)

layers = st.one_of(
    st.just("all"),
    st.sampled_from(["0-3:2", "1-2", "3-"]),
    st.lists(st.integers(-LAYERS, LAYERS - 1), min_size=1, max_size=3),
)
any_spec = specs({"post_block": layers, "mlp_in": layers})
wishes = st.lists(st.tuples(st.one_of(st.none(), any_spec), st.booleans()), min_size=1, max_size=3)
requests = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt length
        st.one_of(st.none(), any_spec),  # its own spec
        st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5)), min_size=1, max_size=6),  # steps; 0: preempted after
    ),
    min_size=1,
    max_size=3,
)


class Link:
    """Puts every frame through its bytes, as a transport does."""

    def __init__(self):
        self.frames = []

    def send(self, header, payload):
        self.frames.append(Frame.decode(*Frame.seal(header, bytes(payload)).encode()))

    def close(self, drain_s=0):
        pass


def resolve(spec):
    return spec.resolve(SITES, num_layers=LAYERS)


def run(wanted, parts, hubs=1, hub_of=(0,) * 3):
    """Run the requests' steps through planner and sender, batched together; return each hub's frames, and how far each
    came.

    hub_of: the hub of request number n.
    """
    planner, links = Planner(len(SITES), hubs), [Link() for _ in range(hubs)]
    ways = [Way(link, f"{BOOT}-{number}") for number, link in enumerate(links)]
    sender = Sender(ways, engine="e", rank=FIRST, info=INFO, sites=SITES, text_of=None)
    sender.start()
    tracked = []
    for number, (prompt, own, _) in enumerate(parts):
        union = join(resolve(spec) for spec in (own, *wanted) if spec is not None)
        hub = hub_of[number]
        program = planner.program({INDEX[site]: want.positions for site, want in union.items()}, hub)
        tracked.append(Tracked(f"k{number}", f"r{number}", prompt, program, planner.nothing, capture=own, hub=hub))
    at, reached = [0] * len(parts), [0] * len(parts)
    steps = max(len(chunks) for _, _, chunks in parts)
    for step in range(steps):
        batch, ids, row = [], [], 0
        for number, (_, _, chunks) in enumerate(parts):
            if step < len(chunks):
                length, fate = chunks[step]
                batch.append(Scheduled(tracked[number], row, at[number], length))
                ids += [1000 * number + at[number] + i for i in range(length)]
                row += length
                reached[number] = max(reached[number], at[number] + length)
                at[number] = 0 if fate == 0 else at[number] + length
        plan = planner.plan(batch)
        rows = np.full((plan.rows, 2), np.nan, np.float32)
        for block in plan.blocks:
            for place, site in enumerate(block.sites):
                for source, target, length in block.runs:
                    first = block.base + place * block.rows + target
                    rows[first : first + length, 0] = ids[source : source + length]
                    rows[first : first + length, 1] = site
        last = step == steps - 1
        ended = [(request, Ended("stop", reached[n])) for n, request in enumerate(tracked)] if last else []
        payload = rows.view(np.uint8).reshape(-1) if plan.rows else None
        sender.put(Computed(step, 0, plan, payload, np.array(ids), lambda: None, ended=ended))
    sender.close(30)
    return [link.frames for link in links], reached


def deliver(frames, asked):
    """Give frames to a hub's index; return each consumer's rows and counts, the ended requests and the sum of rows."""
    index = RequestIndex([Wish(f"c{n}", spec, reads) for n, (spec, reads) in enumerate(asked)], Shares("state", 2**30))
    tallies = [Tallies(consumer) for consumer in range(len(asked))]
    engine = KnownEngine("e", INFO)
    got, counted, over, sent = [[] for _ in asked], [0] * len(asked), [], 0
    for frame in frames:
        sent += frame.nbytes // 8
        arrival = index.take(frame, engine)
        for consumer, mine in enumerate(tallies):
            if (delivery := mine.of(arrival)) is not None:
                counted[consumer] += delivery.rows
                for chunk in delivery.frame.chunks():
                    got[consumer] += check_rows(chunk)
        over += index.finish(frame.header, engine)
    return got, counted, over, sent


def check_rows(chunk):
    """Hold every row of a chunk to be the one it is called; return them as (request, site, position)."""
    for place, site in enumerate(chunk.sites):
        for i, token in enumerate(chunk.token_ids):
            number, position = divmod(token, 1000)
            assert (chunk.request.id, chunk.start + i) == (f"r{number}", position)
            assert chunk.rows[place, i].tolist() == [token, INDEX[site]]
            yield chunk.request.id, site, position


def meant_rows(chosen, parts, reached):
    """The rows that specs mean; chosen: those of request number n."""
    return {
        (f"r{n}", site, position)
        for n, (prompt, _, _) in enumerate(parts)
        for spec in chosen(n)
        for position in meant(spec.positions, prompt, reached[n], spec.max_rows)
        for site in resolve(spec)
    }


@given(wishes, requests)
@settings(max_examples=300, deadline=None)
def test_each_consumer_gets_each_of_its_rows_once_and_no_others(asked, parts):
    (frames,), reached = run([spec for spec, _ in asked], parts)
    got, counted, over, sent = deliver(frames, asked)

    def specs_of(number, consumer):
        spec, reads = asked[consumer]
        return [each for each in (spec, parts[number][1] if reads else None) if each is not None]

    for consumer in range(len(asked)):
        assert len(got[consumer]) == len(set(got[consumer])) == counted[consumer]
        assert set(got[consumer]) == meant_rows(lambda n, c=consumer: specs_of(n, c), parts, reached)
        for where in {row[:2] for row in got[consumer]}:
            positions = [row[2] for row in got[consumer] if row[:2] == where]
            assert positions == sorted(positions), "a site's rows come in the order of their positions"

    def every(number):
        return [spec for spec in (parts[number][1], *(spec for spec, _ in asked)) if spec is not None]

    assert sent == len(meant_rows(every, parts, reached)), "what several want is captured and sent once"
    assert {request.id for request in over} == {f"r{n}" for n in range(len(parts))}
    for request in over:
        number = int(request.id[1:])
        for consumer, share in enumerate(request.shares):
            if share is not None:
                more = [
                    each.max_rows and len(meant(each.positions, parts[number][0], reached[number])) > each.max_rows
                    for each in specs_of(number, consumer)
                ]
                assert Tally(request, consumer).judge(None).budget_reached == any(more)


def told(frames):
    """Return all that frames say of each request: every row by (site, position), bit for bit, and its end."""
    rows, ends = {}, {}
    for frame in frames:
        for chunk in frame.chunks():
            assert chunk.request.id not in ends, "nothing comes after the end"
            for _, site, position in check_rows(chunk):
                mine = rows.setdefault(chunk.request.id, {})
                assert (site, position) not in mine
                at = chunk.rows[chunk.sites.index(site), position - chunk.start]
                mine[site, position] = at.tobytes(), chunk.request.capture, chunk.request.prompt_length
        for finished in frame.header.finished:
            assert finished.id not in ends
            ends[finished.id] = finished
    return rows, ends


@given(wishes, requests, st.lists(st.integers(0, 2), min_size=3, max_size=3))
@settings(max_examples=300, deadline=None)
def test_each_hub_is_told_of_its_requests_what_one_hub_is_told_of_all(asked, parts, hub_of):
    specs = [spec for spec, _ in asked]
    (frames,), _ = run(specs, parts)
    by_hub, _ = run(specs, parts, 3, hub_of)
    rows, ends = told(frames)
    for hub, its in enumerate(by_hub):
        mine = {f"r{number}" for number in range(len(parts)) if hub_of[number] == hub}
        its_rows, its_ends = told(its)
        assert its_rows == {request: result for request, result in rows.items() if request in mine}
        assert its_ends == {request: end for request, end in ends.items() if request in mine}
        assert all(frame.header.boot == f"{BOOT}-{hub}" for frame in its)
        assert all(frame.header.requests or frame.header.finished for frame in its), "a hub hears nothing of others"
        assert sum(frame.nbytes for frame in its) == 8 * sum(map(len, its_rows.values())), "nor has it rows of others"
