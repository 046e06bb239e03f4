"""Scenarios of the oracle: what requests ask for, when they come, what acts on them, and when they are aborted."""

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from capflow.capture.site import SHAPED_HOOKS, Site
from tests.kit.engines import LAYERS, VOCABULARY
from tests.kit.entries import LLAMA_HOOKS, unit_of
from tests.kit.oracle_actions import CONTROLLERS, SITES, drawn, entries_clamp, vector
from tests.kit.oracle_features import field_of
from tests.kit.selectors_model import specs

LENGTH_MAX = 160
ARRIVAL_MAX = 30
PATCHED_GENERATED = 13
"""In a scenario's patches, this number stands for the first generated position; smaller ones are in the prompt."""

_bases = [np.random.default_rng(n).integers(5, VOCABULARY, LENGTH_MAX).tolist() for n in range(3)]
_layers = st.one_of(st.just("all"), st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS, unique=True))
_last = st.sampled_from(["all", [-1], [LAYERS - 1]])
_captures = st.one_of(st.none(), specs({hook: _last if hook == "final" else _layers for hook in LLAMA_HOOKS}))
_TIERS = ("", "prefill_", "decode_")
_clamps = ({"value": 0}, {"min": -0.2, "max": 0.5}, {"entries": 1.0}, {"entries": 0.5}, {"range": 0.05})
_operations = st.one_of(
    st.tuples(st.just("vectors"), st.sampled_from(_TIERS), st.sampled_from((1.0, -0.5))),
    st.tuples(st.just("clamps"), st.sampled_from(_TIERS), st.sampled_from(_clamps)),
    st.tuples(
        st.just("features"),
        st.sampled_from(_TIERS),
        st.sampled_from((2.0, {"set": 0}, {"set": 1.5}, {"set": -1.0, "strength": 0.5})),
    ),
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
        "threshold": st.sampled_from((-0.05, 0.0, 0.05, 0.3)),
        "sharpness": st.sampled_from((None, None, 2.0)),
        "latch": st.booleans(),
        "positions": st.sampled_from(("all", "prompt", "generated", "last_prompt")),
        "abort": st.sampled_from(("", "", "", "stop", "abort")),
    }
)


@st.composite
def requests(draw):
    """One request: its tokens, what it asks for, when it comes, what acts on it, and when it is aborted."""
    prefix = draw(st.integers(0, 110))
    own = draw(st.integers(1, 24))
    base = _bases[draw(st.integers(0, len(_bases) - 1))]
    suffix = np.random.default_rng(draw(st.integers(0, 5))).integers(5, VOCABULARY, own).tolist()
    steering, actions = draw(_steering), draw(drawn)
    if any(action["kind"] == "set_gate" for _, action in actions):
        gate = draw(_gates)
        steering = [*steering, (Site(LAYERS - 1, "post_block"), 1, ("vectors", _tier_of(gate), 1.0))]
    else:
        gate = draw(st.one_of(st.none(), _gates))
    return {
        "prompt": base[:prefix] + suffix,
        "max_tokens": draw(st.integers(1, 40)),
        "capture": draw(_captures),
        "steering": steering,
        "gate": gate,
        "controller": draw(st.sampled_from(("", "", *CONTROLLERS))),
        "actions": actions,
        "arrival": draw(st.integers(0, ARRIVAL_MAX)),
        "abort": draw(st.one_of(st.none(), st.none(), st.none(), st.integers(1, 30))),
    }


scenarios = st.lists(requests(), min_size=6, max_size=12)


def moved(scenario, sites, to):
    """Return a scenario that steers and scores another hook of the same layer in place of these sites."""

    def replaced(value):
        if isinstance(value, Site):
            return value._replace(hook=to) if value in sites else value
        if isinstance(value, dict):
            return {name: replaced(part) for name, part in value.items()}
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    requests = replaced(scenario)
    for request in requests:  # no two that do the same at one site
        request["steering"] = list({(one[0], one[2][:2]): one for one in request["steering"]}.values())
    return requests


def draw_scenarios(prove, count, number):
    """Call `prove` with `count` scenarios, those of the seed `number`."""

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(scenarios)
    def proved(scenario):
        prove(scenario)

    proved()


def fields_of(request):
    """Return the fields of a scenario's steering; its gate gates what lies at layers after the gate's."""
    fields, gate = {}, request.get("gate")
    for site, seed, operation in request["steering"]:
        kind, tier, given = _at(site, *operation)
        gated = gate is not None and site.layer > gate["site"].layer and _can_act(gate, kind, tier)
        if gated:
            fields["steering_gates"] = {"g": _gate(gate)}
        if kind == "features":
            asked = fields.setdefault(f"{tier}steering_features", [])
            asked.append(field_of(site, seed, tier, given, "g" if gated else ""))
            continue
        value = _operation(request, site, seed, kind, given)
        if gated:
            value["gate"] = "g"
        fields.setdefault(f"{tier}steering_{kind}", {}).setdefault(site.hook, {})[site.layer] = value
    if gate is not None and gate.get("abort"):
        fields["steering_gates"] = {"g": _gate(gate)}
    return fields


def _at(site, kind, tier, given):
    """Return an operation as it can be done at a site: the autoencoders are of the stream."""
    shaped = kind == "features" and site.hook in SHAPED_HOOKS
    return ("vectors", tier, 1.0) if shaped else (kind, tier, given)


def _operation(request, site, seed, kind, given):
    """Return the value of a field. Patches of odd seeds are of the first entry where rows have a shape of their own."""
    added, unit = vector(seed, site), unit_of(site.hook)
    if kind == "vectors":
        return {"vector": added, "scale": given}
    if kind == "patches":
        positions = _patched(request, given)
        if site.hook in SHAPED_HOOKS and seed % 2:
            return {"positions": positions, "vector": added[:unit], "index": 0}
        return {"positions": positions, "vector": added}
    if "range" in given and unit == 1:
        return {"index": [2, 0, 1], "min": -given["range"], "max": given["range"]}
    if "entries" in given or "range" in given:
        return entries_clamp(site, seed, given.get("entries", 1.0))
    return {"vector": added, **given}


def _gate(gate):
    asked = {name: gate[name] for name in ("score", "threshold", "sharpness", "latch", "positions")}
    if gate.get("abort"):
        asked["abort"] = gate["abort"]
    site = gate["site"]
    return {**asked, "hook": site.hook, "layer": site.layer, "vector": vector(gate["seed"], site)}


def _tier_of(gate):
    """Return a tier in which a gate can act on a vector."""
    if gate["latch"] or gate["positions"] == "all":
        return ""
    return "decode_" if gate["positions"] == "generated" else "prefill_"


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
