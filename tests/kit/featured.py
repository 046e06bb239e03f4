"""Steering by features of autoencoders, in one batch, compared with the same interventions in Transformers.

`python -m tests.kit.featured MODEL` proves a batch on an engine in this process, as the environment says.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import capflow
from capflow.capture.site import Site
from tests.kit.autoencoders import encoded, gemma_scope, saelens, sparsify, weights
from tests.kit.engines import GREEDY, VOCABULARY, WIDTH, engine, prompts
from tests.kit.steered import LOGITS_MAX, RAW, SteeredReference, entries, logits, vector

SITES = {
    "jump": (Site(1, "post_block"), Site(1, "post_block")),
    "relu": (Site(2, "mlp_out"), Site(2, "mlp_out")),
    "topk": (Site(3, "pre_attn"), Site(3, "pre_attn")),
    "trans": (Site(1, "mlp_in"), Site(1, "mlp_out")),
}
"""The sites that the autoencoders read and reconstruct."""


def tensors_of(name):
    """Return the weights of an autoencoder; about half of its features are active at a token."""
    made = weights(jumps=name == "jump", width=WIDTH, count=48, seed=list(SITES).index(name))
    made["W_enc"] /= 4
    made["W_dec"] /= 6
    return made | ({"threshold": np.linspace(0, 0.6, 48).astype(np.float32)} if name == "jump" else {})


def saved(root):
    """Write the autoencoders; return them as the option `saes` takes them."""
    jump = gemma_scope(root / "gemma-scope-tiny-res" / "layer_1" / "width_48", tensors_of("jump"))
    relu = saelens(root / "relu", tensors_of("relu"), hook="blocks.2.hook_mlp_out")
    topk = sparsify(root / "layers.9", tensors_of("topk"))
    hooks = {"hook": "blocks.1.ln2.hook_normalized", "hook_out": "blocks.1.hook_mlp_out"}
    trans = saelens(root / "trans", tensors_of("trans"), "transcoder", **hooks)
    return [f"jump={jump}", str(relu), f"topk={topk}@pre_attn:3", f"{trans}@mlp_in:1/mlp_out:1"]


def given(sae, **features):
    """Return a field; names of features are `f3` for 3."""
    return {"sae": sae, "features": {int(name[1:]): how for name, how in features.items()}}


def cases():
    """Return what the requests of the batch ask for, by name."""
    some = {f"f{n}": {"set": 0} for n in range(12)}
    return {
        "plain": {},
        "add": {"steering_features": given("jump", f3=4.0, f5={"add": -2.0})},
        "add prefill": {"prefill_steering_features": given("relu", f0=3.0)},
        "add decode": {"decode_steering_features": given("jump", f3=4.0)},
        "add by a transcoder": {"steering_features": given("trans", f7=5.0)},
        "add by a TopK": {"steering_features": [given("topk", f7=5.0)]},
        "set one": {"steering_features": given("jump", f3={"set": 5.0})},
        "set to its value below": {"steering_features": given("jump", f3={"set": -1.5})},
        "ablate": {"steering_features": given("jump", **some)},
        "ablate decode": {"decode_steering_features": given("relu", **some)},
        "half": {"steering_features": given("relu", f3={"set": 6.0, "strength": 0.5})},
        "tiers": {
            "steering_features": given("jump", f1={"set": 3.0}, f2=2.0),
            "prefill_steering_features": [given("jump", f3={"set": 4.0}), given("relu", f1={"set": 1.0})],
            "decode_steering_features": given("jump", f3={"set": -2.0}),
        },
        "among others": {
            "steering_vectors": {"post_block": {1: vector(1), 2: vector(2)}},
            "steering_features": given("jump", f1={"set": 3.0}, f8=2.0, f9={"set": 0}),
            "steering_clamps": {"post_block": {1: {"vector": vector(3), "min": -0.1, "max": 0.2}}},
        },
        "gated": {
            "steering_gates": {"g": {"layer": 0, "hook": "post_block", "vector": vector(4), "threshold": 0.1}},
            "steering_features": {**given("jump", f1={"set": 9.0}, f2={"add": 3.0, "gate": "g"}), "gate": "g"},
        },
    }


class FeatureReference(SteeredReference):
    """Transformers with features added and set by hand, in float64."""

    def logits(self, tokens, prompt_length, fields, **more):
        """Return the logits after each token; the fields are those of one request, without modules."""
        behind = np.arange(len(tokens)) >= prompt_length
        tiers = {"": np.ones_like(behind), "prefill_": ~behind, "decode_": behind}
        opened = {"": np.ones(len(tokens))}

        def steer(site, value):
            x = value[0].double().numpy()
            for name, gate in fields.get("steering_gates", {}).items():
                if Site(gate["layer"], gate["hook"]) == site:
                    opened[name] = (x @ gate["vector"].astype(np.float64) >= gate["threshold"]).astype(float)
                    self.flips = opened[name].mean()
            for added in entries(fields, "steering_vectors", site):
                x += added
            uses = list(_features(fields, tiers, site))
            for tensors, number, how, on, gate in uses:
                if "set" not in how:
                    x += np.outer(on * opened[gate] * how["add"], tensors["W_dec"][number].astype(np.float64))
            before = x.copy()
            for tensors, number, how, on, gate in uses:
                if "set" in how:
                    active = encoded(tensors, before, centred="threshold" not in tensors)[:, number]
                    factor = on * opened[gate] * how.get("strength", 1.0) * (how["set"] - active)
                    x += np.outer(factor, tensors["W_dec"][number].astype(np.float64))
            for clamp in entries(fields, "steering_clamps", site):
                direction = clamp["vector"].astype(np.float64) / np.linalg.norm(clamp["vector"].astype(np.float64))
                along = x @ direction
                x += np.outer(np.clip(along, clamp["min"], clamp["max"]) - along, direction)
            value[0] = torch.from_numpy(x)

        return self._forward(tokens, steer)


def _features(fields, tiers, site):
    """Yield the features of a request at a site: weights, number, what is done, where it holds, and the gate."""
    for tier, on in tiers.items():
        field = fields.get(f"{tier}steering_features", [])
        for entry in field if isinstance(field, list) else [field]:
            if SITES[entry["sae"]][1] == site:
                for number, how in entry["features"].items():
                    done = how if isinstance(how, dict) else {"add": how}
                    yield tensors_of(entry["sae"]), number, done, on, done.get("gate", entry.get("gate", ""))


LENGTHS = (5, 17, 70, 9, 33, 3)


def prove(llm, reference, max_tokens=5):
    """Run all cases in one batch and compare the logits of generated tokens with the reference."""
    asked = cases()
    batch = prompts([LENGTHS[n % len(LENGTHS)] for n in range(len(asked))], seed=3)
    params = [
        capflow.sampling_params(**fields, max_tokens=max_tokens, logprobs=VOCABULARY, **GREEDY)
        for fields in asked.values()
    ]
    outputs = llm.generate(batch, params, use_tqdm=False)
    silent = set()
    for prompt, output, (name, fields) in zip(batch, outputs, asked.items(), strict=True):
        expected = right(reference, output, fields, name)
        unsteered = reference.logits(prompt["prompt_token_ids"], len(prompt["prompt_token_ids"]), {})[-1]
        if np.abs(expected[0] - unsteered).max() < LOGITS_MAX:
            silent.add(name)
    assert silent == {"plain", "add decode", "ablate decode"}
    assert 0.1 < reference.flips < 0.9
    return outputs


def right(reference, output, fields, name=""):
    """Hold an output's logits against the reference; return those that are right."""
    prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
    expected = reference.logits([*prompt, *answer[:-1]], len(prompt), fields)[len(prompt) - 1 :]
    error = np.abs(logits(output) - expected).max()
    assert error < LOGITS_MAX, f"{name}: logits are off by {error:.1e}"
    return expected


def main(model):
    """Prove a batch on an engine that has nothing compiled."""
    root = Path(tempfile.mkdtemp())
    with engine(model, sites=["*:*"], max_num_seqs=16, saes=saved(root), **RAW) as llm:
        prove(llm, FeatureReference(model))
    shutil.rmtree(root)
    print("proved", len(cases()))


if __name__ == "__main__":
    main(sys.argv[1])
