"""What goes wrong while a Parquet file is read, told with the file and the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pyarrow as pa

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_trainer.data.files import DataFile


def guarded(file: DataFile, rows: str, read: Callable[[], Any]) -> Any:
    """Call ``read`` and name the file, and the rows, in what goes wrong.

    Raises:
        NoInputError: the file is gone.
        BadDataError: it was changed, or is damaged.
    """
    try:
        return read()
    except FileNotFoundError as error:
        raise NoInputError(f"{file.name}: no such file: it was there before, so put it back") from error
    except (pa.ArrowException, OSError) as error:
        file.check()  # what changed meanwhile is not damaged
        _refuse(file, rows, error)


def _refuse(file: DataFile, rows: str, error: Exception) -> NoReturn:
    reason = str(error).partition("\n")[0][:200]
    if "decrypt" in reason.lower():
        raise BadDataError(f"{file.name}: it is encrypted, and no keys are known here: write it without") from error
    what = f"{rows} can't be decoded: damaged" if rows else "not a Parquet file, or a damaged one"
    raise BadDataError(f"{file.name}: {what} ({reason}): write or copy it anew") from error
