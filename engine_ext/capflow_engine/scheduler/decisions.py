"""Decisions of ordered controllers: they come with a step's output and become orders of the next step.

Invariants:

* A decision counts only if the request has the token of the row on which it was decided. Rows of rejected drafts and of
  dropped steps decide nothing.
* No token behind the one that the firing row computed is given to the front end.
* Cache blocks are forked when an action is scheduled, at a position that is not behind the first one that it changes.
  So a request for which nothing was decided shares its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from capflow.steering.action import Abort
from capflow_engine.compat import engine as compat
from capflow_engine.compat import step as compat_step
from capflow_engine.scheduler.orders import Decided, Divergence, Marked, News, StepAnswer


class Decisions:
    """The decisions of ordered controllers on running requests. Keys are vLLM's ids.

    fork: gives a request's cache blocks from a position on a key of their own.
    any: whether there may be anything for `apply` and `take_diverged`.
    aborts: the first decision to end each running request.
    ready, marked: what `take` takes.
    """

    def __init__(self, fork: Callable[[Any, int], None]) -> None:
        self._fork = fork
        self.any = False
        # Of the output that is being processed.
        self._taken: list[Decided] = []
        # Until the request ends.
        self.aborts: dict[str, Decided] = {}
        # For the next step's orders.
        self.ready: list[Decided] = []
        # The requests that a decision ended with status `stop` in the output that is being processed.
        self._stopped: set[str] = set()
        self.marked: list[Marked] = []
        self._diverged: Divergence | None = None

    def read(self, model_runner_output: Any, requests: Mapping[str, Any], *, frozen: bool = False) -> None:
        """Take the decisions on a step's output, which the scheduler processes next.

        requests: of the scheduler.
        frozen: whether nothing may steer. Aborts and events alone still count: they change no position.
        """
        data = compat_step.decisions_of(model_runner_output)
        if not data:
            return
        self.any = True
        answer = StepAnswer.decode(data)
        decided = [_placed(requests.get(each.key), each) for each in answer.decided]
        self._taken = [each for each in decided if not _dropped(requests.get(each.key), each)]
        self.marked += answer.marked
        self._diverged = answer.diverged
        if frozen:
            self._taken = [each for each in self._taken if each.action is None or isinstance(each.action, Abort)]
        for each in self._taken:
            if isinstance(each.action, Abort):
                first = self.aborts.setdefault(each.key, each)
                if _fired_at(each) < _fired_at(first):
                    self.aborts[each.key] = each

    def kept(self, request: Any, tokens: list[int]) -> list[int]:
        """Return a step's tokens of a request without those behind the token that a firing row computed."""
        abort = self.aborts.get(request.request_id)
        if abort is None:
            return tokens
        # The first new token has position `num_tokens`.
        return tokens[: max(_fired_at(abort) + 2 - request.num_tokens, 0)]

    def stop(self, request: Any, stopped: bool) -> bool:
        """End a request that a controller aborts; return whether it stopped, which it may have done by itself."""
        abort = self.aborts.get(request.request_id)
        if abort is None:
            return stopped
        if stopped:  # its last token is the firing row's own
            del self.aborts[request.request_id]
            return True
        assert isinstance(abort.action, Abort)
        compat_step.end_by_decision(request, abort.action.as_, abort.action.reason)
        if abort.action.as_ == "stop":
            self._stopped.add(request.request_id)
        return True

    def apply(self, scheduler: Any, outputs: Mapping[int, Any]) -> list[Any]:
        """Prepare the actions of the processed output for the next step; return the requests that were aborted now.

        These are requests without a token in this step, such as those with a part of the prompt to come.

        outputs: for the front ends.
        """
        taken, self._taken = self._taken, []
        if self._stopped:
            compat.end_after_tokens(outputs, self._stopped)
            self._stopped.clear()
        ended = []
        for each in taken:
            request = scheduler.requests.get(each.key)
            if request is None or request.is_finished():
                continue
            if each.row >= request.num_tokens:
                continue
            if isinstance(each.action, Abort):
                if _fired_at(each) + 1 == request.num_tokens:
                    continue  # the firing row's token was dropped with its step; the request ends with it later
                if compat.abort(scheduler, each.key, each.action.as_, each.action.reason):
                    ended.append(request)
                continue
            self.ready.append(each)
            if each.action is not None:
                # Drafts under way may not be accepted, so no later position is certain.
                self._fork(request, max(request.num_tokens - 1, request.num_prompt_tokens, each.row + 1))
        self.aborts = {key: abort for key, abort in self.aborts.items() if key in scheduler.requests}
        self.any = bool(self.aborts)
        return ended

    def take(self, news: News) -> None:
        """Put the decisions into a step's orders, and what controllers of one pipeline stage steered."""
        news.decided, self.ready = self.ready, []
        news.marked, self.marked = self.marked, []

    def take_diverged(self) -> Divergence | None:
        """Return what the processed output says of ranks that steer differently."""
        diverged, self._diverged = self._diverged, None
        return diverged

    def ends(self, decided: Decided) -> None:
        """Note by what a request ends that is aborted now."""
        self.aborts.setdefault(decided.key, decided)
        self.any = True

    def end(self, key: str) -> Decided | None:
        """Forget a request that ended; return the decision that ended it, with the firing position as its row."""
        self.ready = [each for each in self.ready if each.key != key]
        abort = self.aborts.pop(key, None)
        return None if abort is None else abort._replace(action=None, row=_fired_at(abort))


def _placed(request: Any, decided: Decided) -> Decided:
    """Return a decision; an end of a request that was not in the step is at its last computed row."""
    if request is None or decided.row >= 0 or not isinstance(decided.action, Abort):
        return decided
    return decided._replace(row=request.num_tokens - 2, position=None)


def _dropped(request: Any, decided: Decided) -> bool:
    """Return whether the step of a decision is dropped and the request has no token for its row."""
    if request is None or not compat_step.drops_steps_under_way(request):
        return False
    return bool(_fired_at(decided) >= request.num_tokens)


def _fired_at(abort: Decided) -> int:
    return abort.row if abort.position is None else min(abort.position, abort.row)
