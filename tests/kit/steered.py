"""Steering of every kind at once, in one batch, compared with the same interventions in Transformers.

`python -m tests.kit.steered MODEL` proves a batch on an engine in this process, as the environment says;
`test_steering_engine` runs it for the V2 model runner.
"""

import contextlib
import functools
import sys

import numpy as np
import torch

import capflow
from capflow.capture.site import DIVIDED_HOOKS, SHAPED_HOOKS, Site
from capflow.steering.request import STEERING_FIELDS
from tests.kit.engines import GREEDY, LAYERS, VOCABULARY, Reference, engine, prompts
from tests.kit.entries import LLAMA_HOOKS, clamp, patch, shape_of, unit_of, width_of

LOGITS_MAX = 1e-4
RAW = {"logprobs_mode": "raw_logits", "max_logprobs": VOCABULARY}
"""What an engine must be given so that its logits can be compared."""


def vector(seed, norm=3.0, hook="post_block"):
    """Return a vector as wide as a hook's rows."""
    values = np.random.default_rng(seed).standard_normal(width_of(hook)).astype(np.float32)
    return norm * values / np.linalg.norm(values)


def cases(ranks=1):
    """Return what the requests of the batch ask for, by name: each hook, each tier, each operation, and some of all.

    Patches are in the prompt and after it; an amount below 1 shows that one comes before what its phase adds there.

    ranks: how many tensor-parallel ranks divide rows. A direction then has numbers of one rank alone.
    """
    asked = {"plain": {}}
    for hook in LLAMA_HOOKS:
        kept = _CASES_SHAPED if hook in SHAPED_HOOKS else _CASES
        start = _length(len(asked) + kept.index("patch"))
        at_hook = functools.partial(vector, hook=hook)
        # `final` is a site of the last layer alone.
        one, two, three = (LAYERS - 1 if hook == "final" else n for n in (1, 2, 3))
        every, some = ({one}, {one}) if hook == "final" else (range(LAYERS), (0, 2))
        # A change of `final` reaches no later token.
        at = -1 if hook == "final" else -2
        made = {
            "base": {"steering_vectors": {hook: {one: at_hook(1)}}},
            "prefill": {"prefill_steering_vectors": {hook: {two: {"vector": at_hook(2), "scale": 2.0}}}},
            "decode": {"decode_steering_vectors": {hook: {n: at_hook(n) for n in every}}},
            "bounds": {"steering_clamps": {hook: {one: {"vector": at_hook(3), "min": -0.1, "max": 0.2}}}},
            "ablation": {"prefill_steering_clamps": {hook: {n: {"vector": at_hook(4), "value": 0} for n in some}}},
            "half": {"decode_steering_clamps": {hook: {three: {"vector": at_hook(5), "value": 1.5, "strength": 0.5}}}},
            "patch": {
                "steering_patches": {
                    hook: {
                        one: [
                            {"positions": [2, -1], "vector": at_hook(6)},
                            {"positions": [start, start + 2], "vector": [at_hook(20), at_hook(21)]},
                        ]
                    }
                }
            },
            "blend": {"steering_patches": {hook: {two: {"positions": [at], "vector": at_hook(7), "amount": 0.25}}}},
        }
        asked |= {f"{hook} {case}": made[case] for case in kept}
    # Directions that are not orthogonal, so that the order of clamps shows.
    several = [
        {"vector": vector(8), "value": 1.5},
        {"vector": vector(8) + vector(9), "max": -1.0},
        {"vector": vector(10), "max": 0.1},
    ]
    start = _length(len(asked))
    asked["all at once"] = {
        "steering_vectors": {"post_block": {0: vector(11), 1: vector(12)}, "post_attn": {1: vector(13)}},
        "prefill_steering_vectors": {"post_block": {1: {"vector": vector(14), "scale": -1.5}}},
        "decode_steering_vectors": {"post_block": {1: vector(15)}, "mlp_out": {2: vector(16)}},
        "steering_clamps": {"post_block": {1: several}},
        "decode_steering_clamps": {"post_block": {1: {"vector": vector(8) + vector(17), "value": 0}}},
        "steering_patches": {
            "post_block": {
                1: [
                    {"positions": [0, 1], "vector": [vector(18), vector(19)]},
                    {"positions": [start + 1], "vector": vector(22), "amount": 0.5},
                ]
            }
        },
    }
    asked["relative"] = {
        "steering_vectors": {
            "post_block": {1: {"vector": vector(23, 40.0), "scale": 0.4, "relative": True}, 2: vector(24)}
        },
        "prefill_steering_vectors": {
            "post_block": {1: vector(25)},
            "post_attn": {2: {"vector": vector(26), "scale": -0.3, "relative": True}},
        },
        "decode_steering_vectors": {
            "post_block": {1: {"vector": vector(27), "scale": 0.2, "relative": True}},
            "mlp_out": {0: {"vector": vector(28), "scale": 0.5, "relative": True}},
        },
        "steering_clamps": {"post_block": {1: several[:1]}},
        "steering_patches": {"post_block": {1: {"positions": [-1], "vector": vector(29)}}},
    }
    for hook in (*SHAPED_HOOKS[:-1], "post_block"):
        asked[f"{hook} entries"] = _of_entries(hook, _length(len(asked)), ranks)
    asked["scale 0"] = {"steering_vectors": {"post_block": {1: {"vector": vector(1), "scale": 0.0}}}}
    return asked


def _of_entries(hook, start, ranks):
    """Return what acts on entries of a hook's rows: alone, among others, and in each tier.

    start: the first generated position.
    """

    def along(seed):
        rows = vector(seed, hook=hook)
        divided = hook in DIVIDED_HOOKS and hook not in ("k", "v")  # of which each rank has the one head
        rows[: (ranks - 1) * rows.size // ranks * divided] = 0
        return rows

    last, unit = shape_of(hook)[0] - 1, unit_of(hook)
    at_hook = functools.partial(vector, hook=hook)
    rows = at_hook(30)[: 2 * unit].tolist()
    bound = {"index": [last, 0], "min": -0.05, "max": 0.1} if unit == 1 else {"index": last, "value": rows[:unit]}
    both = sorted({last, 0}, reverse=True)
    return {
        "steering_vectors": {hook: {1: at_hook(31, 1.0)}},
        "steering_clamps": {
            hook: {
                1: [
                    {"vector": along(32), "value": 0.5},
                    bound,
                    {"index": both, "value": rows[: unit * len(both)], "strength": 0.5},
                    {"vector": along(33), "min": -0.1},
                ],
                2: {"index": 0, "value": 0.125},
            }
        },
        "decode_steering_clamps": {hook: {1: {"index": last, "value": -0.25}}},
        "steering_patches": {
            hook: {
                1: [
                    {"positions": [0, -1], "vector": [rows[:unit], rows[-unit:]], "index": last},
                    {"positions": [start], "vector": rows[:unit], "index": 0, "amount": 0.5},
                ]
            }
        },
    }


def entries(fields, name, site):
    """Return what a field says of a site, as a list."""
    entry = fields.get(name, {}).get(site.hook, {}).get(site.layer)
    if isinstance(entry, list) and isinstance(entry[0], dict):
        return entry
    return [] if entry is None else [entry]


def named(fields, modules):
    """Return the fields of the modules that fields name, each with its scale."""
    names = fields.get("steering_name", ())
    names = [names] if isinstance(names, str) else names
    scales = names if isinstance(names, dict) else dict.fromkeys(names, fields.get("steering_scale", 1.0))
    return [(modules[name], scale) for name, scale in scales.items()]


class SteeredReference(Reference):
    """Transformers, with all that fields ask for done by hand, in float64.

    What that is stands here once more, from the documentation: none of it is worked out by capflow.
    """

    def logits(self, tokens, prompt_length, fields, **more):
        """Return the logits after each token, `[tokens, vocabulary]`; the arguments are those of `run`."""
        return self.run(tokens, prompt_length, fields, **more)[0]

    def run(self, tokens, prompt_length, fields, *, modules=None, everywhere=None, generated=None):
        """Return the logits, and what each site holds before anything steers it there, `{site: [tokens, hidden]}`.

        fields: the request's.
        modules: the fields of modules, by name.
        everywhere: the fields of the global state.
        generated: the generated positions; by default those from the prompt's end on.
        """
        parts = [(everywhere or {}, 1.0), *named(fields, modules or {}), (fields, 1.0)]
        behind = np.arange(len(tokens)) >= prompt_length
        if generated is not None:
            behind = np.isin(np.arange(len(tokens)), list(generated))
        seen = {}

        def steer(site, value):
            x = value[0].double().numpy()
            seen[site] = value[0].numpy().copy()
            self._patch(x, site, prompt_length, fields)
            for phase, at in (("prefill_", ~behind), ("decode_", behind)):
                x[at] = self._phase(x[at], site, ("", phase), parts)
            value[0] = torch.from_numpy(x)

        return self._forward(tokens, steer), seen

    def _forward(self, tokens, steer):
        """Return the logits after each token; `steer` is called with each site and the stream there, to change it."""
        hooks = []
        for n, layer in enumerate(self.layers):
            norm, mlp = layer.post_attention_layernorm, layer.mlp
            hooks += [
                layer.input_layernorm.register_forward_hook(lambda m, a, o, n=n: steer(Site(n, "attn_in"), o)),
                layer.self_attn.register_forward_hook(lambda m, a, o, n=n: steer(Site(n, "attn_out"), o[0])),
                layer.register_forward_pre_hook(lambda m, a, n=n: steer(Site(n, "pre_attn"), a[0])),
                norm.register_forward_pre_hook(lambda m, a, n=n: steer(Site(n, "post_attn"), a[0])),
                norm.register_forward_hook(lambda m, a, o, n=n: steer(Site(n, "mlp_in"), o)),
                mlp.register_forward_hook(lambda m, a, o, n=n: steer(Site(n, "mlp_out"), o)),
                layer.register_forward_hook(
                    lambda m, a, o, n=n: steer(Site(n, "post_block"), o[0] if isinstance(o, tuple) else o)
                ),
            ]
            hooks.append(
                layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a, n=n: steer(Site(n, "heads"), a[0]))
            )
            down = getattr(mlp, "down_proj", None)
            if down is not None:
                hooks.append(down.register_forward_pre_hook(lambda m, a, n=n: steer(Site(n, "neurons"), a[0])))
        last = Site(len(self.layers) - 1, "final")
        hooks.append(self.model.model.norm.register_forward_hook(lambda m, a, o: steer(last, o)))
        try:
            with torch.no_grad(), self._attending(steer):
                return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _attending(self, steer):
        """Let `steer` change the queries, keys and values that attention is computed of, while a block runs."""
        module = sys.modules[type(self.layers[0].self_attn).__module__]
        attend = module.eager_attention_forward

        def steered(attention, *states_and_mask, **more):
            states, (mask, *rest) = states_and_mask[:3], states_and_mask[3:]
            changed = []
            for hook, state in zip("qkv", states, strict=True):  # [1, heads, tokens, head_dim]
                rows = state.transpose(1, 2).flatten(2)
                steer(Site(attention.layer_idx, hook), rows)
                changed.append(rows.view(1, -1, state.shape[1], state.shape[3]).transpose(1, 2))
            return attend(attention, *changed, mask, *rest, **more)

        module.eager_attention_forward = steered
        try:
            yield
        finally:
            module.eager_attention_forward = attend

    @staticmethod
    def _patch(x, site, prompt_length, fields):
        for given in entries(fields, "steering_patches", site):
            patch(x, given, site.hook, prompt_length)

    @staticmethod
    def _phase(x, site, tiers, parts):
        """Return `[n, hidden]` with all vectors added, then all clamps applied; in each part base precedes phase."""
        x = x.copy()
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        for fields, scale in parts:
            for added in (each for tier in tiers for each in entries(fields, f"{tier}steering_vectors", site)):
                given = added if isinstance(added, dict) else {"vector": added}
                change = np.asarray(given["vector"], np.float64)
                if given.get("relative"):
                    change = norms * change / np.linalg.norm(change)
                x += scale * given.get("scale", 1.0) * change
        for fields, scale in parts:
            for given in (each for tier in tiers for each in entries(fields, f"{tier}steering_clamps", site)):
                clamp(x, given, site.hook, scale)
        return x


_LENGTHS = (5, 17, 70, 9, 33, 3)
_CASES = ("base", "prefill", "decode", "bounds", "ablation", "half", "patch", "blend")
_CASES_SHAPED = ("prefill", "decode", "patch")
"""The cases of a hook; those of one whose rows have a shape of their own, whose entries are acted on, too."""


def _length(case):
    return _LENGTHS[case % len(_LENGTHS)]


def lengths():
    """Return the length of each prompt: short ones, and some of several chunks."""
    return [_length(n) for n in range(len(cases()))]


def prove(llm, reference, max_tokens=5, ranks=1):
    """Run all cases in one batch, compare the logits of generated tokens with the reference, and return the answers."""
    asked = cases(ranks)
    assert set().union(*asked.values()) <= set(STEERING_FIELDS)
    given = prompts(lengths(), seed=3)
    params = [
        capflow.sampling_params(**fields, max_tokens=max_tokens, logprobs=VOCABULARY, **GREEDY)
        for fields in asked.values()
    ]
    outputs = llm.generate(given, params, use_tqdm=False)
    plain = {}
    for number, (name, fields) in enumerate(asked.items()):
        prompt = given[number]["prompt_token_ids"]
        answer = list(outputs[number].outputs[0].token_ids)
        expected = reference.logits([*prompt, *answer[:-1]], len(prompt), fields)[len(prompt) - 1 :]
        actual = logits(outputs[number])
        error = np.abs(actual - expected).max()
        assert error < LOGITS_MAX, f"{name}: logits are off by {error:.1e}"
        unsteered = reference.logits(prompt, len(prompt), {})[-1]
        plain[name] = np.abs(expected[0] - unsteered).max()
    # What steers the prompt changes the first token's logits, and what steers only positions after it does not.
    # All keys moved by one vector move all scores of a query by one number, which attention takes no notice of.
    silent = {"plain", "scale 0", "k prefill", *(name for name in plain if "decode" in name or "half" in name)}
    silenced = {name for name, change in plain.items() if change < LOGITS_MAX}
    assert silenced == silent, f"{sorted(silenced ^ silent)}"
    return outputs


def logits(output):
    """Return the logits of each generated token, `[tokens, vocabulary]`."""
    return np.array([[step[n].logprob for n in range(VOCABULARY)] for step in output.outputs[0].logprobs])


def main(model):
    """Prove a batch on an engine that has nothing compiled."""
    with engine(model, sites=["*:*"], max_num_seqs=16, **RAW) as llm:
        prove(llm, SteeredReference(model))
    print("proved", len(cases()))


if __name__ == "__main__":
    main(sys.argv[1])
