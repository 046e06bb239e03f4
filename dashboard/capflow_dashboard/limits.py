"""Every bound of the dashboard, with the relations between them asserted.

Sizes are bytes unless the name says otherwise; units stand last in names.
"""

from __future__ import annotations

MIB = 1024 * 1024

# What is kept of requests.
REQUESTS_MAX = 512
TOKENS_MIN = 16
TOKENS_MAX = 32_768
VALUES_BYTES_MAX = 512 * MIB  # of one engine's requests; `tokens_max` is lowered for models with many sites
TEXT_LENGTH_MAX = 80  # characters of one token

# The charts of rates, seconds.
RATES_S = 120

# Pages that are open.
CLIENTS_MAX = 16
VISITORS_MAX = 32  # connections that are no pages: they load a file, have not shown a token, or have a wrong one
BACKLOG = 16  # connections that wait to be accepted; so many are accepted at once
UPDATES_PER_S_MAX = 8
MESSAGE_BYTES_MAX = 1024  # of what a page sends
WRITE_BUFFER_BYTES = 256 * 1024  # of one page's socket; past it, nothing is sent until the page has read
STALL_S_MAX = 60.0  # a page that reads nothing for so long is cut off
PING_S = 20.0
OPEN_S_MAX = 10.0

# Numbers that options give.
PORT_MAX = 65_535
TOKEN_LENGTH_MIN = 16

assert TOKENS_MIN < TOKENS_MAX
assert PING_S < STALL_S_MAX
