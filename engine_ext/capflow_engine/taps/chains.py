"""The chains of operations of one step on the CPU: for a token, the operations that follow one another at a site."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from capflow.limits import FEATURES_SET_MAX
from capflow.steering.program import ADD, CLAMP, ENCODE, PATCH, RELATIVE, SET
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.gates import Gating

INDEXED_RUNS_MIN = 8
"""With fewer runs, copying slice by slice is faster than gathering by index."""

_SLICED_LENGTH_MIN = 16  # so it is with runs of this many tokens on average, when rows of the bank are added


def few_or_long(count: int, tokens: int) -> bool:
    """Whether `count` runs or chains with `tokens` tokens in all are faster one by one than gathered by index."""
    return count < INDEXED_RUNS_MIN or tokens >= _SLICED_LENGTH_MIN * count


def changed(
    bank: Bank,
    rows: torch.Tensor,
    heads: npt.NDArray[np.int32],
    stream: torch.Tensor,
    gating: Gating | None,
    token_rows: torch.Tensor,
) -> torch.Tensor:
    """Return the change that the operations make, `[tokens, hidden]` float32.

    Tokens with the same first operation have the same chain of operations. If the chains are few or have many tokens,
    each chain is applied on its own, with one product per operation. Many short chains are applied together, operation
    by operation, until few are left.

    rows: those of the bank, as wide as the site's.
    heads: the first operation of each token.
    stream: the site's value, `[tokens, hidden]` float32; changed too.
    gating: the gates of the step; None if it has none.
    token_rows: the row of each token in the model's tensors.
    """
    change = torch.zeros_like(stream)
    # The norm of each token before its first relative operation; negative before that.
    norms = torch.full((len(heads),), -1.0)
    # The activations of the features that are set, by the number of their pair; each is written before it is read.
    active = torch.empty((len(heads), FEATURES_SET_MAX))
    ops, on = heads, np.arange(len(heads))  # the next operation of each unfinished token, and the tokens' indices
    while len(ops) and not few_or_long(len(np.unique(ops)), len(ops)):
        some = None if len(on) == len(heads) else torch.from_numpy(on)
        _do_next(bank, rows, ops, some, stream, change, norms, active, gating, token_rows)
        following = bank.op_ints.numpy()[ops, 2]
        going = following >= 0
        ops, on = following[going], on[going]
    order = np.argsort(ops, kind="stable")
    ends = np.flatnonzero(np.diff(ops[order])) + 1
    for alike in np.split(order, ends) if len(ops) else ():
        mine, op = on[alike], int(ops[alike[0]])
        first, length = int(mine[0]), len(mine)
        if int(mine[-1]) - first + 1 == length:
            here = slice(first, first + length)
            _do_chain(bank, rows, op, stream[here], change[here], norms[here], active[here], gating, token_rows[here])
        else:
            tokens = torch.from_numpy(mine)
            effect = torch.zeros((length, stream.shape[1]))
            own = stream.index_select(0, tokens)
            _do_chain(bank, rows, op, own, effect, norms[tokens], active[tokens], gating, token_rows[tokens])
            change.index_add_(0, tokens, effect)
    return change


def _do_next(
    bank: Bank,
    bank_rows: torch.Tensor,
    ops: npt.NDArray[np.int32],
    tokens: torch.Tensor | None,
    stream: torch.Tensor,
    change: torch.Tensor,
    norms: torch.Tensor,
    active: torch.Tensor,
    gating: Gating | None,
    token_rows: torch.Tensor,
) -> None:
    """Apply one operation to each token and add its effect to `stream` and `change`.

    bank_rows: those of the bank, as wide as the site's.
    ops: the operation of each token.
    tokens: the rows of `stream` and `change`; None for all rows.
    norms: of each row of `stream` before its first relative operation; negative until then.
    active: the activations of each row of `stream`, by the number of their pair.
    token_rows: the row of each token of `stream` in the model's tensors.
    """
    kinds, numbers, _, codes = bank.op_ints.numpy()[ops].T
    rows = bank_rows.index_select(0, torch.from_numpy(numbers.copy()))
    amount, low, high, sharpness = torch.from_numpy(bank.op_floats.numpy()[ops]).unsqueeze(2).unbind(1)
    if gating is not None and (codes >= 0).any():
        places = token_rows if tokens is None else token_rows[tokens]
        amount = amount * gating.values(codes, sharpness.squeeze(1).numpy(), places).unsqueeze(1)
    x = stream if tokens is None else stream.index_select(0, tokens)
    if (kinds == CLAMP).any():
        projection = (x * rows).sum(1, keepdim=True)
        bounded = torch.minimum(torch.maximum(projection, low), high)
        clamps = torch.from_numpy(kinds == CLAMP).unsqueeze(1)
        amount = torch.where(clamps, amount * (bounded - projection), amount)
    if (kinds == RELATIVE).any():
        relative = torch.from_numpy(kinds == RELATIVE)
        at = slice(None) if tokens is None else tokens
        first = relative & (norms[at] < 0.0)
        norms[at] = torch.where(first, torch.linalg.vector_norm(x, dim=1), norms[at])
        amount = torch.where(relative.unsqueeze(1), amount * norms[at].unsqueeze(1), amount)
    for kind in (ENCODE, SET):
        if (kinds == kind).any():
            amount = _paired(kind, kinds, x, rows, amount, low, high, active, tokens)
    if (kinds == PATCH).any():
        left = rows.isnan()
        rows.sub_(x * torch.from_numpy(kinds == PATCH).unsqueeze(1)).masked_fill_(left, 0.0)
    rows.mul_(amount)
    for target in (stream, change):
        if tokens is None:
            target.add_(rows)
        else:
            target.index_add_(0, tokens, rows)


def _paired(
    kind: int,
    kinds: npt.NDArray[np.int32],
    x: torch.Tensor,
    rows: torch.Tensor,
    amount: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    active: torch.Tensor,
    tokens: torch.Tensor | None,
) -> torch.Tensor:
    """Write the activations of the encoding operations, or read those of the setting ones; return all amounts.

    kind: `ENCODE` or `SET`.
    kinds, x, rows, amount, low, high: of each token, as in `_do_next`.
    """
    mine = torch.from_numpy(np.flatnonzero(kinds == kind))
    at = mine if tokens is None else tokens[mine]
    amount = amount.clone()
    if kind == ENCODE:
        encoded = (x[mine] * rows[mine]).sum(1) + low[mine, 0]
        active[at, amount[mine, 0].long()] = torch.where(encoded > high[mine, 0], encoded, 0.0)
        amount[mine] = 0.0
    else:
        amount[mine] *= low[mine] - active[at, high[mine, 0].long()].unsqueeze(1)
    return amount


def _do_chain(
    bank: Bank,
    rows: torch.Tensor,
    op: int,
    stream: torch.Tensor,
    change: torch.Tensor,
    norms: torch.Tensor,
    active: torch.Tensor,
    gating: Gating | None,
    token_rows: torch.Tensor,
) -> None:
    """Apply an operation and all that follow it to all rows of `stream`, and add the total effect to `change`.

    rows: those of the bank, as wide as the site's.
    norms: of each row before its first relative operation; negative until then.
    active: the activations of each row, by the number of their pair.
    token_rows: the row of each token in the model's tensors.
    """
    ints, floats = bank.op_ints.numpy(), bank.op_floats.numpy()
    vectors, times = [], []  # the rows that were added, and the factor of each token
    while op >= 0:
        amount, low, high, sharpness = floats[op].tolist()
        kind, number, op, code = ints[op].tolist()
        row = rows[number]
        value = None if gating is None or code < 0 else gating.value(code, sharpness)[token_rows]
        if kind == PATCH:
            moved = (row - stream).masked_fill_(row.isnan(), 0.0)
            moved.mul_(amount if value is None else (value * amount).unsqueeze(1))
            stream.add_(moved)
            change.add_(moved)
        elif kind == ADD and value is None:
            stream.add_(row, alpha=amount)
            change.add_(row, alpha=amount)
        elif kind == ENCODE:
            encoded = stream.mv(row).add_(low)
            active[:, int(amount)] = torch.where(encoded > high, encoded, 0.0)
        else:
            if kind == CLAMP:
                projection = stream.mv(row)
                factor = projection.clamp(low, high).sub_(projection).mul_(amount)
            elif kind == SET:
                factor = (low - active[:, int(high)]).mul_(amount)
            elif kind == RELATIVE:
                norms = torch.where(norms < 0.0, torch.linalg.vector_norm(stream, dim=1), norms)
                factor = norms * amount
            else:
                assert kind == ADD
                factor = torch.full((len(stream),), amount)
            times.append(factor if value is None else factor.mul_(value))
            vectors.append(row)
            stream.addr_(times[-1], row)
    if vectors:
        change.addmm_(torch.stack(times, 1), torch.stack(vectors))
