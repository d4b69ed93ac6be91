"""Durations that options of commands ask for, written as in manifests."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from dlrm_api.errors import UsageError, first_problem
from dlrm_api.quantities import Duration


def seconds(option: str, text: str) -> int:
    """The length of a duration, which is longer than nothing.

    Raises:
        UsageError: it is none; names the option.
    """
    try:
        found = int(TypeAdapter[float](Duration).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"{option}: {first_problem(error)}") from error
    if not found:
        raise UsageError(f"{option}: {text} is no time at all: write something like 90s, 30m or 1h30m")
    return found
