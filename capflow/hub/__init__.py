"""The hub: takes frames from workers, gives each consumer what it wants, and answers clients.

The command line, tests and replay run one; the engine never imports it. Folders: `requests` (which run, what each
consumer wants), `peers` (who is connected), `lanes` (a queue and a thread for each consumer), `monitor` (HTTP).
Invariant: the hub's thread never waits for a consumer or a peer, and every promised row is delivered or named as lost.
"""
