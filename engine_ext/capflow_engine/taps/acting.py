"""At which positions operations act on a request's stream, so that each captured row can say whether it was steered.

A position is steered if an operation acts there in its forward pass, at any site of the model: all pipeline stages say
the same. An operation with a closed hard gate does not act. One with a sigmoid gate does, whatever its score.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import runs_of
from capflow.steering.program import SCORES, UNGATED, ProgramGate, SiteOps, SteeringProgram
from capflow_engine.taps.bank import Steered

ALWAYS = -1
"""The value of `Acts` where an operation acts whatever the gates do: it has none."""

Mask = npt.NDArray[np.bool_]

Opened = Callable[[int, int, int], Mask]
"""Returns at which of the positions `first .. end` one of these gates is open, given as bits, `first` and `end`.

A gate that is not hard is open where it has a score, if it is latched also behind that."""


class Acts(NamedTuple):
    """Where a program acts.

    Each value is `ALWAYS`, or the gates of which one must be open, as bits; 0 where it does nothing.

    prefill: at prompt positions.
    decode: at generated positions.
    patched: at single positions with operations of their own.
    """

    prefill: int = 0
    decode: int = 0
    patched: Mapping[int, int] = {}

    @classmethod
    def of(cls, program: SteeringProgram, prompt_length: int) -> Acts:
        """Return where a program acts, for a prompt of this length."""
        prefill = _acting(program.prefill)
        decode = prefill if program.decode == program.prefill else _acting(program.decode)
        return cls(prefill, decode, {p: _acting(ops) for p, ops in program.patches(prompt_length).items()})


def _acting(ops: Sequence[SiteOps]) -> int:
    gates = 0
    for op in itertools.chain.from_iterable(site.ops for site in ops):
        if op.kind in SCORES or not op.amount:
            continue
        if op.gate == UNGATED:
            return ALWAYS
        gates |= 1 << op.gate
    return gates


class SlotRange(NamedTuple):
    """The slots of the bank that steer a request from position `first` on, up to `first` of the next range.

    split: the first position that is steered like a generated one. The slots for the prompt steer those before it.
    acts: where the program acts, also on other pipeline stages.
    key: of the program's content; 0 without a program. Equal programs have equal keys on all ranks.
    shared_key: of the program without what controllers added, which run in one pipeline stage.
    gates: the gates of the program.
    """

    first: int
    split: int
    steered: Steered
    acts: Acts = Acts()
    key: int = 0
    shared_key: int = 0
    gates: tuple[ProgramGate, ...] = ()

    @classmethod
    def of(
        cls, first: int, split: int, steered: Steered, program: SteeringProgram | None, shared: SteeringProgram | None
    ) -> SlotRange:
        """Return the range of a program.

        shared: the program without what controllers added.
        """
        acts = Acts() if program is None else Acts.of(program, split)
        key = 0 if program is None else program.content_key
        shared_key = key if shared is program else shared.content_key if shared else 0
        return cls(first, split, steered, acts, key, shared_key, () if program is None else program.gates)


def steered_runs(history: Sequence[SlotRange], first: int, end: int, opened: Opened | None = None) -> tuple[int, ...]:
    """Return the steered ones of the positions `first .. end`, as runs `first, end, first, end, …`.

    history: the steering of the request.
    opened: None where the scores are unknown; then gates count as open.
    """
    held = history[-1]
    if held.first <= first >= held.split and not held.acts.patched and held.acts.decode in (0, ALWAYS):
        return (first, end) if held.acts.decode else ()  # nearly always so while a request decodes
    mask = np.zeros(end - first, np.bool_)

    def act(acts: int, begin: int, stop: int) -> None:
        if begin < stop:
            here = slice(begin - first, stop - first)
            mask[here] = opened(acts, begin, stop) if acts > 0 and opened is not None else acts != 0

    stop = end
    for held in reversed(history):
        if held.first < stop:
            begin = max(held.first, first)
            split = min(max(held.split, begin), stop)
            act(held.acts.prefill, begin, split)
            act(held.acts.decode, split, stop)
            for position, acts in held.acts.patched.items():
                if begin <= position < stop:
                    act(acts, position, position + 1)
            if held.first <= first:
                break
            stop = begin
    return runs_of(mask, first)


def programs_of(history: Sequence[SlotRange], start: int, length: int) -> list[tuple[int, int, int]]:
    """Return which programs steer positions `start .. start + length` of a request, each from which of them on.

    Indices are counted from `start`. A program has two keys: its own, and that of the part of it that all stages share.
    """
    if history[-1].first <= start:  # nearly always true
        return [(0, history[-1].key, history[-1].shared_key)]
    ranges = zip(history, [*(each.first for each in history[1:]), start + length], strict=True)
    programs = [(max(each.first - start, 0), each.key, each.shared_key) for each, end in ranges if end > start]
    return [each for each in programs if each[0] < length]
