"""The oracle: random requests on one live engine, every row compared with a clean run of that request alone.

A scenario is a list of requests with shared prefixes, lengths, arrival steps, captures, steering and aborts. The engine
is small: prompts are cut into chunks, requests preempt each other and cached blocks are shared and evicted. The
expected result is computed once more without the engine: positions by `selectors_model.meant`, rows by Transformers,
one request at a time.
"""

import contextlib
import itertools

import duckdb
import numpy as np
from hypothesis import strategies as st

import capflow
from capflow.capture.site import HOOKS, Site
from capflow.probes.probe import Probe
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.engines import LAYERS, VOCABULARY, WIDTH, engine, scheduled_ahead
from tests.kit.oracle_reference import OracleReference
from tests.kit.selectors_model import meant, specs
from tests.kit.watching import watch

BOUND = {"float32": 1e-5, "float16": 2e-3}
APART = 1e-4
"""How far a hard gate's scores must be from its threshold, so that rounding decides nothing."""

LENGTH_MAX = 160
ARRIVAL_MAX = 40
PATCHED_GENERATED = 13
"""In a scenario's patches, this number stands for the first generated position; smaller ones are in the prompt."""

PROBED = Site(2, "post_block")
"""The site where the second consumer scores every request's last prompt token and its other captured tokens."""

SITES = [Site(layer, hook) for layer in range(LAYERS) for hook in HOOKS]

# --- scenarios ---

_bases = [np.random.default_rng(n).integers(5, VOCABULARY, LENGTH_MAX).tolist() for n in range(3)]
_layers = st.one_of(st.just("all"), st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS, unique=True))
_captures = st.one_of(st.none(), specs(dict.fromkeys(HOOKS, _layers)))
_TIERS = ("", "prefill_", "decode_")
_operations = st.one_of(
    st.tuples(st.just("vectors"), st.sampled_from(_TIERS), st.sampled_from((1.0, -0.5))),
    st.tuples(st.just("clamps"), st.sampled_from(_TIERS), st.sampled_from(({"value": 0}, {"min": -0.2, "max": 0.5}))),
    st.tuples(
        st.just("patches"),
        st.just(""),
        st.lists(st.integers(-1, PATCHED_GENERATED + 12), min_size=1, max_size=3, unique=True),
    ),
)
_steering = st.one_of(
    st.just([]),
    st.just([]),
    st.lists(
        st.tuples(st.sampled_from(SITES), st.integers(0, 3), _operations),
        min_size=1,
        max_size=3,
        unique_by=lambda one: (one[0], one[2][:2]),
    ),
)


_gates = st.fixed_dictionaries(
    {
        "site": st.sampled_from([site for site in SITES if site.layer < LAYERS - 1]),
        "seed": st.integers(0, 3),
        "score": st.sampled_from(("dot", "cosine", "cast")),
        "threshold": st.sampled_from((-0.05, 0.0, 0.05)),
        "sharpness": st.sampled_from((None, None, 2.0)),
        "latch": st.booleans(),
        "positions": st.sampled_from(("all", "prompt", "generated", "last_prompt")),
    }
)


@st.composite
def requests(draw):
    """One request: its tokens, what it asks for, when it comes, and when it is aborted."""
    prefix = draw(st.integers(0, 110))
    own = draw(st.integers(1, 24))
    base = _bases[draw(st.integers(0, len(_bases) - 1))]
    suffix = np.random.default_rng(draw(st.integers(0, 5))).integers(5, VOCABULARY, own).tolist()
    return {
        "prompt": base[:prefix] + suffix,
        "max_tokens": draw(st.integers(1, 24)),
        "capture": draw(_captures),
        "steering": draw(_steering),
        "gate": draw(st.one_of(st.none(), _gates)),
        "arrival": draw(st.integers(0, ARRIVAL_MAX)),
        "abort": draw(st.one_of(st.none(), st.none(), st.none(), st.integers(1, 30))),
    }


scenarios = st.lists(requests(), min_size=6, max_size=12)


def vector(seed, site):
    """Return the steering vector that a scenario's number stands for at a site."""
    values = np.random.default_rng(100 * seed + site.layer).normal(size=WIDTH)
    return (values * 3 / np.linalg.norm(values)).astype(np.float32)


def fields_of(request):
    """Return the fields of a scenario's steering; its gate gates what lies at layers after the gate's."""
    fields, gate = {}, request.get("gate")
    for site, seed, (kind, tier, given) in request["steering"]:
        how = _patched(request, given) if kind == "patches" else given
        added = {"vectors": {"scale": how}, "clamps": how, "patches": {"positions": how}}[kind]
        value = {"vector": vector(seed, site), **added}
        if gate is not None and site.layer > gate["site"].layer and _can_act(gate, kind, tier):
            value["gate"] = "g"
            asked = {name: gate[name] for name in ("score", "threshold", "sharpness", "latch", "positions")}
            probe = {
                "hook": gate["site"].hook,
                "layer": gate["site"].layer,
                "vector": vector(gate["seed"], gate["site"]),
            }
            fields["steering_gates"] = {"g": {**asked, **probe}}
        fields.setdefault(f"{tier}steering_{kind}", {}).setdefault(site.hook, {})[site.layer] = value
    return fields


def _can_act(gate, kind, tier):
    """Return whether a gate has scores where an operation acts; capflow refuses the others."""
    if gate["positions"] == "all":
        return True
    if gate["positions"] == "generated":
        return kind != "patches" and (tier == "decode_" or (gate["latch"] and not tier))
    return kind != "patches" and (tier == "prefill_" or gate["latch"])


def _patched(request, given):
    """Return patched positions; those after the prompt's end or after the last computed position wrap."""
    length, generated = len(request["prompt"]), request["max_tokens"] - 1
    positions = {}
    for number in given:
        if number >= PATCHED_GENERATED and generated:
            position = length + (number - PATCHED_GENERATED) % generated
        else:
            position = number if number < length else number % length
        positions[position if position >= length else position % length] = position
    return list(positions.values())


# --- the engine ---


class Live:
    """An engine with two consumers: files of what requests ask for, and scores of everyone's last prompt token.

    ahead: how many steps are scheduled before the output of one is processed; above 0, async scheduling is on.
    arguments: more arguments of the engine.
    work: the work of its scheduler, as `watch` counts it.
    proved, rows: the number of correct requests and rows.
    seen: the events that happened to them.
    scores: the expected scores of the second consumer.
    """

    def __init__(self, model, directory, *, ahead=0, **arguments):
        self.ahead, self.arguments = ahead, arguments
        self.work = None
        self.reference = OracleReference(model)
        self.root, self.database = directory / "rows", directory / "scores.duckdb"
        self.probe = Probe.make(PROBED, vector(9, PROBED))
        self.probe.save(directory / "probe.safetensors")
        self.options = [
            f"filesystem:root={self.root},capture=requests",
            f"duckdb:path={self.database},probes={directory / 'probe.safetensors'},positions=last_prompt",
        ]
        self.model = model
        self.wait_s = 60.0
        self.scenario = itertools.count()
        self.proved = self.rows = 0
        self.seen = dict.fromkeys(
            ("preempted", "cached", "aborted", "chunked", "vectors", "clamps", "patches", "gates", "flips"),
            0,
        )
        # The requests whose hard gates scored at their threshold, so that rounding decides.
        self.undecided = 0
        self.scores = {}

    @contextlib.contextmanager
    def start(self):
        """Run the engine for as long as a block runs."""
        arguments = {"block_size": 32, "num_gpu_blocks_override": 14, "max_model_len": 192, **self.arguments}
        arguments |= {"sites": ["*:*"], "max_num_batched_tokens": 48, "max_num_seqs": 6}
        with contextlib.ExitStack() as stack:
            deepen = stack.enter_context(scheduled_ahead(self.ahead)) if self.ahead else None
            llm = stack.enter_context(engine(self.model, consumers=self.options, **arguments))
            if deepen is not None:
                deepen(llm)
            self.work = watch(llm)
            yield llm

    def run(self, llm, scenario):
        """Run a scenario; return the token ids of each answer, by request id."""
        number = next(self.scenario)
        core = llm.llm_engine
        scheduler = core.engine_core.engine_core.scheduler
        waiting = {f"s{number}-{n}": request for n, request in enumerate(scenario)}
        running, answers = {}, {}
        for step in itertools.count():
            for name in [name for name, request in waiting.items() if request["arrival"] <= step]:
                request = waiting.pop(name)
                running[name] = step
                core.add_request(name, {"prompt_token_ids": request["prompt"]}, self._params(name, request))
            for name in [n for n, begun in running.items() if _is_due(scenario[_number(n)]["abort"], begun, step)]:
                core.abort_request([name])
                del running[name]
                self.seen["aborted"] += 1
            if not running and not waiting:
                break
            for output in core.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    running.pop(output.request_id, None)
                    self.seen["cached"] += bool(output.num_cached_tokens)
            self.seen["preempted"] += sum(r.num_preemptions > 0 for r in scheduler.requests.values())
        compat.flush(core)  # the step in which the workers learn what is over
        return number, answers

    def _params(self, name, request):
        steering = fields_of(request)
        for field in steering:
            self.seen[field.rpartition("_")[2]] += 1
        self.seen["chunked"] += len(request["prompt"]) > 48
        return capflow.sampling_params(
            id=name,
            capture=request["capture"],
            **steering,
            max_tokens=request["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
        )

    # --- what is right ---

    def prove(self, llm, scenario):
        """Run a scenario and hold every row of every request against what it must be."""
        number, answers = self.run(llm, scenario)
        names = [f"s{number}-{n}" for n in range(len(scenario))]
        with Client(llm.capflow_settings.hubs[0].address) as client:
            results = client.results(names, wait=True, timeout=self.wait_s)
        data = capflow.open(self.root) if self.root.exists() else {}
        for name, request in zip(names, scenario, strict=True):
            self._check(name, request, answers.get(name, []), data, results[name])
            self.proved += 1

    def _check(self, name, request, answer, data, results):
        tokens = request["prompt"] + answer
        prompt, spec = len(request["prompt"]), request["capture"]
        whole = request["abort"] is None
        assert set(results) == {"filesystem", "duckdb"}, f"{name} has no result"
        assert all(result.status in ("ok", "not_requested") for result in results.values()), (name, results)
        if whole:
            assert len(answer) == request["max_tokens"]
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
        fields = fields_of(request)
        expected, flips, apart = self.reference.run(tokens[: max(computed, prompt)], prompt, fields)
        self.seen["flips"] += flips
        if apart < APART:
            self.undecided += 1
            return
        for site in sites:
            rows = capture[site]
            assert rows.positions.tolist() == promised[site], f"{name} {site}: other positions than were promised"
            assert rows.token_ids.tolist() == [tokens[p] for p in promised[site]], f"{name} {site}: other tokens"
            right = expected[site][promised[site]]
            error = np.linalg.norm(rows.rows - right, axis=-1) / np.linalg.norm(right, axis=-1)
            assert error.max() < BOUND[rows.rows.dtype.name], f"{name} {site}: off by {error.max():.1e}"
            self.rows += len(right)
        if whole:
            scored = {prompt - 1, *promised.get(PROBED, ())}
            self.scores[name] = {p: float(expected[PROBED][p] @ self.probe.weight[0]) for p in scored}

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
            Site(layer, hook): positions
            for hook, layers in spec.hooks.items()
            for layer in (range(LAYERS) if layers == "all" else layers)
        }


def _number(name):
    return int(name.partition("-")[2])


def _is_due(abort, begun, step):
    return abort is not None and step >= begun + abort
