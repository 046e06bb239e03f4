"""The search for keys that occur twice agrees with a parser, whatever strings a text has."""

import json
import random

import pytest

from capflow.errors import UsageError
from capflow.text import jsontext

STRINGS = ("a", "b", "", "\\", "\\\\", '"', '\\"', "a:", ':"', '": ', "\n", "é", 'x"y\\', "{", ",")


def random_text(rng: random.Random, depth: int) -> str:
    """Return a JSON text with keys of `STRINGS`, some of them twice in one object."""

    def string() -> str:
        return json.dumps(rng.choice(STRINGS), ensure_ascii=rng.random() < 0.5)

    space = rng.choice(("", " ", "\n\t"))
    kind = rng.randrange(4) if depth else 0
    if kind == 0:
        return rng.choice((string(), "1", "null"))
    parts = [random_text(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 1:
        return f"[{space}{f'{space},'.join(parts)}]"
    return "{" + ",".join(f"{space}{string()}{space}:{space}{part}" for part in parts) + "}"


def repeats(text: str) -> bool:
    """Return whether a parser sees a key twice in one object."""
    twice = []
    json.loads(text, object_pairs_hook=lambda pairs: twice.append(len({key for key, _ in pairs}) < len(pairs)))
    return any(twice)


def test_a_key_twice_in_one_object_is_refused_and_nothing_else():
    rng, refused = random.Random(5), 0
    for _ in range(5000):
        text = random_text(rng, 3)
        if repeats(text):
            refused += 1
            with pytest.raises(UsageError, match="twice in one object"):
                jsontext.check_keys(text.encode(), "body")
        else:
            jsontext.check_keys(text.encode(), "body")
    assert 200 < refused < 4800


@pytest.mark.parametrize("text", ['"', '"\\"', '{"a\\', '{"a": "\\\\', '{"a": "b\\"', '"a" "b'])
def test_a_text_that_ends_in_a_string_passes(text):
    jsontext.check_keys(text.encode(), "body")
