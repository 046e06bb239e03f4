"""The hook points inside attention and the MLP, on layers written by hand: which are inside, and what refuses."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from capflow_engine.layer.dryrun import overlap
from capflow_engine.layer.inside import ATTENTION_HOOKS, INSIDE_HOOKS
from capflow_engine.layer.parts import Core, Experts, Linear, Mixer, Slot
from capflow_engine.layer.structure import HookPlace, resolve

WIDTH, HEADS, KV_HEADS, HEAD_DIM, NEURONS, EXPERTS = 8, 4, 2, 6, 12, 3
QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


class Projection(nn.Module):
    """Returns a bias besides, as those of vLLM do."""

    def __init__(self, inputs, outputs, *, down=False, kv_heads=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="meta"))
        self.part = Linear(inputs, outputs, down=down, kv_heads=kv_heads)

    def forward(self, x):
        return nn.functional.linear(x, self.weight), None


class Attend(nn.Module):
    def __init__(self, part=Core(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, {})):  # noqa: B008 - it is frozen
        super().__init__()
        self.part = part

    def forward(self, query, key, value):
        raise AssertionError("a dry run does not run it")


class Norm(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="meta"))

    def forward(self, x):
        # What a forward keeps must not stay behind.
        self.last = x
        return x * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = Projection(WIDTH, QUERY + 2 * KEY, kv_heads=KV_HEADS)
        self.q_norm, self.core = Norm(HEAD_DIM), Attend()
        self.o = Projection(QUERY, WIDTH, down=True)

    def forward(self, positions, hidden_states):
        qkv, _ = self.qkv(hidden_states)
        q, k, v = qkv.split([QUERY, KEY, KEY], dim=-1)
        q = self.q_norm(q.view(-1, HEADS, HEAD_DIM)).flatten(-2)
        return self.o(self.gated(self.core(q, k, v), hidden_states))[0]

    def gated(self, x, hidden_states):
        return x


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Projection(WIDTH, NEURONS), Projection(NEURONS, WIDTH, down=True)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)[0]))[0]


class Mixture(nn.Module):
    def __init__(self, inner=False):
        super().__init__()
        self.gate = Projection(WIDTH, EXPERTS)
        self.experts = Routed(self.gate if inner else None)
        self.inner = inner

    def forward(self, x):
        return self.experts(x, router_logits=x if self.inner else self.gate(x)[0].float())


class Routed(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.part = Experts(gate)

    def forward(self, hidden_states, router_logits):
        raise AssertionError("a dry run does not run it")


class Layer(nn.Module):
    def __init__(self, attention=Attention, mlp=MLP):
        super().__init__()
        self.a, self.b, self.mixer, self.mlp = Norm(), Norm(), attention(), mlp()

    def forward(self, positions, hidden_states):
        stream = hidden_states + self.mixer(positions, self.a(hidden_states))
        return stream + self.mlp(self.b(stream))


def structure(layer):
    return resolve(
        layer, torch.float32, lambda m: isinstance(m, Attend), parts=lambda module: getattr(module, "part", None)
    )


def attention_with(**methods):
    return type("Changed", (Attention,), methods)


def test_finds_what_the_core_and_both_projections_are_given():
    inside = structure(Layer())
    assert {hook: inside.places.get(hook) for hook in INSIDE_HOOKS} == {
        "q": HookPlace("mixer.core", (Slot(0, "query"),)),
        "k": HookPlace("mixer.core", (Slot(1, "key"),)),
        "v": HookPlace("mixer.core", (Slot(2, "value"),)),
        "heads": HookPlace("mixer.o", (Slot(0, "x"),)),
        "neurons": HookPlace("mlp.down", (Slot(0, "x"),)),
        "router": None,
    }
    assert inside.shapes == {
        "q": (HEADS, HEAD_DIM),
        "k": (KV_HEADS, HEAD_DIM),
        "v": (KV_HEADS, HEAD_DIM),
        "heads": (HEADS, HEAD_DIM),
        "neurons": (NEURONS,),
    }
    assert inside.missing["router"] == "the layer's MLP is no mixture of experts"
    assert not set(inside.fixed) & set(INSIDE_HOOKS)
    assert {"pre_attn", "attn_out", "mlp_in", "post_block"} <= set(inside.places)


def test_a_rank_has_a_part_of_the_heads_and_the_shape_counts_all():
    layer = Layer()
    layer.mixer.core.part = Core(HEADS // 4, 1, HEAD_DIM, HEAD_DIM, {})  # of 4 ranks; two share a KV head
    layer.mixer.qkv.part = replace(layer.mixer.qkv.part, outputs=QUERY // 4 + 2 * HEAD_DIM)
    layer.mlp.up.part, layer.mlp.down.part = Linear(WIDTH, NEURONS // 4), Linear(NEURONS, WIDTH, down=True)
    layer.mixer.forward = lambda positions, hidden_states: _rank(layer.mixer, hidden_states)
    inside = structure(layer)
    assert inside.shapes == structure(Layer()).shapes

    layer.mixer.qkv.part = replace(layer.mixer.qkv.part, kv_heads=None)  # such projections share no head
    assert structure(layer).shapes["k"] == (4, HEAD_DIM)


def _rank(mixer, hidden_states):
    q, k, v = mixer.qkv(hidden_states)[0].split(HEAD_DIM, dim=-1)
    return mixer.o(mixer.core(q, k, v))[0]


@pytest.mark.parametrize("inner", [False, True])
def test_the_router_is_what_the_gate_returns(inner):
    inside = structure(Layer(mlp=lambda: Mixture(inner)))
    assert inside.places["router"] == HookPlace("mlp.gate")
    assert inside.shapes["router"] == (EXPERTS,)
    assert inside.missing["neurons"] == "the layer's MLP is a mixture of experts"
    assert "router" not in inside.fixed


def test_logits_that_something_else_reads_are_only_captured():
    class Scaling(Mixture):
        def forward(self, x):
            logits, _ = self.gate(x)
            return self.experts(x, router_logits=logits) * logits.sum(-1, keepdim=True)

    inside = structure(Layer(mlp=Scaling))
    assert inside.places["router"] == HookPlace("mlp.gate")
    assert inside.fixed["router"] == "aten.sum.dim_IntList reads the router's logits, too"


@pytest.mark.parametrize("change", [lambda logits: logits.softmax(-1), lambda logits: 2 * logits])
def test_the_router_is_missing_where_experts_are_given_something_else(change):
    class Soft(Mixture):
        def forward(self, x):
            return self.experts(x, router_logits=change(self.gate(x)[0]))

    assert structure(Layer(mlp=Soft)).missing["router"] == "the experts are not given what a gate returns"


def test_the_router_is_missing_where_one_product_makes_its_logits_and_more():
    layer = Layer(mlp=Mixture)
    layer.mlp.experts.part = Experts(lacks="the gates are one")
    assert structure(layer).missing["router"] == "the gates are one"


@pytest.mark.parametrize(
    "gated",
    [
        lambda self, x, h: x * torch.sigmoid(self.qkv(h)[0][:, :QUERY]),
        lambda self, x, h: self.q_norm(x.view(-1, HEADS, HEAD_DIM)).reshape(x.shape).contiguous(),
        lambda self, x, h: x.view(1, -1, QUERY).to(torch.float16).squeeze(0).float(),
    ],
    ids=["gate", "norm", "shape and dtype"],
)
def test_heads_may_be_gated_normed_and_shaped_on_their_way(gated):
    inside = structure(Layer(attention_with(gated=gated)))
    assert inside.places["heads"] == HookPlace("mixer.o", (Slot(0, "x"),))
    assert inside.shapes["heads"] == (HEADS, HEAD_DIM)


@pytest.mark.parametrize(
    ("gated", "readers"),
    [
        (lambda self, x, h: x.view(-1, HEADS, HEAD_DIM).transpose(1, 2).reshape(-1, QUERY), "aten.transpose.int"),
        (lambda self, x, h: x.flip(-1), "aten.flip.default"),
        (lambda self, x, h: x + x.sum(), "aten.add.Tensor, aten.sum.default"),
        (lambda self, x, h: x * x, "aten.mul.Tensor"),
        (lambda self, x, h: torch.empty_like(x), "aten.empty_like.default"),
        (lambda self, x, h: self.qkv(h)[0][:, :QUERY], "nothing"),
    ],
    ids=["transposed", "flipped", "summed", "squared", "empty", "other"],
)
def test_heads_are_missing_where_the_projection_reads_something_else(gated, readers):
    inside = structure(Layer(attention_with(gated=gated)))
    assert inside.missing["heads"] == f"no projection alone reads attention's result, but {readers}"
    assert "heads" not in inside.places
    assert "neurons" in inside.places


def test_heads_may_be_cut_to_their_values_and_values_are_then_padded():
    class Padded(Attention):
        def __init__(self):
            super().__init__()
            self.o = Projection(HEADS * 4, WIDTH, down=True)

        def gated(self, x, h):
            return x.view(-1, HEADS, HEAD_DIM)[..., :4].reshape(-1, HEADS * 4)

    inside = structure(Layer(Padded))
    assert inside.shapes["heads"] == (HEADS, 4)
    assert inside.missing["v"] == "values are padded to the length of a key"
    assert inside.shapes["k"] == (KV_HEADS, HEAD_DIM)


def test_a_tensor_that_is_two_arguments_is_only_captured():
    class Same(Attention):
        def forward(self, positions, hidden_states):
            qkv, _ = self.qkv(hidden_states)
            q, k, _ = qkv.split([QUERY, KEY, KEY], dim=-1)
            return self.o(self.core(q, k, k))[0]

    inside = structure(Layer(Same))
    assert inside.fixed["k"] == "attention is given the same tensor as its value"
    assert inside.fixed["v"] == "attention is given the same tensor as its key"
    assert "q" not in inside.fixed


def test_a_tensor_that_is_read_again_is_only_captured():
    class Again(Attention):
        def forward(self, positions, hidden_states):
            qkv, _ = self.qkv(hidden_states)
            q, k, v = qkv.split([QUERY, KEY, KEY], dim=-1)
            heads = self.core(q, k, v)
            out, _ = self.o(heads)
            return out * k.mean() * heads.view(-1, QUERY).dtype.itemsize

    inside = structure(Layer(Again))
    assert inside.fixed["k"] == "aten.mean.default reads the same tensor"
    assert not set(inside.fixed) & {"q", "v", "heads"}  # a view reads no number; other columns are other numbers


@pytest.mark.parametrize(
    ("lacks", "hooks"),
    [
        ({"q": "one vector", "k": "one vector", "v": "one vector"}, {"heads"}),
        ({"k": "another layer's", "v": "another layer's"}, {"q", "heads"}),
        (dict.fromkeys(ATTENTION_HOOKS, "an encoder"), set()),
    ],
)
def test_a_core_says_what_it_lacks(lacks, hooks):
    layer = Layer()
    layer.mixer.core.part = replace(layer.mixer.core.part, lacks=lacks)
    inside = structure(layer)
    assert set(inside.places) & set(ATTENTION_HOOKS) == hooks
    assert {hook: inside.missing[hook] for hook in lacks} == lacks


def test_a_core_whose_forward_is_called_alone_is_tapped_in_its_forward():
    class Direct(Attention):
        def forward(self, positions, hidden_states):
            q, k, v = self.qkv(hidden_states)[0].split([QUERY, KEY, KEY], dim=-1)
            return self.o(self.core.forward(q, k, v))[0]

    inside = structure(Layer(Direct))
    assert inside.places["q"] == HookPlace("mixer.core", (Slot(0, "query"),), alone=True)
    assert {hook: place.alone for hook, place in inside.places.items() if place.alone} == dict.fromkeys("qkv", True)
    assert inside.places["heads"] == HookPlace("mixer.o", (Slot(0, "x"),))
    assert not set(inside.fixed) & set(INSIDE_HOOKS)


def test_a_core_that_is_no_module_of_the_layer_has_no_queries():
    class Outside(Attention):
        def __init__(self):
            super().__init__()
            self.cores = [self.core]
            del self.core

        def forward(self, positions, hidden_states):
            q, k, v = self.qkv(hidden_states)[0].split([QUERY, KEY, KEY], dim=-1)
            return self.o(self.cores[0](q, k, v))[0]

    inside = structure(Layer(Outside))
    assert {inside.missing[hook] for hook in "qkv"} == {"attention's core is no module of the layer"}
    assert inside.places["heads"].module == "mixer.o"


def test_a_layer_without_attention_or_with_two_has_neurons_alone():
    class Other(Attention):
        def __init__(self):
            super().__init__()
            self.core = Attend(Mixer())

        def forward(self, positions, hidden_states):
            return self.core(hidden_states, None, None)

    class Two(Attention):
        def gated(self, x, h):
            return self.core(x, h, h)

    for attention, reason in ((Other, "its mixer is no attention"), (Two, "the layer has several attention cores")):
        inside = structure(Layer(attention))
        assert {inside.missing[hook] for hook in ATTENTION_HOOKS} == {reason}
        assert inside.places["neurons"].module == "mlp.down"


def test_neurons_are_missing_where_two_projections_end_the_mlp():
    class Twice(MLP):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    assert structure(Layer(mlp=Twice)).missing["neurons"] == "the MLP has several down projections"


def test_rows_that_no_frame_can_have_are_missing():
    layer = Layer()
    layer.mlp.up, layer.mlp.down = Projection(WIDTH, 70_000), Projection(70_000, WIDTH, down=True)
    inside = structure(layer)
    assert inside.missing["neurons"] == "a row has 70,000 numbers, above 65,536"
    assert not {"neurons"} & {*inside.places, *inside.shapes}


def test_a_norm_may_need_values():
    class ReadingNorm(Norm):
        def forward(self, x):
            return x * self.weight if x.sum() > 0 else x

    layer = Layer(attention_with(gated=lambda self, x, h: self.o_norm(x)))
    layer.mixer.o_norm = ReadingNorm(QUERY)
    assert structure(layer).shapes["heads"] == (HEADS, HEAD_DIM)


def test_a_layer_of_transformers_has_a_dimension_of_prompts():
    class Batched(Attention):
        def forward(self, hidden_states, rotation, kept):
            cos, sin = rotation
            prompts, tokens, _ = hidden_states.shape
            q, k, v = (
                self.qkv(hidden_states)[0].view(prompts, tokens, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 2)
            )
            q = q * cos.unsqueeze(2) + q.flip(-1) * sin.unsqueeze(2)
            kept["full"] = k, v  # for later layers
            heads = self.core.forward(q.reshape(tokens, -1), k.reshape(tokens, -1), v.reshape(tokens, -1))
            return self.o(heads.reshape(prompts, tokens, -1).contiguous())[0]

    class Whole(Layer):
        def forward(self, hidden_states, position_embeddings=None, shared_kv_states=None, **kwargs):
            stream = hidden_states + self.mixer(self.a(hidden_states), position_embeddings, shared_kv_states)
            return stream + self.mlp(self.b(stream))

    inside = structure(Whole(Batched))
    keys = dict.fromkeys("kv", (KV_HEADS, HEAD_DIM))
    heads = dict.fromkeys(("q", "heads"), (HEADS, HEAD_DIM))
    assert inside.shapes == {**heads, **keys, "neurons": (NEURONS,)}
    assert inside.places["k"] == HookPlace("mixer.core", (Slot(1, "key"),), alone=True)


def test_what_needs_values_is_refused_and_changes_nothing_else():
    class Reading(MLP):
        def forward(self, x):
            return super().forward(x) * len(x.tolist())

    inside = structure(Layer(mlp=Reading))
    reason = "its forward cannot be run without values: "
    assert all(inside.missing[hook].startswith(reason) for hook in INSIDE_HOOKS)
    assert len(inside.missing["q"]) <= 200
    assert inside.places["mlp_out"].module == "mlp"


def test_a_dry_run_leaves_nothing_behind():
    layer = Layer()
    before = {name: dict(module.__dict__) for name, module in layer.named_modules()}
    structure(layer)
    assert {name: dict(module.__dict__) for name, module in layer.named_modules()} == before
    assert not hasattr(layer.a, "last")
    assert "forward" not in layer.mixer.core.__dict__


def test_a_model_in_another_thread_runs_as_it_is():
    other, given, calls = nn.Sequential(Projection(2, 3), nn.LayerNorm(3)), torch.zeros(1, 2), []
    other[0].forward = lambda x: x.new_ones(1, 3)
    for module in other:
        module.register_forward_hook(lambda module, args, output: calls.append(output.tolist()))

    class Waiting(MLP):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(given,))
            thread.start()
            thread.join()
            return super().forward(x)

    assert structure(Layer(mlp=Waiting)).places == structure(Layer()).places
    assert calls[-2:] == [[[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]]


def test_two_columns_of_one_tensor_have_no_number_in_common():
    whole = torch.empty(5, 6, device="meta")
    assert not overlap(whole[:, :3], whole[:, 3:])
    assert overlap(whole[:, :4], whole[:, 3:])
    assert overlap(whole, whole[4:, 5:])
    assert not overlap(whole, torch.empty(5, 6, device="meta"))
