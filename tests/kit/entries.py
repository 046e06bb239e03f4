"""The hooks of the tiny models, with the shapes of their rows, and clamps and patches done by hand, in float64.

A clamp or a patch may name entries of a row: heads where rows have heads, else single numbers.
"""

import math

import numpy as np

from capflow.capture.site import HOOKS
from tests.kit.engines import SHAPE, WIDTH

_HEADS, _KV_HEADS, _HEAD_DIM = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], 32
_SHAPES = {
    "heads": (_HEADS, _HEAD_DIM),
    "q": (_HEADS, _HEAD_DIM),
    "k": (_KV_HEADS, _HEAD_DIM),
    "v": (_KV_HEADS, _HEAD_DIM),
    "neurons": (SHAPE["intermediate_size"],),
    "router": (4,),
}

LLAMA_HOOKS = tuple(hook for hook in HOOKS if hook != "router")
"""The hooks of the tiny Llama."""


def shape_of(hook):
    """Return the shape of a row, `(width,)` or `(heads, head_dim)`."""
    return _SHAPES.get(hook, (WIDTH,))


def width_of(hook):
    """Return how many numbers a row has."""
    return math.prod(shape_of(hook))


def unit_of(hook):
    """Return how many numbers an entry has."""
    return math.prod(shape_of(hook)[1:])


def columns(index, hook):
    """Return the numbers of a row that entries are."""
    unit = unit_of(hook)
    return np.concatenate([np.arange(n * unit, (n + 1) * unit) for n in np.atleast_1d(index)])


def clamp(x, given, hook, factor=1.0):
    """Clamp rows `[tokens, width]` in place.

    given: a clamp as a request has it, of a direction or of entries.
    factor: multiplies its strength; a number for each row, or one for all.
    """
    factor = np.broadcast_to(factor, len(x)) * given.get("strength", 1.0)
    low, high = (given.get("value", given.get(end, none)) for end, none in (("min", -np.inf), ("max", np.inf)))
    if "index" in given:
        at = columns(given["index"], hook)
        low, high = _spread(low, at), _spread(high, at)
        x[:, at] += factor[:, None] * (np.clip(x[:, at], low, high) - x[:, at])
        return
    direction = np.asarray(given["vector"], np.float64)
    direction = direction / np.linalg.norm(direction)
    along = x @ direction
    x += np.outer(factor * (np.clip(along, low, high) - along), direction)


def patch(x, given, hook, prompt_length, factor=1.0):
    """Replace rows `[tokens, width]` in place, or move them; the arguments are those of `clamp`."""
    factor = np.broadcast_to(factor, len(x)) * given.get("amount", 1.0)
    at = columns(given["index"], hook) if "index" in given else np.arange(x.shape[1])
    values = np.asarray(given["vector"], np.float64)
    values = values if values.ndim == 2 else values[None].repeat(len(given["positions"]), 0)
    for position, row in zip(given["positions"], values, strict=True):
        n = position if position >= 0 else prompt_length + position
        if 0 <= n < len(x):
            x[n, at] += factor[n] * (_spread(row, at) - x[n, at])


def _spread(values, at):
    """Return a value for each number of the entries: one for all, one entry for all, or all entries."""
    values = np.asarray(values, np.float64).reshape(-1)
    return np.tile(values, len(at) // len(values))


def plain_clamp(made):
    """Return a `Clamp` of entries or of a direction in the form of a request."""
    data = np.frombuffer(made.data, np.float32).astype(np.float64)
    bounds = {"min": made.low, "max": made.high, "strength": made.strength}
    if not made.index:
        return {"vector": data, **bounds}
    return {"index": list(made.index), **({"value": data, "strength": made.strength} if len(data) else bounds)}
