"""Which of the chosen sites a model has, and the shapes of their rows, before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capflow.capture.site import SHAPED_HOOKS, Site, refusal_of_fixed
from capflow.errors import UsageError
from capflow_engine.compat import engine as compat
from capflow_engine.compat.model import tapped_by
from capflow_models.backends import resolved_model

Shapes = Mapping[Site, tuple[int, ...]]
"""The shapes of rows, such as `(heads, head_dim)`, of the sites whose rows are not the stream's."""


def shaped(
    model: str, engine: Mapping[str, Any], sites: Sequence[Site], *, strict: bool, where: str = "--hooks"
) -> tuple[list[Site], Shapes]:
    """Return the sites that a model has, and the shapes of those whose rows are not the stream's.

    The model is made without weights, which takes seconds; not if all rows are the stream's.

    strict: whether a site that the model lacks is refused. Else it is left out; a hook that no layer has is refused.

    Raises UsageError for such sites, and for a site that cannot be steered in this engine.
    """
    hooks = [hook for hook in dict.fromkeys(site.hook for site in sites) if hook in SHAPED_HOOKS]
    if not hooks:
        return list(sites), {}
    compat.prepare_environment(engine)
    patterns = [str(site) for site in sites if site.hook in hooks] if strict else [f"{hook}:*" for hook in hooks]
    try:
        tapped = tapped_by(resolved_model(model), engine, patterns)
    except UsageError as e:
        raise UsageError(str(e).replace("--sites: ", f"{where}: ", 1)) from e
    shapes = {site: shape for group in tapped.shapes or () for shape in [group.shape] for site in group.sites}
    present = [site for site in sites if site.hook not in hooks or site in tapped.sites]
    for site in present:
        if site in tapped.fixed:
            raise UsageError(refusal_of_fixed(where, site, "patch"))
    return present, shapes
