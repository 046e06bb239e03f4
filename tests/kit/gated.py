"""Requests with gates in one batch, compared with the same interventions in Transformers, in float64.

`python tests/kit/gated.py FILE` proves the requests in a file on an engine of its own process; `test_gates_engine`
runs it for what a process can choose only once.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import capflow
from capflow.capture.site import DIVIDED_HOOKS, Site
from capflow_engine.taps.step import Step
from capflow_engine.worker.gates.latches import Latches
from tests.kit.engines import GREEDY, VOCABULARY, engine, prompts, relative_error, scheduled_ahead
from tests.kit.entries import LLAMA_HOOKS, clamp, patch, shape_of, unit_of
from tests.kit.sources import ROOT
from tests.kit.steered import RAW, SteeredReference, entries, logits, vector
from tests.kit.watching import watch

BOUND = 1e-5
WRONG = 7
"""The exit status of a child that finds a wrong row, token or logit."""
APART = 1e-3
"""How far each score is from its threshold, at least: rounding in the engine opens no gate."""
EVERYTHING = {"hooks": dict.fromkeys(LLAMA_HOOKS, "all"), "positions": "all"}
ANSWERS = {**EVERYTHING, "positions": "all_generated"}
"""What leaves the blocks of a prompt readable from the cache: a position that is captured is computed."""
SCORE_KINDS = ("dot", "cosine", "cast")
POSITIONS = ("all", "prompt", "generated", "last_prompt")


@dataclasses.dataclass
class Case:
    """A request, and what the reference makes of it.

    opened, shut: at how many scored positions its gates are open and shut.
    flips: how often a gate's value crosses 1/2 from one position to the next.
    """

    name: str
    prompt: list
    fields: dict
    tokens: list
    opened: int
    shut: int
    flips: int


class GatedReference(SteeredReference):
    """Transformers in float64, with gates done by hand from the documentation."""

    def __init__(self, model):
        super().__init__(model, torch.float64)

    def run(self, tokens, prompt_length, fields):
        """Return the logits after each token, what each site holds before it is steered, and each gate's values."""
        gates, count = fields["steering_gates"], len(tokens)
        margins, seen = {}, {}

        def steer(site, stream):
            x = stream[0].numpy().copy()
            seen[site] = x.copy()
            for name, gate in gates.items():
                if Site(gate["layer"], gate["hook"]) == site:
                    scores = score_of(gate["score"], np.asarray(gate["vector"], np.float64), x)
                    scored = scored_positions(gate["positions"], prompt_length, count)
                    margins[name] = np.where(scored, scores + gate.get("bias", 0.0) - gate["threshold"], -np.inf)
            values = {name: self._value(gates[name], margin) for name, margin in margins.items()}
            self._steer(x, site, prompt_length, fields, values)
            stream[0] = torch.from_numpy(x)

        done = self._forward(tokens, steer)
        values = {name: self._value(gates[name], margin) for name, margin in margins.items()}
        return done, seen, margins, values

    @staticmethod
    def _value(gate, margins):
        if gate.get("latch"):
            margins = np.maximum.accumulate(margins)
        if gate.get("sharpness") is None:
            return (margins >= 0).astype(np.float64)
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-gate["sharpness"] * margins))

    @staticmethod
    def _steer(x, site, prompt_length, fields, values):
        def factor(given):
            return values[given["gate"]] if given.get("gate") else np.ones(len(x))

        for given in entries(fields, "steering_patches", site):
            patch(x, given, site.hook, prompt_length, factor(given))
        added = entries(fields, "steering_vectors", site)
        for given in sorted(added, key=lambda given: not given.get("relative")):
            change = np.asarray(given["vector"], np.float64)
            size = given["scale"] * factor(given)
            if given.get("relative"):
                size = size * np.linalg.norm(x, axis=1) / np.linalg.norm(change)
            x += size[:, None] * change
        for given in entries(fields, "steering_clamps", site):
            clamp(x, given, site.hook, factor(given))

    def generate(self, prompt, max_tokens, fields, guess=()):
        """Return the answer that greedy decoding gives.

        guess: an answer that may be like it, which saves runs: one run computes as many tokens as are guessed right.
        """
        answer = []
        while len(answer) < max_tokens:
            rest = list(guess[len(answer) : max_tokens - 1])
            tokens = [*prompt, *answer, *rest]
            following = self.run(tokens, len(prompt), fields)[0].argmax(-1)[len(prompt) + len(answer) - 1 :].tolist()
            right = next((n for n, (a, b) in enumerate(zip(following, rest, strict=False)) if a != b), len(rest))
            answer += following[: right + 1]
        return answer


def score_of(kind, probe, x):
    """Return the score of each row of `[tokens, hidden]`."""
    along = x @ probe
    if kind == "dot":
        return along
    other = np.tanh(np.outer(along / (probe @ probe), probe)) if kind == "cast" else probe[None].repeat(len(x), 0)
    return (x * other).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(other, axis=1)


def scored_positions(positions, prompt_length, count):
    """Return which positions a gate scores."""
    at = np.arange(count)
    return {
        "all": at >= 0,
        "prompt": at < prompt_length,
        "generated": at >= prompt_length,
        "last_prompt": at == prompt_length - 1,
    }[positions]


def cases(reference, combinations, lengths, max_tokens, seed=0, *, opening="half", layer=1, divided=False):
    """Return a case for each combination of score kind, sharpness, latch and positions, each with its own operations.

    Thresholds lie in the middle of the reference's scores, in gaps, so that gates open and shut.

    opening: `half`; `early`, at few scored positions, all in their first half, so that a latch that is lost stays lost;
        or `never`, though nearly.
    layer: that of the probes.
    divided: whether ranks divide the rows at some hooks; there, no probe and only operations that change each number by
        itself.
    """
    made = []
    for number, (kind, sharpness, latch, positions) in enumerate(combinations):
        length = lengths[number % len(lengths)]
        (prompt,) = (one["prompt_token_ids"] for one in prompts((length,), seed=seed + number))
        name = f"{number} {kind} {sharpness} {'latched' if latch else 'each'} {positions}"
        for attempt in range(40):
            fields = _fields(number, kind, sharpness, latch, positions, length, attempt, layer, divided)
            case = _tried(reference, name, prompt, fields, max_tokens, number, opening)
            if case is not None:
                made.append(case)
                break
        else:
            raise AssertionError(f"{name}: no threshold apart from all scores")
    return made


def _fields(number, kind, sharpness, latch, positions, length, attempt, probe, divided):
    apart = DIVIDED_HOOKS if divided else ()
    probed = [hook for hook in LLAMA_HOOKS if hook not in ("final", *apart)]
    hook, other = probed[number % len(probed)], LLAMA_HOOKS[(number // 2 + 1) % len(LLAMA_HOOKS)]
    gate = {
        "hook": hook,
        "layer": probe,
        "vector": vector(100 + number + 50 * attempt, 1.0, hook),
        "score": kind,
        "threshold": 0.0,
    }
    gate |= {"sharpness": sharpness, "latch": latch, "positions": positions}
    layer = 3 if other == "final" else min(probe + 1 + number % 2, 3)
    if not latch and number % 3 == 0:
        other, layer = hook, probe  # the site of the probe
    strong = {"vector": vector(200 + number, 4.0, other), "gate": "g"}
    patched = sorted({-1, *range(0, length + 8, 3)} - {length - 1})
    kinds = (0, 2, 5) if other in apart else range(6)
    operation = [
        {"steering_vectors": {other: {layer: [{**strong, "scale": 1.5}]}}},
        {"steering_clamps": {other: {layer: [{**strong, "min": 0.5, "max": 1.0}]}}},
        {"steering_patches": {other: {layer: [{**strong, "positions": patched, "amount": 0.75}]}}},
        {"steering_vectors": {other: {layer: [{**strong, "scale": 0.5, "relative": True}]}}},
        {
            "steering_vectors": {
                other: {
                    layer: [
                        {"vector": vector(300 + number, 2.0, other), "scale": 1.0},
                        {**strong, "scale": -0.4, "relative": True},
                        {**strong, "scale": 1.0},
                    ],
                    3: [{"vector": vector(310 + number, 3.0, other), "scale": 1.0, "gate": "g"}],
                }
            },
            "steering_clamps": {other: {layer: [{**strong, "min": -0.2, "max": 0.2}]}},
        },
        {
            "steering_clamps": {
                other: {
                    layer: [
                        {"index": 0, "value": vector(320 + number, 3.0, other)[: unit_of(other)], "gate": "g"},
                        {"index": shape_of(other)[0] - 1, "value": 0.25, "gate": "g", "strength": 0.5},
                    ]
                }
            }
        },
    ][kinds[(number + number // 6 * 2) % len(kinds)]]
    return {"steering_gates": {"g": gate}, **operation}


def _tried(reference, name, prompt, fields, max_tokens, number, opening):
    gate = fields["steering_gates"]["g"]
    shut = {**fields, "steering_gates": {"g": {**gate, "threshold": 1e9}}}
    tokens = reference.generate(prompt, max_tokens, shut)
    scores = _scores(reference, [*prompt, *tokens[:-1]], len(prompt), shut)
    if opening == "never":
        gate["threshold"] = float(scores.max()) + 2 * APART
    elif opening == "early":
        high = np.sort(scores)[-4:]
        gate["threshold"] = float(np.mean(high[np.argmax(np.diff(high)) :][:2]))
    elif len(scores) == 1:
        gate["threshold"] = float(scores[0]) + (0.02 if number % 2 else -0.02)
    else:
        ordered = np.sort(scores)
        low = max(0, len(ordered) // 3 - 1)
        middle = ordered[low : max(low + 2, 2 * len(ordered) // 3)]
        widest = int(np.argmax(np.diff(middle)))
        gate["threshold"] = float(np.mean(middle[widest : widest + 2]))
    tokens = reference.generate(prompt, max_tokens, fields, tokens)
    _, _, margins, values = reference.run([*prompt, *tokens[:-1]], len(prompt), fields)
    scored = margins["g"][margins["g"] > -np.inf]
    opened = int((scored >= 0).sum())
    if np.abs(scored).min() < APART or (opening == "never" and opened):
        return None
    if opening != "never" and len(scored) > 1 and not 0 < opened < len(scored):
        return None
    if opening == "early" and np.flatnonzero(scored >= 0)[-1] > len(scored) // 2:
        return None
    flips = int(np.abs(np.diff(values["g"] >= 0.5)).sum())
    return Case(name, prompt, fields, tokens, opened, len(scored) - opened, flips)


def _scores(reference, tokens, prompt_length, fields):
    margins = reference.run(tokens, prompt_length, fields)[2]["g"]
    return margins[margins > -np.inf] + fields["steering_gates"]["g"]["threshold"]


ALL_MODES = list(itertools.product(SCORE_KINDS, (None, 2.0), (False, True), POSITIONS))


def params_of(case, name, max_tokens, capture=EVERYTHING, **more):
    """Return the sampling parameters of a case."""
    asked = {"id": name, "capture": capture, "max_tokens": max_tokens, "logprobs": VOCABULARY, **GREEDY, **more}
    return capflow.sampling_params(**_tiered(case.fields), **asked)


def _tiered(fields):
    """Return fields with gated entries in the tier of the gate's positions: elsewhere an unlatched gate is refused."""
    (gate,) = fields["steering_gates"].values()
    tier = {"prompt": "prefill_", "last_prompt": "prefill_", "generated": "decode_"}.get(gate["positions"], "")
    made = {"steering_gates": fields["steering_gates"]}
    for field in fields.keys() - made.keys():
        for hook, layers in fields[field].items():
            for layer, some in layers.items():
                for one in some:
                    tiered = one.get("gate") and not gate["latch"] and field != "steering_patches"
                    sites = made.setdefault(f"{tier if tiered else ''}{field}", {})
                    sites.setdefault(hook, {}).setdefault(layer, []).append(one)
    return made


def prove(llm, root, reference, given, max_tokens, prefix="r", capture=EVERYTHING):
    """Run cases in one batch and hold rows and logits against the reference; return the outputs."""
    params = [params_of(case, f"{prefix}{n}", max_tokens, capture) for n, case in enumerate(given)]
    outputs = llm.generate([{"prompt_token_ids": case.prompt} for case in given], params, use_tqdm=False)
    data = capflow.open(root)
    for number, (case, output) in enumerate(zip(given, outputs, strict=True)):
        assert list(output.outputs[0].token_ids) == case.tokens, case.name
        tokens = [*case.prompt, *case.tokens[:-1]]
        expected, seen, margins, _ = reference.run(tokens, len(case.prompt), case.fields)
        first = len(case.prompt) if capture is ANSWERS else 0
        hold(data[f"{prefix}{number}"], seen, range(first, len(tokens)), case.name)
        marks = steered_of(case, margins["g"])[first:]
        for site in seen:
            assert data[f"{prefix}{number}"].steered(site).tolist() == marks.tolist(), f"{case.name}: marks at {site}"
        error = relative_error(logits(output), expected[len(case.prompt) - 1 :])
        assert error < BOUND, f"{case.name}: logits are off by {error:.1e}"
    return outputs


def steered_of(case, margins):
    """Return at which positions a case is steered: where an operation acts, whatever its amount."""
    (gate,) = case.fields["steering_gates"].values()
    margins = np.maximum.accumulate(margins) if gate["latch"] else margins
    mask = margins >= 0 if gate["sharpness"] is None else margins > -np.inf
    given = [
        (field, one)
        for field in case.fields.keys() - {"steering_gates"}
        for layers in case.fields[field].values()
        for some in layers.values()
        for one in some
    ]
    if any("gate" not in one for _, one in given):
        return np.ones(len(margins), bool)
    if all(field == "steering_patches" for field, _ in given):
        patched = {at % len(case.prompt) if at < 0 else at for _, one in given for at in one["positions"]}
        mask = mask & np.isin(np.arange(len(margins)), list(patched))
    return mask


def hold(capture, seen, positions, name):
    """Hold captured rows against the reference, at every site and at a range of positions."""
    assert len(capture.sites) == len(seen)
    for site in capture.sites:
        assert list(capture[site].positions) == list(positions), name
        error = relative_error(np.asarray(capture[site].rows), seen[site][positions.start : positions.stop])
        assert error < BOUND, f"{name}: rows at {site} are off by {error:.1e}"


@dataclasses.dataclass
class GatedRun:
    """Cases on an engine of a process of its own; see `tests.kit.children.Run`.

    answers: whether only the positions of answers are captured.
    """

    model: str
    root: str
    cases: list
    max_tokens: int
    engine: dict = dataclasses.field(default_factory=dict)
    v2: bool = False
    ahead: int = 0
    mutant: str = ""
    answers: bool = False


def run_child(job, path, timeout=400):
    """Prove the cases of a `GatedRun` in a child; return its counts."""
    path.write_text(json.dumps(dataclasses.asdict(job), default=lambda values: values.tolist()))
    paths = [str(ROOT / "tests" / "kit" / "triton_cpu")] if job.v2 else []
    environment = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if job.v2 else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [*paths, str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if job.v2:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.kit.gated", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if job.mutant:
        assert done.returncode == WRONG, done.stderr[-4000:]
        return {}
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _drafts_not_cut():
    begin = Latches.begin

    def mutated(self, plan):
        for number in plan.latched:
            request, _, start, _ = plan.batch[number]
            parts = self._parts.get(request.key, [])
            if parts and parts[-1].start < start < parts[-1].start + parts[-1].length:
                parts[-1] = parts[-1]._replace(start=start - parts[-1].length)
        return begin(self, plan)

    return _changed(Latches, "begin", mutated)


def _not_reset():
    begin = Latches.begin

    def mutated(self, plan):
        for number in plan.latched:
            request, _, start, _ = plan.batch[number]
            parts = self._parts.get(request.key, [])
            if parts and parts[0].start > start:
                parts[:] = [parts[-1]._replace(start=start - parts[-1].length)]
        return begin(self, plan)

    return _changed(Latches, "begin", mutated)


def _read_before_scored():
    tap = Step.tap

    def mutated(self, site, *args):
        scores = [] if self.ways is None else self.ways.scores.pop(site, [])
        tap(self, site, *args)
        if scores:
            self.ways.scores[site] = scores
        for score in scores:
            score.put(*args, self.bank.rows_at(site, args[0].shape[1]), self.gating)

    return _changed(Step, "tap", mutated)


MUTANTS = {
    "drafts are not cut": _drafts_not_cut,
    "no reset where a request starts again": _not_reset,
    "a gate is read before its score": _read_before_scored,
    "nothing is carried to the next step": lambda: _changed(Latches, "end", lambda *_: None),
}


def _with_layers(value):
    """Return an object whose keys are numbers where JSON has their text."""
    return {int(key) if key.isdecimal() else key: each for key, each in value.items()}


def main(path):
    """Prove the cases in a file."""
    read = json.loads(Path(path).read_text(), object_hook=_with_layers)
    job = GatedRun(**{**read, "cases": [Case(**case) for case in read["cases"]]})
    scheduling = scheduled_ahead(job.ahead) if job.ahead else contextlib.nullcontext(lambda llm: None)
    arguments = {"consumers": [f"filesystem:root={job.root},capture=requests"], "sites": ["*:*"], **RAW, **job.engine}
    if "pipeline_parallel_size" in job.engine:  # its processes are out of reach here
        with engine(job.model, in_process=False, **arguments) as llm:
            v2 = llm.llm_engine.vllm_config.use_v2_model_runner
            prove(llm, job.root, GatedReference(job.model), job.cases, job.max_tokens)
        print(json.dumps({"v2": v2}))
        return
    with scheduling as deepen, engine(job.model, **arguments) as llm:
        core = llm.llm_engine.engine_core.engine_core
        deepen(llm)
        counts = watch(llm)
        try:
            with MUTANTS[job.mutant]() if job.mutant else contextlib.nullcontext():
                capture = ANSWERS if job.answers else EVERYTHING
                prove(llm, job.root, GatedReference(job.model), job.cases, job.max_tokens, capture=capture)
        except AssertionError as e:
            print(e, file=sys.stderr, flush=True)
            os._exit(WRONG)
        runner = type(core.model_executor.driver_worker.worker.model_runner).__mro__[3].__module__
    print(json.dumps({**counts, "runner": runner}))


if __name__ == "__main__":
    main(sys.argv[1])
