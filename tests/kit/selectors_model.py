"""Selectors for property tests, and what each means, said once more in the plainest way."""

from __future__ import annotations

from hypothesis import strategies as st

from capflow.capture.positions import POSITION_NAMES
from capflow.capture.spec import CaptureSpec

names = st.sampled_from(POSITION_NAMES)
windows = st.one_of(
    st.integers(1, 12).map(lambda n: {"last": n}),
    st.tuples(st.integers(0, 10), st.one_of(st.none(), st.integers(1, 12))).map(
        lambda ends: {"generated": [ends[0], None if ends[1] is None else ends[0] + ends[1]]}
    ),
)
strides = st.integers(1, 9).map(lambda n: {"every": n})
numbers = st.integers(-14, 24)
lists = st.tuples(
    st.lists(st.one_of(numbers, names, windows), min_size=1, max_size=5), st.lists(strides, max_size=1)
).map(lambda parts: [*parts[0], *parts[1]])
forms = st.one_of(names, windows, strides, lists, numbers)
budgets = st.one_of(st.none(), st.none(), st.integers(1, 12))
dtypes = st.sampled_from(["model", "float32", "float16"])


def specs(hooks):
    """Specs over some hooks' layers, which are drawn from `hooks`, `{hook: strategy of layers}`."""
    chosen = st.dictionaries(st.sampled_from(sorted(hooks)), st.none(), min_size=1).flatmap(
        lambda some: st.fixed_dictionaries({hook: hooks[hook] for hook in some})
    )
    return st.builds(
        lambda hooks, positions, max_rows, dtype: CaptureSpec.parse(
            {"hooks": hooks, "positions": positions, "max_rows": max_rows, "dtype": dtype}
        ),
        chosen,
        forms,
        budgets,
        dtypes,
    )


def member(form, prompt, position):
    """Whether a position of a request is meant by a form."""
    match form:
        case list():
            return any(member(item, prompt, position) for item in form)
        case int():
            return position == form if form >= 0 else position - prompt == form
        case "last_prompt":
            return position == prompt - 1
        case "all_prompt":
            return position < prompt
        case "all_generated":
            return position >= prompt
        case "all":
            return True
        case {"last": count}:
            return prompt - count <= position < prompt
        case {"generated": [first, end]}:
            return position - prompt >= first and (end is None or position - prompt < end)
        case {"every": step}:
            return position % step == 0
    raise AssertionError(form)


def meant(form, prompt, computed, max_rows=None):
    """The positions of a request that are meant, in order."""
    return [p for p in range(computed) if member(form, prompt, p)][:max_rows]
