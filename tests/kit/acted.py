"""Actions on running requests, and what they do to each position, worked out once more in float64."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch

from capflow.steering.action import ActionApplied, Freeze, Gain, Steer, Unsteer
from tests.kit.engines import Reference


@dataclass
class Acted:
    """What was applied to one request, in order: the owner, the action, and its first position.

    own: the vectors that the request came with, by layer, added at all positions.
    shared: those of other owners, by their names.
    """

    prompt: int
    own: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)
    applied: list = field(default_factory=list)

    def at(self, position):
        """Return the vectors and the clamps at a position, `{layer: vector}` and a list."""
        steers, gains, frozen = self._state(position)
        live = {name: scale for name, (scale, until) in gains.items() if position < until}
        vectors, clamps = {}, []

        def add(layer, vector, scale):
            vectors[layer] = vectors.get(layer, 0.0) + scale * np.asarray(vector, np.float64)

        for layer, vector in self.own.items():
            add(layer, vector, live.get("request", 1.0))
        for name, some in () if frozen else self.shared.items():
            for layer, vector in some.items():
                add(layer, vector, live.get(name, 1.0))
        for owner in sorted(steers):
            action, until = steers[owner]
            if position < until:
                scale = action.gain * live.get(owner, 1.0)
                for vector in action.vectors:
                    add(vector.layer, vector.array(np.float64), scale)
                clamps += [(clamp, scale) for clamp in action.clamps]
        return vectors, clamps

    def _state(self, position):
        """Return what was applied up to a position: the vectors by owner, the gains by owner, whether it is frozen."""
        steers, gains, frozen = {}, {}, False
        for owner, action, first in self.applied:
            until = first + (getattr(action, "lease_positions", None) or 10**9)
            if position < first:
                continue
            match action:
                case Steer():
                    steers[owner] = (action, until)
                case Unsteer():
                    steers.pop(owner, None)
                case Gain():
                    gains[action.owner] = (action.scale, until)
                case _:
                    steers, gains, frozen = {}, {}, isinstance(action, Freeze)
        return steers, gains, frozen


class ActedReference(Reference):
    """Transformers in float64, with what actions do to each position."""

    def __init__(self, model):
        super().__init__(model, torch.float64)

    def rows(self, token_ids, acted):
        """Return `[layers, tokens, hidden]`: the stream after each layer, before it is steered there."""
        return self._computed(token_ids, acted)[0]

    def likeliest(self, token_ids, acted):
        """Return the likeliest next token at each position."""
        return self._computed(token_ids, acted)[1]

    def _computed(self, token_ids, acted):
        places = [acted.at(position) for position in range(len(token_ids))]
        caught = {}

        def hook_of(number):
            def hook(module, inputs, output):
                hidden = output[0] if isinstance(output, tuple) else output
                caught[number] = hidden[0].detach().numpy().copy()
                for position, (vectors, clamps) in enumerate(places):
                    x = hidden[0, position].numpy()
                    if number in vectors:
                        x += vectors[number]
                    for clamp, scale in clamps:
                        if clamp.layer == number:
                            direction = np.frombuffer(clamp.data, np.float32).astype(np.float64)
                            along = x @ direction
                            inside = min(max(along, clamp.low), clamp.high)
                            x += scale * clamp.strength * (inside - along) * direction

            return hook

        hooks = [layer.register_forward_hook(hook_of(n)) for n, layer in enumerate(self.layers)]
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return np.stack([caught[n] for n in range(len(self.layers))]), logits.argmax(-1).tolist()


def act(core, client, actions, on_step=lambda: None):
    """Send actions and step the engine until all are answered; return the outcomes."""
    outcomes, failed = [], []

    def send():
        try:
            outcomes.extend(client.act(list(actions), timeout=60))
        except Exception as e:  # noqa: BLE001
            failed.append(e)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    while thread.is_alive():
        if core.has_unfinished_requests():
            on_step()
        thread.join(0.01)
    assert not failed, failed
    return outcomes


def note(acted, owner, actions, outcomes):
    """Add what was applied to the records of its requests."""
    for action, outcome in zip(actions, outcomes, strict=True):
        if isinstance(outcome, ActionApplied) and action.request:
            acted[action.request].applied.append((owner, action, outcome.position))
