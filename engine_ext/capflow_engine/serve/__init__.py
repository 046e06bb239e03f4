"""`capflow serve`: vLLM's OpenAI-compatible server with capflow's fields and routes: HTTP (`http`) and gRPC (`rpc`).

`server` is the process; `plugin` is what vLLM loads.
Invariant: a request without capflow's fields gets the bytes that plain vLLM answers.
"""
