"""The dashboard: a consumer that serves a live page and its websocket.

The plugin loader imports `consumer`. `web` has the page's files.
Invariant: a slow or absent browser delays neither the hub nor another browser.
"""
