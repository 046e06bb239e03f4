"""Where norms return the stream, in models written by hand: their values are those of the layers, or there is none."""

import pytest
import torch
from torch import nn

from capflow.capture.site import Site
from capflow_engine.layer.passage import final_place, returned_places
from capflow_engine.layer.structure import HookPlace, UnclearError, resolve

WIDTH, LAYERS = 8, 3


class Core(nn.Module):
    """What mixes tokens."""

    def forward(self, x):
        return x.mean(0, keepdim=True).expand_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.core = nn.Linear(WIDTH, WIDTH), Core()

    def forward(self, hidden_states):
        return self.core(self.proj(hidden_states))


class Norm(nn.Module):
    """Adds the residual, when there is one, and hands the sum on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        normal = total / total.pow(2).mean(-1, keepdim=True).sqrt() * self.weight
        return normal if residual is None else (normal, total)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attn, self.after, self.mlp = Norm(), Attention(), Norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.before(hidden_states)
        else:
            hidden_states, residual = self.before(hidden_states, residual)
        hidden_states, residual = self.after(self.attn(hidden_states), residual)
        return self.mlp(hidden_states), residual


class Whole(Layer):
    """Returns the stream as one tensor."""

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attn(self.before(hidden_states))
        return hidden_states + self.mlp(self.after(hidden_states))


class Twice(Layer):
    """Normalises again what its second norm returned."""

    def forward(self, hidden_states, residual):
        hidden_states, residual = super().forward(hidden_states, residual)
        return self.after(hidden_states), residual


class Scaling(Layer):
    """Changes in place what it is given, and then adds it up."""

    def forward(self, hidden_states, residual):
        hidden_states.mul_(1.5)
        return super().forward(hidden_states, residual)


class Model(nn.Module):
    def __init__(self, kind=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.norm = Norm()

    def between(self, number, hidden_states, residual):
        return hidden_states, residual

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        del positions
        hidden_states = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for number, layer in enumerate(self.layers):
            hidden_states, residual = layer(hidden_states, residual)
            hidden_states, residual = self.between(number, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Stage(Model):
    """The last of several pipeline stages: it receives a split stream."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states, residual = (intermediate_tensors[name] for name in ("hidden_states", "residual"))
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class Adding(Model):
    """Adds something to the stream after the first layer."""

    def between(self, number, hidden_states, residual):
        return (hidden_states + 1 if number == 0 else hidden_states), residual


class InPlace(Model):
    def between(self, number, hidden_states, residual):
        if number == 0:
            residual.add_(1)
        return hidden_states, residual


class Auxiliary(Model):
    """Keeps the stream after the first layer, as a model with a drafter does."""

    def between(self, number, hidden_states, residual):
        if number == 0:
            self.kept = hidden_states + residual
        return hidden_states, residual


class Branching(Model):
    """Its path depends on values, so it cannot be followed."""

    def between(self, number, hidden_states, residual):
        return (hidden_states if hidden_states.sum() > 0 else -hidden_states), residual


class Asking(Model):
    """Asks whether its layers hold a part of the tokens."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            if hidden_states.shape[0] != positions.shape[0]:
                hidden_states = torch.cat([hidden_states, hidden_states])
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class Counting(Model):
    """Its path depends on the number of tokens."""

    def between(self, number, hidden_states, residual):
        return (hidden_states if hidden_states.shape[0] > 1 else -hidden_states), residual


class WholeModel(Model):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


def shared():
    model = Model()
    model.layers[2].before = model.layers[1].before
    return model


def places_of(model):
    """Return the place of each site, as a module's name and an element of its output."""
    layers = dict(enumerate(model.layers))
    structures = {n: resolve(layer, torch.float32, lambda m: isinstance(m, Core)) for n, layer in layers.items()}
    names = {module: name for name, module in model.named_modules()}
    places = returned_places(model, layers, structures, torch.float32)
    return {
        str(site): (names[module.get_submodule(place.module)], *place.items) for site, (module, place) in places.items()
    }


POST_ATTN = {f"post_attn:{n}": (f"layers.{n}.after", 1) for n in range(LAYERS)}
FIRST = {"post_block:0": ("layers.1.before", 1)}
LATER = {
    **{f"pre_attn:{n}": (f"layers.{n}.before", 1) for n in (1, 2)},
    "post_block:1": ("layers.2.before", 1),
    "post_block:2": ("norm", 1),
}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(), POST_ATTN | FIRST | LATER),
        (Stage(), POST_ATTN | FIRST | LATER | {"pre_attn:0": ("layers.0.before", 1)}),
        (Auxiliary(), POST_ATTN | FIRST | LATER),
        (Asking(), POST_ATTN | FIRST | LATER),
        (Adding(), POST_ATTN | LATER),
        (InPlace(), POST_ATTN | LATER),
        (Branching(), POST_ATTN),
        (Counting(), POST_ATTN),
        (Model(Twice), FIRST | LATER),
        (Model(Scaling), POST_ATTN | {"post_block:2": ("norm", 1)}),
        (shared(), {**POST_ATTN, "post_block:2": ("norm", 1)}),
        (WholeModel(Whole), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Model) else "",
)
def test_a_place_is_found_only_where_a_norm_is_given_what_a_layer_returns(model, expected):
    assert places_of(model) == expected


def keep(values, site, elements):
    """Return a hook that keeps the sum of some elements of what a module takes or returns."""

    def hook(module, args, output=None):
        given = args if output is None else output
        halves = [half for half in (given[n] for n in elements) if half is not None]
        values[str(site)] = sum(halves).clone()

    return hook


@pytest.mark.parametrize("kind", [Model, Adding, InPlace, Auxiliary])
def test_the_norm_returns_the_value_of_the_site(kind):
    model, rows, sums = kind(), {}, {}
    for site, (name, item) in places_of(model).items():
        model.get_submodule(name).register_forward_hook(keep(rows, site, [item]))
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(keep(sums, Site(number, "pre_attn"), [0, 1]))
        layer.after.register_forward_pre_hook(keep(sums, Site(number, "post_attn"), [0, 1]))
        layer.register_forward_hook(keep(sums, Site(number, "post_block"), [0, 1]))
    with torch.no_grad():
        model(torch.arange(5), torch.arange(5))
    assert rows
    for site, value in rows.items():
        assert torch.equal(value, sums[site]), site


class Unfollowed(Model):
    """A model of Transformers, whose forward asks what symbols cannot answer."""

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, use_cache=False, return_dict=False):
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return (self.norm(hidden_states),)


class UnfollowedWithout(Unfollowed):
    def forward(self, *args, **kwargs):
        return (super().forward(*args, **kwargs)[0] * 2,)


class Without(Model):
    """Returns the stream as the last layer does."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return hidden_states + residual


class Again(Model):
    """Runs its last norm on the embeddings, too."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states, residual = self.norm(self.embed(input_ids)), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class Aside(Model):
    """Returns a norm of the embeddings."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(self.embed(input_ids))


class Head(nn.Module):
    """Holds a model, as the class with the LM head does."""

    def __init__(self, model, change=lambda x: x):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, input_ids, positions):
        return self.change(self.model(input_ids, positions))


def final_of(model):
    owner = next(m for m in model.modules() if isinstance(m, Model))
    layers = dict(enumerate(owner.layers))
    structures = {n: resolve(layer, torch.float32, lambda m: isinstance(m, Core)) for n, layer in layers.items()}
    module, place = final_place(model, layers, structures, torch.float32)
    assert module is owner
    return place


@pytest.mark.parametrize(
    ("model", "scale"),
    [
        (Model(), 1.0),
        (Stage(), 1.0),
        (Auxiliary(), 1.0),
        (WholeModel(Whole), 1.0),
        (Unfollowed(Whole), 1.0),
        (Head(Model()), 1.0),
        (Head(Model(), lambda x: x / 4), 0.25),
        (Head(Head(WholeModel(Whole), lambda x: x * 3)), 3.0),
    ],
)
def test_final_is_what_the_last_norm_returns_and_the_head_reads(model, scale):
    assert final_of(model) == HookPlace("norm", scale=scale, outside=True)


def test_a_model_that_was_tried_without_its_layers_has_them_afterwards():
    model = Unfollowed(Whole)
    layers = model.layers
    final_of(Head(model))
    assert model.layers is layers
    assert not model.norm._forward_hooks


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Without(), "what the model returns is not what a norm returns"),
        (Again(), "the model's last norm runs twice"),
        (Aside(), "the model's last norm does not take what the last layer returns"),
        (UnfollowedWithout(Whole), "its forward cannot be followed: "),
        (Head(Model(), torch.tanh), "the model changes what its last norm returns"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_model_without_final_says_why(model, reason):
    with pytest.raises(UnclearError) as error:
        final_of(model)
    assert str(error.value).startswith(reason)
