"""The tap on a GPU: one Triton program per token. A program with nothing to do returns at once.

`launch` checks the layout of the tables of `capflow_engine.taps.tables` and `capflow_engine.taps.bank`. A captured row
of a split stream is summed and scaled in float32 and rounded once, to the model's dtype. Steering operations work on
the stream in float32; their total change is added to `hidden` and rounded once.

A score is written to `margins` for later launches; later operations of the same launch read it from a register. A
latched gate reads the margins of earlier tokens, which other programs of this launch may be writing: so the scores of a
latched gate come from an earlier launch.

Behind a matrix product that streams weights through the L2 cache, most of an idle tap's time is the latency of its
tables. So it asks the cache to keep them, and on GPUs that can, it reads them while its predecessor still runs.
Invariant: a kernel that is launched the usual way, the last of `Tables.load`, lies between a change of the tables or
the bank and the first tap of a step, and no predecessor of a tap in the step changes them; margins are read after the
predecessor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from capflow.limits import FEATURES_SET_MAX, GATES_MAX, SITE_OPS_MAX
from capflow.steering.program import CLAMP, ENCODE, PATCH, RELATIVE, SCORE_CAST, SCORE_COSINE, SCORE_DOT, SET
from capflow_engine.taps.bank import OP_WIDTH
from capflow_engine.taps.gpu.score_kernel import unfused
from capflow_engine.taps.requests import SHIP, VIEW
from capflow_engine.taps.scores import NORM_MIN
from capflow_engine.taps.tables import CHANNELS

SCANNED = 128
"""How many earlier tokens a latched gate reads at once."""
REGISTERS_MAX = 128
"""Of a thread: twice as many rows are in flight as with what the compiler takes, and hardly any are spilled."""
EARLY_FROM = (9, 0)
"""The first compute capability with programmatic dependent launches."""

# A cosine's error is about that of tanh divided by its largest value, so small arguments need a small error.
_SERIES_BELOW = 0.05


@triton.jit
def _tanh(x, SERIES_BELOW: tl.constexpr):
    small = tl.abs(x) < SERIES_BELOW
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(x))
    exact = (1.0 - decay) / (1.0 + decay)
    return tl.where(small, series, tl.where(x < 0.0, -exact, exact))


@triton.jit
def _score(
    kind,
    stream,
    vector,
    along,
    COSINES: tl.constexpr,
    CASTS: tl.constexpr,
    NORM_LEAST: tl.constexpr,
    SERIES_BELOW: tl.constexpr,
):
    """Return a score; `along` is the product of stream and probe."""
    score = along
    if kind >= COSINES:
        direction = vector
        if kind == CASTS:
            square = tl.sum(vector * vector, axis=0)
            direction = _tanh(along / tl.maximum(square, NORM_LEAST) * vector, SERIES_BELOW)
        lengths = tl.sqrt(tl.sum(stream * stream, axis=0)) * tl.sqrt(tl.sum(direction * direction, axis=0))
        score = tl.sum(stream * direction, axis=0) / tl.maximum(lengths, NORM_LEAST)
    return score


@triton.jit
def _gate_value(
    code,
    sharpness,
    own,
    token,
    margins,
    first,
    token_latch,
    carried,
    tokens_max,
    latches_max,
    GATES: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Return the value of a gate at a token; `own` holds the margins that this launch scored."""
    gate = code // 2
    here = margins + gate * tokens_max
    margin = tl.maximum(
        tl.load(here + token), tl.max(tl.where(tl.arange(0, GATES) == gate, own, -float("inf")), axis=0)
    )
    if code % 2 == 1:
        column = tl.load(token_latch + token)
        begin = tl.load(first + token)
        if column >= 0:
            margin = tl.maximum(margin, tl.load(carried + gate * latches_max + column))
            while begin < token:
                places = begin + tl.arange(0, SCAN)
                earlier = tl.load(here + places, mask=places < token, other=-float("inf"))
                margin = tl.maximum(margin, tl.max(earlier, axis=0))
                begin += SCAN
    soft = 1.0 / (1.0 + tl.exp(-sharpness * margin))
    return tl.where(sharpness == float("inf"), tl.where(margin >= 0.0, 1.0, 0.0), soft)


@triton.jit
def _stream(half, other_half, inside, scale, SPLIT: tl.constexpr, SCALED: tl.constexpr):
    """Return the stream at a token in float32, from the places of its halves."""
    stream = tl.load(half, mask=inside).to(tl.float32)
    if SPLIT:
        stream += tl.load(other_half, mask=inside).to(tl.float32)
    if SCALED:
        stream *= scale
    return stream


@triton.jit
def _steer(
    op,
    token,
    half_of_row,
    other_half,
    columns,
    inside,
    margins,
    first,
    token_latch,
    carried,
    op_ints,
    op_floats,
    rows,
    scale,
    tokens_max,
    latches_max,
    width: tl.constexpr,
    rows_width: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    CLAMPS: tl.constexpr,
    PATCHES: tl.constexpr,
    RELATIVES: tl.constexpr,
    ENCODES: tl.constexpr,
    SETS: tl.constexpr,
    DOTS: tl.constexpr,
    COSINES: tl.constexpr,
    CASTS: tl.constexpr,
    OPS_MAX: tl.constexpr,
    OP_COLUMNS: tl.constexpr,
    GATES: tl.constexpr,
    FEATURES: tl.constexpr,
    SCAN: tl.constexpr,
    NORM_LEAST: tl.constexpr,
    SERIES_BELOW: tl.constexpr,
):
    """Carry out the operations of a token, from `op` on, and change its row of `hidden`.

    The stream is read again for each operation, and a half of it at the end: that keeps registers free.
    """
    change = tl.zeros([BLOCK], tl.float32)
    own = tl.full([GATES], -float("inf"), tl.float32)
    active = tl.zeros([FEATURES], tl.float32)  # the activations of features that are set
    square = -1.0  # of the norm before the first relative operation
    done = 0
    while (op >= 0) & (done < OPS_MAX):
        kind = tl.load(op_ints + op * OP_COLUMNS)
        row = tl.load(op_ints + op * OP_COLUMNS + 1).to(tl.int64)
        following = tl.load(op_ints + op * OP_COLUMNS + 2)
        code = tl.load(op_ints + op * OP_COLUMNS + 3)
        amount = tl.load(op_floats + op * OP_COLUMNS)
        low = tl.load(op_floats + op * OP_COLUMNS + 1)
        high = tl.load(op_floats + op * OP_COLUMNS + 2)
        sharpness = tl.load(op_floats + op * OP_COLUMNS + 3)
        stream = _stream(half_of_row, other_half, inside, scale, SPLIT, SCALED)
        vector = tl.load(rows + row * rows_width + columns, mask=inside, other=0.0)
        steered = tl.where(inside, stream + change, 0.0)
        projection = tl.sum(steered * tl.where(kind == RELATIVES, steered, vector), axis=0)
        square = tl.where((kind == RELATIVES) & (square < 0.0), projection, square)
        if kind >= DOTS:
            margin = amount + _score(kind, steered, vector, projection, COSINES, CASTS, NORM_LEAST, SERIES_BELOW)
            margin = tl.where(margin >= -float("inf"), margin, -float("inf"))  # without NaN
            own = tl.where(tl.arange(0, GATES) == code // 2, margin, own)
            tl.store(margins + (code // 2) * tokens_max + token, margin)
        elif kind == ENCODES:
            encoded = tl.where(projection + low > high, projection + low, 0.0)
            active = tl.where(tl.arange(0, FEATURES) == amount, encoded, active)
        else:
            if code >= 0:
                amount *= _gate_value(
                    code,
                    sharpness,
                    own,
                    token,
                    margins,
                    first,
                    token_latch,
                    carried,
                    tokens_max,
                    latches_max,
                    GATES,
                    SCAN,
                )
            bounded = tl.minimum(tl.maximum(projection, low), high)
            times = tl.where(kind == CLAMPS, bounded - projection, 1.0)
            held = tl.sum(tl.where(tl.arange(0, FEATURES) == high, active, 0.0), axis=0)
            times = tl.where(kind == SETS, low - held, times)
            along = tl.where(kind == RELATIVES, tl.sqrt(tl.abs(square)), times) * vector
            # NaN leaves the number that is there.
            patched = tl.where((vector >= 0.0) | (vector < 0.0), vector - steered, 0.0)
            change += amount * tl.where(kind == PATCHES, patched, along)
        op = following
        done += 1
    if SCALED:
        change /= scale
    half = tl.load(half_of_row, mask=inside).to(tl.float32)
    tl.store(half_of_row, (half + change).to(half_of_row.dtype.element_ty), mask=inside)


@triton.jit
def _tap_kernel(
    hidden,
    residual,
    site,
    site_line,
    site_base,
    token_row,
    token_steer,
    staging,
    margins,
    first,
    token_latch,
    carried,
    heads,
    op_ints,
    op_floats,
    rows,
    scale,
    hidden_stride,
    residual_stride,
    sites,
    tokens_max,
    latches_max,
    width: tl.constexpr,
    rows_width: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    CLAMPS: tl.constexpr,
    PATCHES: tl.constexpr,
    RELATIVES: tl.constexpr,
    ENCODES: tl.constexpr,
    SETS: tl.constexpr,
    DOTS: tl.constexpr,
    COSINES: tl.constexpr,
    CASTS: tl.constexpr,
    OPS_MAX: tl.constexpr,
    OP_COLUMNS: tl.constexpr,
    GATES: tl.constexpr,
    FEATURES: tl.constexpr,
    SCAN: tl.constexpr,
    NORM_LEAST: tl.constexpr,
    SERIES_BELOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    # These loads are in the order of what they wait for, without branches between them, so that they overlap.
    slot = tl.load(token_steer + token, eviction_policy="evict_last")
    here = tl.load(site, eviction_policy="evict_last")
    ship_line = tl.load(site_line + here, eviction_policy="evict_last")
    view_line = tl.load(site_line + sites + here, eviction_policy="evict_last")
    ship_base = tl.load(site_base + here, eviction_policy="evict_last")
    view_base = tl.load(site_base + sites + here, eviction_policy="evict_last")
    op = tl.load(heads + slot * sites + here, mask=slot >= 0, other=-1, eviction_policy="evict_last")
    ship_place = token_row + ship_line * tokens_max + token
    ship_row = tl.load(ship_place, mask=ship_line >= 0, other=-1, eviction_policy="evict_last")
    view_place = token_row + (sites + view_line) * tokens_max + token
    view_row = tl.load(view_place, mask=view_line >= 0, other=-1, eviction_policy="evict_last")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if (ship_row >= 0) | (view_row >= 0) | (op >= 0):
        columns = tl.arange(0, BLOCK)
        inside = columns < width
        half_of_row = hidden + token.to(tl.int64) * hidden_stride + columns
        other_half = residual + token.to(tl.int64) * residual_stride + columns
        if ship_row >= 0:
            stream = _stream(half_of_row, other_half, inside, scale, SPLIT, SCALED)
            target = staging + (ship_base + ship_row).to(tl.int64) * width + columns
            tl.store(target, stream.to(staging.dtype.element_ty), mask=inside)
        if view_row >= 0:
            stream = _stream(half_of_row, other_half, inside, scale, SPLIT, SCALED)
            target = staging + (view_base + view_row).to(tl.int64) * width + columns
            tl.store(target, stream.to(staging.dtype.element_ty), mask=inside)
        if op >= 0:
            _steer(
                op,
                token,
                half_of_row,
                other_half,
                columns,
                inside,
                margins,
                first,
                token_latch,
                carried,
                op_ints,
                op_floats,
                rows,
                scale,
                tokens_max,
                latches_max,
                width,
                rows_width,
                BLOCK,
                SPLIT,
                SCALED,
                CLAMPS,
                PATCHES,
                RELATIVES,
                ENCODES,
                SETS,
                DOTS,
                COSINES,
                CASTS,
                OPS_MAX,
                OP_COLUMNS,
                GATES,
                FEATURES,
                SCAN,
                NORM_LEAST,
                SERIES_BELOW,
            )


@functools.cache
def _options(device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Return whether the kernel starts before its predecessor ends, and further options of its launch."""
    options: dict[str, Any] = unfused(device)
    if device.type != "cuda" or torch.version.cuda is None:
        return False, options
    early = torch.cuda.get_device_capability(device) >= EARLY_FROM
    return early, {**options, "maxnreg": REGISTERS_MAX, **({"launch_pdl": True} if early else {})}


def launch(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: torch.Tensor,
    site_line: torch.Tensor,
    site_base: torch.Tensor,
    token_row: torch.Tensor,
    token_steer: torch.Tensor,
    staging: torch.Tensor,
    margins: torch.Tensor,
    first: torch.Tensor,
    token_latch: torch.Tensor,
    carried: torch.Tensor,
    heads: torch.Tensor,
    op_ints: torch.Tensor,
    op_floats: torch.Tensor,
    rows: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Launch the tap of one site over `hidden`, `[tokens, width]`; see `capflow_engine.taps.tap.tap`."""
    tokens, width = hidden.shape
    assert len((SHIP, VIEW)) == CHANNELS
    assert hidden.stride(1) == 1
    assert residual is None or (residual.shape == hidden.shape and residual.stride(1) == 1)
    sites = heads.shape[1]
    # A row that is wider than the bank's is of a site that is not steered.
    assert staging.shape[1] == width
    assert staging.is_contiguous()
    assert rows.stride(1) == 1
    assert site_line.shape == site_base.shape == (CHANNELS, sites)
    assert token_row.shape == (CHANNELS, sites, token_steer.shape[0])
    assert tokens <= token_steer.shape[0]
    assert margins.shape == (GATES_MAX, token_steer.shape[0])
    assert first.shape == token_latch.shape == token_steer.shape
    assert carried.shape[0] == GATES_MAX
    assert heads.is_contiguous()
    other = hidden if residual is None else residual
    early, options = _options(hidden.device)
    _tap_kernel[(tokens,)](
        hidden,
        other,
        site,
        site_line,
        site_base,
        token_row,
        token_steer,
        staging,
        margins,
        first,
        token_latch,
        carried,
        heads,
        op_ints,
        op_floats,
        rows,
        scale,
        hidden.stride(0),
        other.stride(0),
        sites,
        token_steer.shape[0],
        carried.shape[1],
        width=width,
        rows_width=rows.stride(0),
        BLOCK=triton.next_power_of_2(width),
        SPLIT=residual is not None,
        SCALED=scale != 1.0,
        CLAMPS=CLAMP,
        PATCHES=PATCH,
        RELATIVES=RELATIVE,
        ENCODES=ENCODE,
        SETS=SET,
        DOTS=SCORE_DOT,
        COSINES=SCORE_COSINE,
        CASTS=SCORE_CAST,
        OPS_MAX=SITE_OPS_MAX,
        OP_COLUMNS=OP_WIDTH,
        GATES=GATES_MAX,
        FEATURES=FEATURES_SET_MAX,
        SCAN=SCANNED,
        NORM_LEAST=NORM_MIN,
        SERIES_BELOW=_SERIES_BELOW,
        EARLY=early,
        num_warps=max(4, min(16, triton.next_power_of_2(width) // 1024)),
        **options,
    )
