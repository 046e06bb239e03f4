"""The plugin contract: the hooks that a plugin package may implement.

A package names a module in its entry points, group `capflow`:

    [project.entry-points.capflow]
    my_plugin = "my_package.my_module"

and the module implements hooks with `capflow.hookimpl`. capflow's own consumers are registered the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from capflow.consumer import Consumer, Controller

ENTRY_POINT_GROUP = "capflow"

hookspec = pluggy.HookspecMarker("capflow")
hookimpl = pluggy.HookimplMarker("capflow")


@hookspec
def capflow_consumers() -> Sequence[type[Consumer | Controller]]:  # type: ignore[empty-body]
    """Return the consumer and controller classes that the plugin brings.

    Each has a `name` of its own, of letters, digits, `-` and `_`. Two plugins with one name stop the start, as
    does a class that is neither a `Consumer` nor a `Controller`.
    """
