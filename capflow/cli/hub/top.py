"""`capflow top`: a running hub's requests, queues, credit, losses and rates, live in the terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import click

from capflow.cli.hub.address import hubs_options
from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.cli.hub.rates import History
    from capflow.cli.hub.view import HubShown
    from capflow.transport.client import Client

_EVERY_S = 1.0
_WINDOW_S = 5.0  # the window of the rates
_ANSWER_S = 3.0  # how long the hub may take to answer
_KEYS_S = 0.25  # how often keys are read and the view is drawn
_LEAVE = ("q", "Q", "\x03", "\x04", "\x1b")


@click.command(
    epilog=examples("capflow top", "capflow top --once", "capflow top --address ipc:///run/a --address ipc:///run/b")
)
@hubs_options
@click.option("--once", is_flag=True, help="Print one table, with the rates of a second, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the rates of a second, and end.")
def top(addresses: tuple[str, ...], key: str | None, insecure: bool, once: bool, as_json: bool) -> None:
    """Watch a running hub: requests, queues, credit, losses, and rates over the last five seconds.

    s sorts by the next column, r reverses the order, q or Ctrl-C leaves. A narrow terminal has fewer columns. If the
    hub ends, the view waits for it to come back. Without a terminal this is the same as --once.

    With several hubs there is a row for each, and their sums.
    """
    from capflow.transport.client import Client

    clients: list[Callable[[], Client]] = [
        functools.partial(Client, address, _ANSWER_S, key=key, insecure=insecure) for address in addresses or (None,)
    ]
    for client in clients:
        client()  # raises now if the address or the key is wrong
    if not (as_json or once) and sys.stdout.isatty():
        _live(clients)
    elif len(clients) == 1:
        _print_once(clients[0], as_json=as_json)
    else:
        _print_several(clients, as_json=as_json)


def _print_several(clients: Sequence[Callable[[], Client]], *, as_json: bool) -> None:
    """Print what the hubs say. The exit code is 1 if one of them does not answer."""
    from capflow.cli.hub.rates import History

    feeds = [_Feed(client, History(_WINDOW_S)) for client in clients]
    for round_of in range(2):
        # All are asked at once: a hub that does not answer takes its time.
        asking = [threading.Thread(target=feed.ask) for feed in feeds]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        if not round_of:
            time.sleep(_EVERY_S)
    if as_json:
        import json

        answers = {feed.address: _as_json(feed) for feed in feeds}
        click.echo(json.dumps({"hubs": answers}, indent=2))
    else:
        from rich.console import Console

        from capflow.cli.hub.view import several

        Console().print(several([_shown(feed) for feed in feeds]))
    if any(feed.gone_since is not None for feed in feeds):
        sys.exit(1)


def _as_json(feed: _Feed) -> dict[str, Any]:
    status, rates = feed.history.now, feed.history.rates
    if status is None:
        return {"error": feed.why}
    return {**status, "rates": None if rates is None else rates.as_json()}


def _shown(feed: _Feed) -> HubShown:
    from capflow.cli.hub.view import HubShown

    return HubShown(feed.address, feed.history.now, feed.history.rates, _gone(feed))


def _print_once(client: Callable[[], Client], *, as_json: bool) -> None:
    from capflow.cli.hub.rates import History

    history = History(_WINDOW_S)
    history.add(_ask(client))
    time.sleep(_EVERY_S)
    history.add(_ask(client))
    status, rates = history.now, history.rates
    assert status is not None
    if as_json:
        import json

        click.echo(json.dumps({**status, "rates": None if rates is None else rates.as_json()}, indent=2))
        return
    from rich.console import Console

    from capflow.cli.hub.view import view

    Console().print(view(status, rates))


def _ask(client: Callable[[], Client]) -> dict[str, Any]:
    with client() as asking:
        return asking.status()


class _Feed:
    """Asks a hub for its status every second on a thread of its own, so that the keys never wait for an answer."""

    def __init__(self, client: Callable[[], Client], history: History) -> None:
        self.address = client().address
        self._client = client
        # Written by the thread, under `lock`.
        self.history = history
        # Guards the fields that the thread writes.
        self.lock = threading.Lock()
        # When the hub stopped answering, on the monotonic clock.
        self.gone_since: float | None = None
        # Why the hub does not answer.
        self.why = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capflow-top", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the thread is not joined: it may wait for an answer that never comes

    def _run(self) -> None:
        while not self._stop.is_set():
            self.ask()
            self._stop.wait(_EVERY_S)

    def ask(self) -> None:
        """Ask once."""
        from capflow.errors import CapflowError

        try:
            status = _ask(self._client)
        except CapflowError as e:
            with self.lock:
                self.why = str(e)
                self.gone_since = self.gone_since or time.monotonic()
        else:
            with self.lock:
                self.gone_since = None
                self.history.add(status)


def _live(clients: Sequence[Callable[[], Client]]) -> None:
    from rich.console import Console
    from rich.live import Live

    from capflow.cli.hub.rates import History
    from capflow.cli.hub.screen import Screen, ordered
    from capflow.cli.hub.view import OLDEST_FIRST, several

    console, order = Console(), OLDEST_FIRST
    shown: object = None
    with (
        _signals() as came,
        contextlib.ExitStack() as stack,
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        feeds = [stack.enter_context(_Feed(client, History(_WINDOW_S))) for client in clients]
        while not came:
            with contextlib.ExitStack() as locks:
                for feed in feeds:
                    locks.enter_context(feed.lock)
                content = ([(feed.history.now, _gone(feed)) for feed in feeds], order, console.size)
                if content != shown and len(feeds) == 1:
                    live.update(Screen(feed.address, feed.history, _gone(feed), order), refresh=True)
                elif content != shown:
                    live.update(several([_shown(feed) for feed in feeds], order), refresh=True)
            shown = content
            for key in _pressed(keys):
                if key in _LEAVE:
                    return
                order = ordered(order, key)


def _gone(feed: _Feed) -> tuple[float, str] | None:
    """Return for how many seconds the hub has not answered, and why; None if it answers."""
    return None if feed.gone_since is None else (time.monotonic() - feed.gone_since, feed.why)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Read keys one by one without echo; yield the file descriptor of the keyboard, None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    tty.setcbreak(source)
    try:
        yield source
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)


def _pressed(source: int | None) -> str:
    """Return the keys that are pressed within `_KEYS_S`."""
    if source is None:
        time.sleep(_KEYS_S)
        return ""
    if not select.select([source], [], [], _KEYS_S)[0]:
        return ""
    keys = os.read(source, 32).decode(errors="replace")
    return (
        keys if len(keys) == 1 or not keys.startswith("\x1b") else ""
    )  # an arrow key sends an escape sequence: it is not Escape


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of ending, so that the terminal is restored; yield the signals that came."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
