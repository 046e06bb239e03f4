"""Attention's weights, computed from captured queries and keys.

The softmax of scaled products of queries and keys (Vaswani et al., "Attention is all you need",
https://arxiv.org/abs/1706.03762), with grouped queries (https://arxiv.org/abs/2305.13245), a sliding window
(https://arxiv.org/abs/2310.06825), a soft cap of the logits (https://arxiv.org/abs/2408.00118), and a sink of each head
(gpt-oss, https://arxiv.org/abs/2508.10925).

Invariant: memory beside the arguments and the result stays below `TILE_BYTES` and a copy of the keys in float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.attention import AttentionForm
from capflow.errors import UsageError, explain
from capflow.probes.probe import as_float32
from capflow.weights import numbers_of

TILE_BYTES = 32 * limits.MIB
"""The memory for the logits of one head and some queries; of one query at least."""

Spans = Mapping[str, tuple[int, int]]


def attention_weights(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    form: AttentionForm,
    *,
    start: int = 0,
    positions: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    heads: Sequence[int] | None = None,
    spans: Spans | None = None,
    sinks: npt.ArrayLike | None = None,
) -> npt.NDArray[Any]:
    """Return attention's weights `[heads, queries, keys]`, or their sums over spans of keys `[heads, queries, spans]`.

    They are float64 if `q` or `k` is, else float32. A key that a query does not see has the weight 0.

    q: rows at `q`, `[queries, heads, head_dim]`, of any captured dtype.
    k: rows at `k` of positions 0, 1, 2 and so on, `[keys, KV heads, head_dim]`, up to the last query's at least.
    form: `ModelInfo.attention_of(layer)`.
    start: the position of the first query; the others follow it.
    positions: the position of each query instead, in any order.
    heads: the query heads to return, in this order; None for all.
    spans: `(first, end)` of the positions of each span of keys. The sums come in the order of the mapping.
    sinks: of attention with sinks, the logit of each query head's, `[heads]`: a weight of the model, such as
        `self_attn.sinks` or `attention_sink_bias`.

    Raises UsageError for arrays that do not fit each other, for a form that says why there are no weights, and for a
    result of more than `limits.ATTENTION_BYTES_MAX` bytes.
    """
    places = _places(q, k, start, positions)
    if form.lacks:
        raise UsageError(explain("attention weights", got=form.lacks, expected="a softmax of q and k alone"))
    added = numbers_of(
        "sinks",
        sinks,
        q.shape[1],
        needed=form.sinks,
        each="query head",
        parameter="self_attn.sinks or attention_sink_bias",
    )
    chosen = _heads(heads, q.shape[1])
    edges = None if spans is None else _edges(spans, len(k))
    dtype = np.dtype(np.float64 if np.float64 in (q.dtype, k.dtype) else np.float32)
    shape = (len(chosen), len(q), len(k) if spans is None else len(spans))
    check_size(shape, dtype.itemsize)
    weights = np.zeros(shape, dtype)
    queries, keys = (
        (rows if rows.dtype == np.float64 else as_float32(rows)).astype(dtype, copy=False) for rows in (q, k)
    )
    group = q.shape[1] // k.shape[1]
    count = max(1, TILE_BYTES // max(1, len(k) * dtype.itemsize))
    for at in range(0, len(q), count):
        rows = slice(at, at + count)
        first, end = _seen(places[rows], form.window)
        unseen = _unseen(places[rows], np.arange(first, end), form.window)
        for number, head in enumerate(chosen):
            tile = queries[rows, head] @ keys[first:end, head // group].T
            _softmax(tile, unseen, form, None if added is None else float(added[head]))
            if edges is None:
                weights[number, rows, first:end] = tile
                continue
            for place, span in enumerate(edges):
                low, high = (min(max(edge, first), end) - first for edge in span)
                weights[number, rows, place] = tile[:, low:high].sum(axis=1)
    return weights


def check_size(shape: tuple[int, int, int], itemsize: int) -> None:
    """Raise UsageError for weights of more bytes than `limits.ATTENTION_BYTES_MAX`."""
    nbytes, bound = shape[0] * shape[1] * shape[2] * itemsize, limits.ATTENTION_BYTES_MAX
    if nbytes > bound:
        got = f"{nbytes:,} bytes for {shape[0]} heads, {shape[1]:,} queries and {shape[2]:,} keys"
        do = "ask for some heads or positions, or for sums with spans"
        raise UsageError(explain("attention weights", got=got, expected=f"at most {bound:,}", do=do))


def _softmax(tile: npt.NDArray[Any], unseen: npt.NDArray[np.bool_], form: AttentionForm, sink: float | None) -> None:
    """Turn products of queries and keys into weights, in place."""
    with np.errstate(invalid="ignore", over="ignore"):  # rows that overflowed give NaN
        tile *= form.scale
        if form.soft_cap is not None:
            tile /= form.soft_cap
            np.tanh(tile, out=tile)
            tile *= form.soft_cap
        tile[unseen] = -np.inf
        highest = tile.max(axis=1, keepdims=True)
        if sink is not None:
            np.maximum(highest, sink, out=highest)
        tile -= highest
        np.exp(tile, out=tile)
        total = tile.sum(axis=1, keepdims=True)
        if sink is not None:
            total += np.exp(sink - highest)
        tile /= total


def _seen(places: npt.NDArray[np.int64], window: int | None) -> tuple[int, int]:
    """Return the first key that a query sees, and the end of those that one sees."""
    first = 0 if window is None else max(0, int(places.min()) - window + 1)
    return first, int(places.max()) + 1


def _unseen(places: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.bool_]:
    """Return whether each query does not see each key, `[queries, keys]`."""
    unseen: npt.NDArray[np.bool_] = keys > places[:, None]
    if window is not None:
        unseen |= keys <= places[:, None] - window
    return unseen


def _places(q: npt.NDArray[Any], k: npt.NDArray[Any], start: int, positions: Any) -> npt.NDArray[np.int64]:
    """Return the positions of the queries; raise UsageError unless they, the queries and the keys fit each other."""
    for name, rows in (("q", q), ("k", k)):
        if rows.ndim != 3:
            raise UsageError(
                explain(name, got=f"an array {list(rows.shape)}", expected=f"[{name} rows, heads, head_dim]")
            )
    if q.shape[2] != k.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        got = f"q of {list(q.shape[1:])} and k of {list(k.shape[1:])}"
        raise UsageError(explain("q and k", got=got, expected="one head_dim, and as many query heads for each KV head"))
    if positions is not None and start:
        raise UsageError(explain("start", got=start, expected="0 with positions", do="remove one of them"))
    places = np.arange(start, start + len(q)) if positions is None else np.asarray(positions)
    if places.shape != (len(q),) or (len(q) and places.dtype.kind not in "iu"):
        expected = f"{len(q)} whole numbers, one for each query"
        raise UsageError(explain("positions", got=f"{places.dtype} {list(places.shape)}", expected=expected))
    if len(q) and not 0 <= places.min() <= places.max() < len(k):
        got = f"queries of positions {places.min()} to {places.max()} and {len(k)} keys"
        raise UsageError(explain("k", got=got, expected="the keys of all positions from 0 to the last query's"))
    return places.astype(np.int64)


def _heads(heads: Sequence[int] | None, count: int) -> list[int]:
    """Return the numbers of the wanted heads; raise UsageError for one that is not there."""
    if heads is None:
        return list(range(count))
    chosen = list(heads) if isinstance(heads, Sequence | np.ndarray) and not isinstance(heads, str) else [heads]
    for head in chosen:
        if isinstance(head, bool) or not isinstance(head, int | np.integer) or not 0 <= head < count:
            raise UsageError(explain("heads", got=head, expected=f"numbers from 0 to {count - 1}"))
    return [int(head) for head in chosen]


def _edges(spans: Spans, count: int) -> list[tuple[int, int]]:
    """Return `(first, end)` of each span; raise UsageError for one that does not lie in so many keys."""
    if not isinstance(spans, Mapping):
        expected = '(first, end) by name, such as {"subject": (3, 7)}'
        raise UsageError(explain("spans", got=spans, expected=expected))
    edges = []
    for name, span in spans.items():
        numbers = isinstance(span, Sequence) and len(span) == 2 and all(isinstance(n, int | np.integer) for n in span)
        if not numbers or not 0 <= span[0] < span[1] <= count:
            expected = f"(first, end) with 0 <= first < end <= {count}, the number of keys"
            raise UsageError(explain(f"spans.{name}", got=span, expected=expected))
        edges.append((int(span[0]), int(span[1])))
    return edges
