"""The version of this release. The build, `capflow.__version__` and `capflow --version` read it from here."""

__version__ = "0.1.0"
