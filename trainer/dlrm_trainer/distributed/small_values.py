"""Small values that ranks tell each other, as JSON: what comes from a peer is checked, and nothing of it is run."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from dlrm_api.errors import TemporaryError, first_problem

T = TypeVar("T")
GATHERED_BYTES = 16 << 20
"""The longest value of one rank of many: every rank holds those of all at once."""
BROADCAST_BYTES = 1 << 30
"""The longest value of rank 0 alone, such as a list of objects to read."""


def encode_value(value: T, kind: TypeAdapter[T]) -> bytes:
    """JSON of a value; numbers that are not finite and names of files that are no UTF-8 stay what they are."""
    return json.dumps(kind.dump_python(value, mode="json"), separators=(",", ":")).encode()


def decode_value(body: bytes, kind: TypeAdapter[T], rank: int) -> T:
    """Read ``encode_value``'s form.

    Args:
        body: what came.
        kind: what it is to be.
        rank: who sent it.

    Raises:
        TemporaryError: it is nothing of that kind; names the rank and what is wrong.
    """
    try:
        return kind.validate_python(json.loads(body))
    except ValidationError as error:
        raise _unreadable(rank, first_problem(error)) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(rank, f"no JSON: {error}") from error


def check_size(size: int, most: int, rank: int) -> None:
    """Refuse a length before memory is taken for it.

    Raises:
        TemporaryError: no value has that length.
    """
    if not 0 < size <= most:
        raise _unreadable(rank, f"{size} bytes, and from 1 to {most} can be told")


def _unreadable(rank: int, problem: str) -> TemporaryError:
    return TemporaryError(
        f"rank {rank} told what this rank can't read ({problem}): run one version of the trainer on all ranks, and let "
        "no others reach their ports"
    )
