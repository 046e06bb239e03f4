"""`capflow dashboard`: the live page of a running hub, or of stored rows."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import click

from capflow.cli.hub.address import KEY_HELP

if TYPE_CHECKING:
    from capflow.cli.hub.running import HubRun
    from capflow.cli.logs import Format
    from capflow.plugins.configure import ConfiguredConsumer

# How often the hub is asked for its status, and how long it may take to answer.
_ASK_S = 1.0
_ANSWER_S = 3.0


@click.command()
@click.argument("target", required=False, metavar="[HUB|PATH]")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8765, show_default=True, help="0 for any free port.")
@click.option(
    "--probe", "probes", multiple=True, metavar="FILE", help="A probe file whose scores are shown; repeatable."
)
@click.option("--hook", metavar="HOOK", help="The hook point whose norms are shown. Default: post_block.")
@click.option("--layers", metavar="LAYERS", help="The layers whose norms are shown, such as 0+8+17. Default: all.")
@click.option("--token-file", metavar="FILE", help="A file of mode 600 with the token. Default: a new one each time.")
@click.option("--key", metavar="NAME|PATH", help=KEY_HELP)
@click.option("--insecure", is_flag=True, help="Allow TCP to another machine without keys.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of standard error."
)
def dashboard(
    target: str | None,
    opens: bool,
    port: int,
    probes: tuple[str, ...],
    hook: str | None,
    layers: str | None,
    token_file: str | None,
    key: str | None,
    insecure: bool,
    log_format: Format,
) -> None:
    r"""Show what a model computes, live in a browser.

    HUB is the address of a running hub, as the hub prints it; by default the hub at the default address. The hub never
    waits for the dashboard, and the page stays when the hub ends. PATH is a recording (`capflow record`) or a data set
    (the consumer `filesystem`). Ctrl-C ends the dashboard.

    \b
    Examples:
      capflow dashboard --open
      capflow dashboard ipc:///run/user/1000/capflow/hub.sock --probe code.safetensors
      capflow dashboard demo-data/rows --open
    """
    from capflow.cli.hub.running import HubRun
    from capflow.plugins.configure import configure, load_plugins
    from capflow.transport.address import check_address, default_address, private_address

    stored = _stored(target)
    address = check_address(target or default_address(), insecure=insecure, where="HUB") if stored is None else ""
    options: dict[str, Any] = {"port": port, "hook": hook, "layers": layers, "token_file": token_file}
    if probes:
        options["probes"] = list(probes)
    if stored is not None:
        options["policy"] = "block"
    given = {name: value for name, value in options.items() if value is not None}
    made = cast("ConfiguredConsumer", configure("dashboard", given, load_plugins()))
    running = HubRun(private_address("dashboard"), [made], log_format=log_format, drain_s=0, shown=True)
    if stored is not None:
        _show_stored(running, made, stored, opens=opens)
    else:
        _show_hub(running, made, address, key=key, insecure=insecure, opens=opens)


def _stored(target: str | None) -> Path | None:
    """Return the path that the argument names; None for a hub.

    Raises UsageError for what is neither.
    """
    from capflow.errors import UsageError, explain

    if target is None or "://" in target:
        return None
    path = Path(target)
    if path.is_socket():
        got, expected = f"{target}, a socket", "a hub's address, a recording or a data set"
        raise UsageError(explain("HUB|PATH", got=got, expected=expected, do=f"ipc://{path.absolute()} for that hub"))
    if not path.exists():
        expected = "a hub's address (ipc:///… or tcp://…), a recording or a data set"
        raise UsageError(explain("HUB|PATH", got=f"{target}, which does not exist", expected=expected))
    return path


def _show_stored(running: HubRun, made: ConfiguredConsumer, path: Path, *, opens: bool) -> None:
    """Show a recording or a data set until a signal comes."""
    from capflow.cli.hub.replay import entries_at, replay_beside
    from capflow.replay.player import Replay, ReplayPace

    entries = entries_at(path, [made], ask=False, timed=False)
    made.consumer.source = ("stored", path.name)  # type: ignore[attr-defined]
    with running:
        _open_if(opens, running, made)
        replayed = Replay(running.hub, ReplayPace(), stopped=running.stopped.is_set)
        replay_beside(replayed, entries, running.wait)
        running.tell("replayed", f"all of {path} is shown; Ctrl-C ends", rows=replayed.rows, frames=replayed.frames)
        running.wait()
    sys.exit(1 if replayed.records_lost else 0)


def _show_hub(
    running: HubRun, made: ConfiguredConsumer, address: str, *, key: str | None, insecure: bool, opens: bool
) -> None:
    """Show a hub until a signal comes."""
    from capflow.hub.watch import Tapping

    made.consumer.source = ("live", address)  # type: ignore[attr-defined]
    with WatchedHubStatus(address, key=key, insecure=insecure) as watched:
        made.consumer.watched = watched  # type: ignore[attr-defined]
        with running:
            tapping = Tapping(address, running.hub, key=key, insecure=insecure)
            with contextlib.closing(tapping):
                if not tapping.join():
                    running.tell("tap_waits", f"no hub answers at {address}; waiting for one", address=address)
                _open_if(opens, running, made)
                running.wait()


def _open_if(opens: bool, running: HubRun, made: ConfiguredConsumer) -> None:
    """Open the page in a browser, by a file with the link, so that no command line has the token."""
    link_file = getattr(made.consumer, "link_file", None)
    if opens and not (link_file and webbrowser.open(Path(link_file).as_uri())):
        running.tell("browser_missing", "no browser could be started; open the link yourself")


class WatchedHubStatus:
    """Asks a hub for its status each second, on a thread of its own, inside a `with` block."""

    def __init__(self, address: str, *, key: str | None, insecure: bool) -> None:
        from capflow.transport.client import Client

        self._client = Client(address, timeout=_ANSWER_S, key=key, insecure=insecure)
        # Written by the thread.
        self._status: dict[str, Any] | None = None
        self._heard_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capflow-status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread is not joined: it may wait for an answer that never comes.
        self._stop.set()

    def silent_s(self) -> float:
        """Return for how many seconds the hub has not answered, beyond the time between two questions."""
        return max(0.0, time.monotonic() - self._heard_at - _ASK_S)

    def hub_status(self) -> dict[str, Any] | None:
        """Return the hub's last status; None before the first."""
        return self._status

    def _run(self) -> None:
        from capflow.errors import CapflowError

        while not self._stop.is_set():
            with contextlib.suppress(CapflowError):
                self._status = self._client.status()
                self._heard_at = time.monotonic()
            self._stop.wait(_ASK_S)
