"""Rules of alerts: what is read, and what is refused with a line that helps."""

from __future__ import annotations

import contextlib
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.errors import UsageError
from capflow_dashboard import limits
from capflow_dashboard.views.alerts.rules import EXAMPLE, QUANTITIES, AlertRule, check_probes, parse_rule, read_rules
from capflow_dashboard.views.alerts.state import AlertState
from tests.kit.sources import ROOT

USUAL = {
    "clear_inclusive": True,
    "inclusive": False,
    "probe": "",
    "compare": None,
    "threshold": 0.0,
    "part": "",
    "over_s": 60.0,
    "for_s": 0.0,
    "keep_s": 0.0,
    "count_min": 1,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "share(code > 2) > 5% over 60s, clear < 2%, for 10s",
            {
                "quantity": "share",
                "probe": "code",
                "compare": ">",
                "threshold": 2.0,
                "bound": 5.0,
                "clear": 2.0,
                "clear_inclusive": False,
                "for_s": 10.0,
            },
        ),
        ("share(code)>5%", {"quantity": "share", "probe": "code", "bound": 5.0, "clear": 5.0}),
        (
            "share(truth <= -0.5, generated) >= 0.1% over 1h, min 200, keep 1.5m",
            {
                "quantity": "share",
                "probe": "truth",
                "compare": "<=",
                "threshold": -0.5,
                "part": "generated",
                "bound": 0.1,
                "inclusive": True,
                "clear": 0.1,
                "clear_inclusive": False,
                "over_s": 3600.0,
                "keep_s": 90.0,
                "count_min": 200,
            },
        ),
        (
            'requests("my (odd), probe" > 1e3, prompt) >= 3 over 90s',
            {
                "quantity": "requests",
                "probe": "my (odd), probe",
                "compare": ">",
                "threshold": 1000.0,
                "part": "prompt",
                "bound": 3.0,
                "inclusive": True,
                "clear": 3.0,
                "clear_inclusive": False,
                "over_s": 90.0,
            },
        ),
        ("max(code) > -1.5", {"quantity": "max", "probe": "code", "bound": -1.5, "clear": -1.5}),
        (
            "max(a.b-c/7, generated) > 3",
            {"quantity": "max", "probe": "a.b-c/7", "part": "generated", "bound": 3, "clear": 3},
        ),
        ("lag > 500ms, clear <= 100ms", {"quantity": "lag", "bound": 0.5, "clear": 0.1}),
        ("lost > 0 over 5m", {"quantity": "lost", "bound": 0.0, "clear": 0.0, "over_s": 300.0}),
        ("skipped > 10", {"quantity": "skipped", "bound": 10.0, "clear": 10.0}),
        ("silent > 3s , for 0s", {"quantity": "silent", "bound": 3.0, "clear": 3.0}),
        ("left >= 1", {"quantity": "left", "bound": 1.0, "inclusive": True, "clear": 1.0, "clear_inclusive": False}),
    ],
)
def test_a_rule_is_read(text, expected):
    rule = parse_rule(f"  a-rule_1:{text}", "--alert")
    assert rule == AlertRule(name="a-rule_1", text=" ".join(text.split()), **(USUAL | expected))
    # What the hub sends to the page's process is read again.
    assert parse_rule(f"{rule.name}: {rule.text}", "") == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got the end, expected a name of 1 to 32 letters"),
        ("x", "rule x: got the end after `x`, expected `:`; for example `leak: share("),
        ("1x: lost > 0", "got `1x`, expected a name of 1 to 32"),
        ("x" * 33 + ": lost > 0", "expected a name of 1 to 32 letters, digits, `_` and `-`"),
        ("ä: lost > 0", "got `ä`, expected a name"),
        (
            "x: shar(code) > 5%",
            "got `shar` after `x :`, expected one of share, requests, max, lag, lost, skipped, left, silent; did you",
        ),
        ("x: share code > 5%", "got `code` after `x : share`, expected `(`"),
        ("x: share() > 5%", "got `)` after `: share (`, expected the name of a probe"),
        ('x: share("") > 5%', 'got `""` after `: share (`, expected the name of a probe'),
        ('x: share("code) > 5%', "expected the name of a probe"),
        ("x: share(code > ) > 5%", "got `)` after `( code >`, expected a number"),
        ("x: share(code > nan) > 5%", "got `nan` after `( code >`, expected a number"),
        ("x: share(code > 1e999) > 5%", "expected a number"),
        ("x: share(code > ٣) > 5%", "expected a number"),
        ("x: share(code = 5) > 5%", "got `=` after `share ( code`, expected `)`"),
        ("x: share(code, answer) > 5%", "got `answer` after `( code ,`, expected `prompt` or `generated`"),
        ("x: max(code > 3) > 2", "got `>` after `max ( code`, expected `)`"),
        ("x: share(code) < 5%", "got `<` after `( code )`, expected `>` or `>=`"),
        ("x: share(code) > 5", "got `5` after `code ) >`, expected a share, 0% to 100%"),
        ("x: share(code) > 101%", "expected a share, 0% to 100%"),
        ("x: share(code) > -1%", "expected a share, 0% to 100%"),
        ("x: requests(code) > 4096", "got `4096` after `code ) >`, expected a number of 0 to 4095"),
        ("x: lost > -1", "expected a number of 0 to"),
        ("x: lag > 5", "got `5` after `: lag >`, expected a time of 0s to 1h, such as 10s"),
        ("x: lag > 2h", "expected a time of 0s to 1h"),
        ("x: lost > 0 over 500ms", "got `500ms` after `> 0 over`, expected a time of 1s to 1h"),
        ("x: silent > 3s over 10s", "got `over` after `silent > 3s`, expected no window"),
        ("x: lost > 0 for 10s", "got `for` after `lost > 0`, expected `,`"),
        ("x: lost > 0, until 10s", "got `until` after `> 0 ,`, expected `clear` or `for` or `keep`"),
        ("x: lost > 0, min 3", "got `min` after `> 0 ,`, expected `clear` or"),
        ("x: share(a) > 1%, min 1.5", "got `1.5` after `1% , min`, expected a number of scores, 1..1"),
        ("x: share(a) > 1%, min 0", "expected a number of scores"),
        ("x: lost > 0, for 1s, for 2s", "got `for twice` after `for 1s ,`, expected each clause once"),
        ("x: lost > 9, clear < 1, clear < 2", "got `clear twice`"),
        ("x: share(a) > 1%, min 2, min 3", "got `min twice`"),
        ("x: lost > 5, clear > 3", "got `>` after `5 , clear`, expected `<` or `<=`"),
        ("x: lost > 5, clear < 6", "rule x: got `clear 6`, expected a value at which the rule does not fire"),
        ("x: lost >= 5, clear <= 5", "got `clear 5`, expected a value at which the rule does not fire"),
        ("x: lost > 0 over 60s, clear < 0" + " " * 200, "got a rule of 23"),
    ],
)
def test_a_wrong_rule_says_what_came_and_what_was_expected(text, message):
    with pytest.raises(UsageError) as raised:
        parse_rule(text, "--alert")
    assert str(raised.value).startswith("--alert: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


WORDS = [*'():,<>%"#', ">=", "<=", "share", "requests", "max", "lag", "lost", "left", "silent", "code", "over", "for"]
WORDS += [
    "keep",
    "clear",
    "min",
    "prompt",
    "generated",
    "5%",
    "5",
    "-1",
    "10s",
    "1h",
    "1e9",
    "9" * 30,
    "x",
    "\x00",
    "ß",
]


@given(
    st.one_of(st.text(max_size=120), st.lists(st.sampled_from(WORDS), max_size=24).map(lambda w: "x:" + " ".join(w)))
)
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_rule_or_a_usage_error(text):
    try:
        rule = parse_rule(text, "--alert")
    except UsageError:
        return
    assert parse_rule(f"{rule.name}: {rule.text}", "") == rule
    assert 1 <= rule.over_s <= 3600
    # A value that fires is not clear, or it would do both each second.
    assert not (rule.holds(rule.bound) and rule.is_clear(rule.bound))


def test_a_rule_with_one_part_changed_is_a_rule_or_a_usage_error():
    rng = random.Random(1)
    for _ in range(2000):
        at, size = rng.randrange(len(EXAMPLE)), rng.randrange(4)
        text = EXAMPLE[:at] + "".join(rng.choices(EXAMPLE + '"\t٣', k=size)) + EXAMPLE[at + rng.randrange(3) :]
        with contextlib.suppress(UsageError):
            assert parse_rule(text, "--alert").text


def test_the_examples_of_the_docs_are_rules_and_every_quantity_and_clause_is_there(tmp_path):
    text = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    section = text.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    first, second = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (inline,) = re.findall(r"--alert '(.*?)'", section)
    path = tmp_path / "rules.txt"
    path.write_text(second, encoding="utf-8")
    rules = read_rules([first, inline.replace("leak", "again")], "")
    many = read_rules([str(path)], "")
    assert parse_rule(EXAMPLE, "") == rules[0]
    assert {rule.quantity for rule in many} == set(QUANTITIES)
    table = re.findall(r"^\| (`.*?) \| .* \| (?:each engine|the hub) \|$", section, re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`([a-z]+)", row)} == set(QUANTITIES)
    parts = re.findall(r"^\| `, (\w+)", section, re.MULTILINE)
    assert parts == ["generated", "clear", "for", "keep", "min"]


def test_files_have_a_rule_a_line_and_name_the_line(tmp_path):
    path = tmp_path / "rules: of mine.txt"
    path.write_text('# rules\n\na: lost > 0  # any\nb: max("x # y") > 2 # why\n', encoding="utf-8")
    rules = read_rules(["c: lag > 1s", str(path)], "--alert")
    assert [(rule.name, rule.probe) for rule in rules] == [("c", ""), ("a", ""), ("b", "x # y")]
    path.write_text("a: lost > 0\nb: lost > many\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"mine.txt:2: rule b: got `many`"):
        read_rules([str(path)], "--alert")
    with pytest.raises(UsageError, match="got the rule a twice, expected a name of its own"):
        read_rules(["a: lost > 0", "a: lag > 1s"], "--alert")
    with pytest.raises(
        UsageError, match=r"nowhere: No such file or directory, expected a rule, NAME: …, or a file of rul"
    ):
        read_rules(["nowhere"], "--alert")
    path.write_bytes(b"a: lost > \xff")
    with pytest.raises(UsageError, match="codec can't decode"):
        read_rules([str(path)], "--alert")
    path.write_bytes(b"#" * (limits.ALERT_FILE_BYTES_MAX + 1))
    with pytest.raises(UsageError, match="which is larger, expected a file of 65536 bytes"):
        read_rules([str(path)], "--alert")
    many = [f"r{number}: lost > {number}" for number in range(limits.ALERT_RULES_MAX + 1)]
    assert len(read_rules(many[1:], "--alert")) == limits.ALERT_RULES_MAX
    with pytest.raises(UsageError, match="got 65 rules, expected 64 or fewer"):
        read_rules(many, "--alert")


def test_probes_of_rules_must_be_there():
    pools = {"code": "token", "tone": "mean"}
    check_probes(read_rules(["a: max(code, prompt) > 1", "b: share(tone) > 5%", "c: lost > 0"], ""), pools, "x")
    with pytest.raises(UsageError) as raised:
        check_probes([parse_rule("a: max(cod) > 1", "")], pools, "x.alerts")
    assert str(raised.value) == "x.alerts: rule a: got cod, expected one of the probes code, tone; did you mean code?"
    with pytest.raises(UsageError, match="expected a probe of `probes`; none is given"):
        check_probes([parse_rule("a: max(code) > 1", "")], {}, "x")
    with pytest.raises(UsageError, match="got prompt, for a probe with pooling, expected no part"):
        check_probes([parse_rule("a: max(tone, prompt) > 1", "")], pools, "x")


def states(text, values):
    """Return what a rule changes to at each value, one a second: `f`iring, `r`esolved; and its state, p, f or i."""
    state = AlertState(parse_rule(f"x: {text}", ""), 0.0)
    return " ".join(
        f"{(state.step(value, float(now)) or ' ')[0]}{state.name[0]}".strip() for now, value in enumerate(values)
    )


def test_a_rule_fires_at_one_bound_and_is_over_at_another():
    assert states("lost > 5, clear < 2", [0, 5, 6, 4, 2, 1, 5, 6]) == "i i ff f f ri i ff"
    assert states("lost > 5", [5, 6, 5, 6]) == "i ff ri ff"
    assert states("lost >= 5", [4, 5, 5, 4.9]) == "i ff f ri"
    assert states("lost >= 5, clear <= 4", [5, 4.5, 4]) == "ff f ri"


def test_a_rule_waits_before_it_fires_and_before_it_is_over():
    assert states("lost > 5, for 2s", [6, 6, 6, 6, 0]) == "p p ff f ri"
    assert states("lost > 5, for 2s", [6, 6, 5, 6, 6, 6]) == "p p i p p ff"
    assert states("lost > 5, clear < 2, for 1s", [6, 3, 6, 6, 3]) == "p i p ff f"
    # Flapping: it is over only after two seconds below.
    assert states("lost > 5, clear < 2, keep 2s", [6, 1, 6, 1, 1, 1]) == "ff f f f f ri"
    assert states("lost > 5, keep 1s", [6, 0, 5.5, 0, 0]) == "ff f f f ri"


def test_a_rule_without_a_value_holds_nothing_and_is_clear():
    assert states("share(a) > 5%, for 2s", [6, None, 6, 6, 6, None, None]) == "p i p p ff ri i"
    assert states("max(a) > 5, keep 1s", [6, None, 6, None, None]) == "ff f f f ri"
