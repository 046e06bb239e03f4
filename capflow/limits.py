"""Every bound of the system, in one place, with the relations between them asserted.

Sizes are bytes unless the name says otherwise; units stand last in names. What a peer sends is
checked against these before anything is allocated for it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

KIB = 1024
MIB = 1024 * KIB

# Identifiers and shapes.
REQUEST_ID_LENGTH_MAX = 512
ENGINE_NAME_LENGTH_MAX = 64
ENGINES_TOLD_MAX = 16  # that have requests of one id; in one answer
LAYERS_MAX = 1024
SITES_MAX = 5 * LAYERS_MAX  # one at each hook of each layer
TAG_LENGTH_MAX = 256  # characters of a capture's tag
CONSUMERS_NAMED_MAX = 64  # that one request may name
RANK_MAX = 65_535
HUBS_MAX = 64  # of one engine
TEXT_LENGTH_MAX = 65_536  # characters of a message for people
DROPPED_REASONS_MAX = 64  # for which one worker dropped rows of one request
ACTED_MAX = 256  # changes of what steers one request that its end tells of
GAPS_MAX = 256  # of one request and reason, in which the lost rows are told; more rows are counted
HIDDEN_SIZE_MAX = 65_536
POSITIONS_LISTED_MAX = 1_024  # in one spec; it travels with every frame of its request
POSITION_MAX = 2**31 - 1
PROBES_PER_FILE_MAX = 4_096  # or features of an autoencoder; each is a row of scores for every token
STEERING_NAME_LENGTH_MAX = 256  # characters of a module's name
STEERING_MODULES_MAX = 64  # that one request may name
# Clamps of one request at one site and position, with those of its modules and of the global state: each costs a pass over the row.
CLAMPS_AT_SITE_MAX = 64
SITE_OPS_MAX = 128  # operations of one request at one site and position: patches, clamps, and sums of vectors: its own, those of actions and controllers
REQUESTS_PER_FRAME_MAX = 8_192
ROWS_PER_FRAME_MAX = 8 * 1024 * 1024

# What is read of a file that says what others hold: the sidecar of a request, the settings of an export.
SIDECAR_BYTES_MAX = 256 * MIB
VECTORS_BYTES_MAX = 1024 * MIB  # that an archive of vectors may expand to

# One message on the wire.
HEADER_BYTES_MAX = 32 * MIB
# Of a frame; while its header is read nobody else is served.
FRAME_HEADER_BYTES_MAX = 8 * MIB
SPANS_PER_FRAME_MAX = 65_536
TOKENS_PER_FRAME_MAX = 1_048_576
FINISHED_PER_FRAME_MAX = 256  # ends of requests in one frame; a worker sends more in several
PAYLOAD_BYTES_MAX = 1024 * MIB
MESSAGE_PARTS_MAX = 2

# What may be in flight: a worker never sends past the credit that its hub granted, nor past its own bound.
CREDIT_BYTES_DEFAULT = 256 * MIB  # of one worker
CREDIT_BYTES_TOTAL = 4096 * MIB  # of all workers of a hub: more than 16 that are connected share it evenly
UNACKED_BYTES_MAX = 512 * MIB  # that a worker keeps of what it sent, whatever a hub grants
OUTBOUND_BYTES_DEFAULT = 256 * MIB
QUEUE_BYTES_DEFAULT = 256 * MIB
QUEUE_BYTES_MAX = 64 * 1024 * MIB
NOTES_BYTES_MAX = 32 * MIB  # ends of requests, engines and answers that wait for one consumer; some 10,000 ends

# On disk, in one spool.
SPOOL_BYTES_DEFAULT = 2048 * MIB
SPOOL_BYTES_MAX = 16 * 1024 * 1024 * MIB
SEGMENT_BYTES_MAX = 64 * MIB  # a larger record has a segment of its own
SPOOL_UNSYNCED_BYTES_MAX = 64 * MIB  # in memory until it is on the disk
PROMISES_BYTES_MIN = 1 * MIB  # written to the file of a worker's promises before it is written anew
PROMISES_READ_BYTES_MAX = 1024 * MIB  # of the promises of a worker that is gone; what is behind them is not looked at
PROMISES_KEPT_S = 7 * 86400.0  # of a worker that is gone, for a hub that does not come
SYNC_PAUSE_S = 0.005  # between two syncs, so that one is for many records
SEGMENTS_BAD_MAX = 2  # damaged ones that are kept to be looked at

# What is counted by name.
REASONS_MAX = 64  # for which one worker may say that it lost rows, altogether
LOSSES_LOGGED_MAX = 10  # requests in a second that are told in the log, by each who loses rows

# When a consumer is taken to have failed, until it does better.
FRAMES_FAILED_MAX = 3  # in a row
CALL_S_MAX = 30.0  # one call of it
RETRY_S_MIN = 0.1  # between two attempts at a call that may work later; doubled after each, up to the next
RETRY_S_MAX = 5.0
RETRY_LOGGED_S = 60.0  # between two lines in the log about one such wait
RESTARTS_MAX = 3  # of a consumer by one record, which is then set aside
DEAD_BYTES_DEFAULT = 1024 * MIB  # of one consumer's dead letters
DEAD_LETTERS_MAX = 100_000  # of one consumer
CONTROLLER_FAILURES_MAX = 16  # in a row; then a controller is switched off until its engine starts again
TROUBLE_LENGTH_MAX = 1_024  # characters of what is told of one controller that fails

# Times, seconds.
HEARTBEAT_S = 1.0
SILENCE_S_MAX = 10.0
NAME_KEPT_S = 3.0  # since an engine was last heard of, in which no other one may have its name
REFUSED_S = 2.0  # until a peer that was refused says Hello again
RESUME_S_MAX = 3600.0  # of a worker that fell silent: after that a hub does not know which of its frames it has
MISSED_S = 5.0  # of hubs that run, in which an engine that an earlier one had may come back
HUB_WAIT_S_DEFAULT = 5.0
BLOCK_S_MAX = 30.0
CAPTURE_WAIT_S_DEFAULT = 30.0
CAPTURE_WAIT_S_MAX = 600.0
HUB_AWAY_S = 3.0  # in which a hub that went away may be back, for a response that waits for its results
HUB_KNOWS_S = 1.0  # until a hub that keeps up knows of a request that has just run

# What may take how long at an end, seconds. Who gets on is given more time than who hangs.
DRAIN_S_DEFAULT = 20.0  # of a hub that is stopped, for consumers that get on
DRAIN_S_MAX = 60.0  # likewise of a run that ends because all is done, and of an engine
LEAVE_S = 2.0  # for consumers that spill when the hub is stopped: their inbox keeps the rest
HANG_S_MAX = 7.0  # one call of a consumer, or a hub that acknowledges nothing; then the end comes without
GIVE_UP_S = 2.0  # for what does not stop after everything it had to do was taken away
SHUTDOWN_S_DEFAULT = 20.0  # of a server that is stopped, for the requests that run
SHUTDOWN_S_MAX = 3600.0
ANSWERS_S = 5.0  # for the last answers of such a server, once its requests have ended or were aborted
ENGINE_END_S_MAX = DRAIN_S_MAX + GIVE_UP_S  # of an engine that has no more requests: it sends what it has

# What the gRPC of one API server bears.
RPC_CONNECTIONS_MAX = 1_024
RPC_CALLS_MAX = 8_192  # that run at once
RPC_IDLE_S = 60.0  # of a connection without a call; then it is closed

# What a server holds of steering, and takes in one request.
STEERING_MODULES_HELD_MAX = 4_096
BANK_BYTES_MAX = 64 * 1024 * MIB
BODY_BYTES_DEFAULT = 256 * MIB
BODY_BYTES_MAX = 4096 * MIB
BODY_DRAIN_BYTES_MAX = 1024 * MIB  # of a body that is refused as too large: read, so that its client gets to the answer
BODY_DRAIN_S_MAX = 30.0

# What the hub remembers about requests that are over, for clients that ask late.
REFUSED_KEPT_MAX = 256  # peers that were refused and stay connected; the oldest is closed
RESULTS_KEPT_MAX = 20_000
ACTIONS_WAITING_MAX = 4_096
# Actions that a scheduler remembers until they expire, so that one that comes twice happens once.
ACTIONS_KNOWN_MAX = 65_536

assert HEADER_BYTES_MAX < PAYLOAD_BYTES_MAX
assert FRAME_HEADER_BYTES_MAX <= HEADER_BYTES_MAX
assert CLAMPS_AT_SITE_MAX + 2 + 3 <= SITE_OPS_MAX  # a position may be patched by its number from either end
assert CREDIT_BYTES_DEFAULT <= UNACKED_BYTES_MAX
assert CREDIT_BYTES_DEFAULT <= CREDIT_BYTES_TOTAL
assert QUEUE_BYTES_DEFAULT <= QUEUE_BYTES_MAX
assert SEGMENT_BYTES_MAX * 8 <= SPOOL_BYTES_DEFAULT <= SPOOL_BYTES_MAX
assert RETRY_S_MIN < RETRY_S_MAX < RETRY_LOGGED_S
assert SEGMENT_BYTES_MAX * 8 <= DEAD_BYTES_DEFAULT <= SPOOL_BYTES_MAX
assert HEARTBEAT_S * 3 <= SILENCE_S_MAX
assert CAPTURE_WAIT_S_DEFAULT <= CAPTURE_WAIT_S_MAX
assert HUB_KNOWS_S < HUB_AWAY_S < CAPTURE_WAIT_S_DEFAULT
assert LEAVE_S < HANG_S_MAX < DRAIN_S_DEFAULT <= DRAIN_S_MAX
assert HANG_S_MAX + GIVE_UP_S < 10
assert ANSWERS_S < SHUTDOWN_S_DEFAULT <= SHUTDOWN_S_MAX
assert BODY_BYTES_DEFAULT <= BODY_BYTES_MAX

TRIM_S = 30.0  # between two times that a hub gives free memory back to the system; 1 GB takes about 0.6 s, in which threads wait for memory

# What a hub bears: beyond these a peer is refused, or cut off.
STATE_PER_BYTE_MAX = 32  # bytes of memory that a hub keeps of a message, for each byte on the wire
SESSIONS_MAX = 4_096
MEMORY_BYTES_MIN = 256 * MIB  # of a hub, for what peers send; see `capflow.hub.peers.budget`
MEMORY_BYTES_MAX = 64 * 1024 * 1024 * MIB
MEMORY_PART = 4  # a hub takes one of so many parts of the machine's memory, unless it is given another bound
OWNERS_MAX = 1_024  # keys, or without keys engines and clients, that share the bounds of a hub at once
assert RPC_CONNECTIONS_MAX <= OWNERS_MAX <= RPC_CALLS_MAX // 2  # each connection can always have a call
AWAITED_MAX = 100_000
TAPS_MAX = 16
TAP_BYTES_MAX = 64 * MIB  # on the way to one tap; what comes meanwhile it skips
MESSAGES_UNREAD_MAX = 64  # of one connection, in the hub's socket; then it stops reading from it
MESSAGES_UNSENT_MAX = 131_072  # to one connection; then the hub gives it up
HELLO_BYTES_MAX = 1 * MIB  # of the first message of a peer
REFUSALS_MAX = 256  # different ones for which peers were refused; the rest are counted together
OFFENCES_MAX = 16  # against the protocol within the window; then a peer is ignored
OFFENCE_WINDOW_S = 60.0
IGNORED_S = 30.0

assert AWAITED_MAX < MESSAGES_UNSENT_MAX
assert HELLO_BYTES_MAX <= HEADER_BYTES_MAX

# Lines of the log about what peers do; the rest are counted.
LOG_KIND_LINES_MAX = 100  # of one event, at once
LOG_KIND_LINES_PER_S = 1.0  # from then on
LOG_PEER_LINES_MAX = 20  # of one key or connection, at once
LOG_PEER_LINES_PER_S = 0.2
LOG_LEFT_OUT_S = 10.0  # between two lines that say how many were left out
# What waits for whoever reads standard error; then lines are dropped, and counted.
LOG_UNREAD_BYTES_MAX = 4 * MIB
LOG_END_S_MAX = 2.0  # at the end, for what waits

assert FINISHED_PER_FRAME_MAX <= REQUESTS_PER_FRAME_MAX

# Keys.
KEY_NAME_LENGTH_MAX = 64
KEY_FILE_BYTES_MAX = 4 * MIB

# Times of the transport, seconds.
IDLE_S = 0.25
RESULT_S_MAX = 10.0  # without any result, for that of a request that is over and pins much of an inbox
ACTION_S_MAX = 30.0
# How much longer a hub waits for the answer to an action that has expired.
ACTION_ANSWER_S_MAX = 5.0
LINGER_S = 0.5
RECONNECT_S_MIN = 0.1
RECONNECT_S_MAX = 0.5
HANDSHAKE_S_MAX = 10.0  # from the opening of a connection until ZMQ has made one of it; then until it has a session
DEAD_S_MAX = 30.0  # that a TCP connection takes nothing of what is sent on it; then it is closed

# Descriptors of a hub's process.
DESCRIPTORS_WANTED = 65_536  # as far as the system lets it
DESCRIPTORS_KEPT_MIN = 64  # for files, consumers and the endpoint; at least this share of all:
DESCRIPTORS_KEPT_SHARE = 0.25
CONNECTIONS_IDLE_MAX = 1_024  # without a session; then the oldest is closed

# One turn of the hub's thread.
READ_AHEAD_BYTES_MAX = 256 * MIB  # read from the socket, not handled, and no frames that are paid for
READ_AHEAD_EACH_BYTES_MAX = 16 * MIB  # of these, of one peer; a single message may be larger
READ_AHEAD_EACH_BYTES_MIN = 64 * KIB
SLICE_REQUESTS = 256  # answered, or ended with their engine, before it is another peer's turn
TURN_S = 0.005  # of handling messages before what consumers came back with is looked at
assert READ_AHEAD_EACH_BYTES_MIN * SESSIONS_MAX <= READ_AHEAD_BYTES_MAX

# What the endpoint for metrics and health bears.
HTTP_CLIENTS_MAX = 16
HTTP_HEAD_S_MAX = 2.0  # until a request is read
HTTP_S_MAX = 10.0  # until it is answered

assert RECONNECT_S_MIN < RECONNECT_S_MAX < SILENCE_S_MAX <= DEAD_S_MAX

# What a consumer answers about its database.
QUERIES_MAX = 4  # at once
QUERY_S_MAX = 60.0  # one, whole
SQL_BYTES_MAX = 1 * MIB
QUERY_BATCH_BYTES_MAX = 256 * MIB  # of an answer, which comes in batches of 2,048 rows
QUERY_ROWS_DEFAULT = 10_000

# Types of what comes over the wire. A value outside its bounds is refused while it is decoded.

Name = Annotated[str, Meta(max_length=REQUEST_ID_LENGTH_MAX)]
"""What something is called: a request, an engine, an action."""

Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
"""A message for people."""

Count = Annotated[int, Meta(ge=0, le=2**40)]
"""How many there are of something; a hub that adds up millions of these still has a number of 64 bits."""

Total = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""What adds up for as long as something runs, or a number of bytes."""

Position = Annotated[int, Meta(ge=0, le=POSITION_MAX)]
"""A position of a request, or a length."""

Token = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A token id, as vLLM holds it."""

Place = Annotated[int, Meta(ge=0, le=RANK_MAX)]
"""One of the numbers of a rank."""

Nanoseconds = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A time of the wall clock."""
