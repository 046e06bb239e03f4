"""An engine whose hub and clients are killed while the clients act on its requests, and what must have held.

The engine runs in this process, the hub (`capflow run`) and the clients (`tests.kit.acting_client`) in others. What the
engine answered is read where its link answers; what clients were answered, in their logs. What held at each position of
each request is compared with the logits of the request's answer, against Transformers in float64.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

import capflow
from capflow.capture.site import Site
from capflow.steering.action import Abort, ActionApplied, Rejected
from capflow.transport.address import is_listening
from capflow.transport.links.scheduler import SchedulerLink
from capflow_engine.compat import engine as compat
from tests.kit.acting_client import PARTS
from tests.kit.engines import GREEDY, VOCABULARY, engine
from tests.kit.oracle_actions import FOREVER, Changes, Steps, held_on, vector
from tests.kit.oracle_reference import OracleReference
from tests.kit.servers import environment
from tests.kit.sources import ROOT
from tests.kit.steered import LOGITS_MAX, RAW
from tests.kit.waiting import eventually

RUNNING = 6
TOKENS = (40, 90)
APART = 1e-4
"""How far a hard gate's scores must be from its threshold, so that rounding decides nothing."""
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 16, "max_model_len": 192, "max_num_seqs": RUNNING}
PROBE, BEHIND = Site(1, "post_block"), Site(2, "post_block")


class Answers:
    """What an engine took and answered, by sender and number.

    taken: the actions, each with its place in the order in which the engine took them.
    answered: the outcomes; more than one is a fault.
    """

    def __init__(self):
        self.taken, self.answered = {}, defaultdict(list)

    @contextlib.contextmanager
    def watched(self):
        """Watch all links of schedulers in the block."""
        answer, receive = SchedulerLink._answer, SchedulerLink._take

        def take(link, act):
            self.taken.setdefault(act.key[1:], (len(self.taken), act.action))
            receive(link, act)

        def answers(link, key, outcome):
            self.answered[key[1:]].append(outcome)
            answer(link, key, outcome)

        SchedulerLink._answer, SchedulerLink._take = answers, take
        try:
            yield self
        finally:
            SchedulerLink._answer, SchedulerLink._take = answer, receive


class Others:
    """The hub and the clients, which are killed now and then."""

    def __init__(self, address, home, choose):
        self.address, self.home, self.choose = address, Path(home), choose
        self.hub, self.clients, self.killed = None, {}, Counter()

    def start(self):
        self.hub = self._process("-m", "capflow", "run", "--address", self.address, "--consumer", "log")
        for part in range(PARTS):
            self._client(part)

    def end(self):
        for process in (self.hub, *self.clients.values()):
            process.kill()
            process.wait(60)

    def kill(self, kind):
        """Kill the hub or a client, and start another one."""
        self.killed[kind] += 1
        if kind == "hub":
            self.hub.send_signal(signal.SIGKILL)
            self.hub.wait(60)
            self.hub = self._process("-m", "capflow", "run", "--address", self.address, "--consumer", "log")
        else:
            part = self.choose.randrange(PARTS)
            self.clients[part].send_signal(signal.SIGKILL)
            self.clients[part].wait(60)
            self._client(part)

    def _client(self, part):
        seed = str(self.choose.getrandbits(32))
        self.clients[part] = self._process(
            "-m", "tests.kit.acting_client", self.address, seed, str(part), str(self.home)
        )

    def _process(self, *command):
        variables = environment(self.home, path=ROOT)
        with (self.home / "stderr").open("ab") as errors:
            return subprocess.Popen([sys.executable, *command], env=variables, stdout=errors, stderr=errors)

    @property
    def sent(self):
        """The number of actions that clients sent."""
        return sum(log.read_bytes().count(b"sent ") for log in self.home.glob("*.log"))


class Acting:
    """A run: requests of an engine, clients that act on them, and kills.

    wrong: what was not as it must be.
    counts: what happened.
    """

    def __init__(self, model, seed=0):
        self.choose = random.Random(seed)
        self.reference = OracleReference(model)
        self.model, self.answers, self.steps = model, Answers(), Steps()
        self.ends, self.requests, self.outputs = {}, {}, {}
        self.wrong, self.counts = [], Counter()

    def run(self, actions, pause_s=(1.0, 4.0)):
        """Run until clients have sent so many actions, and more until all has happened; then check everything.

        On a fast machine, actions are sent before the first hub is killed.
        """
        with tempfile.TemporaryDirectory(prefix="cf") as home, contextlib.ExitStack() as stack:
            others = Others(f"ipc://{home}/h", home, self.choose)
            stack.callback(others.end)
            others.start()
            eventually(lambda: is_listening(others.address), 60)
            stack.enter_context(self.answers.watched())
            llm = stack.enter_context(engine(self.model, hub=others.address, sites=["*:*"], **CROWDED, **RAW))
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            self.steps.watch(scheduler)
            self._watch_leases(scheduler, others)
            self._act(llm.llm_engine, others, actions, pause_s)
            self.counts.update(others.killed)
            logs = {log.stem: log.read_text().splitlines() for log in Path(home).glob("*.log")}
        self._check_logs(logs)
        self._check_requests()

    def _watch_leases(self, scheduler, others):
        begin = scheduler.capflow.actions.begin

        def begun(running):
            begin(running)
            for end in scheduler.capflow.actions._ended:
                self.ends[end.label] = end.position
                self.counts["lease ends"] += 1
                self.counts["lease ends without a hub"] += not is_listening(others.address)

        scheduler.capflow.actions.begin = begun

    def _act(self, core, others, actions, pause_s):
        due = time.monotonic() + 1.0
        for turn in range(10**9):
            if turn % 50 == 0 and others.sent >= actions * (1 if self._has_met_all(others) else 100):
                break
            while len(self.requests) - len(self.outputs) < RUNNING:
                self._ask(core)
            running = [name for name in self.requests if name not in self.outputs]
            (others.home / "new").write_text(" ".join(running))
            (others.home / "new").replace(others.home / "running")
            if time.monotonic() >= due:
                others.kill(self.choose.choice(("hub", "client", "client")))
                due = time.monotonic() + self.choose.uniform(*pause_s)
            self._step(core)
        (others.home / "running").unlink()
        while core.has_unfinished_requests():
            self._step(core)
        compat.flush(core)

    def _has_met_all(self, others):
        """Return whether hubs and clients were killed, and requests that are over were preempted."""
        over = any(self.steps.preempted.get(name) for name in self.outputs)
        return bool(over and others.killed["hub"] and others.killed["client"] and self.counts["lease ends"])

    def _ask(self, core):
        name, choose = f"r{len(self.requests)}", self.choose
        gate = {"hook": PROBE.hook, "layer": PROBE.layer, "vector": vector(choose.randrange(4), PROBE)}
        gate |= {"score": "dot", "threshold": 0.3, "latch": choose.random() < 0.3, "positions": "generated"}
        own = {"vector": vector(choose.randrange(4), BEHIND), "scale": 1.0, "gate": "g"}
        fields = {"steering_gates": {"g": gate}, "decode_steering_vectors": {BEHIND.hook: {BEHIND.layer: own}}}
        prompt = [choose.randrange(5, VOCABULARY) for _ in range(choose.randrange(3, 60))]
        self.requests[name] = prompt, fields, choose.randrange(*TOKENS)
        params = capflow.sampling_params(
            id=name, max_tokens=self.requests[name][2], logprobs=VOCABULARY, **fields, **GREEDY
        )
        core.add_request(name, {"prompt_token_ids": prompt}, params)

    def _step(self, core):
        for output in core.step():
            if output.finished:
                self.outputs[output.request_id] = output

    # --- what is right ---

    def _check_logs(self, logs):
        """Hold what clients were answered against what the engine answered."""
        for key, outcomes in self.answers.answered.items():
            if len(outcomes) != 1:
                self.wrong.append(f"{key} was answered {len(outcomes)} times: {outcomes}")
        for sender, lines in logs.items():
            answered = Counter()
            for line in lines[1:]:
                kind, number, *rest = line.split(" ", 3)
                self.counts[kind] += 1
                if kind == "differs":
                    self.wrong.append(f"{sender}: {line}")
                if kind in ("sent", "differs"):
                    continue
                answered[number] += 1
                outcomes = self.answers.answered.get((sender, number), [])
                by_engine = outcomes[0] if outcomes else None
                if kind == "applied" and not (
                    isinstance(by_engine, ActionApplied)
                    and [str(by_engine.step), str(by_engine.position)] == [rest[0], rest[1].split(" ")[0]]
                ):
                    self.wrong.append(f"{sender}: {line}, but the engine answered {by_engine}")
                if kind == "rejected" and isinstance(by_engine, ActionApplied):
                    self.wrong.append(f"{sender}: {line}, but the engine answered {by_engine}")
            self.wrong += [f"{sender} got {count} answers to {n}" for n, count in answered.items() if count != 1]
        self.counts["taken by the engine"] = len(self.answers.answered)

    def _check_requests(self):
        """Hold the logits of every answer against what the applied actions make of them."""
        applied = [
            (*self.answers.taken[key], outcomes[0])
            for key, outcomes in self.answers.answered.items()
            if isinstance(outcomes[0], ActionApplied)
        ]
        by_request = defaultdict(list)
        for each in applied:
            by_request[each[1].request].append(each)
        for name, output in self.outputs.items():
            mine = by_request[name] + by_request[""]
            changes = Changes(each for _, each in sorted(held_on(name, mine, self.steps, self.ends), key=_first))
            self._check_request(name, output.outputs[0], changes, [a for _, a, _ in mine if isinstance(a, Abort)])
        rejected = [outcomes for outcomes in self.answers.answered.values() if isinstance(outcomes[0], Rejected)]
        self.counts["rejected by the engine"] = len(rejected)
        self.counts["applied by the engine"] = len(applied)

    def _check_request(self, name, answer, changes, aborts):
        prompt, fields, length = self.requests[name]
        self.counts["requests"] += 1
        self.counts["preempted"] += bool(self.steps.preempted.get(name))
        reason = aborts[0].as_ if aborts else "length"
        if answer.finish_reason != reason or (not aborts and len(answer.token_ids) != length):
            self.wrong.append(f"{name} ended by {answer.finish_reason}, not by {reason}")
        if not answer.token_ids:
            return
        tokens = [*prompt, *answer.token_ids]
        right = self.reference.run(tokens[:-1], len(prompt), fields, changes)
        if right.apart < APART:
            self.counts["undecided"] += 1
            return
        errors = np.abs(logits_of(answer) - right.logits[len(prompt) - 1 :]).max(axis=1)
        self.counts["positions"] += len(errors)
        self.counts["changed positions"] += sum(bool(changes.at(p).steers) for p in range(len(prompt), len(tokens) - 1))
        if errors.max() >= LOGITS_MAX:
            first = len(prompt) - 1 + int(np.argmax(errors >= LOGITS_MAX))
            held = [f"{type(a).__name__} {a.label[-4:]} {p}..{u if u < FOREVER else ''}" for _, a, p, u in changes.held]
            self.wrong.append(f"{name}: logits are off by {errors.max():.1e} from {first} on, held {'; '.join(held)}")


def logits_of(answer):
    """Return the logits of each generated token."""
    return np.array([[step[n].logprob for n in range(VOCABULARY)] for step in answer.logprobs])


def _first(each):
    return each[0]
