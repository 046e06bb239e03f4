"""The oracle: random requests on one live engine, every row compared with a clean run of that request alone.

A scenario is a list of requests with shared prefixes, lengths, arrival steps, captures, steering, gates, controllers,
actions and aborts. The engine is small: prompts are cut into chunks, requests preempt each other and cached blocks are
shared and evicted. The expected result is computed once more without the engine: positions by `selectors_model.meant`,
what actions do by `oracle_actions`, rows by Transformers, one request at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import duckdb
import msgspec
import numpy as np

import capflow
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.plugins.configure import ConfiguredConsumer, configure, load_plugins, parse
from capflow.plugins.consumer import Consumer
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import Abort, ActionApplied, Freeze, Rejected, Steer, Unsteer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from capflow_engine.request.options import KEY, RequestOptions
from tests.kit import oracle_features
from tests.kit.engines import LAYERS, engine, scheduled_ahead
from tests.kit.hubs import running_hub
from tests.kit.oracle_actions import CONTROLLERS, SITES, Changes, Held, Sender, Steps, held_on, vector
from tests.kit.oracle_reference import OracleReference
from tests.kit.oracle_scenarios import fields_of
from tests.kit.selectors_model import meant
from tests.kit.watching import watch

BOUND = {"float32": 1e-5, "float16": 2e-3}
APART = 1e-4
"""How far a hard gate's scores must be from its threshold, so that rounding decides nothing."""

PROBED = Site(2, "post_block")
"""The site where the second consumer scores every request's last prompt token and its other captured tokens."""

CONTROLLED, ADDED = Site(1, "post_block"), Site(2, "mlp_out")
"""Where the hub's gates score, and where they add a vector."""

OPENS, CLOSES = 0.4, -0.2
"""The scores at which they open and close."""

STEER = Steer("r", (SteeringVector.make(ADDED, vector(7, ADDED)),))
"""What the hub's gates do while they are open."""
# --- the engine ---


class Events(Consumer):
    """Keeps the events of requests."""

    name = "events"
    reads_requests = False

    def __init__(self):
        super().__init__(None)
        # By request, in order.
        self.events = {}

    def on_frame(self, frame):
        pass

    def on_action(self, answered):
        self.events.setdefault(answered.request, []).append(answered)

    def on_request_done(self, done):
        return CaptureResult("ok")


class Answer(NamedTuple):
    """The answer to a request, as far as it came.

    reason: why it ended; empty if it was aborted from outside.
    detail: its stop reason.
    """

    tokens: list[int]
    reason: str = ""
    detail: Any = None


class Ran(NamedTuple):
    """A scenario that ran: the answers by request, and the actions with their outcomes, in order."""

    names: list[str]
    answers: dict[str, Answer]
    sent: list
    outcomes: list


class Live:
    """An engine with three consumers: files of what requests ask for, scores of everyone's last prompt token, events.

    ahead: how many steps are scheduled before the output of one is processed; above 0, async scheduling is on.
    arguments: more arguments of the engine.
    work: the work of its scheduler, as `watch` counts it.
    proved, rows: the number of correct requests and rows.
    seen: the events that happened to them.
    scores: the expected scores of the second consumer.
    """

    def __init__(self, model, directory, *, ahead=0, **arguments):
        saes = oracle_features.saved(directory / "saes", arguments.get("steer_sites"))
        self.ahead, self.arguments = ahead, {"saes": saes, **arguments}
        self.work = None
        self.reference = OracleReference(model)
        self.root, self.database = directory / "rows", directory / "scores.duckdb"
        self.probe = Probe.make(PROBED, vector(9, PROBED))
        self.probe.save(directory / "probe.safetensors")
        Probe.make(CONTROLLED, vector(8, CONTROLLED)).save(directory / "fires.safetensors")
        save_vector(directory / "added.safetensors", ADDED, vector(7, ADDED))
        gate = (
            f"probe={directory / 'fires.safetensors'},vector={directory / 'added.safetensors'},threshold={OPENS},"
            f"release={CLOSES},score=dot,positions=all_generated"
        )
        self.options = [
            f"filesystem:root={self.root},capture=requests",
            f"duckdb:path={self.database},probes={directory / 'probe.safetensors'},positions=last_prompt",
            *(
                f"gate@{name}:{gate},requests={name}.*,mode={mode}"
                for name, mode in zip(CONTROLLERS, ("replicated", "ordered"), strict=True)
            ),
        ]
        self.model = model
        self.wait_s = 60.0
        self.scenario = itertools.count()
        self.proved = self.rows = self.steps = 0
        self.seen = Counter(
            dict.fromkeys(
                (
                    "preempted",
                    "cached",
                    "aborted",
                    "chunked",
                    "vectors",
                    "clamps",
                    "features",
                    "patches",
                    "gates",
                    "flips",
                ),
                0,
            )
        )
        # How often each kind of action was applied or rejected, and what became of it.
        self.acted = Counter()
        # The requests whose hard gates scored at their threshold, so that rounding decides.
        self.undecided = 0
        self.scores = {}
        self.events, self.watched, self.address = Events(), Steps(), ""

    @contextlib.contextmanager
    def start(self):
        """Run the engine for as long as a block runs."""
        arguments = {"block_size": 32, "num_gpu_blocks_override": 12, "max_model_len": 192, **self.arguments}
        arguments |= {"sites": ["*:*"], "max_num_batched_tokens": 48, "max_num_seqs": 6}
        plugins = load_plugins()
        made = [configure(*parse(option), plugins) for option in self.options]
        consumers = [one for one in made if isinstance(one, ConfiguredConsumer)]
        controllers = [one for one in made if not isinstance(one, ConfiguredConsumer)]
        with contextlib.ExitStack() as stack:
            self.address = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory(prefix='cf'))}/h"
            stack.enter_context(running_hub(self.address, *consumers, self.events, controllers=controllers))
            deepen = stack.enter_context(scheduled_ahead(self.ahead)) if self.ahead else None
            llm = stack.enter_context(engine(self.model, hub=self.address, **arguments))
            if deepen is not None:
                deepen(llm)
            self.work = watch(llm)
            self.resolved = llm._fit.resolved
            self.watched.watch(llm.llm_engine.engine_core.engine_core.scheduler)
            yield llm

    def run(self, llm, scenario):
        """Run a scenario."""
        number = next(self.scenario)
        names = [f"{r.get('controller') or 'p'}.s{number}-{n}" for n, r in enumerate(scenario)]
        sender, answers = Sender(self.address), {}
        self._steps(llm.llm_engine, dict(zip(names, scenario, strict=True)), answers, sender)
        compat.flush(llm.llm_engine)  # the step in which the workers learn what is over
        outcomes = sender.end()
        return Ran(names, answers, sender.sent, outcomes)

    def _steps(self, core, scenario, answers, sender):
        scheduler = core.engine_core.engine_core.scheduler
        waiting, running = dict(scenario), {}
        for step in itertools.count():
            for name in [name for name, request in waiting.items() if request["arrival"] <= step]:
                request = waiting.pop(name)
                running[name] = step
                core.add_request(name, {"prompt_token_ids": request["prompt"]}, self._params(name, request))
            for name in [n for n, begun in running.items() if _is_due(scenario[n]["abort"], begun, step)]:
                core.abort_request([name])
                del running[name]
                self.seen["aborted"] += 1
            for name, begun in running.items():
                for delay, action in scenario[name].get("actions", ()):
                    if step == begun + delay:
                        sender.send(action, name)
            if not running and not waiting:
                break
            for output in core.step():
                (answer,) = output.outputs
                name = output.request_id
                answers[name] = Answer(list(answer.token_ids), answer.finish_reason or "", answer.stop_reason)
                if output.finished:
                    running.pop(name, None)
                    self.seen["cached"] += bool(output.num_cached_tokens)
            self.seen["preempted"] += sum(r.num_preemptions > 0 for r in scheduler.requests.values())

    def _params(self, name, request):
        steering = fields_of(request)
        for field in steering:
            self.seen[field.rpartition("_")[2]] += 1
        self.seen["chunked"] += len(request["prompt"]) > 48
        params = capflow.sampling_params(
            id=name,
            capture=request["capture"],
            **steering,
            max_tokens=request["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
        )
        # A front end resolves features; the engine core, which these requests come to, knows no autoencoder.
        options = RequestOptions.unpack(params.extra_args)
        resolved = options.steering and self.resolved(options.steering)
        params.extra_args[KEY] = msgspec.structs.replace(options, steering=resolved).pack()
        return params

    # --- what is right ---

    def prove(self, llm, scenario):
        """Run a scenario and hold every row of every request against what it must be; return what ran."""
        ran = self.run(llm, scenario)
        with Client(self.address) as client:
            results = client.results(ran.names, wait=True, timeout=self.wait_s)
        data = capflow.open(self.root) if self.root.exists() else {}
        self._check_answers(ran)
        for name, request in zip(ran.names, scenario, strict=True):
            self._check(name, request, ran, data, results[name])
            self.proved += 1
        return ran

    def _check_answers(self, ran):
        """Hold the answers of actions against what they must be."""
        for sent, outcome in zip(ran.sent, ran.outcomes, strict=True):
            kind = type(sent.action).__name__
            self.acted[kind if isinstance(outcome, ActionApplied) else f"{kind} rejected"] += 1
            assert isinstance(outcome, ActionApplied | Rejected), (sent, outcome)
            if sent.wrong:
                assert isinstance(outcome, Rejected), (sent, outcome)

    def _changes(self, name, ran):
        """Return the actions that held on a request, and its hub's `Abort` if one was applied."""
        events = self.events.events.get(name, ())
        applied = [
            (sent.number, sent.action, outcome)
            for sent, outcome in zip(ran.sent, ran.outcomes, strict=True)
            if isinstance(outcome, ActionApplied)
        ]
        ends = {each.label: each.position for each in events if each.kind == "lease_end" and each.label}
        held = held_on(name, applied, self.watched, ends)
        for number, event in enumerate(each for each in events if each.asked_by.startswith("controller ")):
            if event.kind in ("steer", "unsteer"):
                action = STEER if event.kind == "steer" else Unsteer("r")
                held.append(((event.step, 0, number), Held(event.asked_by, action, event.position)))
        held.sort(key=lambda each: each[0])
        aborts = [action for _, action, _ in applied if isinstance(action, Abort) and action.request == name]
        return Changes(each for _, each in held), aborts[0] if aborts else None

    def _check(self, name, request, ran, data, results):
        answer = ran.answers.get(name, Answer([]))
        tokens = request["prompt"] + answer.tokens
        prompt, spec = len(request["prompt"]), request["capture"]
        whole = answer.reason == "length"
        assert set(results) == {"filesystem", "duckdb", "events"}, f"{name} has no result"
        assert all(result.status in ("ok", "not_requested") for result in results.values()), (name, results)
        if name not in data:
            promised = self._promised(spec, prompt, len(tokens) - 1) if spec else {}
            assert not whole or not any(promised.values()), f"{name} has no rows at all"
            computed, sites, promised = len(tokens) - 1, (), {}
        else:
            capture = data[name]
            computed, sites = capture.computed_length, capture.sites
            assert computed == len(tokens) - 1 if whole else computed <= len(tokens)
            promised = self._promised(spec, prompt, computed)
            assert {s for s, p in promised.items() if p} == set(sites), f"{name}: other sites than were promised"
        changes, abort = self._changes(name, ran)
        right = self.reference.run(tokens[: max(computed, prompt)], prompt, fields_of(request), changes)
        self.seen["flips"] += right.flips
        if right.apart < APART:
            self.undecided += 1
            return
        self._check_end(name, request, answer, right.ends, abort)
        for site in sites:
            rows = capture[site]
            assert rows.positions.tolist() == promised[site], f"{name} {site}: other positions than were promised"
            assert rows.token_ids.tolist() == [tokens[p] for p in promised[site]], f"{name} {site}: other tokens"
            expected = right.rows[site][promised[site]]
            norms = np.maximum(np.linalg.norm(expected, axis=-1), np.finfo(np.float32).tiny)
            error = np.linalg.norm(rows.rows - expected, axis=-1) / norms
            assert error.max() < BOUND[rows.rows.dtype.name], (
                f"{name} {site}: off by {error.max():.1e} at {promised[site][int(error.argmax())]}, "
                f"prompt {prompt}, held {changes.held}, preempted {self.watched.preempted.get(name)}"
            )
            self.rows += len(expected)
            if not fields_of(request):
                self._check_steered(name, capture.steered(site), promised[site], changes)
        self._check_controller(name, prompt, computed, right, changes)
        self._check_tokens(name, prompt, answer, right.logits)
        self._count(name, changes)
        if whole:
            scored = {prompt - 1, *promised.get(PROBED, ())}
            self.scores[name] = {p: float(right.rows[PROBED][p] @ self.probe.weight[0]) for p in scored}

    def _check_end(self, name, request, answer, ends, abort):
        """Hold where and why an answer ended against what may end it."""
        length, most = len(answer.tokens), request["max_tokens"]
        cut = request["abort"] is not None or abort is not None
        if ends is not None:
            last = max(ends + 2 - len(request["prompt"]), 0)
            assert length <= last, f"{name}: {length - last} tokens behind the one that its gate ends it with"
            most = min(most, last)
            if length == last and not cut and last < request["max_tokens"]:
                status = request["gate"]["abort"]
                assert (answer.reason, answer.detail.split(":")[:2]) == (status, ["capflow", "g"]), (name, answer)
                self.acted["gates that end"] += 1
        if not cut:
            assert length == most, f"{name}: {length} tokens instead of {most}, {answer}"
            assert ends is not None or answer.reason == "length", (name, answer)
        if abort is not None and request["abort"] is None:
            assert answer.reason == abort.as_, (name, answer)
            assert answer.detail == (abort.reason or None), (name, answer)

    @staticmethod
    def _check_tokens(name, prompt, answer, logits):
        """Hold greedy tokens against the reference; of nearly equal ones either is right."""
        for number, token in enumerate(answer.tokens):
            if prompt - 1 + number < len(logits):
                at = logits[prompt - 1 + number]
                assert at.max() - at[token] < 1e-3, f"{name}: token {number} is off by {at.max() - at[token]}"

    @staticmethod
    def _check_steered(name, steered, positions, changes):
        """Hold which rows say that they were steered against what held there."""
        expected = [any(gain for _, gain in changes.at(position).steers) for position in positions]
        assert steered.tolist() == expected, f"{name}: {changes.held}"

    def _check_controller(self, name, prompt, computed, right, changes):
        """Hold the events of a gate of the hub against the reference's scores."""
        if name[0] not in CONTROLLERS or self.ahead or any(isinstance(each.action, Freeze) for each in changes.held):
            return
        scores = right.rows[CONTROLLED][prompt:computed] @ vector(8, CONTROLLED)
        if min((np.abs(scores - bound).min(initial=np.inf) for bound in (OPENS, CLOSES)), default=np.inf) < APART:
            return
        expected, opened = [], False
        for position, score in enumerate(scores.tolist(), prompt + 1):
            if (score >= OPENS) if not opened else (score < CLOSES):
                opened = not opened
                expected.append(("steer" if opened else "unsteer", position))
        events = [each for each in self.events.events.get(name, ()) if each.asked_by.startswith("controller ")]
        got = [(each.kind, each.position) for each in events if each.kind in ("steer", "unsteer")]
        assert [e for e in got if e[1] < computed] == [e for e in expected if e[1] < computed], (name, got, expected)
        self.acted["controllers"] += bool(got)

    def _count(self, name, changes):
        """Count what became of the actions on a request that was right."""
        preempted = self.watched.preempted.get(name, [])
        self.acted["preempted afterwards"] += any(each.first < n for each in changes.held for n in preempted)
        self.acted["lease ends"] += sum(each.kind == "lease_end" for each in self.events.events.get(name, ()))

    def prove_scores(self):
        """Hold every score in the closed database against the row that it must be of."""
        with duckdb.connect(str(self.database), read_only=True) as database:
            table = database.execute("SELECT request_id, position, score FROM scores").fetchall()
        by_request = {}
        for name, position, score in table:
            scores = by_request.setdefault(name, {})
            assert position not in scores, f"{name} was scored twice at {position}"
            scores[position] = score
        for name, scores in self.scores.items():
            assert by_request[name].keys() == scores.keys(), name
            assert max(abs(by_request[name][p] - score) for p, score in scores.items()) < 1e-3, name

    @staticmethod
    def _promised(spec, prompt, computed):
        """Return the positions that must be there, by site."""
        positions = meant(spec.positions, prompt, computed, spec.max_rows)
        return {
            site: positions
            for site in SITES
            if (layers := spec.hooks.get(site.hook)) is not None
            and (layers == "all" or not {site.layer, site.layer - LAYERS}.isdisjoint(layers))
        }


def _is_due(abort, begun, step):
    return abort is not None and step >= begun + abort
