"""The dashboard consumer: writes frames and results to a board, and serves the page that shows it."""

from __future__ import annotations

import logging
import re
import secrets
import socket
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from capflow import CaptureResult, CaptureSpec, Consumer, Frame, RequestDone, UsageError, hookimpl
from capflow.capture.model import ModelInfo
from capflow.capture.site import hook_named
from capflow.capture.spec import read_layers
from capflow.errors import explain
from capflow.plugins.consumer import Context
from capflow.probes.kinds import load_probes
from capflow.probes.probe import Scorer
from capflow_dashboard import limits
from capflow_dashboard.board import Board

if TYPE_CHECKING:
    from capflow_dashboard.server import PageServer

logger = logging.getLogger("capflow.consumer.dashboard")


class DashboardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer dashboard:`.

    port: the port to listen on; 0 for any free one.
    host: a loopback address.
    hook: the hook to capture for every request.
    layers: the layers to capture.
    positions: the positions to capture.
    probes: probe files whose scores can be shown.
    token: the secret in the page's address; a new random one at each start unless given.
    requests_max: how many requests are kept.
    tokens_max: how many tokens of each request are kept, the latest ones.
    """

    port: int = 8765
    host: str = "127.0.0.1"
    hook: str = "post_block"
    layers: list[int | str] | str = "all"
    positions: str = "all"
    probes: tuple[str, ...] = ()
    token: str | None = None
    requests_max: int = 64
    tokens_max: int = 2048


class Dashboard(Consumer):
    """Shows the norms of rows and the scores of probes live.

    address: the page's address with its token; None until `open`.
    """

    name = "dashboard"
    extra = "dashboard"
    Config = DashboardConfig
    policy = "skip"
    reads_requests = False

    def __init__(self, config: DashboardConfig) -> None:
        super().__init__(config)
        self.config: DashboardConfig = config
        self.address: str | None = None
        self._board = Board(config.requests_max, config.tokens_max)
        # Set from `open` to `close`.
        self._server: PageServer | None = None
        # The address without the token, for results, which are public.
        self._url = ""

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
        from capflow_dashboard.pages import LOOPBACK_NAMES

        config = self.config
        if config.host not in LOOPBACK_NAMES:
            do = "reach it from elsewhere through ssh -L"
            expected = f"one of {', '.join(LOOPBACK_NAMES)}"
            raise UsageError(explain("consumers.dashboard.host", got=config.host, expected=expected, do=do))
        _check_range("port", config.port, 0, limits.PORT_MAX)
        _check_range("requests_max", config.requests_max, 1, limits.REQUESTS_MAX)
        _check_range("tokens_max", config.tokens_max, limits.TOKENS_MIN, limits.TOKENS_MAX)
        if config.token is not None and not re.fullmatch(
            rf"[\w.~-]{{{limits.TOKEN_LENGTH_MIN},}}", config.token, re.ASCII
        ):
            expected = f"{limits.TOKEN_LENGTH_MIN} or more letters, digits, '.', '_', '~' and '-'"
            raise UsageError(
                explain("consumers.dashboard.token", got=f"{len(config.token)} characters", expected=expected)
            )
        self._try_port()

    def claim(self) -> tuple[str, str] | None:
        """Return the port; None for any free port."""
        return ("port", str(self.config.port)) if self.config.port else None

    def open(self, context: Context) -> None:
        """Serve the page."""
        from capflow_dashboard.pages import PageFiles
        from capflow_dashboard.server import PageServer

        token = self.config.token or secrets.token_urlsafe(24)
        # "localhost" may be two addresses, IPv4 and IPv6, which would get different free ports.
        listen_at = "127.0.0.1" if self.config.host == "localhost" else self.config.host
        server = PageServer(listen_at, self.config.port, self._board, PageFiles(token), context.count)
        server.start()
        self._server = server
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        self._url = f"http://{host}:{server.port}/"
        self.address = f"{self._url}?token={token}"
        logger.info("dashboard at %s", self.address)

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Add the engine to the board; log the probes that do not fit its model."""
        sites = list(self.spec().resolve(model.sites, num_layers=model.num_layers))
        for problem in self._board.greet(engine, model, sites, self._probes):
            logger.error("%s", problem)

    def on_engine_gone(self, engine: str) -> None:
        """Remove the engine from the board, once none of its requests is shown."""
        self._board.forget(engine)

    def on_frame(self, frame: Frame) -> None:
        """Compute norms and scores; the rows are not kept."""
        chunks = list(frame.chunks())
        self._board.count(frame.header)
        for chunk in chunks:
            self._board.put(frame.header.engine, chunk)

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Show the request as finished."""
        self._board.finish(done)
        return CaptureResult("partial_error" if done.dropped else "ok", payload={"address": self._url})

    def look(self) -> tuple[str, str]:
        """Return that nothing is stored."""
        return "shown live, not kept", ""

    def close(self) -> None:
        """Close the pages' connections and stop serving."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    @cached_property
    def _probes(self) -> list[Scorer]:
        return load_probes(self.config.probes, "consumers.dashboard.probes")

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
