"""The version of this release. The build reads it from here, `capflow.__version__` and `capflow --version` too."""

__version__ = "0.1.0"
