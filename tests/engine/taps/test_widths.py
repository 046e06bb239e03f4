"""Width classes: rows of every shape, from the taps of each rank to the frames of each hub."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.frame import Frame, Rank
from capflow.capture.model import ModelInfo, grouped
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow.protocol.row_format import RowFormat
from capflow.steering.compiler import program_of
from capflow.steering.request import Steering
from capflow_engine.compat import engine as compat
from capflow_engine.steering.budget import Size
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.step import Step
from capflow_engine.taps.widths import Width, Widths
from capflow_engine.worker.rows import RowMemory
from capflow_engine.worker.sender import Computed, Sender, Way

HIDDEN, TOKENS = 6, 24
SHAPES = {
    Site(0, "heads"): (4, 3),
    Site(0, "k"): (2, 3),
    Site(0, "neurons"): (8,),
    Site(0, "router"): (5,),
    Site(1, "heads"): (4, 2),
    Site(1, "k"): (1, 3),
}
SITES = tuple(sorted({Site(0, "post_block"), Site(1, "post_block"), Site(1, "mlp_out"), *SHAPES}))
INFO = ModelInfo("m", 2, HIDDEN, "float32", SITES, shapes=grouped(SHAPES))


def over(ranks):
    """Return the model with rows that so many ranks divide."""
    return msgspec.structs.replace(INFO, ranks=ranks)


def value(site, token):
    """Return the whole row of a site for a token row of the step."""
    return 1000.0 * SITES.index(site) + 20.0 * token + np.arange(INFO.width_of(site), dtype=np.float32)


def part_of(site, row, rank, ranks):
    """Return the numbers of a row that one of the ranks has, as vLLM divides heads and columns."""
    shape = INFO.own_shape(site)
    if not shape or site.hook == "router":
        return row
    each = row.reshape(shape[0], -1)
    if shape[0] < ranks:
        return each[rank * shape[0] // ranks]
    return each.reshape(ranks, -1)[rank]


class Kept:
    def __init__(self):
        self.frames = []

    def send(self, header, payload):
        frame = Frame.decode(*Frame.seal(header, bytes(payload)).encode())
        RowFormat(INFO).check(frame.header)
        self.frames.append(frame)

    def close(self, drain_s=0):
        pass


class Worker:
    """What a rank's worker does with a step, without vLLM."""

    def __init__(self, rank, ranks, hubs):
        self.rank, self.ranks = rank, ranks
        self.widths = Widths.of(over(ranks), SITES)
        self.planner = Planner(len(SITES), hubs, self.widths.of_site)
        self.memory = RowMemory(self.widths, torch.float32, ranks)

    def tracked(self, name, hub, ship, view):
        """Return a request; `ship` and `view` are the indices of sites that are wanted."""
        programs = [
            self.planner.program(dict.fromkeys(sites, Positions.ALL), hub)
            for sites in (ship, [site for site in view if not self.widths.of_site[site]])
        ]
        return Tracked(name, name, 99, *programs, hub=hub)

    def steer(self, program):
        """Return the whole rows of a step's tokens at each site after this program, as this rank has them."""
        begins = [self.widths.classes[number].begin(self.rank) for number in self.widths.of_site]
        index = {site: number for number, site in enumerate(SITES)}
        bank = Bank(Size(64, 256, 64), index, INFO.steered_width, torch.device("cpu"), begins)
        request = self.tracked("r", 0, [], [])
        request.steered = [SlotRange(0, 2, bank.acquire(program, 2))]
        step = Step(self.planner.plan([Scheduled(request, 1, 0, 4)]), None, bank)
        steered = {}
        for number, site in enumerate(SITES):
            rows = np.stack([part_of(site, value(site, token), self.rank, self.ranks) for token in range(6)])
            steered[site] = torch.from_numpy(rows.astype(np.float32))
            step.tap(number, steered[site], None)
        return steered

    def run(self, batch, *, room):
        """Run a step; return its plan, the host's memory, and where the rows of other classes begin in it."""
        plan = self.planner.plan(batch)
        does, buffer = plan, None
        divided = [number for number, width in enumerate(self.widths.classes) if width.divided]
        if self.rank == 0 and room:
            buffer = np.full(self.memory.nbytes(plan, plan.rows), 0xFF, np.uint8)
        else:
            does = plan.unsent(divided if self.rank else ())
        out, *shaped = self.memory.host(buffer, does, does.rows)
        if buffer is None:
            out = torch.empty((does.rows, HIDDEN))
        parts = self.memory.parts(plan, shaped)
        step = Step(does, out, None, shaped=parts)
        for index, site in enumerate(SITES):
            rows = np.stack([part_of(site, value(site, token), self.rank, self.ranks) for token in range(TOKENS)])
            step.tap(index, torch.from_numpy(rows), None)
        for rows, target in zip(self.memory.joined(plan, parts), shaped, strict=False):
            if rows is not None and target is not None:
                target.copy_(rows)
        return plan, buffer, self.memory.shaped_at(plan.rows)


some = st.lists(st.integers(0, len(SITES) - 1), unique=True, max_size=len(SITES))
requests = st.lists(st.tuples(st.integers(0, 1), some, some, st.integers(1, 4)), min_size=1, max_size=5)


@given(requests, st.integers(1, 2), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_hub_gets_the_rows_of_its_requests_whole(asked, hubs, ranks, room):

    sent, whole = [], []
    with pytest.MonkeyPatch.context() as patched:
        for rank in reversed(range(ranks)):
            worker, calls, batch, row = Worker(rank, ranks, hubs), [], [], 0
            for number, (hub, ship, view, length) in enumerate(asked):
                batch.append(Scheduled(worker.tracked(f"r{number}", hub % hubs, ship, view), row, 0, length))
                row += length

            def to_first(part, calls=calls, rank=rank):
                calls.append(part.clone())
                if rank:
                    return None
                others = [other[len(calls) - 1] for other in reversed(sent)]
                return torch.cat([part, *others])

            patched.setattr(compat, "to_first_rank", to_first)
            whole = worker.run(batch, room=room)
            sent.append(calls)
    assert len({len(calls) for calls in sent}) == 1, "each rank calls the collective as often"
    plan, buffer, shaped_at = whole
    if not room:
        return
    links = [Kept() for _ in range(hubs)]
    ways = [Way(link, "b") for link in links]
    sender = Sender(
        ways, engine="e", rank=Rank(0, 0, 0), info=INFO, sites=SITES, text_of=None, widths=worker.widths.classes
    )
    sender.start()
    ids = np.arange(TOKENS)
    sender.put(Computed(1, 7, plan, buffer if plan.ships else None, ids, lambda: None, shaped_at=shaped_at))
    sender.close(30)
    got = {}
    for hub, link in enumerate(links):
        for frame in link.frames:
            for chunk in frame.chunks():
                for place, site in enumerate(chunk.sites):
                    assert chunk.shape == INFO.own_shape(site)
                    for offset in range(chunk.rows.shape[1]):
                        key = hub, chunk.request.id, site, chunk.token_ids[offset]
                        assert key not in got
                        got[key] = chunk.rows[place, offset].tolist()
    expected, row = {}, 0
    for number, (hub, ship, _, length) in enumerate(asked):
        for index in ship:
            for token in range(row, row + length):
                expected[hub % hubs, f"r{number}", SITES[index], token] = value(SITES[index], token).tolist()
        row += length
    assert got == expected


def _vector(site, seed):
    return np.random.default_rng(seed).normal(size=INFO.width_of(site)).astype(np.float32)


STEERED = [
    {"steering_vectors": {site.hook: {site.layer: {"vector": _vector(site, n), "scale": 0.5}}}}
    for n, site in enumerate(SITES)
] + [
    {"steering_patches": {site.hook: {site.layer: {"positions": [0, 3], "vector": _vector(site, 9), "amount": 0.5}}}}
    for site in SITES
] + [
    {
        "steering_vectors": {"heads": {0: _vector(Site(0, "heads"), 3)}, "k": {1: [1.0, 2.0, 3.0]}},
        "prefill_steering_clamps": {
            "heads": {0: {"index": [0, 3], "value": [1, 2, 3]}, 1: {"vector": [0, 0, 0, 0, 1, 1, 0, 0], "value": 4}},
            "neurons": {0: [{"index": [7, 2], "max": 1.0}, {"index": 3, "value": 0, "strength": 0.5}]},
            "k": {0: {"vector": [0, 0, 0, 1, -1, 1], "min": 5}},
        },
        "steering_patches": {"k": {0: {"positions": [2], "index": 1, "vector": [7, 8, 9]}}},
    }
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_steers_its_part_of_a_row(ranks):
    for fields in STEERED:
        steering = Steering.parse(fields)
        steering.check(over(ranks))
        program = program_of(INFO, [steering])
        program.check(over(ranks))
        whole = Worker(0, 1, 1).steer(program)
        several = [Worker(rank, ranks, 1).steer(program) for rank in range(ranks)]
        changed = {site for site in SITES if not np.allclose(whole[site], [value(site, n) for n in range(6)])}
        assert changed == program.sites
        for site in SITES:
            for rank, steered in enumerate(several):
                expected = np.stack([part_of(site, row, rank, ranks) for row in whole[site].numpy()])
                assert np.array_equal(steered[site], expected), f"{site} on rank {rank} of {ranks}: {fields}"


def test_the_classes_of_a_worker():
    whole = Widths.of(INFO, SITES)
    assert whole.classes[0] == Width((), 6, 6)
    assert not any(each.divided for each in whole.classes)
    assert {(each.shape, each.part) for each in whole.classes[1:]} == {
        ((4, 3), 12), ((2, 3), 6), ((8,), 8), ((5,), 5), ((4, 2), 8), ((1, 3), 3),
    }  # fmt: skip
    divided = Widths.of(over(4), SITES)
    assert {(each.shape, each.part, each.copies) for each in divided.classes if each.divided} == {
        ((4, 3), 3, 1), ((2, 3), 3, 2), ((8,), 2, 1), ((4, 2), 2, 1), ((1, 3), 3, 4),
    }  # fmt: skip
    with pytest.raises(
        CapflowError, match=r"^site heads:0: got 4 over 3 tensor-parallel ranks, expected as many on each"
    ):
        Widths.of(over(3), (Site(0, "heads"),))


@pytest.mark.parametrize("requests", [1, 40], ids=["runs", "indexed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_in_another_dtype_come_in_the_models(requests, dtype):
    planner = Planner(1)
    tracked = [
        Tracked(str(n), str(n), 4, planner.program({0: Positions.ALL}), planner.nothing) for n in range(requests)
    ]
    plan = planner.plan([Scheduled(each, 2 * n, 0, 1) for n, each in enumerate(tracked)])
    logits, rows = torch.randn(2 * requests, 5), torch.empty(requests, 5, dtype=dtype)
    Step(plan, rows, None).tap(0, logits, None)
    assert torch.equal(rows, logits[::2].to(dtype))
