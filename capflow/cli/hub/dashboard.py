"""`capflow dashboard`: the live page of a running hub, or of stored rows."""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import click

from capflow.cli.hub.address import KEY_HELP, METRICS_OPTION
from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.cli.hub.running import HubRun
    from capflow.cli.logs import Format
    from capflow.plugins.configure import ConfiguredConsumer
    from capflow.steering.action import Action, Answered, Outcome
    from capflow.transport.client import Client

    _Asked = tuple[Action, Callable[[Answered], None]]

# How often the hub is asked for its status, and how long it may take to answer.
_ASK_S = 0.5
_ANSWER_S = 3.0
# How long an action may take to be answered, and how many are sent at once.
_ACT_S = 15.0
_ACTIONS_AT_ONCE = 256


@click.command(
    epilog=examples(
        "capflow dashboard --open",
        "capflow dashboard ipc:///run/user/1000/capflow/hub.sock --probe code.safetensors",
        "capflow dashboard demo-data/rows --open",
        "capflow dashboard --allow-steering --vector calm=calm.safetensors",
        "capflow dashboard rows --lens jacobian.safetensors",
        "capflow dashboard --probe code.safetensors --alert 'leak: share(code)>5% over 60s'",
        "capflow dashboard --allow-steering --module glad --server http://127.0.0.1:8000",
    )
)
@click.argument("targets", nargs=-1, metavar="[HUB|PATH]...")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8765, show_default=True, help="0 for any free port.")
@click.option(
    "--probe", "probes", multiple=True, metavar="FILE", help="A probe file whose scores are shown; repeatable."
)
@click.option("--hook", metavar="HOOK", help="The hook point whose norms are shown. Default: post_block.")
@click.option("--layers", metavar="LAYERS", help="The layers whose norms are shown, such as 0+8+17. Default: all.")
@click.option("--allow-steering", is_flag=True, help="Let the page steer and abort requests. Needs the right `steer`.")
@click.option("--vector", "vectors", multiple=True, metavar="NAME=FILE", help="A vector that the page may use.")
@click.option("--module", "modules", multiple=True, metavar="NAME", help="A module of the engine that it may scale.")
@click.option("--labels", metavar="FILE", help="The labels of requests, as `capflow probe fit` reads them.")
@click.option("--lens", metavar="FILE", help="A lens file, as `capflow lens` writes it. Default: the logit lens.")
@click.option("--other-weights", is_flag=True, help="Accept a lens of other weights of the model's sizes.")
@click.option(
    "--alert", "alerts", multiple=True, metavar="RULE|FILE", help="A rule of an alert, or a file of rules; repeatable."
)
@click.option("--server", metavar="URL", help="A `capflow serve` at which it may run requests again, steered.")
@click.option(
    "--server-key-file", metavar="FILE", help="A file of mode 600 with the server's key. Default: VLLM_API_KEY."
)
@METRICS_OPTION
@click.option("--token-file", metavar="FILE", help="A file of mode 600 with the token. Default: a new one each time.")
@click.option("--key", metavar="NAME|PATH", help=KEY_HELP)
@click.option("--insecure", is_flag=True, help="Allow TCP to another machine without keys.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of standard error."
)
def dashboard(
    targets: tuple[str, ...],
    opens: bool,
    port: int,
    probes: tuple[str, ...],
    hook: str | None,
    layers: str | None,
    allow_steering: bool,
    vectors: tuple[str, ...],
    modules: tuple[str, ...],
    labels: str | None,
    lens: str | None,
    other_weights: bool,
    alerts: tuple[str, ...],
    server: str | None,
    server_key_file: str | None,
    metrics_address: str | None,
    token_file: str | None,
    key: str | None,
    insecure: bool,
    log_format: Format,
) -> None:
    """Show what a model computes, live in a browser.

    HUB is the address of a running hub, as the hub prints it; by default the hub at the default address. The hub never
    waits for the dashboard, and the page stays when the hub ends. Name all hubs of an engine with several: the page
    shows the rows of all, and the state of the first, which also gets the page's actions. PATH is a recording (`capflow
    record`) or a data set (the consumer `filesystem`). Ctrl-C ends the dashboard.
    """
    from capflow.buffers.policy import WhenFull
    from capflow.cli.hub.running import HubRun
    from capflow.errors import UsageError, explain
    from capflow.hub.monitor.endpoint import parse_listen
    from capflow.plugins.configure import configure, load_plugins
    from capflow.transport.address import check_address, default_address, private_address

    target, *others = targets or (None,)
    stored = _stored(target)
    address = check_address(target or default_address(), insecure=insecure, where="HUB") if stored is None else ""
    for other in others:
        if stored is not None or "://" not in str(other) or targets.count(str(other)) > 1:
            raise UsageError(explain("HUB|PATH", got=str(other), expected="one path, or the address of each hub once"))
        check_address(str(other), insecure=insecure, where="HUB")
    options: dict[str, Any] = {"port": port, "hook": hook, "layers": layers, "labels": labels, "token_file": token_file}
    options |= {"lens": lens, "other_weights": other_weights or None}
    options |= {"allow_steering": allow_steering or None, "server": server, "server_key_file": server_key_file}
    lists = {"probes": probes, "vectors": vectors, "modules": modules, "alerts": alerts}
    options |= {name: list(values) for name, values in lists.items() if values}
    if stored is not None:
        if allow_steering:
            raise UsageError(explain("--allow-steering", got=f"with {target}", expected="a hub: nothing runs here"))
        if alerts:
            raise UsageError(explain("--alert", got=f"with {target}", expected="a hub: stored rows come all at once"))
        options["policy"] = str(WhenFull.BLOCK)
    given = {name: value for name, value in options.items() if value is not None}
    made = cast("ConfiguredConsumer", configure("dashboard", given, load_plugins()))
    running = HubRun(
        private_address("dashboard"),
        [made],
        metrics=parse_listen(metrics_address, "--metrics-address"),
        log_format=log_format,
        drain_s=0,
        shown=True,
    )
    if stored is not None:
        _show_stored(running, made, stored, opens=opens)
    else:
        _show_hub(running, made, [address, *map(str, others)], key=key, insecure=insecure, opens=opens)


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
    from capflow.protocol.recording import is_recording
    from capflow.replay.player import Replay, ReplayPace

    entries = entries_at(path, [made], ask=False, timed=False)
    made.consumer.source = ("stored", path.name)  # type: ignore[attr-defined]
    if not is_recording(path):
        made.consumer.data = str(path.absolute())  # type: ignore[attr-defined]
    with running:
        _open_if(opens, running, made)
        replayed = Replay(running.hub, ReplayPace(), stopped=running.stopped.is_set)
        replay_beside(replayed, entries, running.wait)
        running.tell("replayed", f"all of {path} is shown; Ctrl-C ends", rows=replayed.rows, frames=replayed.frames)
        running.wait()
    sys.exit(1 if replayed.records_lost else 0)


def _show_hub(
    running: HubRun,
    made: ConfiguredConsumer,
    addresses: Sequence[str],
    *,
    key: str | None,
    insecure: bool,
    opens: bool,
) -> None:
    """Show hubs until a signal comes. The first one is asked for its status and gets actions."""
    from capflow.hub.watch import Tapping

    address = addresses[0]
    made.consumer.source = ("live", address)  # type: ignore[attr-defined]
    with HubAside(address, key=key, insecure=insecure) as watched:
        made.consumer.watched = watched  # type: ignore[attr-defined]
        with running, contextlib.ExitStack() as stack:
            first: Tapping | None = None
            for each in addresses:
                tapping = Tapping(each, running.hub, key=key, insecure=insecure, beside=first)
                stack.enter_context(contextlib.closing(tapping))
                first = first or tapping
                if not tapping.join():
                    running.tell("tap_waits", f"no hub answers at {each}; waiting for one", address=each)
            _open_if(opens, running, made)
            running.wait()


def _open_if(opens: bool, running: HubRun, made: ConfiguredConsumer) -> None:
    """Open the page in a browser, by a file with the link, so that no command line has the token."""
    link_file = getattr(made.consumer, "link_file", None)
    if opens and not (link_file and webbrowser.open(Path(link_file).as_uri())):
        running.tell("browser_missing", "no browser could be started; open the link yourself")


class HubAside:
    """Another hub, beside which this process runs: asks for its status twice a second, and sends it actions.

    Both are done inside a `with` block, on threads of their own.
    """

    def __init__(self, address: str, *, key: str | None, insecure: bool) -> None:
        from capflow.transport.client import Client

        self._connect = functools.partial(Client, address, timeout=_ANSWER_S, key=key, insecure=insecure)
        # Raises for a wrong key.
        self._connect()
        # Written by the thread.
        self._status: dict[str, Any] | None = None
        self._heard_at = time.monotonic()
        self._stop = threading.Event()
        self._actions: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        # Freezes and their ends, which wait for no answer to another action.
        self._freezes: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        # They are not joined: they may wait for an answer that never comes.
        self._threads = [
            threading.Thread(target=self._watch, name="capflow-status", daemon=True),
            threading.Thread(target=self._send, args=(self._actions,), name="capflow-actions", daemon=True),
            threading.Thread(target=self._send, args=(self._freezes,), name="capflow-freezes", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._actions.put(None)
        self._freezes.put(None)

    def silent_s(self) -> float:
        """Return for how many seconds the hub has not answered."""
        return time.monotonic() - self._heard_at

    def hub_status(self) -> dict[str, Any] | None:
        """Return the hub's last status; None before the first."""
        return self._status

    def act(self, action: Action, on_answered: Callable[[Answered], None]) -> None:
        """Send an action to the hub. `on_answered` is called with the answer, or with why there is none."""
        from capflow.steering.action import Freeze, Unfreeze

        (self._freezes if isinstance(action, Freeze | Unfreeze) else self._actions).put((action, on_answered))

    def _watch(self) -> None:
        from capflow.errors import CapflowError

        with self._connecting() as client:
            while not self._stop.is_set():
                with contextlib.suppress(CapflowError):
                    self._status = client.status()
                    self._heard_at = time.monotonic()
                self._stop.wait(_ASK_S)

    def _send(self, actions: queue.SimpleQueue[_Asked | None]) -> None:
        """Send the actions that wait in one message, in their order, and answer each."""
        from capflow.errors import CapflowError
        from capflow.steering.action import Answered, Unknown

        with self._connecting() as client:
            while (first := actions.get()) is not None:
                asked = [first]
                with contextlib.suppress(queue.Empty):
                    while len(asked) < _ACTIONS_AT_ONCE and (more := actions.get_nowait()) is not None:
                        asked.append(more)
                outcomes: Sequence[Outcome]
                try:
                    outcomes = client.act([action for action, _ in asked], timeout=_ACT_S)
                except CapflowError as e:
                    outcomes = [Unknown("", str(e))] * len(asked)
                for (action, on_answered), outcome in zip(asked, outcomes, strict=True):
                    on_answered(Answered.of(action, outcome, engine=action.engine, asked_by="client"))

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[Client]:
        client = self._connect()
        try:
            yield client
        finally:
            client.close()
