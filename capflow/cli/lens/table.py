"""The table of a request: layers by positions, with the most likely token of each.

Layers are rows, the last one first. Positions are columns, in as many blocks as the width needs. Of one position, the
columns are the `k` most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size

from capflow.capture.site import Site
from capflow.lenses.captured import SiteReading
from capflow.lenses.lens import LensReading
from capflow.text.printable import printable

_TOKEN_WIDTH = 12
_GAP = "  "


def table_lines(readings: Iterable[SiteReading], texts: dict[int, str], width: int) -> Iterator[str]:
    """Yield the lines of a request's table.

    texts: the text of each position's token, where it is known.
    width: the width of a line.
    """
    cells: dict[Site, dict[int, tuple[LensReading, int]]] = {}
    ids: dict[int, int] = {}
    for site, positions, token_ids, reading in readings:
        row = cells.setdefault(site, {})
        for index, (position, token) in enumerate(zip(positions.tolist(), token_ids.tolist(), strict=True)):
            row[position] = reading, index
            ids[position] = token
    sites = sorted(cells, key=lambda site: site.depth, reverse=True)
    if len(ids) == 1:
        (position,) = ids
        yield f"position {position}, after {_shown(texts.get(position), ids[position])}"
        yield from _ranked([(site, *cells[site][position]) for site in sites])
        return
    columns = [
        [
            str(position),
            _shown(texts.get(position), ids[position]),
            *(_best(*cells[site][position]) if position in cells[site] else "" for site in sites),
        ]
        for position in sorted(ids)
    ]
    names = ["position", "token", *map(str, sites)]
    yield from _blocks(names, columns, width)


def _ranked(rows: Sequence[tuple[Site, LensReading, int]]) -> Iterator[str]:
    """Yield the lines of one position: the most likely tokens with their probabilities, and what else was asked for."""
    lines = []
    for site, reading, index in rows:
        cells = [
            "the row holds NaN or infinity" if token < 0 else f"{_shown(text, token)} {probability:.3f}"
            for token, text, probability in zip(
                reading.ids[index].tolist(), reading.texts[index], reading.probabilities[index].tolist(), strict=True
            )
        ]
        lines.append([str(site), *(cells if reading.ids[index, 0] >= 0 else cells[:1]), *_asked(reading, index)])
    widths = [
        max(cell_len(line[number]) if number < len(line) else 0 for line in lines) for number in range(len(lines[0]))
    ]
    for line in lines:
        yield _line(line, widths)


def _asked(reading: LensReading, index: int) -> list[str]:
    """Return the cells of the chosen token and of the divergence, those that are there."""
    cells = []
    if reading.token_ranks[index]:
        cells.append(f"rank {reading.token_ranks[index]} {reading.token_probabilities[index]:.3g}")
    if not np.isnan(reading.divergences[index]):
        cells.append(f"KL {reading.divergences[index]:.2f}")
    return cells


def _best(reading: LensReading, index: int) -> str:
    token = int(reading.ids[index, 0])
    if token < 0:
        return "NaN"
    if reading.token_ranks[index]:
        return f"{_cut(_shown(reading.texts[index][0], token))} #{reading.token_ranks[index]}"
    return f"{_cut(_shown(reading.texts[index][0], token))} {reading.probabilities[index, 0]:.2f}"


def _blocks(names: list[str], columns: list[list[str]], width: int) -> Iterator[str]:
    """Yield lines of as many columns as fit, and then of the next ones."""
    first = max(map(cell_len, names))
    widths = [max(cell_len(_cut(cell) if row == 1 else cell) for row, cell in enumerate(column)) for column in columns]
    start = 0
    while start < len(columns):
        end, used = start, first
        while end < len(columns) and (end == start or used + len(_GAP) + widths[end] <= width):
            used += len(_GAP) + widths[end]
            end += 1
        if start:
            yield ""
        for row, name in enumerate(names):
            cells = [_cut(column[row]) if row == 1 else column[row] for column in columns[start:end]]
            yield _line([name, *cells], [first, *widths[start:end]])
        start = end


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=False)).rstrip()


def _shown(text: Any, token: int) -> str:
    """Return a token's text in quotes, or its id if it has none."""
    if text is None:
        return f"#{token}" if token >= 0 else "?"
    return printable(f"'{text}'".replace("\n", "\\n").replace("\t", "\\t"))


def _cut(text: str) -> str:
    return text if cell_len(text) <= _TOKEN_WIDTH else set_cell_size(text, _TOKEN_WIDTH - 1) + "…"
