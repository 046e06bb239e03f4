"""`capflow result`: what became of captures, asked of the hubs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from capflow import limits
from capflow.cli.hub.address import KEY_HELP, engine_option
from capflow.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capflow.capture.result import CaptureResult


@click.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--wait", type=click.FloatRange(0, limits.CAPTURE_WAIT_S_MAX), default=0.0, metavar="SECONDS", help="Wait until every consumer is done, at most so long."
)  # fmt: skip
@engine_option("The engine of the requests, where several have one of an ID.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: by request, by consumer.")
@click.option("--address", "addresses", multiple=True, metavar="ADDRESS", help="The hub's address; once for each of several hubs.")  # fmt: skip
@click.option("--key", metavar="NAME|PATH", help=KEY_HELP)
@click.option("--insecure", is_flag=True, help="Allow TCP to another machine without keys.")
def result(
    ids: tuple[str, ...],
    wait: float,
    engine: str,
    as_json: bool,
    addresses: tuple[str, ...],
    key: str | None,
    insecure: bool,
) -> None:
    """Show what became of the captures of requests, each by its ID, while they run and after.

    The samples of a request are ID#0, ID#1 and so on. The exit code is 1 when a request is unknown, and 2 when requests of several
    engines have an ID and no --engine is named.
    """
    from capflow.errors import CapflowError, UsageError, explain

    for one in ids:
        if not 0 < len(one) <= limits.REQUEST_ID_LENGTH_MAX:
            raise UsageError(explain("ID", got=one, expected=f"1..{limits.REQUEST_ID_LENGTH_MAX} characters"))
    hubs = _Hubs(addresses, key, insecure, engine)
    found = hubs.results(ids, wait)
    if as_json:
        import json

        import msgspec

        click.echo(json.dumps(msgspec.to_builtins({one: found[one] for one in ids if found[one]}), indent=2))
    else:
        for one in ids:
            for consumer, told in found[one].items():
                click.echo(_line(one, consumer, told))
    unknown = [one for one in ids if not found[one]]
    if unknown:
        do = f"a hub forgets a request after {limits.RESULTS_KEPT_MAX:,} later ones, and all of them when it restarts"
        first = f"{unknown[0]}#0"[: limits.REQUEST_ID_LENGTH_MAX]
        samples = hubs.results([first], 0.0)
        if any(samples.values()):
            do = f"it has several samples: ask for {unknown[0]}#0, {unknown[0]}#1, …"
        raise CapflowError(explain(f"request {unknown[0]}: unknown to the hub", do=do))


class _Hubs(NamedTuple):
    """The hubs that are asked, and the engine whose requests are asked for."""

    addresses: tuple[str, ...]
    key: str | None
    insecure: bool
    engine: str

    def results(self, ids: Sequence[str], wait_s: float) -> dict[str, dict[str, CaptureResult]]:
        """Return the results by request and consumer, of whichever hub knows the request."""
        import time

        from capflow.transport.client import Client

        deadline = time.monotonic() + wait_s
        found: dict[str, dict[str, CaptureResult]] = {one: {} for one in ids}
        for address in self.addresses or (None,):
            with Client(address, key=self.key, insecure=self.insecure) as client:
                known = client.results(ids, wait=False, engine=self.engine)
                mine = [one for one in ids if known[one] or len(self.addresses) < 2]
                if wait_s and mine:
                    left_s = max(0.0, deadline - time.monotonic())
                    known |= client.results(mine, timeout=left_s, engine=self.engine)
            found |= {one: results for one, results in known.items() if results}
        return found


def _line(request: str, consumer: str, result: CaptureResult) -> str:
    import json

    said = " ".join(filter(None, [result.error, json.dumps(result.payload) if result.payload else ""]))
    return printable(f"{request}  {consumer}  {result.status}  {said}".rstrip())
