"""The engine's part of `capflow doctor --steering`: whether steering works on this machine, and its cost.

`python -m capflow_engine.jobs.steercheck JOB` reports to its parent in the form of `capflow_engine.jobs.child`: each
`stage`, and at the end the `report`, a `capflow.steering.report.Report`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.site import HOOKS, Site
from capflow.steering.report import RELATIVE_NORM, AppliedCheck, Cost, Fired, Mates, Report
from capflow_engine.compat import engine as compat
from capflow_engine.compat import model as compat_model
from capflow_engine.jobs import demo
from capflow_engine.jobs.child import Tell, work_for_parent
from capflow_engine.jobs.trial import (
    GREEDY,
    LENGTHS,
    TIMED_PROMPTS,
    TIMED_TOKENS,
    Answer,
    Plain,
    Setup,
    answers,
    apart,
    asks,
    moved,
    prepare_process,
    prompts,
    timed,
)

Say = Callable[[str], None]
Rows = Mapping[Site, npt.NDArray[np.float32]]
"""Captured rows by site, `[tokens, width]`."""

_ASKED_AGAIN = 3
_LENGTH = 16
# So many requests of a batch are plain; the others are their mates.
_PLAIN = len(LENGTHS) // 2
_TURN_S_MIN = 2.0
_ROUNDS_MAX = 50


class CheckJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The check to make.

    sites: patterns of the sites that carry a tap.
    turns: how many of each mode are measured; 0 leaves the cost out.
    directory: for the job's files.
    """

    model: str
    dtype: str
    sites: list[str]
    eager: bool
    turns: int
    directory: str


def steerable(llm: Any) -> list[Site]:
    """Return the sites of an engine that can be steered, in the order of their computation."""
    info = llm.capflow_model
    return sorted(set(info.sites) - set(info.fixed), key=lambda site: site.depth)


def chosen(sites: Sequence[Site]) -> list[Site]:
    """Return the first, the middle and the last site of each hook, each once."""
    result = []
    for hook in HOOKS:
        some = [site for site in sites if site.hook == hook]
        result += [some[n] for n in sorted({0, len(some) // 2, len(some) - 1})] if some else []
    return result


def fields(vectors: Mapping[Site, Any]) -> dict[str, dict[int, Any]]:
    """Return values by site in the form of a request's field."""
    field: dict[str, dict[int, Any]] = {}
    for site, value in vectors.items():
        field.setdefault(site.hook, {})[site.layer] = value
    return field


class Checks:
    """The checks of one engine.

    root: the data set of its consumer `filesystem`.
    """

    def __init__(self, llm: Any, root: Path) -> None:
        self.llm, self.root = llm, root
        self.sites = steerable(llm)
        self._asked = 0
        self._prompt = prompts(llm, [_LENGTH])[0]
        self._answers: list[Answer] = []
        self._rows: Rows = {}
        for _ in range(_ASKED_AGAIN):
            answer, self._rows = self._ask(2)
            self._answers.append(answer)
        rng = np.random.default_rng(1)
        self.vectors = {site: self._vector(site, rng) for site in self.sites}

    def _vector(self, site: Site, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        norm = RELATIVE_NORM * float(np.median(np.linalg.norm(self._rows[site], axis=-1)))
        vector = rng.standard_normal(self.llm.capflow_model.width_of(site))
        return np.asarray(norm * vector / np.linalg.norm(vector), np.float32)

    def _ask(self, max_tokens: int = 1, **steering: Any) -> tuple[Answer, Rows]:
        """Run one request alone; return its answer and the rows of its prompt at every tapped site."""
        import capflow

        self._asked += 1
        name = f"asked-{self._asked}"
        everywhere = {"hooks": {hook: sorted(at) for hook, at in fields(dict.fromkeys(self.sites)).items()}}
        params = capflow.sampling_params(id=name, capture=everywhere, **asks(max_tokens), **steering)
        (answer,) = answers(self.llm, [self._prompt], params)
        request = capflow.open(self.root)[name]
        return answer, {site: np.asarray(request[site].rows, np.float32)[:_LENGTH] for site in self.sites}

    def _everywhere(self, make: Callable[[npt.NDArray[np.float32]], Any]) -> dict[str, dict[int, Any]]:
        return fields({site: make(vector) for site, vector in self.vectors.items()})

    def fired(self, site: Site) -> Fired:
        """Add a vector at a site, and measure what changes.

        Keys that all move by one vector move all scores of a query by one number, which the softmax of attention takes
        no notice of. There, the change is that of the token after the first one, whose own key is not moved.
        """
        plain, *again = self._answers
        vector = self.vectors[site]
        token = 1 if site.hook == "k" else 0
        steered, rows = self._ask(token + 1, prefill_steering_vectors=fields({site: vector}))
        decoded, _ = self._ask(2, decode_steering_vectors=fields({site: vector}))
        by_hand = {"positions": list(range(_LENGTH)), "vector": list(self._rows[site] + vector)}
        patched, _ = self._ask(token + 1, steering_patches=fields({site: by_hand}))
        change = moved(plain.logprobs[token], steered.logprobs[token])
        before = [one for one in self.sites if one == site or one.layer < site.layer]
        return Fired(
            str(site),
            noise=apart([plain] * len(again), again).logprob,
            moved=change,
            decode_moved=moved(plain.logprobs[1], decoded.logprobs[1]),
            changed_before=max(_relative(rows[one], self._rows[one]) for one in before),
            patched_apart=moved(steered.logprobs[token], patched.logprobs[token]) / max(change, 1e-9),
        )

    def mates(self, plain_vllm: Sequence[Answer]) -> Mates:
        """Run plain requests beside requests that are steered in every way, and beside the same requests unsteered."""
        import capflow

        given = prompts(self.llm, LENGTHS)
        alike = [capflow.sampling_params(**asks())] * len(given)
        kinds: dict[str, dict[str, Any]] = {
            "vectors": {"steering_vectors": fields(self.vectors)},
            "vectors after the prompt": {"decode_steering_vectors": fields(self.vectors)},
            "clamps": {"steering_clamps": self._everywhere(lambda v: {"vector": v, "value": float(np.linalg.norm(v))})},
            "patches": {"steering_patches": self._everywhere(lambda v: {"positions": [-1], "vector": v})},
        }
        steered = alike[:_PLAIN] + [capflow.sampling_params(**asks(), **asked) for asked in kinds.values()]
        first, again, beside, after = (answers(self.llm, given, params) for params in (alike, alike, steered, alike))
        alone = [answers(self.llm, [prompt], alike[0])[0] for prompt in given[:_PLAIN]]
        return Mates(
            _PLAIN,
            noise=apart(first, again),
            beside=apart(first[:_PLAIN], beside[:_PLAIN]),
            after=apart(first, after),
            alone=apart(first[:_PLAIN], alone),
            vllm=apart(first, plain_vllm),
            mates={
                kind: apart([one], [other]).logprob
                for kind, one, other in zip(kinds, first[_PLAIN:], beside[_PLAIN:], strict=True)
            },
        )

    def applied(self) -> AppliedCheck:
        """Return the steering that the answer to a request with vectors at every site reports."""
        import capflow

        params = capflow.sampling_params(**asks(2), steering_vectors=fields(self.vectors))
        (output,) = self.llm.generate([self._prompt], params, use_tqdm=False)
        summary = output.steering_applied
        expected = [str(site) for site in self.sites]
        return (
            AppliedCheck("none", {}, {}, expected)
            if summary is None
            else AppliedCheck(summary.key, summary.prefill, summary.decode, expected)
        )

    def cost(self, plain: Plain, turns: int, say: Say) -> Cost:
        """Measure plain vLLM, this engine idle, and all of its requests steered at every site, turn by turn."""
        import capflow

        fixed = {"max_tokens": TIMED_TOKENS, **GREEDY}
        steered = capflow.sampling_params(**fixed, steering_vectors=fields(self.vectors))
        modes: dict[str, Callable[[int], float]] = {
            "plain": plain.timed,
            "idle": lambda rounds: timed(self.llm, capflow.sampling_params(**fixed), rounds),
            "steered": lambda rounds: timed(self.llm, steered, rounds),
        }
        say("the cost: warming up")
        for run in modes.values():
            run(1)
        rounds = min(_ROUNDS_MAX, math.ceil(_TURN_S_MIN / plain.timed(1)))
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for turn in range(turns):
            say(f"the cost: turn {turn + 1} of {turns}")
            for mode in modes if turn % 2 == 0 else reversed(modes):
                seconds[mode].append(modes[mode](rounds))
        return Cost(TIMED_PROMPTS * TIMED_TOKENS * rounds, seconds)


def _relative(rows: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> float:
    """Return the largest relative difference of any row; 0 where both are 0."""
    norms = np.maximum(np.linalg.norm(others, axis=-1), np.finfo(np.float32).tiny)
    return float((np.linalg.norm(rows - others, axis=-1) / norms).max())


def check(job: CheckJob, say: Say) -> Report:
    """Start both engines and check; return the report. The engines run at the same time if the cost is measured.

    Raises UsageError for a model or sites that do not exist, and CapflowError when plain vLLM fails.
    """
    compat.require()
    import capflow

    directory = Path(job.directory)
    model = demo.resolved(job.model, progress=say)
    setup = Setup(model, job.dtype, job.eager, both=job.turns > 0)
    say("inspecting the model")
    with compat_model.explaining(model):
        arguments = setup.engine_args()
    compat_model.check_model(arguments, job.sites)
    say("starting vLLM without capflow")
    with Plain(setup, directory / "plain.log") as plain:
        unsteered = plain.answers()
        if not job.turns:
            plain.close()
        say("starting vLLM with capflow")
        consumers = [f"filesystem:root={directory / 'rows'},capture=requests"]
        with capflow.LLM(consumers=consumers, sites=job.sites, **setup.arguments()) as llm:
            checks = Checks(llm, directory / "rows")
            fired = []
            for site in chosen(checks.sites):
                say(f"steering at {site}")
                fired.append(checks.fired(site))
            say("plain requests beside steered ones")
            mates = checks.mates(unsteered)
            cost = checks.cost(plain, job.turns, say) if job.turns else None
            info = llm.capflow_model
            return Report(job.model, info.dtype, not job.eager, len(info.sites), fired, mates, checks.applied(), cost)


def main() -> int:
    """Do the job that the one argument describes; return the exit code."""

    def work(tell: Tell) -> None:
        job = msgspec.json.decode(sys.argv[1], type=CheckJob)
        report = check(job, lambda stage: tell("stage", stage=stage))
        tell("report", report=msgspec.to_builtins(report))

    prepare_process()
    return work_for_parent(work)


if __name__ == "__main__":
    sys.exit(main())
