"""Steerable models: each operation against plain torch, the specification, and both back ends compared."""

import contextlib
import functools

import numpy as np
import pytest
import torch
import transformers

from capflow.capture.site import HOOKS as ALL_HOOKS
from capflow.capture.site import STREAM_HOOKS as HOOKS
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.feature import SetFeature, parse_features
from capflow.steering.request import Steering, Tier
from capflow_models import (
    AblationSpec,
    LayerSteeringSpec,
    ProjectionCapSpec,
    SteeringSpec,
    TransformersSteerableModel,
)
from capflow_models.model import Sampling
from capflow_models.spec import join
from capflow_models.specfiles import load_spec
from capflow_models.stream import structure_of
from tests.kit.autoencoders import encoded, saelens, weights
from tests.kit.engines import LAYERS, WIDTH, Reference, engine, environment, prompts, save_tiny, save_words

LOGITS_BOUND = 1e-4
PROMPTS = [prompt["prompt_token_ids"] for prompt in prompts((5, 1, 23, 9))]
GREEDY = Sampling(max_new_tokens=10, ignore_eos=True)
A, B, C = (np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32) for seed in range(3))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def tiny(tmp_path_factory, request):
    directory = tmp_path_factory.mktemp(request.param)
    save_words(directory)
    return save_tiny(directory, request.param)


@pytest.fixture(scope="module")
def loaded(tiny):
    return TransformersSteerableModel(tiny, dtype="float32")


@pytest.fixture
def model(loaded):
    loaded.clear_all()
    yield loaded
    loaded.modules.clear_global()
    for name in loaded.modules.names:
        loaded.modules.unregister(name)


@functools.cache
def reference(tiny):
    return Reference(tiny)


def unit(vector):
    return torch.tensor(vector, dtype=torch.float64) / np.linalg.norm(vector.astype(np.float64))


def test_features_are_fields_of_their_tiers_unless_they_are_resolved():
    from capflow_models.vllm_model import _fields

    uses = {
        f"{tier}steering_features": parse_features({"sae": "mood", "features": {7: 2.0, set_one: {"set": 0}}}, name)
        for tier, name, set_one in (("", "base", 8), ("prefill_", "prefill", 9), ("decode_", "decode", 9))
    }
    assert _fields(Steering.parse(uses)) == uses
    row = np.ones(4, np.float32).tobytes()
    tier = Tier(features=(SetFeature(1, "post_block", row, row, 0.0, 0.0, 1.0),))
    with pytest.raises(UsageError, match=r"^decode_steering_features.post_block.1: got a feature that is resolved"):
        _fields(Steering(decode=tier))


def placed(layer, hook):
    """Return the module of a layer that a hook point is at, by Transformers' names, and whether it lies before that."""
    norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    return {
        "pre_attn": (layer, True),
        "attn_in": (layer.input_layernorm, False),
        "attn_out": (
            layer.self_attn if norm is layer.post_attention_layernorm else layer.post_attention_layernorm,
            False,
        ),
        "post_attn": (norm, True),
        "mlp_in": (norm, False),
        "mlp_out": (getattr(layer, "post_feedforward_layernorm", layer.mlp), False),
        "post_block": (layer, False),
    }[hook]


def layer_of(hook, layer):
    """Return the layer of a site of a hook: the last one for `final`, else `layer`."""
    return LAYERS - 1 if hook == "final" else layer


def expected(tiny, token_ids, changes):
    """Return plain torch's `[tokens, vocabulary]` log probabilities, one pass over all tokens.

    changes: `{(layer, hook): function}` of the `[tokens, hidden]` float64 stream there.
    """
    model = reference(tiny).model

    def done(hidden, change):
        hidden[0] = change(hidden[0].double())

    with contextlib.ExitStack() as stack:
        for (layer, hook), change in changes.items():
            final = (model.model.norm, False)
            module, before = final if hook == "final" else placed(model.model.layers[layer], hook)
            if before:
                handle = module.register_forward_pre_hook(lambda _, a, c=change: done(a[0], c))
            else:
                handle = module.register_forward_hook(
                    lambda _, __, out, c=change: done(out[0] if isinstance(out, tuple) else out, c)
                )
            stack.callback(handle.remove)
        with torch.no_grad():
            logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1).numpy()


def check(model, tiny, changes, *, lengths=False, steering=None):
    """Hold the next token's log probabilities, and greedy answers computed with a cache, against plain torch.

    lengths: whether `changes` is a function of the prompt's length.
    """
    got = model.logprobs(PROMPTS, steering=steering)
    answers = model.complete(PROMPTS, GREEDY, steering=steering)
    plain = expected(tiny, PROMPTS[2], {})[-1]
    for prompt, row, answer in zip(PROMPTS, got, answers, strict=True):
        here = changes(len(prompt)) if lengths else changes
        assert np.abs(row - expected(tiny, prompt, here)[-1]).max() < LOGITS_BOUND
        tokens = [*prompt, *answer.token_ids]
        assert answer.token_ids == tuple(expected(tiny, tokens, here)[len(prompt) - 1 : -1].argmax(-1))
    return np.abs(got[2] - plain).max()


def add(vector, scale=1.0):
    return lambda x: x + scale * torch.tensor(vector, dtype=torch.float64)


def bounded(vector, low, high, strength=1.0):
    def change(x):
        projection = x @ unit(vector)
        return x + strength * (projection.clamp(low, high) - projection)[:, None] * unit(vector)

    return change


def test_nothing_set_changes_nothing(model, tiny):
    assert check(model, tiny, {}) == pytest.approx(0.0, abs=LOGITS_BOUND)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_vector_is_added(model, tiny, hook):
    layer = layer_of(hook, 2)
    model.set_layer_vector(layer, A, scale=1.5, hook=hook)
    assert check(model, tiny, {(layer, hook): add(A, 1.5)}) > 0.1


def test_a_vector_is_set_at_the_target_layer_and_taken_away(model):
    with pytest.raises(UsageError, match="set_vector: no target layer; call set_target_layer first"):
        model.set_vector(A)
    try:
        model.set_target_layer(2)
        with pytest.raises(UsageError, match=f"layer: got {LAYERS}"):
            model.set_target_layer(LAYERS)
        model.set_vector(A, 2.0)
        model.set_layer_ablation(2, B)
        model.set_target_layer(1, hook="pre_attn")
        model.set_vector(C)
        ablated = LayerSteeringSpec(ablation=AblationSpec(B))
        two = LayerSteeringSpec(A, 2.0, ablation=AblationSpec(B))
        at = Site(1, "pre_attn")
        assert model.export_steering_spec() == SteeringSpec({2: two, at: LayerSteeringSpec(C)})
        model.set_vector(None)
        assert model.export_steering_spec() == SteeringSpec({2: two})
        model.clear_all_vectors()
        assert model.export_steering_spec() == SteeringSpec({2: ablated})
    finally:
        model._target = None


def by_norm(vector, scale):
    return lambda x: x + scale * x.norm(dim=-1, keepdim=True) * unit(vector)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_relative_vector_is_added_by_the_streams_norm(model, tiny, hook):
    layer = layer_of(hook, 2)
    model.set_layer_vector(layer, A, scale=0.5, relative=True, hook=hook)
    assert check(model, tiny, {(layer, hook): by_norm(A, 0.5)}) > 0.01


def test_relative_vectors_of_a_specification_and_a_call_are_of_the_same_stream(model, tiny, tmp_path):
    model.set_layer_vector(2, A, scale=0.5, relative=True)
    kept = model.export_steering_spec()
    model.save_pretrained(tmp_path)
    model.clear_all()
    model.apply_steering_spec(load_spec(tmp_path)[1])
    assert model.export_steering_spec() == kept
    fields = {"steering_vectors": {"post_block": {2: {"vector": B, "scale": -0.25, "relative": True}}}}
    model.modules.register("longer", Steering.parse({"steering_vectors": {"post_block": {2: C}}}))
    used = Steering.parse(fields | {"steering_name": "longer"})

    def change(x):
        norms = x.norm(dim=-1, keepdim=True)
        return x + norms * (0.5 * unit(A) - 0.25 * unit(B)) + torch.tensor(C, dtype=torch.float64)

    assert check(model, tiny, {(2, "post_block"): change}, steering=used) > 0.01
    away = Steering.parse({"steering_vectors": {"post_block": {2: {"vector": A, "scale": -0.5, "relative": True}}}})
    assert check(model, tiny, {}, steering=away) == pytest.approx(0.0, abs=LOGITS_BOUND)


@pytest.mark.parametrize(
    ("hook", "bounds"),
    [
        *((hook, (0.3, 0.4) if hook == "final" else (-0.1, 0.2)) for hook in HOOKS),
        *((hook, bounds) for hook in ("pre_attn", "post_block") for bounds in ((None, -0.5), (0.5, None), (3.0, 3.0))),
    ],
)
def test_a_projection_is_capped(model, tiny, hook, bounds):
    layer = layer_of(hook, 1)
    model.set_layer_projection_cap(layer, A, *bounds, hook=hook)
    low, high = bounds
    change = bounded(A, -np.inf if low is None else low, np.inf if high is None else high)
    assert check(model, tiny, {(layer, hook): change}) > 0.001


@pytest.mark.parametrize("scale", [0.0, 0.25, -1.0])
def test_a_direction_is_ablated(model, tiny, scale):
    model.set_layer_ablation(1, A, scale=scale)
    assert check(model, tiny, {(1, "post_block"): bounded(A, 0.0, 0.0, 1.0 - scale)}) > 0.001


def test_an_ablation_of_scale_one_changes_nothing(model, tiny):
    model.set_layer_ablation(1, A, scale=1.0)
    assert check(model, tiny, {}) == pytest.approx(0.0, abs=LOGITS_BOUND)


def test_a_layer_adds_then_caps_then_ablates_in_whatever_order_it_was_set(model, tiny):
    model.set_layer_ablation(2, C, scale=0.5)
    model.set_layer_projection_cap(2, B, -0.2, 0.2)
    model.set_layer_vector(2, A)
    model.set_layer_vector(0, B, hook="pre_attn")

    def change(x):
        return bounded(C, 0.0, 0.0, 0.5)(bounded(B, -0.2, 0.2)(add(A)(x)))

    assert check(model, tiny, {(2, "post_block"): change, (0, "pre_attn"): add(B)}) > 0.1


def test_what_a_call_brings_is_added_to_what_was_set_at_its_site(model, tiny):
    model.set_layer_vector(2, A, scale=2.0)
    model.set_layer_ablation(2, C)
    brought = {"steering_vectors": {"post_block": {2: {"vector": B, "scale": -0.5}}}}

    def change(x):
        return bounded(C, 0.0, 0.0)(add(B, -0.5)(add(A, 2.0)(x)))

    assert check(model, tiny, {(2, "post_block"): change}, steering=Steering.parse(brought)) > 0.1


def test_joined_vectors_of_one_tier_and_site_are_one():
    first, second = (
        Steering.parse(
            {
                f"{tier}steering_vectors": {"post_block": {2: {"vector": v, "scale": s}, n: C}}
                for tier in ("", "decode_")
            }
        )
        for n, v, s in ((0, A, 2.0), (3, B, -0.5))
    )
    joined = join(first, None, second)
    for tier in (joined.base, joined.decode):
        held = {vector.site: vector.array(np.float64) for vector in tier.vectors}
        assert len(held) == len(tier.vectors) == 3
        assert np.array_equal(held[2, "post_block"], 2.0 * A.astype(np.float64) - 0.5 * B)
        assert np.array_equal(held[0, "post_block"], C)
    assert joined.prefill.vectors == ()


def test_a_named_module_is_added_by_its_scale(model, tiny):
    fields = {
        "steering_vectors": {"post_block": {1: A}},
        "steering_clamps": {"mlp_out": {2: {"vector": B, "max": -0.5}}},
    }
    model.modules.register("glad", Steering.parse(fields))
    model.set_layer_vector(1, C)
    changes = {
        (1, "post_block"): add(0.5 * A + C),
        (2, "mlp_out"): bounded(B, -np.inf, -0.5, strength=0.5),
    }
    used = Steering.parse({"steering_name": "glad", "steering_scale": 0.5})
    assert check(model, tiny, changes, steering=used) > 0.1
    assert check(model, tiny, {(1, "post_block"): add(C)}) > 0.1


def test_the_global_state_steers_every_call(model, tiny):
    model.modules.set_global(Steering.parse({"steering_vectors": {"post_block": {1: A}}}))
    assert check(model, tiny, {(1, "post_block"): add(A)}) > 0.1


def test_modules_that_are_unknown_or_do_not_fit_are_refused(model):
    many = {"steering_clamps": {"post_block": {1: [{"vector": A, "value": 0}] * 65}}}
    for fields, message in (
        ({"steering_vectors": {"post_block": {LAYERS: A}}}, "layer: got"),
        (many, "steering_clamps.post_block.1: got 65 clamps"),
    ):
        with pytest.raises(UsageError, match=message):
            model.modules.register("wrong", Steering.parse(fields))
        with pytest.raises(UsageError, match=message):
            model.modules.set_global(Steering.parse(fields))
        with pytest.raises(UsageError, match=message):
            model.logprobs(PROMPTS, steering=Steering.parse(fields))
    model.modules.register("glad", Steering.parse({"steering_vectors": {"post_block": {1: A}}}))
    for ask in (model.logprobs, model.complete):
        with pytest.raises(UsageError, match=r"steering_name: got sad, expected a registered module \(glad\)"):
            ask(PROMPTS, steering=Steering.parse({"steering_name": "sad"}))


def at_phase(change, first, end=None):
    return lambda length: {(1, "post_block"): lambda x: torch.cat([x[: first(length)], change(x[first(length) :])])}


def test_decode_steering_begins_with_the_first_generated_token(model, tiny):
    steering = Steering.parse({"decode_steering_vectors": {"post_block": {1: A}}})
    assert check(model, tiny, at_phase(add(A), lambda length: length), lengths=True, steering=steering) < LOGITS_BOUND


def test_prefill_steering_ends_with_the_prompt(model, tiny):
    steering = Steering.parse({"prefill_steering_clamps": {"post_block": {1: {"vector": A, "value": 2.0}}}})

    def changes(length):
        change = bounded(A, 2.0, 2.0)
        return {(1, "post_block"): lambda x: torch.cat([change(x[:length]), x[length:]])}

    assert check(model, tiny, changes, lengths=True, steering=steering) > 0.001


def test_patches_come_before_what_the_phase_does(model, tiny):
    model.set_layer_vector(1, A)
    patches = {"post_block": {1: {"positions": [-1], "vector": B, "amount": 0.5}}}

    def changes(length):
        def change(x):
            y = x.clone()
            y[length - 1] += 0.5 * (torch.tensor(B, dtype=torch.float64) - y[length - 1])
            return add(A)(y)

        return {(1, "post_block"): change}

    check(model, tiny, changes, lengths=True, steering=Steering.parse({"steering_patches": patches}))


def test_entries_are_set_and_leave_the_others(model, tiny):
    clamps = {"post_block": {1: {"index": [2, 5], "value": [4.0, -3.0]}}}
    patches = {"mlp_in": {2: {"positions": [-1], "vector": [7.0], "index": 3, "amount": 0.5}}}

    def changes(length):
        def clamp(x):
            y = x.clone()
            y[:, 2], y[:, 5] = 4.0, -3.0
            return y

        def patch(x):
            y = x.clone()
            y[length - 1, 3] += 0.5 * (7.0 - y[length - 1, 3])
            return y

        return {(1, "post_block"): clamp, (2, "mlp_in"): patch}

    steering = Steering.parse({"steering_clamps": clamps, "steering_patches": patches})
    assert check(model, tiny, changes, lengths=True, steering=steering) > 0.01


def test_a_half_precision_model_is_rounded_once(tiny):
    half = TransformersSteerableModel(tiny, dtype="bfloat16")
    half.set_layer_vector(1, A)
    half.set_layer_ablation(1, B)
    (tokens, *_) = PROMPTS
    before = half.last_rows([tokens], [Site(1, "post_block")])[Site(1, "post_block")]
    after = half.last_rows([tokens], [Site(2, "pre_attn")])[Site(2, "pre_attn")]
    row = bounded(B, 0.0, 0.0)(add(A)(torch.tensor(before).double()))
    assert torch.equal(row.float().bfloat16().float(), torch.tensor(after))


@pytest.mark.parametrize("hook", ["post_attn", "mlp_in", "mlp_out"])
def test_rows_are_what_comes_to_a_site(model, tiny, hook):
    site = Site(2, hook)
    model.set_layer_vector(2, A, hook=hook)
    model.set_layer_vector(1, B)
    for prompt, row in zip(PROMPTS, model.last_rows(PROMPTS, [site])[site], strict=True):
        seen = []
        expected(tiny, prompt, {(1, "post_block"): add(B), (2, hook): lambda x, seen=seen: seen.append(x.clone()) or x})
        assert np.abs(row - seen[0][-1].numpy()).max() < LOGITS_BOUND


SMALL = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300,
}  # fmt: skip


def of_other_structure(config):
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
    return TransformersSteerableModel(made.float())


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL),
        transformers.Gemma3TextConfig(**SMALL, head_dim=32, num_key_value_heads=1),
        transformers.GraniteConfig(**SMALL, residual_multiplier=0.3),
        transformers.Olmo2Config(**SMALL),
        transformers.MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=1),
    ],
    ids=lambda config: config.model_type,
)
def test_what_is_added_to_what_the_mlp_adds_is_added_to_the_stream(config):
    model = of_other_structure(config)
    plain = model.logprobs(PROMPTS)
    logprobs = []
    for hook in ("mlp_out", "post_block"):
        model.clear_all()
        model.set_layer_vector(0, A, hook=hook)
        logprobs.append(model.logprobs(PROMPTS))
    assert np.abs(logprobs[0] - logprobs[1]).max() < LOGITS_BOUND
    assert np.abs(logprobs[0] - plain).max() > 0.1


def test_a_layer_that_lacks_a_hook_says_why():
    model = of_other_structure(transformers.GPTNeoXConfig(**SMALL))
    assert set(model.hooks) == set(HOOKS) - {"post_attn"}
    why = "attention and the MLP stand side by side"
    reason = f"hook: got post_attn:1, which GPTNeoXLayer lacks: {why}, expected one of pre_attn"
    for wrong in (
        lambda: model.set_layer_vector(1, A, hook="post_attn"),
        lambda: model.last_rows(PROMPTS, [Site(1, "post_attn")]),
        lambda: model.logprobs(PROMPTS, steering=Steering.parse({"steering_vectors": {"post_attn": {1: A}}})),
    ):
        with pytest.raises(UsageError, match=reason):
            wrong()


def test_what_only_the_stream_shows_can_be_captured_and_not_steered():
    model = of_other_structure(transformers.Olmo2Config(**SMALL))
    site = Site(1, "mlp_in")
    assert model.last_rows(PROMPTS, [site])[site].shape == (len(PROMPTS), WIDTH)
    with pytest.raises(UsageError, match="mlp_in:1, which can only be captured"):
        model.set_layer_vector(1, A, hook="mlp_in")


class Branching(torch.nn.Module):
    """A layer whose Python asks what the stream holds."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.mlp = attention, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, past_key_values=None):
        if hidden_states.sum() > 0:
            hidden_states = hidden_states + self.attention(hidden_states, past_key_values)
        return hidden_states + self.mlp(hidden_states)


class Mixing(torch.nn.Module):
    def forward(self, hidden_states, past_key_values):
        return hidden_states.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Branching(Mixing()), "its forward cannot be followed"),
        (Branching(torch.nn.Identity()), "no module of the layer takes a cache"),
    ],
    ids=["branching", "without a cache"],
)
def test_of_a_layer_that_cannot_be_followed_both_ends_are_known(layer, reason):
    structure = structure_of(layer, torch.float32)
    assert set(structure.places) == {"pre_attn", "post_block"}
    assert all(why.startswith(reason) for why in structure.missing.values())
    assert set(structure.missing) == set(ALL_HOOKS) - {"pre_attn", "post_block", "final"}


def test_clearing_takes_each_back(model):
    plain = model.logprobs(PROMPTS)
    model.set_layer_vector(1, A)
    only = model.export_steering_spec()
    model.set_layer_projection_cap(1, B, cap_above=0.0)
    model.set_layer_ablation(1, C)
    model.set_layer_ablation(2, C, hook="pre_attn")
    model.clear_layer_projection_cap(1)
    model.clear_layer_ablation(1)
    model.clear_layer_ablation(2, hook="pre_attn")
    assert model.export_steering_spec() == only
    model.clear_layer_vector(1)
    assert model.export_steering_spec() == SteeringSpec()
    model.set_layer_vector(1, A)
    model.clear_all()
    assert np.array_equal(model.logprobs(PROMPTS), plain)


def test_the_context_restores_nested_and_after_exceptions(model):
    model.set_layer_vector(0, A)
    outer = model.export_steering_spec()
    one, two = (SteeringSpec({n: LayerSteeringSpec(B, ablation=AblationSpec(C))}) for n in (1, 2))
    with model.steering(one) as same:
        assert same is model

        def fail_inside():
            with model.steering(two):
                assert model.export_steering_spec() == two
                model.set_layer_vector(3, C)
                raise KeyError

        with pytest.raises(KeyError):
            fail_inside()
        assert model.export_steering_spec() == one
    assert model.export_steering_spec() == outer


def test_a_context_that_cannot_begin_changes_nothing(model):
    model.set_layer_vector(0, A)
    before = model.export_steering_spec()
    with pytest.raises(UsageError), model.steering(SteeringSpec({LAYERS: LayerSteeringSpec(A)})):
        pass
    assert model.export_steering_spec() == before


def test_an_exported_specification_does_not_change(model):
    model.set_layer_vector(0, A)
    kept = model.export_steering_spec()
    model.set_layer_vector(0, B)
    assert np.array_equal(kept.layers[0].vector, A)
    with pytest.raises(ValueError, match="read-only"):
        kept.layers[0].vector[0] = 1.0


def full_spec():
    return SteeringSpec(
        {
            0: LayerSteeringSpec(A, scale=-0.5),
            Site(1, "pre_attn"): LayerSteeringSpec(projection_cap=ProjectionCapSpec(B, cap_above=0.25)),
            2: LayerSteeringSpec(C, 2.0, ProjectionCapSpec(A, -1.0, 1.5), AblationSpec(B, 0.25)),
        }
    )


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """An autoencoder at post_block:1, saved; its path and tensors."""
    made = {name: value / 8 for name, value in weights(jumps=True, width=WIDTH, count=12).items()}
    return saelens(tmp_path_factory.mktemp("saes") / "mood", made, "jumprelu"), made


def steer_features(tensors, uses):
    """Return what features do to rows `[tokens, hidden]` float64: added ones first, then all that are set."""

    def change(x):
        rows = x.numpy().copy()
        rows += sum(
            how * tensors["W_dec"][n].astype(np.float64) for n, how in uses.items() if not isinstance(how, dict)
        )
        active = encoded(tensors, rows)
        for number, how in uses.items():
            if isinstance(how, dict):
                moved = how.get("strength", 1.0) * (how["set"] - active[:, number])
                rows += moved[:, None] * tensors["W_dec"][number].astype(np.float64)
        return torch.from_numpy(rows)

    return change


@pytest.mark.parametrize(
    "uses", [{3: 9.0, 5: -4.0}, {3: {"set": 8.0}, 7: {"set": 0}}, {1: 5.0, 3: {"set": 6.0, "strength": 0.5}}]
)
def test_features_are_added_and_set_as_named(loaded, tiny, tensors, uses):
    path, made = tensors
    model = TransformersSteerableModel(loaded.model, tokenizer=loaded.tokenizer, saes=[f"mood={path}"])
    asked = Steering.parse({"steering_features": {"sae": "mood", "features": uses}})
    change = steer_features(made, uses)
    assert check(model, tiny, {(1, "post_block"): change}, steering=asked) > 1e-2
    model.set_layer_vector(1, A)
    assert check(model, tiny, {(1, "post_block"): lambda x: change(add(A)(x))}, steering=asked) > 1e-2
    model.clear_all()
    model.modules.register("glad", asked)
    named = Steering.parse({"steering_name": "glad"})
    assert check(model, tiny, {(1, "post_block"): change}, steering=named) > 1e-2


def test_features_that_there_are_not_are_refused(loaded, tensors, tmp_path):
    path, _ = tensors
    model = TransformersSteerableModel(loaded.model, saes=[f"mood={path}"])
    for asked, message in (
        (
            {"sae": "sad", "features": {1: 2.0}},
            "steering_features.features.1: got autoencoder sad, expected a known one",
        ),
        ({"sae": "mood", "features": {99: 2.0}}, "steering_features.features.99: got 99, expected a feature of "),
    ):
        with pytest.raises(UsageError) as caught:
            model.logprobs(PROMPTS, steering=Steering.parse({"steering_features": asked}))
        assert str(caught.value).startswith(message)
    with pytest.raises(UsageError, match=r"steering_features.features.1: got autoencoder mood, .* \(none is named\)"):
        loaded.logprobs(PROMPTS, steering=Steering.parse({"steering_features": {"sae": "mood", "features": {1: 2.0}}}))
    wide = saelens(tmp_path / "wide", weights(width=WIDTH + 1))
    with pytest.raises(UsageError, match=f"wide: decoder: got {WIDTH + 1} numbers a row"):
        TransformersSteerableModel(loaded.model, saes=[str(wide)])


def test_what_is_saved_is_loaded(model, tiny, tmp_path):
    model.apply_steering_spec(full_spec())
    model.save_pretrained(tmp_path / "kept")
    again = TransformersSteerableModel.load(tmp_path / "kept", dtype="float32")
    assert again.export_steering_spec() == full_spec()
    assert again.info.name == tiny
    assert np.array_equal(again.logprobs(PROMPTS), model.logprobs(PROMPTS))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"steering.json", "steering.safetensors"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "steering.json").unlink(), "no saved specification"),
        (lambda d: (d / "steering.json").write_text("{}"), "files of save_pretrained"),
        (lambda d: (d / "steering.safetensors").write_bytes(b"abc"), "files of save_pretrained"),
        (lambda d: (d / "steering.json").write_text('{"format":9,"model":"m","layers":[]}'), "format: got 9"),
        (lambda d: (d / "steering.json").write_text('{"format":1,"model":"m","layers":[]}'), "unknown tensors"),
    ],
)
def test_a_damaged_directory_is_refused(model, tmp_path, damage, message):
    model.apply_steering_spec(full_spec())
    model.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=message):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: m.set_layer_vector(LAYERS, A), f"layer: got {LAYERS}, expected 0..{LAYERS - 1}"),
        (lambda m: m.set_layer_vector(-1, A), "layer: got -1"),
        (lambda m: m.set_layer_vector(0, A[:-1]), f"expected {WIDTH}, the model's width"),
        (lambda m: m.set_layer_vector(0, A * np.nan), "expected finite numbers"),
        (lambda m: m.set_layer_vector(0, A, np.inf), "scale: got inf"),
        (lambda m: m.set_layer_vector(0, A, hook="nowhere"), "hook: got nowhere"),
        (lambda m: m.set_layer_projection_cap(0, A), "projection_cap: no bound"),
        (lambda m: m.set_layer_projection_cap(0, A, 2.0, 1.0), "cap_below: got 2.0, expected at most cap_above, 1.0"),
        (lambda m: m.set_layer_ablation(0, 0 * A), "ablation.vector: got a zero vector"),
        (lambda m: m.generate(5), "prompts: got 5, expected a text, a list of token ids, or a list of these"),
        (lambda m: m.generate([""]), "prompts.0"),
        (lambda m: m.generate(["w5"], max_new_tokens=0), "max_new_tokens: got 0"),
        (lambda m: m.generate(["w5"], temperature=-1.0), "temperature: got -1.0"),
        (lambda m: m.generate(["w5"], top_p=0.0), "top_p: got 0.0"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(model, wrong, message):
    before = full_spec()
    model.apply_steering_spec(before)
    with pytest.raises(UsageError, match=message):
        wrong(model)
    assert model.export_steering_spec() == before


def test_two_keys_of_one_site_are_refused():
    with pytest.raises(UsageError, match="the layer twice"):
        SteeringSpec({1: LayerSteeringSpec(A), Site(1, "post_block"): LayerSteeringSpec(B)})


def test_text_goes_in_and_comes_out(model):
    (text,) = model.generate(["w5 w9 w200"], max_new_tokens=4, ignore_eos=True)
    (done,) = model.complete([[5, 9, 200]], Sampling(4, ignore_eos=True))
    assert text == done.text
    assert model.generate("w5 w9 w200", max_new_tokens=4, ignore_eos=True) == [text]
    assert model.complete((5, 9, 200), Sampling(4, ignore_eos=True)) == [done]
    assert np.array_equal(model.logprobs("w5 w9 w200"), model.logprobs([[5, 9, 200]]))
    assert done.prompt_token_ids == (5, 9, 200)
    assert text == "".join(f" w{token}" for token in done.token_ids)


def test_sampling_follows_its_seed(model):
    def drawn(seed):
        return model.generate(["w5 w9"], max_new_tokens=12, temperature=1.5, seed=seed, ignore_eos=True)

    assert drawn(1) == drawn(1) != drawn(2)
    narrow = model.generate(["w5 w9"], max_new_tokens=12, temperature=1.5, top_p=1e-6, seed=3, ignore_eos=True)
    assert narrow == model.generate(["w5 w9"], max_new_tokens=12, ignore_eos=True)


def test_an_answer_ends_where_the_model_ends_it(model):
    (first, *_) = model.complete([[7, 8]], GREEDY)[0].token_ids
    ends, model._ends = model._ends, frozenset((first,))
    try:
        assert model.complete([[7, 8]], Sampling(10))[0].token_ids == (first,)
        assert len(model.complete([[7, 8]], GREEDY)[0].token_ids) == 10
    finally:
        model._ends = ends


def test_a_name_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a model that Transformers loads"):
        TransformersSteerableModel(str(tmp_path))


@pytest.mark.engine
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.long)], ids=["eager", "compiled"])
def test_both_back_ends_agree(tiny, loaded, tmp_path, tensors, eager):
    from capflow_models import VLLMSteerableModel

    saes = [f"mood={tensors[0]}"]
    loaded = TransformersSteerableModel(loaded.model, tokenizer=loaded.tokenizer, saes=saes)
    sites = [Site(layer_of(hook, 2), hook) for hook in HOOKS]
    arguments = {
        "sites": ["*:*"],
        "consumers": [f"filesystem:root={tmp_path},capture=requests"],
        "max_logprobs": -1,
        "enforce_eager": eager,
        "skip_tokenizer_init": False,
        "saes": saes,
    }
    specs = [
        SteeringSpec(),
        SteeringSpec({2: LayerSteeringSpec(A, 1.5)}),
        SteeringSpec({1: LayerSteeringSpec(A, 0.5, ablation=AblationSpec(B), relative=True)}),
        SteeringSpec({Site(1, "pre_attn"): LayerSteeringSpec(projection_cap=ProjectionCapSpec(A, -0.1, 0.2))}),
        SteeringSpec({1: LayerSteeringSpec(ablation=AblationSpec(B, 0.25))}),
        full_spec(),
        *(
            SteeringSpec({Site(layer_of(hook, 1), hook): LayerSteeringSpec(B, -1.5, ablation=AblationSpec(A))})
            for hook in HOOKS
        ),
    ]
    phases = {
        "prefill_steering_vectors": {"post_block": {1: {"vector": A, "scale": -1.0}}},
        "decode_steering_clamps": {"post_block": {2: {"vector": B, "min": 1.0, "strength": 0.5}}},
    }
    besides = [
        None,
        phases,
        {
            "steering_vectors": {
                hook: {layer_of(hook, 2): {"vector": B, "scale": 0.5}} | ({} if hook == "final" else {1: A})
                for hook in HOOKS
            }
        },
        {"steering_name": {"glad": 0.5, "calm": -1.0}, **phases},
        {"decode_steering_vectors": {"post_block": {1: {"vector": C, "scale": 0.5, "relative": True}}}, **phases},
        {"decode_steering_features": {"sae": "mood", "features": {2: 9.0, 3: {"set": 8.0}, 4: {"set": 0}}}, **phases},
    ]
    modules = {
        "glad": {
            "steering_vectors": {
                "post_block": {2: A, 1: {"vector": A, "scale": 0.2, "relative": True}},
                "mlp_in": {1: B},
            },
            "decode_steering_vectors": {"mlp_out": {2: C}},
        },
        "calm": {
            "prefill_steering_vectors": {"post_attn": {1: B}},
            "steering_clamps": {"post_block": {1: {"vector": C, "value": 1.0}}},
        },
    }
    with engine(tiny, **arguments) as llm:
        served = VLLMSteerableModel(llm, rows=tmp_path)
        for name, fields in modules.items():
            for each in (served, loaded):
                each.modules.register(name, Steering.parse(fields))
        seen = []
        for spec in specs:
            with served.steering(spec), loaded.steering(spec):
                for fields in besides:
                    steering = None if fields is None else Steering.parse(fields)
                    ours, theirs = (m.logprobs(PROMPTS, steering=steering) for m in (served, loaded))
                    assert np.abs(ours - theirs).max() < LOGITS_BOUND
                    answers = [m.complete(PROMPTS, GREEDY, steering=steering) for m in (served, loaded)]
                    assert answers[0] == answers[1]
                    seen.append(tuple(answer.token_ids for answer in answers[0]))
                rows = [m.last_rows(PROMPTS, sites) for m in (served, loaded)]
                assert all(np.abs(rows[0][site] - rows[1][site]).max() < LOGITS_BOUND for site in sites)
        assert len(set(seen)) > len(specs), "steering changes the answers"
        for each in (served, loaded):
            with pytest.raises(UsageError, match="steering_name: got sad"):
                each.logprobs(PROMPTS, steering=Steering.parse({"steering_name": "sad"}))


@pytest.mark.engine
def test_a_model_opened_by_name_takes_every_specification_brings_its_own_rows_and_leaves_nothing(
    tiny, loaded, tmp_path
):
    from capflow_models import VLLMSteerableModel

    loaded.apply_steering_spec(SteeringSpec({2: LayerSteeringSpec(A)}))
    loaded.save_pretrained(tmp_path / "kept")
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with environment(**variables):
        with VLLMSteerableModel.load(
            tmp_path / "kept", dtype="float32", enforce_eager=True, max_model_len=256
        ) as served:
            site = Site(3, "post_block")
            got, want = (m.last_rows(PROMPTS, [site])[site] for m in (served, loaded))
            assert np.abs(got - want).max() < LOGITS_BOUND
            every = SteeringSpec({Site(layer_of(hook, 1), hook): LayerSteeringSpec(B, 0.5) for hook in HOOKS})
            for each in (served, loaded):  # with the defaults of both back ends
                each.apply_steering_spec(every)
            assert np.abs(served.logprobs(PROMPTS) - loaded.logprobs(PROMPTS)).max() < LOGITS_BOUND
            kept = served._rows
            assert kept.is_dir()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    assert not kept.exists()
    loaded.clear_all()
