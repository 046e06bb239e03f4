"""Every bound of the dashboard; assertions check the relations between them.

Units stand last in names: `_BYTES`, `_S` for seconds.
"""

from __future__ import annotations

MIB = 1024 * 1024

# Requests that are kept.
REQUESTS_MAX = 512
TOKENS_MIN = 16
TOKENS_MAX = 32_768
# Values of one engine's requests; `tokens_max` is lowered for models with many sites.
VALUES_BYTES_MAX = 512 * MIB
# Characters of one token.
TEXT_LENGTH_MAX = 80

# The charts of rates.
RATES_S = 120

# Open pages.
CLIENTS_MAX = 16
# Other connections: they load a file, have not sent a token yet, or have sent a wrong one.
VISITORS_MAX = 32
# Connections that wait to be accepted; as many are accepted at once.
BACKLOG = 16
UPDATES_PER_S_MAX = 8
# A message from a page.
MESSAGE_BYTES_MAX = 1024
# Of one page's socket; above it, nothing is sent until the page has read.
WRITE_BUFFER_BYTES = 256 * 1024
# How long a page may read nothing before it is disconnected.
STALL_S_MAX = 60.0
PING_S = 20.0
OPEN_S_MAX = 10.0

# Values of options.
PORT_MAX = 65_535
TOKEN_LENGTH_MIN = 16

assert TOKENS_MIN < TOKENS_MAX
assert PING_S < STALL_S_MAX
