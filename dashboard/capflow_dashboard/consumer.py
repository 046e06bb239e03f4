"""The dashboard consumer: sends frames and results to the process that serves the page.

Rows that the process does not read in time wait in the consumer's queue, which skips what is older than a second.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from capflow import CaptureResult, CaptureSpec, Consumer, Frame, RequestDone, UsageError, hookimpl
from capflow.capture.model import ModelInfo
from capflow.capture.site import hook_named
from capflow.capture.spec import read_layers
from capflow.capture.wanted import wanted_rows
from capflow.errors import FatalError, explain
from capflow.plugins.consumer import Context
from capflow.probes.kinds import load_probes
from capflow.probes.probe import Scorer
from capflow.steering.action import Action, Answered
from capflow_dashboard import limits
from capflow_dashboard.channel import (
    ActionAnswered,
    EngineLeft,
    EngineMet,
    EventTaken,
    HubAlive,
    PageSetup,
    RequestOver,
    RowsTaken,
    ToPages,
)

if TYPE_CHECKING:
    from capflow_dashboard.access import LinkFile
    from capflow_dashboard.process import PageProcess


class DashboardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer dashboard:`.

    port: the port to listen on; 0 for any free one.
    host: a loopback address.
    hook: the hook to capture for every request.
    layers: the layers to capture.
    positions: the positions to capture.
    probes: probe files whose scores are shown.
    token_file: a file with the secret that admits a browser; by default the variable `CAPFLOW_DASHBOARD_TOKEN`, or else
        a new random one at each start.
    requests_max: how many requests are kept.
    tokens_max: how many tokens of each request are kept, the latest ones.
    allow_steering: whether a page may steer and abort requests; otherwise it only shows.
    vectors: vector files that a page may use, each as `NAME=FILE`.
    modules: modules of the engines that a page may scale.
    labels: a file with the labels of requests, as `capflow probe` reads it.
    lens: a lens file, as `capflow lens` writes it; without one the page shows the logit lens.
    other_weights: whether the lens may be of other weights of the same sizes.
    alerts: rules of alerts, each as `NAME: RULE`, or files with one a line.
    server: the address of a `capflow serve` at which pages may run requests again, steered.
    server_key_file: a file with its key; by default the variable `VLLM_API_KEY`.
    """

    port: int = 8765
    host: str = "127.0.0.1"
    hook: str = "post_block"
    layers: list[int | str] | str = "all"
    positions: str = "all"
    probes: tuple[str, ...] = ()
    token_file: str | None = None
    requests_max: int = 4096
    tokens_max: int = 32_768
    allow_steering: bool = False
    vectors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    labels: str | None = None
    lens: str | None = None
    other_weights: bool = False
    alerts: tuple[str, ...] = ()
    server: str | None = None
    server_key_file: str | None = None


class WatchedHub(Protocol):
    """The hub that is shown, if it is another one than the consumer's."""

    def silent_s(self) -> float:
        """Return for how many seconds nothing has come from it."""

    def hub_status(self) -> dict[str, Any] | None:
        """Return its counters, as `capflow status --json` prints them; None if they are not known."""

    def act(self, action: Action, on_answered: Callable[[Answered], None]) -> None:
        """Send an action to it. `on_answered` is called on any thread with the answer, or with why there is none."""


class Dashboard(Consumer):
    """Shows the norms of rows, the scores of probes and the steering of requests live.

    address: the page's address; empty until `open`.
    link: the address with the token, which admits a browser.
    link_file: the path of a file of this user's that leads a browser to the link; None if there is none.
    watched: the hub that is shown, if it is another one than the consumer's.
    source: what is shown: `live` and a hub's address, or `stored` and a name.
    data: the path of the data set that is shown; empty for a hub and for a recording.
    """

    name = "dashboard"
    extra = "dashboard"
    Config = DashboardConfig
    policy = "skip"
    queue_bytes_max = limits.QUEUE_BYTES
    reads_requests = False

    def __init__(self, config: DashboardConfig) -> None:
        super().__init__(config)
        self.config: DashboardConfig = config
        self.address = ""
        self.link = ""
        self.watched: WatchedHub | None = None
        self.source = ("live", "")
        self.data = ""
        # A random token is kept from one `open` to the next, so that open pages come back.
        self._token: str | None = None
        # Set by `check`.
        self._server_key = ""
        # Set from `open` to `close`.
        self._process: PageProcess | None = None
        self._link_file: LinkFile | None = None
        self._context: Context | None = None
        # When the process last got a beat.
        self._beat_at = 0.0

    def spec(self) -> CaptureSpec:
        """Return a spec of the configured sites and those of the probes, for every request.

        Raises UsageError for invalid sites and for probe files that cannot be used.
        """
        hook = hook_named(self.config.hook) or self.config.hook
        hooks = {hook: read_layers(self.config.layers, "consumers.dashboard.layers")}
        for probe in self._probes:
            layers = hooks.get(probe.site.hook, [])
            if not isinstance(layers, str):
                hooks[probe.site.hook] = [*layers, probe.site.layer]
        return CaptureSpec.parse({"hooks": hooks, "positions": self.config.positions}, where="consumers.dashboard")

    def check(self) -> None:
        """Raise UsageError when an option is invalid or the port cannot be used."""
        from capflow_dashboard.access import new_token, read_key, read_token
        from capflow_dashboard.again.address import CompletionServer
        from capflow_dashboard.pages import LOOPBACK_NAMES
        from capflow_dashboard.steering import load_vectors

        config = self.config
        if config.host not in LOOPBACK_NAMES:
            do = "reach it from elsewhere through ssh -L"
            expected = f"one of {', '.join(LOOPBACK_NAMES)}"
            raise UsageError(explain("consumers.dashboard.host", got=config.host, expected=expected, do=do))
        _check_range("port", config.port, 0, limits.PORT_MAX)
        _check_range("requests_max", config.requests_max, 1, limits.REQUESTS_MAX)
        _check_range("tokens_max", config.tokens_max, limits.TOKENS_MIN, limits.TOKENS_MAX)
        given = next((name for name in ("vectors", "modules", "server") if getattr(config, name)), None)
        if given is not None and not config.allow_steering:
            raise UsageError(explain("consumers.dashboard.allow_steering", got=f"false, with {given}", expected="true"))
        load_vectors(config.vectors, "consumers.dashboard.vectors")
        if config.labels is not None:
            from capflow_dashboard.serving import labels_of

            labels_of(config.labels)
        if config.lens is not None:
            from capflow_dashboard.serving import lens_of

            lens_of(config.lens)
        _ = self._alerts
        if config.server is not None:
            CompletionServer.parse(config.server, where="consumers.dashboard.server")
            self._server_key = read_key(config.server_key_file) or ""
        elif config.server_key_file is not None:
            raise UsageError(explain("consumers.dashboard.server", got="none, with a server_key_file"))
        self._token = read_token(config.token_file) or new_token()
        self._try_port()

    def claim(self) -> tuple[str, str] | None:
        """Return the port; None for any free port."""
        return ("port", str(self.config.port)) if self.config.port else None

    def open(self, context: Context) -> None:
        """Start the process that serves the page."""
        from capflow_dashboard.access import LinkFile, link_to, new_token
        from capflow_dashboard.process import PageProcess

        self._token = self._token or new_token()
        setup = PageSetup(
            # "localhost" may be two addresses, IPv4 and IPv6, which would get different free ports.
            "127.0.0.1" if self.config.host == "localhost" else self.config.host,
            self.config.port,
            self._token,
            self.config.requests_max,
            self.config.tokens_max,
            self.config.probes,
            *self.source,
            self.config.allow_steering,
            self.config.vectors,
            self.config.modules,
            self.config.labels or "",
            self._alerts,
            self.config.server or "",
            self._server_key,
            self.data,
            self.config.lens or "",
            self.config.other_weights,
        )
        process = PageProcess(setup, context.count, self._act)
        process.start()
        self._process, self._context = process, context
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        self.address = f"http://{host}:{process.port}/"
        self.link = link_to(self.address, self._token)
        self._link_file = LinkFile(process.port, self.link)

    @property
    def link_file(self) -> str | None:
        """The path of a file that leads a browser to the link; None if there is none."""
        path = None if self._link_file is None else self._link_file.path
        return None if path is None else str(path)

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Show the engine; errors of probes that do not fit its model are logged."""
        sites = tuple(self.spec().resolve(model.sites, num_layers=model.num_layers))
        self._send(EngineMet(engine, model, sites))

    def on_engine_gone(self, engine: str) -> None:
        """Show the engine as gone, as long as one of its requests is shown."""
        self._send(EngineLeft(engine))

    def on_frame(self, frame: Frame) -> None:
        """Send the rows to the process, which does not keep them."""
        header, rows = wanted_rows(frame)
        self._send(RowsTaken(header), rows)

    def on_action(self, answered: Answered) -> None:
        """Show an event of a request's steering."""
        self._send(EventTaken(answered))

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Show the request as finished."""
        self._send(RequestOver(done))
        return CaptureResult("partial_error" if done.dropped else "ok", payload={"address": self.address})

    def on_idle(self) -> None:
        """Say that the hub is alive, and its counters if a page shows them."""
        now = time.monotonic()
        if now - self._beat_at < limits.TICK_S or self._process is None or self._context is None:
            return
        self._beat_at = now
        watched = self.watched
        status = None
        if self._process.health_wanted or self.config.allow_steering:
            status = self._context.hub_status() if watched is None else watched.hub_status()
        self._send(HubAlive(0.0 if watched is None else watched.silent_s(), status))

    def look(self) -> tuple[str, str]:
        """Return that nothing is stored."""
        return "shown live, not kept", ""

    def close(self) -> None:
        """Close the pages' connections and end the process."""
        if self._link_file is not None:
            self._link_file.remove()
            self._link_file = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    @cached_property
    def _probes(self) -> list[Scorer]:
        return load_probes(self.config.probes, "consumers.dashboard.probes")

    @cached_property
    def _alerts(self) -> tuple[str, ...]:
        """The rules, each as `NAME: RULE`. Raises UsageError for one that cannot be used."""
        from capflow_dashboard.views.alerts.rules import check_probes, read_rules

        where = "consumers.dashboard.alerts"
        rules = read_rules(self.config.alerts, where)
        check_probes(
            rules, {name: probe.pool for probe in self._probes for name in probe.names} if rules else {}, where
        )
        return tuple(f"{rule.name}: {rule.text}" for rule in rules)

    def _act(self, action: Action) -> None:
        """Send an action of a page to the hub that is shown. Called on the process's thread."""
        assert self._context is not None
        if self.watched is None:
            self._context.act(action)
        else:
            self.watched.act(action, self._take_answer)

    def _take_answer(self, answered: Answered) -> None:
        process = self._process
        if process is not None:
            # A process that is gone is noticed with the next row.
            with contextlib.suppress(FatalError):
                process.send(ActionAnswered(answered))

    def _send(self, message: ToPages, rows: list[Any] | None = None) -> None:
        assert self._process is not None
        self._process.send(message, rows or ())

    def _try_port(self) -> None:
        """Raise UsageError when the port cannot be used, before an engine is started."""
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((self.config.host, self.config.port))
            except OSError as e:
                from capflow_dashboard.server import port_error

                raise port_error(self.config.host, self.config.port, e) from e


def _check_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        do = "remove it to use the default"
        raise UsageError(explain(f"consumers.dashboard.{option}", got=value, expected=f"{low}..{high}", do=do))


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Return the dashboard."""
    return [Dashboard]
