"""pyarrow, which reads Parquet and Arrow files, and the values of its columns."""

from __future__ import annotations

from typing import Any

from ....core.errors import ConfigError, one_of, suggest


def pyarrow(where: str) -> Any:
    """Return the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow as package
    except ImportError:
        raise ConfigError(f"{where}: needs pyarrow, pip install flextrain[data]") from None
    return package


def check_columns(columns: list[str] | None, known: list[str], where: str) -> None:
    """Raise ConfigError if a column is not in a file."""
    if columns is not None and not columns:
        raise ConfigError(f"{where}: [] is not allowed, give at least one column, or None for all")
    for name in columns or ():
        if name not in known:
            raise ConfigError(
                f'{where}: "{name}" is no column{suggest(name, known) or f", choose {one_of(known)}" if known else ""}'
            )


def row_of(batch: Any, row: int) -> dict[str, Any]:
    """One row of a table or record batch: column to value; lists of numbers are NumPy arrays."""
    return {name: _value(batch.column(at), row) for at, name in enumerate(batch.schema.names)}


def _value(column: Any, row: int) -> Any:
    found = column[row]
    values = getattr(found, "values", None)
    if values is not None and hasattr(values, "null_count") and not values.null_count and _is_number(values.type):
        return values.to_numpy(zero_copy_only=False).copy()
    return found.as_py()


def _is_number(kind: Any) -> bool:
    import pyarrow as package

    return bool(package.types.is_integer(kind) or package.types.is_floating(kind))
