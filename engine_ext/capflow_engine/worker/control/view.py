"""A step as one controller sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.plugins.consumer import ScoreBatch, StepRows, StepScores
from capflow_engine.taps.plan import Plan, PlannedBlock
from capflow_engine.taps.requests import VIEW, Tracked
from capflow_engine.worker.control.scoring import ScoredRows, Scores

_NO_SCORES = np.empty(0, np.float32)


class Shown(NamedTuple):
    """What a step has for the controllers of one hub.

    rows: `[plan.rows, hidden]` in the model's dtype; None if no controller reads rows.
    parts, scores: the scores of all probes of the hub's controllers.
    ends: by vLLM's id, the end of a request's valid positions, for requests of which the step has more.
    """

    step: int
    plan: Plan
    rows: npt.NDArray[Any] | None
    ends: Mapping[str, int]
    parts: Sequence[ScoredRows] = ()
    scores: Scores = _NO_SCORES


class Seen(NamedTuple):
    """What a controller sees of the steps.

    sites: the tapped sites, in the order of their indices.
    reads: the positions whose rows it reads, by the index of the site; None if the step has no others there.
    probes: for each of its probes, the index of the site, the probe's place among the site's probes, and the positions
        as above.
    sees: returns whether it sees the request of this id; None if it sees all.
    """

    sites: tuple[Site, ...]
    reads: Mapping[int, Positions | None]
    probes: Sequence[tuple[int, int, Positions | None]] = ()
    sees: Callable[[str], bool] | None = None


class View:
    """The rows and the scores of one step that a controller asked for.

    hub: the index of the hub whose requests are shown.
    steered: returns the ids of the requests that the controller steers.
    """

    def __init__(self, shown: Shown, seen: Seen, hub: int, steered: Callable[[], Collection[str]]) -> None:
        self.step = shown.step
        self._shown = shown
        self._seen = seen
        self._hub = hub
        self._steered = steered

    def rows(self) -> Iterator[StepRows]:
        """Yield the rows of each request at each site, as float32."""
        rows, sites = self._shown.rows, self._seen.sites
        if rows is None:
            return
        for block in self._shown.plan.blocks:
            if block.channel != VIEW or block.hub != self._hub:
                continue
            for order, index in enumerate(block.sites):
                if index not in self._seen.reads:
                    continue
                base = block.base + order * block.rows
                for request, start, length, row in self._spans(block, self._seen.reads[index]):
                    values = rows[base + row : base + row + length].astype(np.float32)
                    yield StepRows(request.id, sites[index], start, request.prompt_length, values)

    def scores(self) -> Iterator[StepScores]:
        """Yield the scores of each request by each probe."""
        for batch in self.score_batches():
            bounds = batch.offsets.tolist()
            for n, request in enumerate(batch.requests):
                scores = batch.scores[bounds[n] : bounds[n + 1]]
                yield StepScores(request, batch.site, batch.probe, batch.starts[n], batch.prompt_lengths[n], scores)

    def score_batches(self) -> Iterator[ScoreBatch]:
        """Yield the same scores in larger arrays."""
        for number, (site, order, positions) in enumerate(self._seen.probes):
            for part in self._shown.parts:
                if part.site == site:
                    first = part.first + order * part.rows
                    batch = self._batch(number, part, self._shown.scores[first : first + part.rows], positions)
                    if batch.requests:
                        yield batch

    def steered(self) -> Collection[str]:
        """Return the ids of the requests that a `Steer` of this controller steers now."""
        return self._steered()

    def _batch(self, number: int, part: ScoredRows, scores: Scores, positions: Positions | None) -> ScoreBatch:
        block, site = self._shown.plan.blocks[part.block], self._seen.sites[part.site]
        if positions is None and self._seen.sees is None and not self._shown.ends:
            batch = self._shown.plan.batch
            numbers, starts, _, rows = zip(*block.spans, strict=True)
            requests = [batch[n].request for n in numbers]
            ids, prompts = [request.id for request in requests], [request.prompt_length for request in requests]
            return ScoreBatch(number, site, ids, starts, prompts, np.array((*rows, part.rows)), scores)
        spans = list(self._spans(block, positions))
        pieces = [scores[row : row + length] for _, _, length, row in spans]
        offsets = np.cumsum([0, *(length for _, _, length, _ in spans)])
        return ScoreBatch(
            number,
            site,
            [request.id for request, _, _, _ in spans],
            [start for _, start, _, _ in spans],
            [request.prompt_length for request, _, _, _ in spans],
            offsets,
            np.concatenate(pieces) if pieces else _NO_SCORES,
        )

    def _spans(self, block: PlannedBlock, positions: Positions | None) -> Iterator[tuple[Tracked, int, int, int]]:
        """Yield the visible parts of a block: the request, its first position, the length, and the first row."""
        batch, ends, sees = self._shown.plan.batch, self._shown.ends, self._seen.sees
        for number, start, length, row in block.spans:
            request = batch[number].request
            if sees is not None and not sees(request.id):
                continue
            end = min(start + length, ends.get(request.key, start + length))
            if positions is None:
                if end > start:
                    yield request, start, end - start, row
                continue
            for begin, stop in positions.at(request.prompt_length).runs(start, end) if end > start else ():
                yield request, begin, stop - begin, row + begin - start
