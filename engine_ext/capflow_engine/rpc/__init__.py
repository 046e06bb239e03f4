"""gRPC beside HTTP: the services of `capflow.proto`, in the process and the event loop of the API server."""
