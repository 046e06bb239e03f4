"""gRPC beside HTTP: the services of `capflow.proto`, in the process and the event loop of the API server.

`capflow_engine.serve.plugin` starts the server. Nothing else imports grpc.
Invariant: a call does what the HTTP route of the same name does.
"""
