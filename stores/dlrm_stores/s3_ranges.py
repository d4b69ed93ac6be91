"""Ranges of S3 objects: each answer says of which version of the object it is, so that ranges never mix two."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm_api.errors import InvalidSpecError, StoreUnavailableError
from dlrm_stores.s3_errors import Place

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PIECE_BYTES = 1 << 20
"""What a range takes beside the buffer that it is read into: it stays in the processor's cache on its way there."""


class Version(NamedTuple):
    """Which of the objects that a key has had was read."""

    size: int
    etag: str


def read(s3: S3Client, place: Place, wanted: dict[str, Any], start: int, length: int) -> bytes:
    """Bytes [start, start + length), fewer at the object's end; ``wanted`` names the object, as boto3 does.

    Raises:
        StoreUnavailableError: the service sent fewer bytes.
        InvalidSpecError: the service answers with something else than the range.
    """
    answer = s3.get_object(**wanted, Range=f"bytes={start}-{start + length - 1}")
    end = min(length, _version(answer, place).size - start)
    body: bytes = answer["Body"].read()
    if len(body) < end:
        raise StoreUnavailableError(f"{place.endpoint}: {len(body)} bytes of {end} came of {wanted['Key']}")
    return body


def read_into(s3: S3Client, place: Place, wanted: dict[str, Any], start: int, view: memoryview) -> Version:
    """Fill ``view`` with the object's bytes from ``start`` on, as far as it has any.

    Raises:
        StoreUnavailableError: the service sent fewer bytes than it said.
        InvalidSpecError: the service answers with something else than the range.
    """
    answer = s3.get_object(**wanted, Range=f"bytes={start}-{start + len(view) - 1}")
    version = _version(answer, place)
    done, end = 0, min(len(view), version.size - start)
    with contextlib.closing(answer["Body"]) as body:
        while done < end:
            piece = body.read(min(PIECE_BYTES, end - done))
            if not piece:
                raise StoreUnavailableError(f"{place.endpoint}: {done} bytes of {end} came of {wanted['Key']}")
            view[done : done + len(piece)] = piece
            done += len(piece)
    return version


def _version(answer: Any, place: Place) -> Version:
    size = str(answer.get("ContentRange", "")).rpartition("/")[2]
    if not size.isdigit():
        raise InvalidSpecError(
            place.fields.service, f"{place.endpoint} does not answer with ranges of objects: use another service"
        )
    return Version(int(size), answer.get("ETag", ""))
