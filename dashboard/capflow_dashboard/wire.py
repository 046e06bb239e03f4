"""The messages between the server and a page, version 1.

The server sends binary messages. A message is the length of its head in bytes (uint32), the head (JSON, padded with
spaces to a multiple of 4 bytes), and numbers (float32, which hold NaN and infinity). All are little-endian. The head
has these keys; a key without news is left out:

| key | meaning |
|---|---|
| hello | the first message: the versions of protocol and capflow, what the page may do, limits, formats of exports |
| heartbeat | each second and at a change: whether the hub is alive (`live`, `stale`), its silence, the rows' lag |
| seq | the number of an update; the page answers `seen` once it has drawn it, and then gets the next |
| engines | the engines on the board: name, model, sites, probes, problems, whether they are gone |
| counts | requests open, done and not kept; rows dropped by reason; totals |
| rates | tokens, rows and bytes in each second up to `last` |
| requests | requests that are new or changed, each with its `key` and its changed fields |
| sparks | sparklines of requests in the page's window: highest scores of its probe in equal parts of the request |
| gone | keys of requests that were dropped from the board |
| detail | tokens of the selected request: columns `first .. first+count`, at positions `base + column` |
| other | as `detail`, of the request that it is compared with; its numbers begin at number `at` of the message |
| population | once a second, of one engine and probe: histograms of tokens and requests by bin, and what fired |
| health | the hub's counters, as `capflow status --json` prints them |
| acks | answers to its actions: `id`; `state`: applied, rejected, unknown or waiting; `step`, `position`, `reason` |
| steering | what is held by all pages: `frozen`, and `holds`, each with request, kind, name, mode, ratio and page |
| alerts | `states` of rules that fire or are pending, of all while it shows them; `changes` that it does not have |
| lens, stored | the answer to a `lens` or `stored` of this page; it comes beside the updates, without `seq` |
| again | news of this page's run, or why it is refused; beside the updates too, at most 8 a second |

The numbers are the values of `detail`, `[series, count]`: a norm or a score, NaN or infinity if the row has such
numbers, and minus infinity if there is no row. With `fresh`, `detail` replaces what the page has, and has the
series, the baseline and all events. Otherwise it has the baseline and events only if they are new.

A `lens` has the `id`, `request` and `position` that the page asked for, `layers`, and `error`: one line that says why
there are no layers, or empty. Each of `layers` is `{"layer": 0, "site": "post_block:0", "tokens": [[id, text,
probability], …]}`, by layer: at most 8 tokens, the most likely first. A text is null if the model's files have none for
the token. A layer without tokens has a row with NaN or infinity; layers whose rows are not kept are left out.

Each of the `states` of `alerts` has `rule`, `engine` and `request` (empty for none), `state` (inactive, pending,
firing), `since_s` (Unix time) and `value`; it replaces what the page had. Each of `changes` has `rule`, `engine`,
`request`, `state` (firing, resolved), `value`, `at_s` and `fired_s`; the server keeps 100. A value is in the unit of
the rule in `hello`, null without one.

An `again` has the `id` of the page's ask. A refused ask has `error`. News has the `label` of the run and `plain` or
`steered` or both: `request`, its id at the hub; `pieces`, each `[token ids, text]`, since the last news; `over`,
whether it is the last; `finish`, why the completion ended, or null; `error`, why it failed, or empty. If the hub
captures these requests, they are in the list too.

A `stored` has `stores` in place of `layers`: one for each consumer of the hub that stores rows, or for the data set
that is shown. Each has the name of its `consumer` (empty for a data set that is shown), its `kind`, `filesystem` or
`duckdb`, and its `path`. If the token's rows are there, a data set also has its `layout`, the Python `expression` of
the request, and `rows`: for each site `[name, index of the row, file]`. Without `rows`, `note` says why; an
`expression` is then that on the hub's machine. A database has a `command` that prints the token's scores.

A page sends text, one of these:

| message | meaning |
|---|---|
| `{"subscribe": {"request": KEY, "other": KEY, "window": [KEY, …], "probe": NAME, …}}` | what it shows: `Subscribe` |
| `{"seen": SEQ, "frame_ms": NUMBER}` | it has drawn an update; its 95th percentile of the time of a frame |
| `{"act": {"id": N, "kind": KIND, …}}` | an action, as `capflow_dashboard.steering.PageAction`; with the right only |
| `{"alive": NAME}` | its name, and that what it holds goes on; once a second while it holds something |
| `{"lens": {"id": N, "request": KEY, "position": P}}` | it asks for the lens of a token; the answer repeats N |
| `{"stored": {"id": N, "request": KEY, "position": P}}` | it asks where the rows of a token are stored |
| `{"again": {"id": N, "request": KEY, …}}` | a run, or the `stop` of it: `again.desk.RunAsk`; with the right only |

At most one lens of a page is worked on, and at most two a second; the same holds for `stored`. One that waits is
replaced by the next, and gets no answer.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from capflow.errors import RemoteProtocolError, explain
from capflow_dashboard import limits
from capflow_dashboard.again.desk import RunAsk
from capflow_dashboard.board.series import Values
from capflow_dashboard.steering import PageAction

VERSION = 1

_PageName = Annotated[str, msgspec.Meta(pattern=f"^[a-z0-9]{{4,{limits.PAGE_NAME_LENGTH_MAX}}}$")]
_Key = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Subscribe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a page shows.

    request: the request's key; 0 for none.
    other: the key of a request that it compares with; 0 for none.
    window: the keys of the requests in view, in the list.
    probe: the probe whose sparklines it shows.
    health: whether it shows the hub's counters.
    population: the engine whose population of `probe` it shows; empty for none.
    alerts: whether it shows all rules of alerts.
    """

    request: _Key = 0
    other: _Key = 0
    window: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=limits.WINDOW_MAX)] = ()
    probe: str = ""
    health: bool = False
    population: str = ""
    alerts: bool = False


class TokenAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page asks for the lens of a token, or where its rows are stored.

    id: the page's number of the ask.
    request: the request's key.
    position: the position of the token in the request.
    """

    id: _Key
    request: _Key
    position: _Key


class PageMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a page: exactly one of `subscribe`, `seen`, `lens`, `stored`, `act`, `alive` and `again`.

    alive: the page's name; a page that connects again keeps it.
    seen: the number of the update that the page has drawn.
    frame_ms: the 95th percentile of the time of a frame, in milliseconds.
    """

    subscribe: Subscribe | None = None
    seen: _Key | None = None
    frame_ms: float = 0.0
    act: PageAction | None = None
    alive: _PageName | None = None
    lens: TokenAsk | None = None
    stored: TokenAsk | None = None
    again: RunAsk | None = None


_KINDS = ("subscribe", "seen", "lens", "stored", "act", "alive", "again")
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PageMessage)


def encode(head: dict[str, Any], values: Values | None = None) -> bytes:
    """Return a message to a page.

    values: float32 `[series, count]`.
    """
    text = _encoder.encode(head)
    text += b" " * (-len(text) % 4)
    numbers = b"" if values is None else values.astype("<f4", copy=False).tobytes()
    return struct.pack("<I", len(text)) + text + numbers


def decode(message: str | bytes) -> PageMessage:
    """Return a page's message. Raises RemoteProtocolError when it is invalid."""
    expected = f"one of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
    try:
        read = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise RemoteProtocolError(explain("message of a page", got=str(e), expected=expected)) from e
    kinds = [name for name in _KINDS if getattr(read, name) is not None]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of them"
        raise RemoteProtocolError(explain("message of a page", got=got, expected=expected))
    return read
