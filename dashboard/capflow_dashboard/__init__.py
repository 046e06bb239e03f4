"""The dashboard: a consumer that serves a live page and its websocket.

The plugin loader imports `consumer`. The page's files lie in `web`.
Invariant: a browser that is slow or gone delays neither the hub nor another browser.
"""
