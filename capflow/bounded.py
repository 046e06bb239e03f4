"""Types of what comes over the wire, with their bounds: a value outside them is refused while it is decoded."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from capflow import limits

Name = Annotated[str, Meta(max_length=limits.REQUEST_ID_LENGTH_MAX)]
"""What something is called: a request, an engine, an action."""

Text = Annotated[str, Meta(max_length=limits.TEXT_LENGTH_MAX)]
"""A message for people."""

Count = Annotated[int, Meta(ge=0, le=2**40)]
"""How many there are of something; a hub that adds up millions of these still has a number of 64 bits."""

Total = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""What adds up for as long as something runs, or a number of bytes."""

Position = Annotated[int, Meta(ge=0, le=limits.POSITION_MAX)]
"""A position of a request, or a length."""

Token = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A token id, as vLLM holds it."""

Place = Annotated[int, Meta(ge=0, le=limits.RANK_MAX)]
"""One of the numbers of a rank."""

Nanoseconds = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A time of the wall clock."""
