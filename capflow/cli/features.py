"""Features of autoencoders, as options of commands give them: JSON, in the words of a request's `steering_features`."""

from __future__ import annotations

from typing import Any

import msgspec

from capflow.errors import UsageError, explain
from capflow.text import jsontext


def read_features(text: str, option: str) -> Any:
    """Return the plain value of a JSON text. Raises UsageError for other texts.

    option: it has the text.
    """
    jsontext.check_keys(text.encode(), option)
    try:
        return jsontext.decode(text)
    except msgspec.DecodeError as e:
        expected = 'JSON such as {"sae": "mood", "features": {"123": 4.0}}'
        raise UsageError(explain(option, got=f"{text}: {e}", expected=expected)) from e
