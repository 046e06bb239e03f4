"""Rules: when an alert fires.

A rule is one line of text:

    RULE      NAME ":" QUANTITY (">" | ">=") BOUND ["over" TIME] {"," CLAUSE}
    QUANTITY  ("share" | "requests") "(" PROBE [COMPARE NUMBER] ["," PART] ")" | "max" "(" PROBE ["," PART] ")"
              | "lag" | "lost" | "skipped" | "left" | "silent"
    CLAUSE    "clear" ("<" | "<=") BOUND | "for" TIME | "keep" TIME | "min" COUNT
    COMPARE   ">" | ">=" | "<" | "<="
    PART      "prompt" | "generated"

PROBE is a name, in double quotes if it has spaces or signs. BOUND is a percentage for `share`, a TIME for `lag` and
`silent`, else a NUMBER. A TIME is a number with `ms`, `s`, `m` or `h`. `for` and `keep` are those of Prometheus (`for`,
`keep_firing_for`); docs/dashboard.md says what each quantity is.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from capflow.errors import UsageError, explain
from capflow.text.suggestion import did_you_mean
from capflow_dashboard import limits

EXAMPLE = "leak: share(code > 2) > 5% over 60s, clear < 2%, for 10s"

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
"""The comparisons of a score with a threshold; they take arrays too."""

OF_PROBES = ("share", "requests", "max")
OF_HUB = ("left", "silent")
QUANTITIES = (*OF_PROBES, "lag", "lost", "skipped", *OF_HUB)
"""Those of a probe, those of an engine, and those of the hub."""

_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_-]{{0,{limits.ALERT_NAME_LENGTH_MAX - 1}}}")
_IS_RULE = re.compile(r"\s*[\w-]*\s*:(?!//)")
_TOKEN = re.compile(r'\s*("[^"]*"|[<>]=?|[(),:]|[^\s"<>(),:]+|")')
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class AlertRule(NamedTuple):
    """One rule.

    text: the rule as it was written, after the name.
    probe: the probe of `share`, `requests` and `max`; empty for others.
    compare: how a score is compared with `threshold`; None for the probe's own threshold, from which on it fires.
    part: `prompt` or `generated`, whose tokens alone count; empty for both.
    bound: a percentage, seconds, or a number; `inclusive` if a value that is equal to it fires.
    over_s: the window, in seconds.
    clear: the value below which it is over, with `clear_inclusive` at which; in the unit of `bound`.
    for_s: how long the condition holds before it fires.
    keep_s: how long it is clear before it is over.
    count_min: how many scores a share is of at least.
    """

    name: str
    text: str
    quantity: str
    bound: float
    inclusive: bool
    clear: float
    clear_inclusive: bool
    probe: str = ""
    compare: str | None = None
    threshold: float = 0.0
    part: str = ""
    over_s: float = limits.ALERT_WINDOW_S
    for_s: float = 0.0
    keep_s: float = 0.0
    count_min: int = 1

    @property
    def unit(self) -> str:
        """The unit of its values: `%`, `s`, or empty."""
        return {"share": "%", "lag": "s", "silent": "s"}.get(self.quantity, "")

    def holds(self, value: float) -> bool:
        """Return whether its condition holds for a value."""
        return value >= self.bound if self.inclusive else value > self.bound

    def is_clear(self, value: float) -> bool:
        """Return whether it is over at a value."""
        return value <= self.clear if self.clear_inclusive else value < self.clear

    def fields(self) -> dict[str, Any]:
        """Return the rule as a page receives it."""
        return {
            "name": self.name,
            "text": self.text,
            "probe": self.probe,
            "unit": self.unit,
            "bound": f"{'≥' if self.inclusive else '>'} {_short(self.bound)}",
            "clear": f"{'≤' if self.clear_inclusive else '<'} {_short(self.clear)}",
        }


def read_rules(items: Iterable[str], where: str) -> tuple[AlertRule, ...]:
    """Return rules: each item is one, or the path of a file with one a line, in which `#` begins a comment.

    where: the option, for the message. Raises UsageError for a file or a rule that cannot be used, and for two rules of
    one name.
    """
    rules: dict[str, AlertRule] = {}
    for place, text in _lines(items, where):
        rule = parse_rule(text, place)
        if rule.name in rules:
            raise UsageError(explain(place, got=f"the rule {rule.name} twice", expected="a name of its own"))
        rules[rule.name] = rule
    if len(rules) > limits.ALERT_RULES_MAX:
        raise UsageError(explain(where, got=f"{len(rules)} rules", expected=f"{limits.ALERT_RULES_MAX} or fewer"))
    return tuple(rules.values())


def check_probes(rules: Sequence[AlertRule], pools: Mapping[str, str], where: str) -> None:
    """Raise UsageError for a rule whose probe is not there, or has one score of a request and not of each token.

    pools: the pooling of each probe, by its name.
    """
    for rule in rules:
        place = f"{where}: rule {rule.name}"
        if not rule.probe:
            continue
        if rule.probe not in pools:
            expected = f"one of the probes {', '.join(pools)}" if pools else "a probe of `probes`; none is given"
            raise UsageError(explain(place, got=rule.probe, expected=expected, do=did_you_mean(rule.probe, pools)))
        if rule.part and pools[rule.probe] != "token":
            got = f"{rule.part}, for a probe with pooling"
            raise UsageError(explain(place, got=got, expected="no part: the score is of the whole request"))


def parse_rule(text: str, where: str) -> AlertRule:
    """Return the rule of a line. Raises UsageError that names the rule, what came, and what was expected."""
    if len(text) > limits.ALERT_TEXT_LENGTH_MAX:
        expected = f"{limits.ALERT_TEXT_LENGTH_MAX} or fewer"
        raise UsageError(explain(where, got=f"a rule of {len(text)} characters", expected=expected))
    return _Reader(text, where).rule()


def written(value: float, rule: AlertRule) -> str:
    """Return a value of a rule with its unit."""
    return f"{_short(value)}{rule.unit}"


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.6g}"


def _lines(items: Iterable[str], where: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each rule."""
    for item in items:
        if _IS_RULE.match(item):
            yield where, item
            continue
        path = Path(item)
        try:
            with path.open("rb") as file:
                content = file.read(limits.ALERT_FILE_BYTES_MAX + 1)
            lines = content.decode().splitlines()
        except (OSError, ValueError) as e:
            got = f"{item}: {e.strerror if isinstance(e, OSError) else e}"
            do = f"for example `{EXAMPLE}`"
            raise UsageError(explain(where, got=got, expected="a rule, NAME: …, or a file of rules", do=do)) from e
        if len(content) > limits.ALERT_FILE_BYTES_MAX:
            expected = f"a file of {limits.ALERT_FILE_BYTES_MAX} bytes or fewer"
            raise UsageError(explain(where, got=f"{item}, which is larger", expected=expected))
        for number, line in enumerate(lines, 1):
            if rule := _without_comment(line):
                yield f"{where}: {item}:{number}", rule


def _without_comment(line: str) -> str:
    """Return a line of a file without its comment; a `#` in a quoted name begins none."""
    return re.sub(r'^((?:[^"#]|"[^"]*")*)#.*$', r"\1", line).strip()


class _Reader:
    """Reads one rule, part by part.

    where: the option or the line, for messages.
    """

    def __init__(self, text: str, where: str) -> None:
        # The parts that are not read yet, the last one first; `_past` has those that are.
        self._parts = [match[1] for match in _TOKEN.finditer(text)][::-1]
        self._past: list[str] = []
        self._where = where
        self._text = " ".join(text.split())

    def rule(self) -> AlertRule:
        name = self._next()
        if not _NAME.fullmatch(name):
            self._refuse(f"a name of 1 to {limits.ALERT_NAME_LENGTH_MAX} letters, digits, `_` and `-`", name)
        self._where = f"{self._where}: rule {name}"
        self._expect(":")
        quantity = self._next()
        if quantity not in QUANTITIES:
            self._refuse(f"one of {', '.join(QUANTITIES)}", quantity, did_you_mean(quantity, QUANTITIES))
        fields: dict[str, Any] = self._scores(quantity) if quantity in OF_PROBES else {}
        fields["inclusive"] = self._one_of(">", ">=") == ">="
        fields["bound"] = self._bound(quantity)
        if self._at("over"):
            if quantity == "silent":
                self._refuse("no window: `silent` has none", "over")
            fields["over_s"] = self._time(1.0)
        fields |= self._clauses(quantity)
        fields.setdefault("clear", fields["bound"])
        fields.setdefault("clear_inclusive", not fields["inclusive"])
        touch = fields["inclusive"] and fields["clear_inclusive"] and fields["clear"] == fields["bound"]
        if fields["clear"] > fields["bound"] or touch:
            self._past.clear()
            self._refuse("a value at which the rule does not fire", f"clear {_short(fields['clear'])}")
        return AlertRule(name, self._text.partition(":")[2].strip(), quantity, **fields)

    def _scores(self, quantity: str) -> dict[str, Any]:
        """Read what is in the brackets: a probe, a threshold unless it is of `max`, a part."""
        self._expect("(")
        fields: dict[str, Any] = {"probe": self._probe()}
        if quantity != "max" and self._parts and self._parts[-1] in COMPARE:
            fields["compare"] = self._next()
            fields["threshold"] = self._number(self._next())
        if self._at(","):
            fields["part"] = self._one_of("prompt", "generated")
        self._expect(")")
        return fields

    def _clauses(self, quantity: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        words = ("clear", "for", "keep", *(("min",) if quantity == "share" else ()))
        while self._parts:
            self._expect(",")
            word = self._one_of(*words)
            if f"{word}_s" in fields or word in fields or (word == "min" and "count_min" in fields):
                self._refuse("each clause once", f"{word} twice")
            if word == "clear":
                fields["clear_inclusive"] = self._one_of("<", "<=") == "<="
                fields["clear"] = self._bound(quantity)
            elif word == "min":
                count = self._number(text := self._next())
                if count != int(count) or not 1 <= count <= limits.ALERT_COUNT_MAX:
                    self._refuse(f"a number of scores, 1..{limits.ALERT_COUNT_MAX}", text)
                fields["count_min"] = int(count)
            else:
                fields[f"{word}_s"] = self._time(0.0)
        return fields

    def _probe(self) -> str:
        name = self._next()
        if len(name) > 1 and name.startswith('"'):
            name = name[1:-1]
        elif re.fullmatch(r'[<>=(),:"]*', name):
            self._refuse("the name of a probe", name)
        if not name:
            self._refuse("the name of a probe", '""')
        return name

    def _bound(self, quantity: str) -> float:
        text = self._next()
        if quantity == "share":
            share = self._number(text[:-1]) if text.endswith("%") else math.nan
            return share if 0 <= share <= 100 else self._refuse("a share, 0% to 100%", text)
        if quantity in ("lag", "silent"):
            return self._seconds(text, 0.0)
        number = self._number(text)
        high = limits.ALERT_REQUESTS_MAX - 1 if quantity == "requests" else limits.ALERT_COUNT_MAX
        if quantity != "max" and not 0 <= number <= high:
            self._refuse(f"a number of 0 to {high}", text)
        return number

    def _time(self, low: float) -> float:
        return self._seconds(self._next(), low)

    def _seconds(self, text: str, low: float) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text, re.ASCII)
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
        if low <= seconds <= limits.ALERT_WINDOW_S_MAX:
            return seconds
        return self._refuse(
            f"a time of {_short(low)}s to {_short(limits.ALERT_WINDOW_S_MAX / 3600)}h, such as 10s", text
        )

    def _number(self, text: str) -> float:
        number = float(text) if _NUMBER.fullmatch(text) and text.isascii() else math.inf
        return number if math.isfinite(number) else self._refuse("a number", text)

    def _next(self) -> str:
        part = self._parts.pop() if self._parts else ""
        self._past.append(part)
        return part

    def _at(self, part: str) -> bool:
        """Read a part if it comes next; return whether it did."""
        return bool(self._parts and self._parts[-1] == part and self._next())

    def _expect(self, part: str) -> None:
        self._one_of(part)

    def _one_of(self, *parts: str) -> str:
        part = self._next()
        if part not in parts:
            self._refuse(" or ".join(f"`{each}`" for each in parts), part, did_you_mean(part, parts))
        return part

    def _refuse(self, expected: str, got: str, do: str = "") -> NoReturn:
        after = " ".join(self._past[-4:-1])
        got = f"`{got}`" if got else "the end"
        do = f"{do} for example `{EXAMPLE}`".lstrip()
        raise UsageError(explain(self._where, got=f"{got} after `{after}`" if after else got, expected=expected, do=do))
