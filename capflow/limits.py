"""Every bound of the system, in one place, with the relations between them asserted.

Sizes are bytes unless the name says otherwise; names end with their unit. What a peer sends is checked against these
before anything is allocated for it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

KIB = 1024
MIB = 1024 * KIB

# Identifiers and shapes.
REQUEST_ID_LENGTH_MAX = 512
ENGINE_NAME_LENGTH_MAX = 64
ENGINES_TOLD_MAX = 16  # engines named in one answer
LAYERS_MAX = 1024
SITES_MAX = 14 * LAYERS_MAX  # one at each hook of each layer
TAG_LENGTH_MAX = 256  # characters of a capture's tag
CONSUMERS_NAMED_MAX = 64  # consumers that one request names
RANK_MAX = 65_535
HUBS_MAX = 64  # hubs of one engine
TEXT_LENGTH_MAX = 65_536  # characters of a message for people
DROPPED_REASONS_MAX = 64  # reasons why one worker dropped rows of one request
ACTED_MAX = 256  # changes of one request's steering in its `Finished`
EVENTS_PER_STEP_MAX = 64  # events of one request's steering in one step; more are counted
EVENTS_PER_FRAME_BYTES_MAX = 1 * MIB  # about; a worker sends the events of a step in several frames if need be
EVENTS_OWED_MAX = 1_024  # frames whose events wait for room in an inbox that drops rows
EVENTS_KEPT_MAX = 4_096  # events of one request that a data set keeps
RANKS_TOLD_MAX = 4_096  # ranks of one engine in a message
CHECKSUM_STEPS_MAX = 1_024  # steps whose checksums a rank keeps
CHECKSUM_PARTS_MAX = 256  # steps of which a rank can tell its requests apart
CHECKSUM_STEPS = 64  # after so many steps, ranks compare their checksums
CHECKSUM_S = 1.0  # and at least so often
CHECKSUM_ANSWERS_S = 5.0  # how long a rank waits for the sums of single requests
WEIGHTS_TOLD_MAX = 64  # states of the weights that the end of one request has
GAPS_MAX = 256  # gaps of one request and reason; rows beyond these are only counted
HIDDEN_SIZE_MAX = 65_536
POSITIONS_LISTED_MAX = 1_024  # positions in one spec, which travels with every frame of its request
POSITION_MAX = 2**31 - 1
ATTENTION_BYTES_MAX = 4096 * MIB  # attention weights that one call returns
PROBES_PER_FILE_MAX = 4_096  # probes or features of one file; each is a row of scores for every token
TOP_FEATURES_MAX = 1_024  # features of an autoencoder that are kept of each token
STEERING_NAME_LENGTH_MAX = 256  # characters of a module's name
STEERING_MODULES_MAX = 64  # modules that one request names
ENTRIES_MAX = 4096  # entries of a row that one clamp or patch names
# Clamps of one request at one site and position, with those of its modules and of the global state. Each costs a pass
# over the row.
CLAMPS_AT_SITE_MAX = 64
FEATURES_STEERED_MAX = 4_096  # SAE features that one request, a module or the global state names, in all its tiers
FEATURES_SET_MAX = 16  # SAE features that one request sets at one site and position, with those of its modules
GATE_NAME_LENGTH_MAX = 64  # characters
GATES_MAX = 8  # gates of one request, with those of its modules and of the global state
# Operations of one request at one site and position: patches, clamps, and sums of vectors (the request's, of actions
# and of controllers).
SITE_OPS_MAX = 128
REQUESTS_PER_FRAME_MAX = 8_192
ROWS_PER_FRAME_MAX = 8 * 1024 * 1024

# Files that describe other files.
SIDECAR_BYTES_MAX = 256 * MIB  # the sidecar of a request, the settings of an export
VECTORS_BYTES_MAX = 1024 * MIB  # the expanded size of an archive of vectors
SAE_BYTES_MAX = 64 * 1024 * MIB  # the expanded size of an archive of an autoencoder's weights

# One message on the wire.
HEADER_BYTES_MAX = 32 * MIB
FRAME_HEADER_BYTES_MAX = 8 * MIB  # less than other messages: the hub serves nobody else while it reads one
SPANS_PER_FRAME_MAX = 65_536
TOKENS_PER_FRAME_MAX = 1_048_576
FINISHED_PER_FRAME_MAX = 256  # ends of requests in one frame; a worker sends more in several frames
PAYLOAD_BYTES_MAX = 1024 * MIB
STEP_BYTES_MAX = PAYLOAD_BYTES_MAX  # rows of one step in one frame; a worker sends more in several frames
STEP_PART_BYTES_MAX = 64 * MIB  # rows in each of these
MESSAGE_FRAMES_MAX = 32  # frames in one message
MESSAGE_FRAMES_BYTES_MAX = 1 * MIB  # of several frames in one message; one frame may be larger

# What may be in flight. A worker never sends more than its hub's credit, nor more than its own bound.
CREDIT_BYTES_DEFAULT = 256 * MIB  # credit of one worker
CREDIT_BYTES_TOTAL = 4096 * MIB  # credit of all workers of a hub; more than 16 of them share it evenly
UNACKED_BYTES_MAX = 512 * MIB  # sent frames that a worker keeps, whatever credit a hub grants
OUTBOUND_BYTES_DEFAULT = 256 * MIB
QUEUE_BYTES_DEFAULT = 256 * MIB
QUEUE_BYTES_MAX = 64 * 1024 * MIB
# How old rows may be when a consumer with policy skip gets them.
SKIP_AGE_S = 1.0
NOTES_BYTES_MAX = 32 * MIB  # ends of requests, engines and answers that wait for one consumer: some 10,000 ends

# The files of one spool.
SPOOL_BYTES_DEFAULT = 2048 * MIB
SPOOL_BYTES_MAX = 16 * 1024 * 1024 * MIB
SEGMENT_BYTES_MAX = 64 * MIB  # a larger record gets a segment of its own
SPOOL_UNSYNCED_BYTES_MAX = 64 * MIB  # records in memory that are not on the disk yet
PROMISES_BYTES_MIN = 1 * MIB  # bytes appended to a file of promises before it is rewritten
PROMISES_READ_BYTES_MAX = 1024 * MIB  # bytes read of the promises of an earlier worker; later ones are ignored
PROMISES_KEPT_S = 7 * 86400.0  # how long promises of an earlier worker wait for their hub
SYNC_PAUSE_S = 0.005  # pause between two syncs, so that one sync covers many records
SYNC_BYTES = 8 * MIB  # bytes of records that are worth a sync at once; they end the pause
SEGMENTS_BAD_MAX = 2  # damaged segments kept for inspection

# What is counted by name.
REASONS_MAX = 64  # reasons for lost rows that one worker may name
LOSSES_LOGGED_MAX = 10  # lines about lost rows in a second, for each worker, hub or consumer that loses rows

# The limits above which a consumer counts as failed, and its retries.
FRAMES_FAILED_MAX = 3  # failed frames in a row
CALL_S_MAX = 30.0  # one call of it
RETRY_S_MIN = 0.1  # first pause before a retry; doubled after each, up to RETRY_S_MAX
RETRY_S_MAX = 5.0
RETRY_LOGGED_S = 60.0  # time between two log lines about one call that is retried
RESTARTS_MAX = 3  # restarts of a consumer by one record, which is then set aside
DEAD_BYTES_DEFAULT = 1024 * MIB  # dead letters of one consumer
DEAD_LETTERS_MAX = 100_000  # dead letters of one consumer
CONTROLLER_CALLS_TIMED = 32  # calls of one controller of which the median is taken
CONTROLLER_CALL_S_MAX = 0.1  # that median; a controller that stays above it is off until its engine restarts
CONTROLLER_S_MAX = 10.0  # the sum of so many calls or fewer; a controller that takes longer is off at once
CONTROLLER_ACTIONS_KEPT = 64  # latest actions of one controller on one request
CONTROLLERS_MAX = 64  # controllers that one worker reports
CONTROLLER_FAILURES_MAX = 16  # failures in a row; then a controller is off until its engine restarts
TROUBLE_LENGTH_MAX = 1_024  # characters of the message about one failed controller

# Times, seconds.
HEARTBEAT_S = 1.0
SILENCE_S_MAX = 10.0
NAME_KEPT_S = 3.0  # since the last message of an engine; until then no other engine may have its name
REFUSED_S = 2.0  # pause before a refused peer sends its next Hello
RESUME_S_MAX = 3600.0  # silence after which a hub forgets which frames of a worker it has
HANDOVER_QUIET_S = 2 * HEARTBEAT_S  # a hub that hands over ends when nothing came for so long
MISSED_S = 5.0  # time without a connection after which an engine counts as gone
HUB_WAIT_S_DEFAULT = 5.0
BLOCK_S_MAX = 30.0
CAPTURE_WAIT_S_DEFAULT = 30.0
CAPTURE_WAIT_S_MAX = 600.0
HUB_AWAY_S = 3.0  # how long a response that waits for its results waits for a hub that went away
HUB_KNOWS_S = 1.0  # after this time an undelayed hub knows a request that has just run

# Times at an end, seconds. A part that makes progress gets more time than a part that hangs.
DRAIN_S_DEFAULT = 20.0  # a stopped hub waits so long for consumers that make progress
DRAIN_S_MAX = 60.0  # the same for a run that ends because all is done, and for an engine
LEAVE_S = 2.0  # a stopped hub waits so long for consumers that spill: their inbox keeps the rest
HANG_S_MAX = 7.0  # the end waits no longer for one call of a consumer, or for a hub that acknowledges nothing
GIVE_UP_S = 2.0  # the last wait for a part that does not stop although it has no more work
BYE_S = 0.75  # a run that ends waits so long for the Bye of an engine that has ended
SHUTDOWN_S_DEFAULT = 20.0  # a stopped server waits so long for running requests
SHUTDOWN_S_MAX = 3600.0
ANSWERS_S = 5.0  # a stopped server has so long for its last answers, once its requests have ended or were aborted
ENGINE_END_S_MAX = DRAIN_S_MAX + GIVE_UP_S  # an engine without requests has so long to send its rows
JOB_STEP_S_MAX = 20.0  # an interrupted model job waits so long for its current step; a second signal ends it at once
# An interrupted model job: its current step, the end of its engine, and the end of vLLM and Python.
JOB_END_S_MAX = JOB_STEP_S_MAX + ENGINE_END_S_MAX + 2 * HANG_S_MAX

# The gRPC of one API server.
RPC_CONNECTIONS_MAX = 1_024
RPC_CALLS_MAX = 8_192  # calls at once
RPC_IDLE_S = 60.0  # a connection without a call is closed after this

# The steering of a server, and of one request.
STEERING_MODULES_HELD_MAX = 4_096
SHARED_PART_BYTES_MAX = 24 * MIB  # a module, or the global state, that the front ends of an engine share
SHARED_PARTS_MAX = 2 * STEERING_MODULES_HELD_MAX  # parts of one engine, with those that were removed
SHARED_SENT_BYTES_MAX = 64 * MIB  # parts on the way to front ends
SHARING_MAX = 1_024  # front ends of a hub that share steering
SHARED_S_MAX = 3.0  # how long a change of shared steering is waited for
BANK_BYTES_MAX = 64 * 1024 * MIB
BODY_BYTES_DEFAULT = 256 * MIB
BODY_BYTES_MAX = 4096 * MIB
BODY_DRAIN_BYTES_MAX = 1024 * MIB  # bytes read of a body that is too large, so that its client reads the answer
BODY_DRAIN_S_MAX = 30.0

# What a hub keeps for late questions.
REFUSED_KEPT_MAX = 256  # refused peers that stay connected; the oldest is closed
RESULTS_KEPT_MAX = 20_000
RUNNING_SHOWN_MAX = 50  # open requests in a hub's status; the oldest
ACTIONS_WAITING_MAX = 4_096
# Actions that a scheduler remembers until they expire, so that one that comes twice takes effect once.
ACTIONS_KNOWN_MAX = 65_536

assert HEADER_BYTES_MAX < PAYLOAD_BYTES_MAX
assert min(CREDIT_BYTES_DEFAULT, OUTBOUND_BYTES_DEFAULT, STEP_BYTES_MAX) >= 2 * STEP_PART_BYTES_MAX
assert SHARED_PART_BYTES_MAX + MIB <= HEADER_BYTES_MAX
assert FRAME_HEADER_BYTES_MAX <= HEADER_BYTES_MAX
# A position can be patched by its number from either end.
assert CLAMPS_AT_SITE_MAX + 2 * FEATURES_SET_MAX + 2 + 3 + GATES_MAX <= SITE_OPS_MAX
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
assert BYE_S + HANG_S_MAX + GIVE_UP_S < 10
assert ANSWERS_S < SHUTDOWN_S_DEFAULT <= SHUTDOWN_S_MAX
assert BODY_BYTES_DEFAULT <= BODY_BYTES_MAX

# Time between two times that a hub returns free memory to the system. For 1 GB this takes about 0.6 s, in which other
# threads wait for memory.
TRIM_S = 30.0

# What a hub bears. Beyond these a peer is refused or cut off.
STATE_PER_BYTE_MAX = 32  # bytes of memory for each byte of a message
SESSIONS_MAX = 4_096
MEMORY_BYTES_MIN = 256 * MIB  # memory of a hub for what peers send; see `capflow.hub.peers.budget`
MEMORY_BYTES_MAX = 64 * 1024 * 1024 * MIB
MEMORY_PART = 4  # by default a hub takes this fraction of the machine's memory: one fourth
OWNERS_MAX = 1_024  # owners (keys; without keys engines and clients) that share the bounds of a hub at once
# Each connection can always have a call.
assert RPC_CONNECTIONS_MAX <= OWNERS_MAX <= RPC_CALLS_MAX // 2
AWAITED_MAX = 100_000
TAPS_MAX = 16
TAP_BYTES_MAX = 64 * MIB  # frames on the way to one watching client; it skips those that come meanwhile
# Messages of one connection in the hub's socket; then it stops reading from it. Many of up to MESSAGE_FRAMES_BYTES_MAX
# would not stay in the processor's cache until they are handled.
MESSAGES_READ_AHEAD_MAX = 16
MESSAGES_UNREAD_MAX = 64  # messages of its hub in a peer's socket
MESSAGES_UNSENT_MAX = 131_072  # messages to one connection; then the hub closes it
HELLO_BYTES_MAX = 1 * MIB  # the first message of a peer
REFUSALS_MAX = 256  # different refusals counted by name; the rest are counted together
OFFENCES_MAX = 16  # offences against the protocol within the window; then a peer is ignored
OFFENCE_WINDOW_S = 60.0
IGNORED_S = 30.0

assert AWAITED_MAX < MESSAGES_UNSENT_MAX
assert HELLO_BYTES_MAX <= HEADER_BYTES_MAX

# Lines of the log about peers; the rest are counted.
LOG_KIND_LINES_MAX = 100  # lines of one event at once
LOG_KIND_LINES_PER_S = 1.0  # lines of one event in a second after that
LOG_PEER_LINES_MAX = 20  # lines about one key or connection at once
LOG_PEER_LINES_PER_S = 0.2
LOG_LEFT_OUT_S = 10.0  # time between two lines with the number of dropped lines
LOG_UNREAD_BYTES_MAX = 4 * MIB  # text waiting for the reader of standard error; further lines are dropped and counted
LOG_END_S_MAX = 2.0  # how long the end of a process waits for log text that is not read

assert FINISHED_PER_FRAME_MAX <= REQUESTS_PER_FRAME_MAX

# Keys.
KEY_NAME_LENGTH_MAX = 64
KEY_FILE_BYTES_MAX = 4 * MIB

# Times of the transport, seconds.
IDLE_S = 0.25
RESULT_S_MAX = 10.0  # wait without any result, before a finished request that pins much of an inbox is let go
ACTION_S_MAX = 30.0
ACTION_KEPT_S = 300.0  # how long the answer to an action is kept for the case that it is sent again
ACTION_IDLE_S = 0.2  # how long an engine without steps may take to answer an action on all its requests
# Actions that a hub takes, of one sender and for one request: each second, and at once.
ACTIONS_PER_S_MAX, ACTIONS_AT_ONCE_MAX = 2_000, 8_192
REQUEST_ACTIONS_PER_S_MAX, REQUEST_ACTIONS_AT_ONCE_MAX = 200, 2_048
ACTION_ANSWER_S_MAX = 5.0  # how much longer a hub waits for the answer to an expired action
LINGER_S = 0.5
RECONNECT_S_MIN = 0.1
RECONNECT_S_MAX = 0.5
HANDSHAKE_S_MAX = 10.0  # time for the ZMQ handshake of a new connection, and as long again until its session
DEAD_S_MAX = 30.0  # a TCP connection that takes no data for this long is closed

# Descriptors of a hub's process.
DESCRIPTORS_WANTED = 65_536  # if the system allows it
DESCRIPTORS_KEPT_MIN = 64  # kept for files, consumers and the endpoint; and at least this fraction of all:
DESCRIPTORS_KEPT_SHARE = 0.25
CONNECTIONS_IDLE_MAX = 1_024  # connections without a session; then the oldest is closed

# One turn of the hub's thread.
READ_AHEAD_BYTES_MAX = 256 * MIB  # bytes that are read from the socket and not handled, except frames within credit
READ_AHEAD_EACH_BYTES_MAX = 16 * MIB  # the part of one peer; a single message may be larger
READ_AHEAD_EACH_BYTES_MIN = 64 * KIB
SLICE_FRAMES = 8  # frames of one message that are taken before it is another peer's turn
SLICE_REQUESTS = 256  # requests answered, or ended with their engine, before it is another peer's turn
TURN_S = 0.005  # how long messages are handled before the results of consumers are
assert READ_AHEAD_EACH_BYTES_MIN * SESSIONS_MAX <= READ_AHEAD_BYTES_MAX

# The endpoint for metrics and health.
HTTP_CLIENTS_MAX = 16
HTTP_HEAD_S_MAX = 2.0  # until a request is read
HTTP_S_MAX = 10.0  # until it is answered

assert CHECKSUM_STEPS * 4 <= CHECKSUM_STEPS_MAX
assert RECONNECT_S_MIN < RECONNECT_S_MAX < SILENCE_S_MAX <= DEAD_S_MAX

# Queries of a consumer's database.
QUERIES_MAX = 4  # queries at once
QUERY_S_MAX = 60.0  # one whole query
SQL_BYTES_MAX = 1 * MIB
QUERY_BATCH_BYTES_MAX = 256 * MIB  # one batch of an answer, 2,048 rows
QUERY_ROWS_DEFAULT = 10_000

# Lenses.
LENS_TILE_BYTES = 8 * MIB  # a tile of an unembedding or of a translator, in float32
LENS_LOGITS_BYTES = 16 * MIB  # the logits of one tile
LENS_ROWS = 1_024  # rows that are read in one pass over the unembedding
LENS_TOKENS_MAX = 1_024  # most likely tokens of a row
MODEL_JSON_BYTES_MAX = 256 * MIB  # a JSON file of a model

# Types of values on the wire. A value out of bounds is refused while it is decoded.

Name = Annotated[str, Meta(max_length=REQUEST_ID_LENGTH_MAX)]
"""The name or id of a request, an engine or an action."""

Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
"""A message for people."""

Count = Annotated[int, Meta(ge=0, le=2**40)]
"""A number of things; the sum of millions of these still fits in 64 bits."""

Total = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A sum over the life of a process, or a number of bytes."""

Position = Annotated[int, Meta(ge=0, le=POSITION_MAX)]
"""A position of a request, or a length."""

Token = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A token id, as vLLM holds it."""

Place = Annotated[int, Meta(ge=0, le=RANK_MAX)]
"""One of the numbers of a rank."""

Nanoseconds = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A time of the wall clock."""
