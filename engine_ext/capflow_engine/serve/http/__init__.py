"""The routes, bodies and middleware of `capflow serve` over HTTP.

`capflow_engine.serve.plugin` installs them; gRPC calls the same handlers.
Invariant: a refused request is an error as OpenAI's clients know it, and changes nothing.
"""
