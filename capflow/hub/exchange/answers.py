"""The answers: clients ask for the results of requests, and are answered when the results are final."""

from __future__ import annotations

from collections.abc import Iterator

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.capture.result import CaptureResult
from capflow.hub.effects import CountResult, Effects
from capflow.hub.exchange.waiters import Waiters
from capflow.hub.peers.roster import Peer, Roster
from capflow.hub.requests.index import RequestIndex
from capflow.hub.requests.request import Request, RequestName
from capflow.protocol.message import Await, Results

LEFT = CaptureResult("pending", "the hub stopped; the next hub gives the result of the request")
"""The result of a consumer that goes on with a request under the next hub."""


class Answers:
    """The results of requests, and the clients that wait for them.

    state: the memory that the names of awaited requests share.
    """

    def __init__(self, index: RequestIndex, roster: Roster, state: Shares, effects: Effects) -> None:
        self._index = index
        self._roster = roster
        self._effects = effects
        self._waiters = Waiters(state)

    def __contains__(self, peer: bytes) -> bool:
        """Return whether a client waits for a result."""
        return peer in self._waiters

    def settle(self, named: Request | RequestName, consumer: int, result: CaptureResult) -> None:
        """Take a consumer's result of a request. Of several results of one request, the first counts.

        After `LEFT`, which says that the result comes later, the next one is counted and not stored.

        consumer: the number of its lane.
        """
        request = self._index.over(named)
        before = None if request is None else request.results[consumer]
        if before not in (None, LEFT):
            return
        self._effects.add(CountResult(consumer, result.status))
        if request is not None and before is None:
            request.settle(consumer, result)
            self.answer(request)

    def ask(self, peer: bytes, client: Peer, question: Await) -> Iterator[None]:
        """Answer a client with the results that are final, and have it wait for the others. Yields between slices.

        A client that does not wait gets all results now, final or not.
        """
        for number, request in enumerate(question.requests, 1):
            if not number % limits.SLICE_REQUESTS:
                yield
                if self._roster.peers.get(peer) is not client:
                    return  # the client left meanwhile, or said Hello again
            results, final = self._results(request, question.engine)
            if final or not question.wait:
                self._effects.say(peer, results)
            else:
                self._waiters.add((question.engine, request), peer, client.owner)

    def answer(self, request: Request) -> None:
        """Answer the clients that wait for a request, if its results are final."""
        newest = self._index.newest(request.key)
        # Whether the request was forgotten, or belongs to an earlier start of its engine.
        is_gone = newest is None or newest.engine != request.engine
        for engine in {"", request.key[0], request.engine}:
            if not self._waiters.waits((engine, request.id)):
                continue
            if is_gone and (engine == request.engine or not self._index.named(request.id, engine)):
                by_consumer, final = self._index.results_of(request)
                results = Results(request.id, by_consumer, engine, (request.key[0],))
            else:
                results, final = self._results(request.id, engine)
            for peer in self._waiters.pop((engine, request.id)) if final else ():
                self._effects.say(peer, results)

    def gone(self, peer: bytes) -> None:
        """Forget a client."""
        self._waiters.gone(peer)

    def _results(self, request: str, engine: str) -> tuple[Results, bool]:
        """Return the results of a request, and whether they are final.

        If several engines have a request of this id, the answer names them, has no results, and is final.
        """
        requests = self._index.named(request, engine)
        names = tuple(each.key[0] for each in requests[: limits.ENGINES_TOLD_MAX])
        if len(requests) == 1:
            results, final = self._index.results_of(requests[0])
            return Results(request, results, engine, names), final
        return Results(request, {}, engine, names), bool(requests)
