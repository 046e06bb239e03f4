"""The tables and the plot: printed, or put between the markers of the documentation."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .contenders import ABSENT, PLAIN, TASKS, Contender
from .drive import Turn

PLOT = "docs/images/versus.svg"
CAPTION = "Tokens a second, as a share of plain vLLM"
TICK_S = 0.01
"""Linux counts CPU time in these: a shorter turn has none."""


@dataclass
class Outcome:
    """The result of a contender.

    reason: why it has no result; empty if it has one.
    turns: the cost of each turn, and of plain vLLM's turn of the same round.
    peak_bytes: of memory. disk_bytes, row_bytes: of a turn.
    answers_wrong, rows_wrong: the most of any turn. rows: how many a turn has.
    """

    contender: Contender
    reason: str = ""
    turns: list[tuple[Turn, Turn]] = field(default_factory=list)
    peak_bytes: int = 0
    disk_bytes: int = 0
    row_bytes: int = 0
    answers_wrong: int = 0
    rows_wrong: int = 0
    rows: int = 0

    @property
    def measured(self) -> bool:
        """Whether there are ratios."""
        return bool(self.turns) and not self.reason

    @property
    def walls(self) -> list[float]:
        """Tokens a second of each turn, as a share of plain vLLM's."""
        return [plain.seconds / own.seconds for own, plain in self.turns]

    @property
    def wall(self) -> float:
        """The median of `walls`."""
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        """Tokens in a second of CPU time, as a share of plain vLLM's: the median."""
        return statistics.median(
            max(plain.cpu_seconds, TICK_S) / max(own.cpu_seconds, TICK_S) for own, plain in self.turns
        )

    @property
    def seconds(self) -> float:
        """The median wall time of a turn."""
        return statistics.median(own.seconds for own, _ in self.turns)

    @property
    def mb_s(self) -> float:
        """Megabytes of rows delivered in a second."""
        return self.row_bytes / 1e6 / self.seconds

    def refusal(self, prompts: int) -> str:
        """Return why its results do not count; empty if they do."""
        if self.rows_wrong:
            return f"{self.rows_wrong:,} of {self.rows:,} rows differ from Transformers"
        # Two likeliest tokens may be equal but for rounding, so one answer may differ.
        if self.answers_wrong > max(1, prompts // 10):
            return f"{self.answers_wrong} of {prompts} answers differ from Transformers"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Return all of it in plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"contender", "turns"}}
        turns = [{"own": own._asdict(), "plain": plain._asdict()} for own, plain in self.turns]
        return {"name": self.contender.name} | values | {"turns": turns}


WALL, SPREAD = "tok/s of plain", "lowest to highest"
COLUMNS: dict[str, tuple[Callable[[Outcome], float], str, bool]] = {
    WALL: (lambda outcome: outcome.wall, "{:.2f}", True),
    "tok per CPU s of plain": (lambda outcome: outcome.cpu, "{:.2f}", True),
    "MB/s delivered": (lambda outcome: outcome.mb_s, "{:.0f}", True),
    "peak memory, GB": (lambda outcome: outcome.peak_bytes / 1e9, "{:.2f}", False),
    "on disk, MB a turn": (lambda outcome: outcome.disk_bytes / 1e6, "{:.0f}", False),
}
"""A column's value, how it is printed, and whether more is better. That of `WALL` is followed by its spread."""

CERTAIN = 0.01
"""A lead is certain if equal contenders would show one like it with less than this probability."""


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return a table for each task, where capflow is behind, and over whom its lead is certain."""
    parts = []
    for task, title in TASKS.items():
        some = [outcome for outcome in outcomes if outcome.contender.task == task]
        if not some or (task == "serve" and len(some) == 1):
            continue
        names = [
            name
            for name in COLUMNS
            if task in {"rows", "probe"} or name not in {"MB/s delivered", "on disk, MB a turn"}
        ]
        if task == "probe":
            names.remove("MB/s delivered")
        heads = ["contender", WALL, SPREAD, *names[1:], "rows that differ", "predicted"]
        lines = [f"**{title}**", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [_line(outcome, names) for outcome in sorted(some, key=_place)]
        measured = [outcome for outcome in some if outcome.measured and outcome.contender != PLAIN]
        if {outcome.contender.ours for outcome in measured} == {True, False}:
            behind = "; ".join(_behind(measured, names))
            lines += ["", f"Behind: {behind}." if behind else "No peer is ahead of capflow in any column."]
            lines += [f"\n{wrapped(lead)}" for lead in _leads(measured)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _place(outcome: Outcome) -> tuple[bool, float]:
    """Plain first, then the fastest; those without a result last."""
    return not outcome.measured, -(9.0 if outcome.contender == PLAIN else outcome.wall if outcome.measured else 0.0)


def _line(outcome: Outcome, names: Sequence[str]) -> str:
    title, predicted = outcome.contender.title, outcome.contender.predicted
    last = f"{predicted:.2f}" if predicted else "cannot run"
    if not outcome.measured:
        reason = (outcome.reason or "no turns").replace("|", "\\|")
        return f"| {title} | not measured: {reason} |" + " |" * (len(names) + 1) + f" {last} |"
    cells = [COLUMNS[name][1].format(COLUMNS[name][0](outcome)) for name in names]
    cells.insert(1, f"{min(outcome.walls):.2f} to {max(outcome.walls):.2f}")
    return f"| {title} | " + " | ".join(cells) + f" | {_wrong(outcome)} | {last} |"


def _wrong(outcome: Outcome) -> str:
    wrong = f"{outcome.rows_wrong:,} of {outcome.rows:,}" if outcome.rows else "no rows"
    return f"{wrong}; {outcome.answers_wrong} answers" if outcome.answers_wrong else wrong


def _behind(outcomes: Iterable[Outcome], names: Sequence[str]) -> Iterable[str]:
    """Yield a text for each column in which the best of capflow is behind a peer; both have been measured."""
    ours = [outcome for outcome in outcomes if outcome.contender.ours]
    peers = [outcome for outcome in outcomes if not outcome.contender.ours]
    for name in names:
        value, form, more = COLUMNS[name]
        best = max if more else min
        own, peer = best(ours, key=value), best(peers, key=value)
        if form.format(value(own)) != form.format(value(peer)) and best(value(own), value(peer)) == value(peer):
            yield f"{name} ({form.format(value(own))} against {form.format(value(peer))} of {peer.contender.title})"


def _leads(outcomes: Iterable[Outcome]) -> Iterable[str]:
    """Yield over which peers the lead of the fastest of capflow in tokens a second is certain, and over which not."""
    ours = max((outcome for outcome in outcomes if outcome.contender.ours), key=lambda outcome: outcome.wall)
    peers = [outcome for outcome in outcomes if not outcome.contender.ours and outcome.wall < ours.wall]
    chances = [(chance(ours.walls, peer.walls), peer.contender.title) for peer in sorted(peers, key=_place)]
    certain = [title for p, title in chances if p < CERTAIN]
    others = [f"{title} (p = {p:.2f})" for p, title in chances if p >= CERTAIN]
    lead = f"In tokens a second, the lead of {ours.contender.title} is"
    if certain:
        yield f"{lead} certain (rank sums, p < {CERTAIN}) over: {', '.join(certain)}."
    if others:
        yield f"{lead} not certain over: {', '.join(others)}; run more rounds."


def chance(ours: Sequence[float], peers: Sequence[float]) -> float:
    """Return the probability that equal contenders show a lead like this: the rank sum test of Mann and Whitney, exact.

    Of all ways to divide the values between the two, those count in which ours win at least as many pairs as here. A
    tie is half a win.
    """
    values, size = [*ours, *peers], len(ours)
    wins = [sum((other < value) + (other == value) / 2 for other in values) for value in values]
    # How many ways there are to choose so many values with so many wins, over all values.
    ways: Counter[tuple[int, float]] = Counter({(0, 0.0): 1})
    for each in wins:
        for (count, total), number in list(ways.items()):
            if count < size:
                ways[count + 1, total + each] += number
    least = sum(wins[:size])
    whole = {total: number for (count, total), number in ways.items() if count == size}
    return sum(number for total, number in whole.items() if total >= least) / sum(whole.values())


def summary(args: argparse.Namespace, idle_cpu_share: float) -> str:
    """Return what was run, for the line above the tables."""
    length, tokens = args.lengths.split(",")
    model = {"demo": "Gemma-3-270m", "llama": "A Llama of the same shape, random weights"}.get(args.model, args.model)
    compiled = "" if args.eager else ", `torch.compile` on where a contender allows it"
    return (
        f"{model} in float32{compiled}: {args.prompts} prompts of {length} tokens and {tokens} generated, "
        f"{args.rounds} rounds. Contenders that waited for their turn took {idle_cpu_share:.2f} of a core at most."
    )


def print_tables(outcomes: Sequence[Outcome], args: argparse.Namespace, *, idle_cpu_share: float) -> None:
    """Print them."""
    print(f"\n{summary(args, idle_cpu_share)}\n\n{tables(outcomes)}")


def write_docs(outcomes: Sequence[Outcome], args: argparse.Namespace, *, idle_cpu_share: float, root: Path) -> None:
    """Put the tables into docs/performance.md, and those of the demo model also into README.md and a plot."""
    pages, marker = documents(args, root)
    text = f"{wrapped(summary(args, idle_cpu_share))}\n\n{tables(outcomes)}"
    if args.model == "demo":
        absent = "\n".join(
            wrapped(f"* {name} is not in the tables: {reason}.", "  ") for name, reason in ABSENT.items()
        )
        text += f"\n\n{absent}\n\n![{CAPTION}](images/{Path(PLOT).name})"
        replace(pages[1], marker, short(outcomes))
        plot(outcomes, root / PLOT)
    replace(pages[0], marker, text)


def documents(args: argparse.Namespace, root: Path) -> tuple[list[Path], str]:
    """Return the pages that get tables, and the name of their markers; raise ValueError if a page lacks them."""
    names = ["docs/performance.md", *(["README.md"] if args.model == "demo" else [])]
    pages, marker = [root / name for name in names], "versus" if args.model == "demo" else "versus-llama"
    for page in pages:
        parts(page, marker)
    return pages, marker


def short(outcomes: Sequence[Outcome]) -> str:
    """Return the table of the README: who captures every row."""
    some = [outcome for outcome in outcomes if outcome.contender.task == "rows" and outcome.measured]
    intro = (
        "Other ways to capture every row of the same requests, all checked. `make versus` measures them, with steering "
        "and probes; [performance](docs/performance.md#against-others) says how."
    )
    lines = [
        wrapped(intro),
        "",
        "| every row captured by | " + " | ".join(COLUMNS) + " | rows that differ |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for outcome in sorted(some, key=_place):
        cells = [form.format(value(outcome)) for value, form, _ in COLUMNS.values()]
        lines.append(f"| {outcome.contender.title} | " + " | ".join(cells) + f" | {_wrong(outcome)} |")
    lines += ["", f"![{CAPTION}]({PLOT})"]
    return "\n".join(lines)


def replace(path: Path, marker: str, text: str) -> None:
    """Replace what is between two markers of a file; raise ValueError where one is missing."""
    before, begin, end, after = parts(path, marker)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def parts(path: Path, marker: str) -> tuple[str, str, str, str]:
    """Return a file up to a marker, the marker, that of its end, and the rest; raise ValueError without both."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(f"<!-- {marker}:begin -->")
    _, end, after = rest.partition(f"<!-- {marker}:end -->")
    if not (begin and end):
        raise ValueError(f"{path}: got no <!-- {marker}:begin --> and end, expected both")
    return before, begin, end, after


def wrapped(text: str, indent: str = "") -> str:
    """Wrap prose as the documentation is."""
    import textwrap

    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw tokens a second of every contender, by task, and what was predicted."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "capflow", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    groups = [
        [o for o in outcomes if o.contender.task == task and o.measured and o.contender != PLAIN] for task in TASKS
    ]
    titles = [title.partition(":")[0] for title in TASKS.values()]
    kept = [(title, group) for title, group in zip(titles, groups, strict=True) if group]
    figure, axes = plt.subplots(
        len(kept), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(7, 0.6 + sum(0.35 + 0.28 * len(group) for _, group in kept)),
        height_ratios=[len(group) + 0.6 for _, group in kept],
    )  # fmt: skip
    for (title, group), axis in zip(kept, axes[:, 0], strict=True):
        fastest_last = sorted(group, key=lambda outcome: outcome.wall)
        names = [outcome.contender.title.replace("**", "").replace("`", "") for outcome in fastest_last]
        colors = ["#0b6e8f" if outcome.contender.ours else "#b8bec4" for outcome in fastest_last]
        bars = axis.barh(names, [outcome.wall for outcome in fastest_last], color=colors, height=0.7)
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.axvline(1, color="#444", linewidth=0.8, linestyle=":")
        axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
        axis.set_xlim(0, max(1.15, 1.12 * max(outcome.wall for outcome in fastest_last)))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("generated tokens a second, as a share of plain vLLM")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
