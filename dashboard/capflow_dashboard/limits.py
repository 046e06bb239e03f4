"""Every bound of the dashboard; assertions check the relations between them.

Units stand last in names: `_BYTES`, `_S` for seconds.
"""

from __future__ import annotations

from capflow.limits import LENS_LOGITS_BYTES, LENS_TILE_BYTES, MODEL_JSON_BYTES_MAX

KIB = 1024
MIB = 1024 * KIB

# Requests that are kept.
REQUESTS_MAX = 65_536
TOKENS_MIN = 16
TOKENS_MAX = 131_072
# The memory of all tokens that are kept: their values, ids and texts.
BOARD_BYTES_MAX = 512 * MIB
# The memory of a token besides its values: its id, its text and its marks.
TOKEN_BYTES = 128
# Characters of one token.
TEXT_LENGTH_MAX = 80
# Characters of a prompt in the list of requests.
PREVIEW_LENGTH_MAX = 160
# Events of one request's steering, the latest.
EVENTS_MAX = 256
# Numbers of a request's sparkline.
SPARK_LENGTH = 24
# Tokens after which the baseline of an engine is computed; it is fixed from then on.
BASELINE_TOKENS = 512

# The charts of rates.
RATES_S = 120

# Rows that wait in the hub for the page's process.
QUEUE_BYTES = 32 * MIB
# How long the page's process may take to listen.
START_S_MAX = 60.0
# How often the hub says that it is alive.
TICK_S = 0.5
# After so long without a word, what is shown is stale.
SILENCE_S = 2.0

# Open pages.
CLIENTS_MAX = 16
# Other connections: they load a file, have not sent a token yet, or have sent a wrong one.
VISITORS_MAX = 32
# Connections that wait to be accepted; as many are accepted at once.
BACKLOG = 16
# Updates of a page, of which one is in flight.
UPDATES_PER_S_MAX = 8
# Updates of the list of requests.
LISTS_PER_S_MAX = 2
HEARTBEAT_S = 1.0
# How often the hub's state is looked at; a change is sent at once.
STATE_S = 0.25
# Requests in one update; a page that opens gets the newest first.
REQUESTS_PER_UPDATE = 512
# A message from a page.
MESSAGE_BYTES_MAX = 4 * KIB
# Rows of the list that a page may have in view.
WINDOW_MAX = 64
# Of one page's socket; above it, nothing is sent until the page has read.
WRITE_BUFFER_BYTES = 256 * KIB
# How long a page may leave an update unread before it gets the next: the page may be hidden, and draws nothing.
UNSEEN_S = 2.0
# How long a page may read nothing before it is disconnected.
STALL_S_MAX = 60.0
PING_S = 20.0
# How long a connection may take to send its request.
OPEN_S_MAX = 3.0

# The bins of a histogram of scores, and how much of the range of the first scores is added at each end: requests have
# higher scores than most tokens.
POPULATION_BINS = 200
POPULATION_PAD = 0.3
POPULATIONS_PER_S_MAX = 1
# The charts of what fired.
RATES_MINUTES = 60
# A file of labels: about a million requests.
LABELS_BYTES_MAX = 64 * MIB

# Rows of an export that are written at a time: tens of milliseconds, between which others have their turn.
EXPORT_ROWS = 1024
EXPORT_PART_BYTES = 256 * KIB
# How long an export may take to be read; the largest has about 100 MB, and may go through a tunnel.
EXPORT_S_MAX = 120.0
# Exports at a time; each holds a copy of its request. Further ones wait for their turn.
EXPORTS_MAX = 2
# Characters of a request's id in the name of a file.
EXPORT_NAME_LENGTH_MAX = 80

# What a page may add of the norm of the residual stream at each token, up or down, and the scale of a module.
RATIO_MAX = 0.5
GAIN_MAX = 1.0
# An action ends by itself after so many seconds or positions; it is sent again while its page is alive.
LEASE_S = 6.0
LEASE_POSITIONS = 1024
RENEW_S = 2.0
# How long a page may be silent and keep what it holds.
PAGE_ALIVE_S = 3.0
# How long after a change the counters of the hub may still say otherwise.
FROZEN_CHECK_S = 5.0
# Actions of one page.
ACTIONS_PER_S_MAX = 10
# Actions without an answer, and answers that are kept of each page.
WAITING_MAX = 256
# Pages that are known by name.
PAGES_KNOWN_MAX = 64
PAGE_NAME_LENGTH_MAX = 32
# How often leases are looked at.
LEASES_S = 0.25
# A request that is run again: tokens of each answer, and the temperature.
AGAIN_TOKENS_MAX = 2048
AGAIN_TEMPERATURE_MAX = 2.0
# Runs of all pages, each of two streams.
AGAIN_RUNS_MAX = 4
AGAIN_CONNECT_S_MAX = 5.0
# How long a server may send nothing, and how long a run may take.
AGAIN_SILENT_S_MAX = 60.0
AGAIN_S_MAX = 600.0
# What is read of a stream at once, an event of it, and all of it.
AGAIN_READ_BYTES = 64 * KIB
AGAIN_EVENT_BYTES_MAX = 256 * KIB
AGAIN_STREAM_BYTES_MAX = 8 * MIB
# Any other answer of the server.
AGAIN_ANSWER_BYTES_MAX = 256 * KIB
# Characters of an error on the page.
AGAIN_ERROR_LENGTH_MAX = 500
# The newest rows, which are kept for lenses, with an estimate of their headers.
KEPT_ROWS_BYTES_MAX = 128 * MIB
# The header of a kept frame, besides its tokens.
KEPT_FRAME_BYTES = 4 * KIB
# Tokens of a layer in a lens.
LENS_TOKENS = 8
# Lenses of one page.
LENSES_PER_S_MAX = 2
# How long a lens may take, with the start of its process.
LENS_S_MAX = 30.0
# Where a token's rows are stored: asks of one page, how long a disk may take, and how long the hub's status.
STORED_PER_S_MAX = 2
STORED_S_MAX = 10.0
STATUS_S_MAX = 4.0
STATUS_LOOK_S = 0.1
# The consumers of a hub whose files are looked at.
STORES_MAX = 8
# How long the process waits for the next lens.
LENS_IDLE_S = 60.0
# The memory of the process, besides mapped files.
LENS_BYTES_MAX = 1024 * MIB

# Rules of alerts: how many, the characters of one and of its name, and a file of them.
ALERT_RULES_MAX = 64
ALERT_TEXT_LENGTH_MAX = 200
ALERT_NAME_LENGTH_MAX = 32
ALERT_FILE_BYTES_MAX = 64 * KIB
# The window of a rule, and the longest one; the parts of a window.
ALERT_WINDOW_S = 60.0
ALERT_WINDOW_S_MAX = 3600.0
ALERT_PARTS = 60
# How often rules are evaluated.
ALERTS_S = 1.0
# Different requests of one window, and the largest number in a rule.
ALERT_REQUESTS_MAX = 4096
ALERT_COUNT_MAX = 10**12
# Rows whose scores wait to be counted; they are counted at least at each evaluation.
ALERT_ROWS_MAX = 16_384
# Changes that are kept, and engines that are gone and still have rows in a window.
ALERT_CHANGES_MAX = 100
ALERT_GONE_MAX = 64

# Values of options.
PORT_MAX = 65_535
TOKEN_LENGTH_MIN = 16
TOKEN_LENGTH_MAX = 256
TOKEN_FILE_BYTES_MAX = 4 * KIB
KEY_LENGTH_MAX = 1024

assert TOKENS_MIN < TOKENS_MAX
assert OPEN_S_MAX < EXPORT_S_MAX
assert PING_S < STALL_S_MAX
assert TICK_S < SILENCE_S / 2
assert STATE_S < HEARTBEAT_S < SILENCE_S
assert 2 * RENEW_S + LEASES_S < LEASE_S
assert CLIENTS_MAX < PAGES_KNOWN_MAX
assert AGAIN_READ_BYTES <= AGAIN_EVENT_BYTES_MAX <= AGAIN_STREAM_BYTES_MAX
assert AGAIN_CONNECT_S_MAX < AGAIN_SILENT_S_MAX < AGAIN_S_MAX
assert MODEL_JSON_BYTES_MAX < LENS_BYTES_MAX
assert LENS_TILE_BYTES + LENS_LOGITS_BYTES < LENS_BYTES_MAX
