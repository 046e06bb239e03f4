"""`capflow result`: asks hubs for the results of captures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from capflow import limits
from capflow.cli.hub.address import KEY_HELP, engine_option
from capflow.text.examples import examples
from capflow.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capflow.capture.result import CaptureResult


@click.command(epilog=examples("capflow result REQUEST --wait 30 --json"))
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--wait",
    type=click.FloatRange(0, limits.CAPTURE_WAIT_S_MAX),
    default=0.0,
    metavar="SECONDS",
    help="Wait until every consumer is done, at most this long.",
)
@engine_option("The engine of the requests, if several engines have a request with this ID.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: by request, by consumer.")
@click.option(
    "--address", "addresses", multiple=True, metavar="ADDRESS", help="The hub's address; repeat it for several hubs."
)
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
    """Show the capture results of requests, by ID, while they run and after.

    The samples of a request are ID#0, ID#1 and so on. The exit code is 1 if a request is unknown, and 2 if requests of
    several engines have the ID and --engine is not given.
    """
    from capflow.errors import CapflowError, UsageError, explain

    for one in ids:
        if not 0 < len(one) <= limits.REQUEST_ID_LENGTH_MAX:
            raise UsageError(explain("ID", got=one, expected=f"1..{limits.REQUEST_ID_LENGTH_MAX} characters"))
    hubs = _Hubs(addresses, key, insecure, engine)
    results = hubs.results(ids, wait)
    if as_json:
        import json

        import msgspec

        click.echo(json.dumps(msgspec.to_builtins({one: results[one] for one in ids if results[one]}), indent=2))
    else:
        for one in ids:
            for consumer, one_result in results[one].items():
                click.echo(_line(one, consumer, one_result))
    unknown = [one for one in ids if not results[one]]
    if unknown:
        do = f"a hub forgets a request after {limits.RESULTS_KEPT_MAX:,} later ones, and all of them when it restarts"
        first = f"{unknown[0]}#0"[: limits.REQUEST_ID_LENGTH_MAX]
        samples = hubs.results([first], 0.0)
        if any(samples.values()):
            do = f"it has several samples: ask for {unknown[0]}#0, {unknown[0]}#1, …"
        raise CapflowError(explain(f"request {unknown[0]}: unknown to the hub", do=do))


class _Hubs(NamedTuple):
    """The hubs to ask, and the engine of the requests."""

    addresses: tuple[str, ...]
    key: str | None
    insecure: bool
    engine: str

    def results(self, ids: Sequence[str], wait_s: float) -> dict[str, dict[str, CaptureResult]]:
        """Return the results by request and consumer, from whichever hub knows the request."""
        import time

        from capflow.transport.client import Client

        deadline = time.monotonic() + wait_s
        results: dict[str, dict[str, CaptureResult]] = {one: {} for one in ids}
        for address in self.addresses or (None,):
            with Client(address, key=self.key, insecure=self.insecure) as client:
                answer = client.results(ids, wait=False, engine=self.engine)
                mine = [one for one in ids if answer[one] or len(self.addresses) < 2]
                if wait_s and mine:
                    left_s = max(0.0, deadline - time.monotonic())
                    answer |= client.results(mine, timeout=left_s, engine=self.engine)
            results |= {one: by_consumer for one, by_consumer in answer.items() if by_consumer}
        return results


def _line(request: str, consumer: str, result: CaptureResult) -> str:
    import json

    details = " ".join(filter(None, [result.error, json.dumps(result.payload) if result.payload else ""]))
    return printable(f"{request}  {consumer}  {result.status}  {details}".rstrip())
