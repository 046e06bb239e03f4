"""The tables that tell the GPU taps what the plan says, and the staging buffer their rows land in.

All are allocated once, before graphs are captured, and never move.

| tensor | shape | meaning |
|---|---|---|
| site_group | int32 [2, sites] | the group of each site, per channel (`SHIP`, `VIEW`); -1: nothing |
| site_base | int32 [2, sites] | the first staging row of each site, per channel |
| token_row | int32 [2, groups, tokens] | the row of each token within its group; -1: not wanted |
| token_steer | int32 [tokens] | the steering slot of each token; -1: none |
| steer_bank | int32 [slots, sites] | the bank row that a slot adds at a site; -1: none |
| staging | [rows, hidden] | the rows of the step, packed as the plan says |
| bank | [bank rows, hidden] | the steering vectors |

Where the taps read the plan itself, on the CPU, the tensors have one element each (`resident` is False).
"""

from __future__ import annotations

import numpy as np
import torch

from capflow_engine.plan import Plan

CHANNELS = 2


class Tables:
    """The tables of one worker. tokens: the most tokens of a step; rows: the most rows of one; sites, as tapped.

    device: where the model is. resident: whether the taps read the tables. Everything is sized to its bound at once;
    `load` copies what a plan fills.
    """

    def __init__(
        self,
        *,
        sites: int,
        tokens: int,
        rows: int,
        bank_rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        resident: bool,
    ) -> None:
        self.resident = resident
        if not resident:
            sites = tokens = rows = bank_rows = hidden = 1
        self.sites = sites
        self.slots = 2 * tokens
        self.site_group = torch.full((CHANNELS, sites), -1, dtype=torch.int32, device=device)
        self.site_base = torch.zeros((CHANNELS, sites), dtype=torch.int32, device=device)
        self.token_row = torch.full((CHANNELS, sites, tokens), -1, dtype=torch.int32, device=device)
        self.token_steer = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.steer_bank = torch.full((self.slots, sites), -1, dtype=torch.int32, device=device)
        self.staging = torch.empty((rows, hidden), dtype=dtype, device=device)
        self.bank = torch.zeros((bank_rows, hidden), dtype=dtype, device=device)
        self._idle = True  # what the device holds now says "nothing to do"
        self._steering = False  # some token on the device has a steering slot

    def device_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that every tap carries, by the names of the op's arguments."""
        names = ("site_group", "site_base", "token_row", "token_steer", "steer_bank", "staging", "bank")
        return {name: getattr(self, name) for name in names}

    def load(self, plan: Plan, padded_tokens: int) -> None:
        """Make the tables say what a plan says, for tensors of `padded_tokens` rows; asynchronous on a GPU."""
        if plan.idle and self._idle:
            return
        self._idle = plan.idle
        group_of = np.full((CHANNELS, self.sites), -1, np.int32)
        base_of = np.zeros((CHANNELS, self.sites), np.int32)
        numbers = [0] * CHANNELS
        for group in plan.groups:
            rows = np.full(padded_tokens, -1, np.int32)
            for run in group.runs:
                rows[run.source : run.source + run.length] = np.arange(run.target, run.target + run.length)
            number = numbers[group.channel]
            numbers[group.channel] += 1
            self._upload(self.token_row[group.channel, number, :padded_tokens], rows)
            for place, site in enumerate(group.sites):
                group_of[group.channel, site] = number
                base_of[group.channel, site] = group.base + place * group.rows
        self._upload(self.site_group, group_of)
        self._upload(self.site_base, base_of)
        self._load_steering(plan)

    def _load_steering(self, plan: Plan) -> None:
        if not plan.adds:
            if self._steering:
                self.token_steer.fill_(-1)
                self._steering = False
            return
        self._steering = True
        steer_of = np.full(self.token_steer.shape[0], -1, np.int32)
        slots: dict[tuple[int, int], int] = {}
        for adds in plan.adds.values():
            for add in adds:
                slot = slots.setdefault((add.source, add.length), len(slots))
                steer_of[add.source : add.source + add.length] = slot
        bank_of = np.full((len(slots), self.sites), -1, np.int32)
        for site, adds in plan.adds.items():
            for add in adds:
                bank_of[slots[add.source, add.length], site] = add.bank
        self._upload(self.token_steer, steer_of)
        self._upload(self.steer_bank[: len(slots)], bank_of)

    def _upload(self, target: torch.Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if target.device.type != "cpu":
            source = source.pin_memory()  # kept by the caching host allocator until the copy is over
        target.copy_(source, non_blocking=True)
