"""The structural resolver, on decoder layers written by hand: which hook points it finds, and what it refuses."""

import functools

import pytest
import torch
from torch import nn

from capflow_engine.layer.parts import Slot
from capflow_engine.layer.structure import HookPlace, UnclearError, resolve

WIDTH = 8
HOOKS = {"pre_attn", "attn_in", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"}


class Core(nn.Module):
    """What mixes tokens: here each row becomes the mean of all."""

    def forward(self, x):
        return x.mean(0, keepdim=True).expand_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.core = nn.Linear(WIDTH, WIDTH), Core()

    def forward(self, positions, hidden_states):
        return self.core(self.proj(hidden_states))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.proj(x))


class FusedNorm(nn.Module):
    """Adds the residual, when there is one, and hands the sum on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, residual=None):
        if residual is None:
            return self._normal(x)
        total = x + residual
        return self._normal(total), total

    def _normal(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight


class PassingNorm(FusedNorm):
    """Normalises what it is given and hands the residual on as it came."""

    def forward(self, x, residual=None):
        return self._normal(x) if residual is None else (self._normal(x), residual)


class LosingNorm(FusedNorm):
    """Does neither."""

    def forward(self, x, residual=None):
        return self._normal(x) if residual is None else (self._normal(x), residual * 2)


class Layer(nn.Module):
    """The modules that the layers below are made of."""

    def __init__(self, norm=FusedNorm):
        super().__init__()
        self.a, self.b = norm(), norm()
        self.c, self.d = norm(), norm()
        self.mixer, self.ffn, self.more = Attention(), MLP(), MLP()


class Split(Layer):
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.a(hidden_states)
        else:
            hidden_states, residual = self.a(hidden_states, residual)
        hidden_states = self.mixer(positions, hidden_states)
        hidden_states, residual = self.b(hidden_states, residual)
        return self.ffn(hidden_states), residual


class Whole(Layer):
    def forward(self, positions, hidden_states):
        stream = hidden_states + self.mixer(positions, self.a(hidden_states))
        return stream + self.ffn(self.b(stream))


class Sandwich(Layer):
    def forward(self, positions, hidden_states):
        stream = hidden_states + self.b(self.mixer(positions, self.a(hidden_states)))
        return stream + self.d(self.ffn(self.c(stream)))


class PostNorm(Layer):
    def forward(self, positions, hidden_states):
        stream = hidden_states + self.a(self.mixer(positions, hidden_states))
        return stream + self.b(self.ffn(stream))


class Parallel(Layer):
    def forward(self, positions, hidden_states):
        normal = self.a(hidden_states)
        return hidden_states + self.mixer(positions, normal) + self.ffn(normal)


class Scaled(Layer):
    def forward(self, positions, hidden_states):
        stream = hidden_states + self.mixer(positions, self.a(hidden_states)) * 0.3
        return stream + self.ffn(self.b(stream)) * 0.3


class Divided(Layer):
    """As `Split`; in float16 the stream is a quarter from the first layer on."""

    def __init__(self, first=True):
        super().__init__()
        self.first = first

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.a(hidden_states)
        else:
            hidden_states, residual = self.a(hidden_states, residual)
        hidden_states = self.mixer(positions, hidden_states)
        if hidden_states.dtype == torch.float16:
            hidden_states = hidden_states * 0.25
            if self.first:
                residual *= 0.25
        hidden_states, residual = self.b(hidden_states, residual)
        hidden_states = self.ffn(hidden_states)
        if hidden_states.dtype == torch.float16 and not isinstance(self.ffn, DividingMLP):
            hidden_states *= 0.25
        return hidden_states, residual


class DividingMLP(MLP):
    """Divides its output by itself, in float16."""

    def forward(self, x):
        return super().forward(x) * (0.25 if x.dtype == torch.float16 else 1.0)


class TwoMLPs(Layer):
    def forward(self, positions, hidden_states):
        stream = hidden_states + self.mixer(positions, self.a(hidden_states))
        normal = self.b(stream)
        return stream + self.ffn(normal) + self.more(normal)


class NoMLP(Layer):
    def forward(self, positions, hidden_states):
        return hidden_states + self.mixer(positions, self.a(hidden_states))


class Unused(Layer):
    """Takes the residual, returns one, and has the whole stream in the first alone."""

    def forward(self, positions, hidden_states, residual):
        stream = hidden_states + self.mixer(positions, self.a(hidden_states))
        return stream + self.ffn(self.b(stream)), None


class Branching(Layer):
    def forward(self, positions, hidden_states):
        if hidden_states.sum() > 0:
            return hidden_states
        return hidden_states + self.ffn(hidden_states)


class NoStream(Layer):
    def forward(self, positions, hidden_states):
        return self.ffn(self.mixer(positions, hidden_states))


class Weighted(Layer):
    """Weighs the stream before it adds to it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, positions, hidden_states):
        stream = hidden_states * self.weight + self.mixer(positions, self.a(hidden_states))
        return stream * self.weight + self.ffn(self.b(stream)), None


class SplitNoStream(Layer):
    def forward(self, positions, hidden_states, residual):
        return self.ffn(self.mixer(positions, hidden_states)), residual


class TwoStreams(Layer):
    """Hands on what its MLP adds: the next layer adds it."""

    def forward(self, positions, hidden_states, before):
        stream = hidden_states * 2 + before
        return stream, self.ffn(self.b(stream))


class Constant(Layer):
    def forward(self, positions, hidden_states):
        return self.ffn(positions)


class OtherNames(Layer):
    def forward(self, tokens):
        return tokens + self.ffn(tokens)


def found_in(layer):
    return resolve(layer, torch.float32, lambda module: isinstance(module, Core))


def values(layer, structure, split=False, dtype=torch.float32):
    """Return what a layer has at each place that was found, when it runs."""
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(4, WIDTH, generator=generator).to(dtype) for _ in range(2 if split else 1)]
    seen = {}

    def before(place):
        def take(module, args, kwargs):
            return sum(slot.of(args, kwargs) for slot in place.slots) * place.scale

        return take

    for hook, place in structure.places.items():
        module = layer.get_submodule(place.module)
        if place.slots:
            taker = before(place)
            module.register_forward_pre_hook(
                lambda m, a, k, hook=hook, taker=taker: seen.update({hook: taker(m, a, k)}), with_kwargs=True
            )
        else:

            def after(module, args, output, hook=hook, place=place):
                whole = output if isinstance(output, tuple) else (output,)
                seen[hook] = sum(whole[item] for item in place.items) * place.scale

            module.register_forward_hook(after)
    with torch.no_grad():
        stream = sum(parts)
        layer(None, *parts)
    return stream, seen


def truth(layer, stream, *, attn_norm, attention, mlp_norm, mlp):
    """Return every hook's value, written out."""
    with torch.no_grad():
        read = attn_norm(stream)
        attended = attention(read)
        middle = stream + attended
        taken = mlp_norm(middle)
        added = mlp(taken)
    values = (stream, read, attended, middle, taken, added, middle + added)
    hooks = ("pre_attn", "attn_in", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block")
    return dict(zip(hooks, values, strict=True))


TRUTHS = {
    Split: {
        "mlp_norm": lambda s, x: s.b(x),
        "attn_norm": lambda s, x: s.a(x),
        "attention": lambda s, x: s.mixer(None, x),
        "mlp": lambda s, x: s.ffn(x),
    },
    Whole: {
        "mlp_norm": lambda s, x: s.b(x),
        "attn_norm": lambda s, x: s.a(x),
        "attention": lambda s, x: s.mixer(None, x),
        "mlp": lambda s, x: s.ffn(x),
    },
    Sandwich: {
        "mlp_norm": lambda s, x: s.c(x),
        "attn_norm": lambda s, x: s.a(x),
        "attention": lambda s, x: s.b(s.mixer(None, x)),
        "mlp": lambda s, x: s.d(s.ffn(x)),
    },
    PostNorm: {
        "mlp_norm": lambda s, x: x,
        "attn_norm": lambda s, x: x,
        "attention": lambda s, x: s.a(s.mixer(None, x)),
        "mlp": lambda s, x: s.b(s.ffn(x)),
    },
    Scaled: {
        "mlp_norm": lambda s, x: s.b(x),
        "attn_norm": lambda s, x: s.a(x),
        "attention": lambda s, x: s.mixer(None, x) * 0.3,
        "mlp": lambda s, x: s.ffn(x) * 0.3,
    },
}


def differing(layer, structure, split):
    """Return the hooks whose values are not what they must be."""
    stream, seen = values(layer, structure, split)
    parts = {name: lambda x, part=part: part(layer, x) for name, part in TRUTHS[type(layer)].items()}
    for module in layer.modules():  # the truth is computed by the same modules
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    true = truth(layer, stream, **parts)
    return {hook for hook in seen if not torch.allclose(seen[hook], true[hook], atol=1e-5)}, set(seen)


@pytest.mark.parametrize("kind", list(TRUTHS), ids=lambda kind: kind.__name__)
def test_finds_every_hook_where_its_value_is(kind):
    torch.manual_seed(3)
    layer = kind()
    structure = found_in(layer)
    assert structure.layer == kind.__name__
    assert structure.missing == {}
    assert differing(layer, structure, kind is Split) == (set(), HOOKS)


WRONG = {
    "mlp_in": HookPlace("b", (Slot(0, "x"),)),  # before the norm, not after it
    "mlp_out": HookPlace("mixer"),
    "attn_in": HookPlace("a", (Slot(0, "x"),)),
    "attn_out": HookPlace("ffn"),
    "post_attn": HookPlace("b"),
    "pre_attn": HookPlace("a"),
    "post_block": HookPlace("ffn"),
}


@pytest.mark.parametrize("hook", list(WRONG))
def test_a_wrong_place_would_be_noticed(hook):
    torch.manual_seed(3)
    layer = Whole()
    structure = found_in(layer)
    structure.places[hook] = WRONG[hook]
    assert differing(layer, structure, split=False) == ({hook}, HOOKS)


def test_a_norm_may_pass_its_residual_on():
    class Passing(Layer):
        def forward(self, positions, hidden_states, residual):
            stream = hidden_states if residual is None else hidden_states + residual
            hidden_states, residual = self.a(stream, stream)
            stream = self.mixer(positions, hidden_states) + residual
            hidden_states, residual = self.b(stream, stream)
            return self.ffn(hidden_states), residual

    structure = found_in(Passing(PassingNorm))
    assert set(structure.places) == HOOKS
    assert structure.places["mlp_in"] == HookPlace("b")


def test_parallel_blocks_have_no_stream_between():
    structure = found_in(Parallel())
    assert set(structure.places) == HOOKS - {"post_attn"}
    assert "side by side" in structure.missing["post_attn"]
    assert structure.places["mlp_in"] == structure.places["attn_in"] == HookPlace("a")
    assert structure.places["mlp_out"] == HookPlace("ffn")
    assert structure.places["attn_out"] == HookPlace("mixer")


@pytest.mark.parametrize("kind", [*TRUTHS, Parallel], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("hook", "reader"), [("mlp_in", "the MLP"), ("attn_in", "attention")])
def test_what_a_part_shares_cannot_be_steered(kind, hook, reader):
    """Where something else is given the tensor that a part takes, a change of it would reach that too."""
    other = {"the MLP": "attention", "attention": "the MLP"}[reader]
    why = {PostNorm: f"{reader} takes the residual stream itself", Parallel: f"{other} takes what {reader} takes"}
    assert found_in(kind()).fixed.get(hook) == why.get(kind)


@pytest.mark.parametrize("kind", list(TRUTHS), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("hook", ["attn_in", "mlp_in"])
def test_a_change_where_a_part_takes_its_input_reaches_that_part_alone(kind, hook):
    """Which is what `fixed` says of a structure, tried by changing it."""
    torch.manual_seed(3)
    layer = kind()
    structure = found_in(layer)
    parts = {name: lambda x, part=part: part(layer, x) for name, part in TRUTHS[kind].items()}
    stream, change = torch.randn(4, 8), torch.randn(8)
    of_attention, of_mlp = (change if hook == name else 0 for name in ("attn_in", "mlp_in"))
    with torch.no_grad():
        middle = stream + parts["attention"](parts["attn_norm"](stream) + of_attention)
        expected = middle + parts["mlp"](parts["mlp_norm"](middle) + of_mlp)

    place = structure.places[hook]

    def add(module, args, kwargs):
        place.slots[0].of(args, kwargs).add_(change)

    def add_behind(module, args, output):
        (output[0] if isinstance(output, tuple) else output).add_(change)

    module = layer.get_submodule(place.module)
    if place.slots:
        module.register_forward_pre_hook(add, with_kwargs=True)
    else:
        module.register_forward_hook(add_behind)
    given = (stream.clone() / 2, stream.clone() / 2) if kind is Split else (stream.clone(),)
    with torch.no_grad():
        out = layer(None, *given)
    got = sum(out) if isinstance(out, tuple) else out
    assert torch.allclose(got, expected, atol=1e-5) == (hook not in structure.fixed)


def divisor(module):
    return 4.0 if isinstance(module, DividingMLP) else 1.0


def divided(*, first, dividing):
    torch.manual_seed(3)
    layer = Divided(first)
    layer.ffn = DividingMLP() if dividing else MLP()
    return layer


@pytest.mark.parametrize("dividing", [False, True], ids=["layer", "mlp"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_stream_that_is_divided_in_one_dtype_is_given_whole(first, dividing):
    layer = divided(first=first, dividing=dividing)
    structure = resolve(layer, torch.float16, lambda module: isinstance(module, Core), divisor)
    assert structure.missing == {}
    assert (structure.taken, structure.given) == ((1.0, 0.25) if first else (0.25, 0.25))

    stream, seen = values(layer.half(), structure, split=True, dtype=torch.float16)
    for module in layer.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    whole = (stream if first else stream * 4).float()
    parts = layer.float()  # which divides nothing
    mixed = functools.partial(parts.mixer, None)
    true = truth(parts, whole, attn_norm=parts.a, attention=mixed, mlp_norm=parts.b, mlp=parts.ffn)
    assert set(seen) == HOOKS
    assert {h for h in seen if not torch.allclose(seen[h].float(), true[h], rtol=0.01, atol=0.01)} == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_that_is_divided_in_another_dtype_is_taken_as_it_is(dtype):
    structure = resolve(divided(first=True, dividing=False), dtype, lambda module: isinstance(module, Core), divisor)
    assert {place.scale for place in structure.places.values()} == {1.0}
    assert (structure.taken, structure.given) == (1.0, 1.0)


def test_refuses_a_layer_that_divides_the_stream_and_not_all_that_it_adds():
    layer = divided(first=False, dividing=True)
    with pytest.raises(
        UnclearError, match=r"in float16 alone it adds (ffn 1 times, )?mixer 0.25 times.*: use another dtype"
    ):
        resolve(layer, torch.float16, lambda module: isinstance(module, Core))


def test_refuses_layers_of_which_one_takes_another_multiple_than_the_one_before_returns():
    from capflow.errors import CapflowError
    from capflow_engine.compat import model as compat_model

    first, later = (
        resolve(divided(first=one, dividing=False), torch.float16, lambda module: isinstance(module, Core), divisor)
        for one in (True, False)
    )
    assert compat_model.in_one_scale((first, later, later)) == (first, later, later)
    for layers in ((later, later), (first, first), (first, found_in(Split()))):
        with pytest.raises(
            CapflowError, match=r"its part of the stream: got .* times the stream, expected .* times it"
        ):
            compat_model.in_one_scale(layers)


def test_two_mlps_have_no_one_output():
    structure = found_in(TwoMLPs())
    assert set(structure.missing) == {"mlp_out"}
    assert "no one module's output" in structure.missing["mlp_out"]
    assert structure.places["mlp_in"] == HookPlace("b")


def test_a_layer_without_an_mlp_has_its_ends_and_attention():
    structure = found_in(NoMLP())
    assert set(structure.places) == {"pre_attn", "attn_in", "attn_out", "post_block"}
    assert (structure.places["attn_in"], structure.places["attn_out"]) == (HookPlace("a"), HookPlace("mixer"))
    assert set(structure.missing.values()) == {"the layer has no MLP beside attention"}


def test_a_residual_that_is_not_used_is_no_half_of_the_stream():
    structure = found_in(Unused())
    assert len(structure.places["pre_attn"].slots) == 1
    assert structure.places["post_block"].items == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layer", [Weighted(), NoStream()], ids=["weighted", "no stream"])
def test_a_layer_that_returns_something_else_than_a_sum_has_what_it_takes_and_returns(layer, dtype):
    structure = resolve(layer, dtype, lambda module: isinstance(module, Core))
    assert set(structure.places) == {"pre_attn", "post_block"}
    assert structure.missing == dict.fromkeys(
        HOOKS - set(structure.places), "its output is not its input plus what its modules add"
    )
    stream, seen = values(layer.to(dtype), structure, dtype=dtype)
    with torch.no_grad():
        returned = layer(None, stream)
    assert torch.equal(seen["pre_attn"], stream)
    assert torch.equal(seen["post_block"], returned[0] if isinstance(returned, tuple) else returned)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Branching(), "its forward cannot be followed: TraceError"),
        (SplitNoStream(), "its output is not its input plus what its modules add"),
        (TwoStreams(), "its output is not its input plus what its modules add, and 2 of the tensors that it returns"),
        (Constant(), "its output is not its input plus what its modules add"),
        (OtherNames(), "its forward takes tokens, none of which is the stream"),
        (Split(LosingNorm), "its norm LosingNorm neither adds the residual nor hands it on"),
    ],
    ids=["branch", "split", "two streams", "constant", "names", "norm"],
)
def test_refuses_what_it_cannot_follow(layer, reason):
    with pytest.raises(UnclearError) as error:
        found_in(layer)
    assert str(error.value).startswith(reason)


def test_the_refusal_names_the_class():
    from capflow.errors import CapflowError
    from capflow_engine.compat import model as compat_model

    with pytest.raises(CapflowError, match=r"Branching: unknown structure of a decoder layer.*cannot be followed"):
        compat_model.structure_of(Branching(), torch.float32)


class KernelNorm(FusedNorm):
    """vLLM's own operation, which prefers the kernel of another device."""

    def forward(self, x, residual=None):
        from vllm import ir

        if residual is None:
            return ir.ops.rms_norm(x, self.weight, 1e-6)
        return ir.ops.fused_add_rms_norm(x, residual, self.weight, 1e-6)


def test_a_norm_whose_kernel_is_for_another_device_is_tried_in_pytorch(monkeypatch):
    from vllm import ir

    from capflow_engine.compat import model as compat_model

    def elsewhere(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("not on a CPU")

    monkeypatch.setattr(compat_model, "mixes_tokens", lambda module: isinstance(module, Core))
    norm = ir.ops.fused_add_rms_norm
    norm.register_impl("elsewhere")(elsewhere)
    try:
        with norm.set_priority(["elsewhere"]):
            with pytest.raises(NotImplementedError):
                KernelNorm()(torch.ones(1, WIDTH), torch.ones(1, WIDTH))
            structure = compat_model.structure_of(Split(KernelNorm), torch.float32)
    finally:
        del norm.impls["elsewhere"]
    assert set(structure.places) == HOOKS


def test_a_slice_of_the_layers_is_no_second_list_of_them(monkeypatch):
    from capflow_engine.compat import model as compat_model

    monkeypatch.setattr(compat_model, "mixes_tokens", lambda module: isinstance(module, Core))
    model = nn.Module()
    model.layers = nn.ModuleList([Attention(), Attention()])
    model.cached = model.layers[:2]
    assert compat_model.decoder_layers(model, 2) == list(enumerate(model.layers))
