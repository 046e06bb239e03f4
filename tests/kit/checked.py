"""A consumer as the start of a hub checks it."""


def checked(consumer):
    """Check a consumer's options and ask for its spec, as `capflow.plugins.configure` does; return the consumer."""
    consumer.check()
    consumer.spec()
    return consumer
