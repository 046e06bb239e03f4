"""Results later: a request's capture results by its id, while it runs and afterwards.

Each hub keeps the results of its latest requests: `capflow.limits.RESULTS_KEPT_MAX`.
Invariant: a request that this server runs is never unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.result import CaptureResult, joined
from capflow.errors import CapflowError, UsageError, explain
from capflow.text.engine_name import name_of
from capflow_engine.request.options import RequestOptions, check_id, check_names
from capflow_engine.serve.ask import SAMPLES_MAX
from capflow_engine.serve.front import Front

PARAMETERS = ("n", "prompts", "wait")
"""The names of the query's parameters."""


class UnknownCaptureError(CapflowError):
    """No hub knows a request of this id."""


class Question(msgspec.Struct, frozen=True):
    """Which results are asked for.

    id: the request's `capture_id`, or its response's id.
    samples, prompts: how many the request had; their product is the number of its choices.
    wait_s: how long to wait until every consumer is done.
    """

    id: str
    samples: int = 1
    prompts: int = 1
    wait_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the request's choices, by their index."""
        prompts = [self.id] if self.prompts == 1 else [f"{self.id}#{number}" for number in range(self.prompts)]
        return tuple(name for prompt in prompts for name in RequestOptions(id=prompt, samples=self.samples).names)

    @classmethod
    def parse(cls, id: str, parameters: Mapping[str, str]) -> Question:
        """Return the question of a path and a query. Raises UsageError that begins with the parameter's name."""
        for name in parameters:
            if name not in PARAMETERS:
                raise UsageError(explain(f"{name}: unknown", expected=f"one of {', '.join(PARAMETERS)}"))
        wait = parameters.get("wait", "0")
        try:
            wait_s = float(wait)
        except ValueError:
            wait_s = math.nan
        return cls.make(
            id, samples=_count(parameters, "n"), prompts=_count(parameters, "prompts"), wait_s=wait_s, wait=wait
        )

    @classmethod
    def make(cls, id: str, *, samples: int = 1, prompts: int = 1, wait_s: float = 0.0, wait: Any = None) -> Question:
        """Return the question. Raises UsageError for a value out of bounds.

        wait: `wait_s` as the client wrote it.
        """
        check_id(id)
        if samples < 1 or prompts < 1 or samples * prompts > SAMPLES_MAX:
            got = f"{samples} samples of each of {prompts} prompts"
            raise UsageError(explain("n", got=got, expected=f"1..{SAMPLES_MAX} choices"))
        if not 0 <= wait_s <= limits.CAPTURE_WAIT_S_MAX:
            expected = f"0..{limits.CAPTURE_WAIT_S_MAX:g} seconds"
            raise UsageError(explain("wait", got=wait_s if wait is None else wait, expected=expected))
        question = cls(id, samples, prompts, wait_s)
        check_names(question.names, id, "id")
        return question


async def later(front: Front, question: Question) -> dict[str, Any]:
    """Return the members of the response: `id`, the results, and `done`: all consumers are done with all choices.

    Raises UnknownCaptureError, and CapflowError if a hub does not answer or refuses.
    """
    names = question.names
    runs = any(map(front.ran, names))
    known_s = max(question.wait_s, limits.HUB_KNOWS_S) if runs else limits.HUB_KNOWS_S
    # An earlier start of the engine may have run it.
    engine = front.settings.engine if runs else name_of(front.settings.engine)
    results = await front.asker.find(names, wait_s=question.wait_s, known_s=known_s, engine=engine)
    # The hub may not know the last of its choices yet.
    runs = runs or any(map(_pending, results.values()))
    unknown = [name for name in names if not results[name]]
    if unknown and not runs:
        raise UnknownCaptureError(await _unknown(front, question, unknown[0]))
    members: dict[str, Any] = {
        "id": question.id,
        "done": not unknown and not any(map(_pending, results.values())),
        "capture_results": joined(results),
    }
    if len(names) > 1:
        members["capture_results_by_choice"] = [results[name] for name in names]
    return members


async def _unknown(front: Front, question: Question, name: str) -> str:
    """Return the message for a request that no hub knows."""
    expected = "the id of one that runs, or of one of the hub's latest"
    do = f"a hub forgets a request after {limits.RESULTS_KEPT_MAX:,} later ones, and all of them when it restarts"
    if len(question.names) == 1:
        one = f"{name}#0"
        several = [each for each in (one, f"{one}#0") if len(each) <= limits.REQUEST_ID_LENGTH_MAX]
        engine = name_of(front.settings.engine)
        samples = await front.asker.find(several, wait_s=0.0, known_s=0.0, engine=engine)
        if any(samples.values()):
            do = "that request has several choices: say how many with n=, and prompts="
    return explain(f"capture {name}: unknown", expected=expected, do=do)


def _pending(results: Mapping[str, CaptureResult]) -> bool:
    return any(result.status == "pending" for result in results.values())


def _count(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(explain(name, got=text, expected="a whole number from 1 on"))
    return int(text)
