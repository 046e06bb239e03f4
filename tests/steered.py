"""Steering of every kind at once, in one batch, and what Transformers computes with the same interventions.

`python tests/steered.py MODEL` proves a batch on an engine in this process, as the environment says: `test_steering_engine` runs it for
the V2 model runner.
"""

import sys

import numpy as np
import torch
from engines import GREEDY, LAYERS, VOCABULARY, WIDTH, Reference, engine, prompts

import capflow
from capflow.program import ADD, PATCH, program_of
from capflow.site import HOOKS, Site
from capflow.steering import STEERING_FIELDS, Steering

LOGITS_MAX = 1e-4
RAW = {"logprobs_mode": "raw_logits", "max_logprobs": VOCABULARY}
"""What an engine must be given so that its logits can be compared."""


def vector(seed, norm=3.0):
    """Return a vector of the model's width."""
    values = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return norm * values / np.linalg.norm(values)


def cases():
    """Return what the requests of the batch ask for, by name: each hook, each tier, each operation, and some of all."""
    asked = {"plain": {}}
    for hook in HOOKS:
        asked |= {
            f"{hook} base": {"steering_vectors": {hook: {1: vector(1)}}},
            f"{hook} prefill": {"prefill_steering_vectors": {hook: {2: {"vector": vector(2), "scale": 2.0}}}},
            f"{hook} decode": {"decode_steering_vectors": {hook: {n: vector(n) for n in range(LAYERS)}}},
            f"{hook} bounds": {"steering_clamps": {hook: {1: {"vector": vector(3), "min": -0.1, "max": 0.2}}}},
            f"{hook} ablation": {
                "prefill_steering_clamps": {hook: {n: {"vector": vector(4), "value": 0} for n in (0, 2)}}
            },
            f"{hook} half": {
                "decode_steering_clamps": {hook: {3: {"vector": vector(5), "value": 1.5, "strength": 0.5}}}
            },
            f"{hook} patch": {"steering_patches": {hook: {1: {"positions": [2, -1], "vector": vector(6)}}}},
            f"{hook} blend": {
                "steering_patches": {hook: {2: {"positions": [-2], "vector": vector(7), "amount": 0.25}}}
            },
        }
    several = [{"vector": vector(n), "max": 0.1 * n} for n in range(8, 11)]
    asked["all at once"] = {
        "steering_vectors": {"post_block": {0: vector(11), 1: vector(12)}, "post_attn": {1: vector(13)}},
        "prefill_steering_vectors": {"post_block": {1: {"vector": vector(14), "scale": -1.5}}},
        "decode_steering_vectors": {"post_block": {1: vector(15)}, "mlp_out": {2: vector(16)}},
        "steering_clamps": {"post_block": {1: several}},
        "decode_steering_clamps": {"post_block": {1: {"vector": vector(17), "value": 0}}},
        "steering_patches": {"post_block": {1: {"positions": [0, 1], "vector": [vector(18), vector(19)]}}},
    }
    asked["scale 0"] = {"steering_vectors": {"post_block": {1: {"vector": vector(1), "scale": 0.0}}}}
    return asked


class SteeredReference(Reference):
    """Transformers, with every operation of a program done by hand, in float64 where it computes."""

    def logits(self, tokens, prompt_length, program):
        """Return the logits behind each token, `[tokens, vocabulary]`."""
        return self.run(tokens, prompt_length, program)[0]

    def run(self, tokens, prompt_length, program):
        """Return the logits, and what each site holds before anything steers it there, `{site: [tokens, hidden]}`."""
        operations = [self._operations(program, position, prompt_length) for position in range(len(tokens))]
        rows = torch.from_numpy(program.array().copy()).double() if program is not None else None
        seen = {}

        def steer(site, value):
            seen[site] = value[0].detach().clone().numpy()
            for position, at in enumerate(operations):
                if site not in at:
                    continue
                x = value[0, position].double()
                for kind, number, amount, low, high in at[site]:
                    row = rows[number]
                    if kind == ADD:
                        x = x + amount * row
                    elif kind == PATCH:
                        x = x + amount * (row - x)
                    else:
                        along = float(x @ row)
                        x = x + amount * (min(max(along, low), high) - along) * row
                value[0, position] = x.float()

        hooks = []
        for n, layer in enumerate(self.layers):
            norm, mlp = layer.post_attention_layernorm, layer.mlp
            hooks += [
                layer.register_forward_pre_hook(lambda m, a, n=n: steer(Site(n, "pre_attn"), a[0])),
                norm.register_forward_pre_hook(lambda m, a, n=n: steer(Site(n, "post_attn"), a[0])),
                norm.register_forward_hook(lambda m, a, o, n=n: steer(Site(n, "mlp_in"), o)),
                mlp.register_forward_hook(lambda m, a, o, n=n: steer(Site(n, "mlp_out"), o)),
                layer.register_forward_hook(
                    lambda m, a, o, n=n: steer(Site(n, "post_block"), o[0] if isinstance(o, tuple) else o)
                ),
            ]
        try:
            with torch.no_grad():
                return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy(), seen
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def _operations(program, position, prompt_length):
        found = {}
        if program is None:
            return found
        for written, ops in program.patched:
            if position == (written if written >= 0 else prompt_length + written):
                for layer, hook, each in ops:
                    found.setdefault(Site(layer, hook), []).extend(each)
        for layer, hook, each in program.prefill if position < prompt_length else program.decode:
            found.setdefault(Site(layer, hook), []).extend(each)
        return found


def program(asked):
    """Return the program that some fields come to; None when they come to nothing."""
    return program_of(WIDTH, [Steering.parse(asked)]) if asked else None


def lengths():
    """Return the length of each prompt: short ones, and some of several chunks."""
    return [(5, 17, 70, 9, 33, 3)[n % 6] for n in range(len(cases()))]


def prove(llm, reference, max_tokens=5):
    """Run all cases in one batch; hold the logits of every generated token against the reference. Return the answers."""
    asked = cases()
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
        expected = reference.logits([*prompt, *answer[:-1]], len(prompt), program(fields))[len(prompt) - 1 :]
        found = logits(outputs[number])
        error = np.abs(found - expected).max()
        assert error < LOGITS_MAX, f"{name}: logits are off by {error:.1e}"
        unsteered = reference.logits(prompt, len(prompt), None)[-1]
        plain[name] = np.abs(expected[0] - unsteered).max()
    # What steers the prompt changes the first token's logits, and what steers only behind it does not.
    silent = {"plain", "scale 0", *(name for name in plain if "decode" in name or "half" in name)}
    assert {name for name, change in plain.items() if change < LOGITS_MAX} == silent
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
