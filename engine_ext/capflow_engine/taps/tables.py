"""The tables that hold the plan for the GPU taps, and the staging buffer that their rows are copied to.

All tensors are allocated once, before CUDA graphs are captured, and never move.

| tensor | shape | meaning |
|---|---|---|
| site_line | int32 [2, sites] | the line of `token_row` that each site reads, per channel (`SHIP`, `VIEW`); -1: none |
| site_base | int32 [2, sites] | the number that each site adds to the entries of that line, per channel |
| token_row | int32 [2, lines, tokens] | the staging row of each token minus `site_base` of the site; -1: not wanted |
| token_steer | int32 [tokens] | the slot of the bank that steers each token; -1: none |
| staging | [rows, part] | of each width class: the rows of the step, in the order of the plan |
| margins | float32 [gates, tokens] | the margin of each gate at each token; -inf: not scored |
| first | int32 [tokens] | the first token row of the token's request |
| token_latch | int32 [tokens] | the column of `carried` of the token's request; -1: none |
| carried | float32 [gates, requests] | the largest margin of each gate in the request's earlier steps |

The last four are read only by operations with a gate, and written before each step that has gates.

The steering operations are in the bank (`capflow_engine.taps.bank`). On the CPU, the taps read the plan itself; the
tensors then have one element per dimension (`resident` is False).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from capflow import limits
from capflow_engine.taps.plan import Plan, PlannedBlock, Slots, counted, token_rows

CHANNELS = 2

_GATE_TABLES = ("margins", "first", "token_latch", "carried")

_NOTHING = np.empty(0, np.int32)


class Tables:
    """The tables of one worker, allocated at their maximum size.

    sites: the number of tapped sites.
    tokens: the maximum number of tokens of a step.
    rows: the maximum number of rows of a step, of class 0.
    requests: the maximum number of requests of a step.
    shaped: the maximum number of rows of each further width class, and how many numbers of a row this rank has.
    device: where the model is.
    resident: whether the taps read the tables.
    """

    def __init__(
        self,
        *,
        sites: int,
        tokens: int,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        resident: bool,
        requests: int = 1,
        shaped: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.resident = resident
        gates = limits.GATES_MAX
        if not resident:
            sites = tokens = rows = hidden = requests = gates = 1
            shaped = [(1, 1)] * len(shaped)
        self.sites = sites
        self.site_line = torch.full((CHANNELS, sites), -1, dtype=torch.int32, device=device)
        self.site_base = torch.zeros((CHANNELS, sites), dtype=torch.int32, device=device)
        self.token_row = torch.full((CHANNELS, sites, tokens), -1, dtype=torch.int32, device=device)
        self.token_steer = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        # Of each width class.
        self.stagings = [torch.empty(size, dtype=dtype, device=device) for size in ((rows, hidden), *shaped)]
        self.margins = torch.full((gates, tokens), -math.inf, dtype=torch.float32, device=device)
        self.first = torch.zeros((tokens,), dtype=torch.int32, device=device)
        self.token_latch = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.carried = torch.full((gates, requests), -math.inf, dtype=torch.float32, device=device)
        # On a GPU, changed by the kernel that ends `load`.
        self._fence = torch.zeros(1, dtype=torch.int32, device=device)
        # The values last uploaded to each table.
        self._written: dict[str, npt.NDArray[np.int32]] = {}
        # Whether the uploaded tables are those of an idle plan.
        self._idle = True
        # The blocks of the uploaded tables without their spans, and the number of rows that the tables are for.
        self._layout: tuple[int, list[PlannedBlock]] | None = None
        self._slots: Slots | None = None
        # Whether the uploaded `token_steer` names a slot.
        self._steering = False

    @property
    def staging(self) -> torch.Tensor:
        """The staging buffer of class 0."""
        return self.stagings[0]

    def holds(self, plan: Plan) -> bool:
        """Return whether the staging buffers have room for a plan."""
        return all(self.fits(plan))

    def fits(self, plan: Plan) -> list[bool]:
        """Return for each width class whether its staging buffer has room for a plan; always, if taps do not use it."""
        counts = zip((plan.rows, *plan.shaped), self.stagings, strict=False)
        return [not self.resident or rows <= len(staging) for rows, staging in counts]

    def device_tensors(self, width_class: int = 0) -> dict[str, torch.Tensor]:
        """Return the tensors that a tap holds at a site of a class, by the names of the op's arguments."""
        names = ("site_line", "site_base", "token_row", "token_steer", "staging", *_GATE_TABLES)
        return {name: getattr(self, name) for name in names} | {"staging": self.stagings[width_class]}

    def load(
        self,
        plan: Plan,
        padded_tokens: int,
        carried: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> None:
        """Copy a plan to the tables, for model tensors of `padded_tokens` rows; asynchronous on a GPU.

        The bank does not change between this and the forward pass.

        carried: what latched gates carry, `[gates, latched requests]`, in the order of `plan.latched`; None if there
            are none.
        received: the margins that earlier pipeline stages scored, for the first token rows; None at the first stage.
        """
        if plan.gates:
            self._load_gates(plan, padded_tokens, carried, received)
        if plan.idle and self._idle:
            return
        self._idle = plan.idle
        # While a batch decodes, only the positions of its rows change, which no table has.
        layout = (padded_tokens, [block._replace(spans=()) for block in plan.blocks])
        if layout != self._layout:
            self._load_rows(plan, padded_tokens)
            self._layout = layout
        if plan.steered is not self._slots:
            self._load_steering(plan)
            self._slots = plan.steered
        if self._fence.is_cuda:
            # A tap reads the tables while the kernel before it still runs. That must never be one that writes them, and
            # a tap may be the first kernel of a later pipeline stage.
            self._fence.add_(1)

    def _load_rows(self, plan: Plan, padded_tokens: int) -> None:
        line_of = np.full((CHANNELS, self.sites), -1, np.int32)
        base_of = np.zeros((CHANNELS, self.sites), np.int32)
        for channel in range(CHANNELS):
            blocks = [block for block in plan.blocks if block.channel == channel]
            if blocks:
                lines = _lines(blocks, padded_tokens, line_of[channel], base_of[channel])
                self._write(f"token_row {channel}", self.token_row[channel, : len(lines), :padded_tokens], lines)
        self._write("site_line", self.site_line, line_of)
        self._write("site_base", self.site_base, base_of)

    def _load_gates(
        self, plan: Plan, padded_tokens: int, carried: torch.Tensor | None, received: torch.Tensor | None
    ) -> None:
        self.margins[: plan.gates, :padded_tokens].fill_(-math.inf)
        if received is not None:
            self.margins[: plan.gates, : received.shape[1]].copy_(received, non_blocking=True)
        if carried is None:
            return
        first = np.zeros(self.first.shape[0], np.int32)
        latch = np.full(self.first.shape[0], -1, np.int32)
        for column, number in enumerate(plan.latched):
            _, row, _, length = plan.batch[number]
            first[row : row + length], latch[row : row + length] = row, column
        self._write("first", self.first, first)
        self._write("token_latch", self.token_latch, latch)
        self.carried[: carried.shape[0], : carried.shape[1]].copy_(carried, non_blocking=True)

    def _load_steering(self, plan: Plan) -> None:
        if not plan.steered:
            if self._steering:
                self.token_steer.fill_(-1)
                self._written.pop("token_steer", None)
                self._steering = False
            return
        self._steering = True
        self._write("token_steer", self.token_steer, plan.slots(self.token_steer.shape[0]))

    def _write(self, name: str, target: torch.Tensor, values: npt.NDArray[np.int32]) -> None:
        """Upload values if they differ from the last upload; while a batch decodes, they are mostly equal."""
        if not np.array_equal(self._written.get(name, _NOTHING), values):
            self._written[name] = values
            self._upload(target, values)

    @staticmethod
    def _upload(target: torch.Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if target.device.type != "cpu":
            source = source.pin_memory()  # the caching host allocator keeps this memory until the copy is done
        target.copy_(source, non_blocking=True)


def _lines(
    blocks: Sequence[PlannedBlock], tokens: int, line_of: npt.NDArray[np.int32], base_of: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return the lines of `token_row` for one channel's blocks; fill `line_of` and `base_of` per site.

    If no site is in two blocks, the sites of a block share a line, and `base_of` is where a site's own rows begin.
    Otherwise each site has a line of its own. So there are never more lines than sites.
    """
    sites = np.array([site for block in blocks for site in block.sites])
    sources = token_rows([run for block in blocks for run in block.runs])  # the token row of each row of each block
    sizes = np.array([block.rows for block in blocks])
    site_counts = np.array([len(block.sites) for block in blocks])
    owners = np.repeat(np.arange(len(blocks)), site_counts)  # the block of each entry of `sites`
    bases = np.array([block.base for block in blocks])[owners] + counted(site_counts) * sizes[owners]
    used, lines_of_sites = np.unique(sites, return_inverse=True)
    if len(used) == len(sites):
        lines = np.full((len(blocks), tokens), -1, np.int32)
        line_of[sites], base_of[sites] = owners, bases
        lines[np.repeat(np.arange(len(blocks)), sizes), sources] = counted(sizes)
        return lines
    lines = np.full((len(used), tokens), -1, np.int32)
    line_of[used] = np.arange(len(used))
    rows = sizes[owners]  # the rows of each entry of `sites`
    within = counted(rows)
    first = (np.cumsum(sizes) - sizes)[owners]  # where the rows of its block begin in `sources`
    lines[np.repeat(lines_of_sites, rows), sources[np.repeat(first, rows) + within]] = np.repeat(bases, rows) + within
    return lines
