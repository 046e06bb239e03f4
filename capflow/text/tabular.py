"""Objects that give a table: to Arrow themselves, and from there to pandas and Polars."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from capflow.errors import UsageError, explain

if TYPE_CHECKING:
    import pyarrow as pa


class Tabular:
    """A base of what has `to_arrow`."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """Return the table as a `pyarrow.Table`."""

    def to_pandas(self) -> Any:
        """Return the table as a data frame of pandas. Raises UsageError if pandas is not installed."""
        try:
            return self.to_arrow().to_pandas()
        except ModuleNotFoundError as e:
            raise _missing("pandas") from e

    def to_polars(self) -> Any:
        """Return the table as a data frame of Polars. Raises UsageError if Polars is not installed."""
        try:
            import polars as pl
        except ModuleNotFoundError as e:
            raise _missing("polars") from e
        return pl.from_arrow(self.to_arrow())


def _missing(package: str) -> UsageError:
    return UsageError(explain(f"to_{package}: missing package {package}", do=f"pip install {package}"))
