"""The cells of an experiment and their order.

A cell is one setting, one prompt and one seed. A block is one seed and up to `batch` prompts under every setting: the
settings answer the same prompts one after another, in an order that is shuffled for each block. So neither the time nor
the state of the machine favours an arm, and differences between arms are paired by prompt and seed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

import msgspec

from capflow_models.experiment.arms import Setting
from capflow_models.experiment.prompts import LabelledPrompt

CellKey = tuple[str, float | None, float | None, float | None, int | None, str, int]
"""Arm, threshold, sharpness, scale, layer, the prompt's id, seed."""


class Turn(msgspec.Struct, frozen=True):
    """One setting's batch in a block.

    prompts: those whose cells are not there yet.
    """

    setting: Setting
    prompts: tuple[LabelledPrompt, ...]


class SeedBlock(msgspec.Struct, frozen=True):
    """A seed, prompts, and the turns of the settings in their order."""

    number: int
    seed: int
    prompts: tuple[LabelledPrompt, ...]
    turns: tuple[Turn, ...]


def key_of(setting: Setting, prompt: str, seed: int) -> CellKey:
    """Return the key of a cell.

    prompt: its id.
    """
    return setting.arm, setting.threshold, setting.sharpness, setting.scale, setting.layer, prompt, seed


def blocks(
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    seeds: Sequence[int],
    batch: int,
    done: Collection[CellKey] = (),
) -> Iterator[SeedBlock]:
    """Yield the blocks with cells that are not done, in order. An order of settings depends on seed and block only.

    Prompts of both labels are mixed within a block, so that each of its batches has both.
    """
    order = _mixed(prompts)
    number = 0
    for seed in seeds:
        for start in range(0, len(order), batch):
            chunk = tuple(order[start : start + batch])
            shuffled = list(settings)
            random.Random(f"{seed} {start}").shuffle(shuffled)  # noqa: S311 - an order, not a secret
            turns = tuple(
                Turn(setting, missing)
                for setting in shuffled
                if (missing := tuple(p for p in chunk if key_of(setting, p.id, seed) not in done))
            )
            if turns:
                yield SeedBlock(number, seed, chunk, turns)
            number += 1


def _mixed(prompts: Sequence[LabelledPrompt]) -> list[LabelledPrompt]:
    """Return the prompts with both labels spread evenly."""
    places: list[tuple[float, int, LabelledPrompt]] = []
    for label in ("target", "benign"):
        mine = [prompt for prompt in prompts if prompt.label == label]
        places += [((n + 0.5) / len(mine), prompt.number, prompt) for n, prompt in enumerate(mine)]
    return [prompt for *_, prompt in sorted(places, key=lambda place: place[:2])]
