"""The hub: takes frames from workers, gives each consumer the rows that it wants, and answers clients.

The command line, tests and replay run a hub; the engine never imports it. A message goes from `hub` (sockets, one
thread) through `dispatch` to `exchange`, which is pure state, and back as `effects`. Folders: `exchange` (sessions,
frames, actions), `requests` (which requests run), `peers` (who is connected), `lanes` (a queue and a thread for each
consumer), `monitor` (HTTP).
Invariant: the hub's thread never waits for a consumer or a peer, and every promised row is delivered or named as lost.
"""
