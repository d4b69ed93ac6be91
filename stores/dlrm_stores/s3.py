"""Object store over S3: whole objects in parallel parts and ranges, repeated within a budget."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dlrm_api.errors import NoInputError, StoreUnavailableError
from dlrm_stores.base import Body, ObjectInfo, StoreOptions, delete_each
from dlrm_stores.s3_calls import Calls
from dlrm_stores.s3_client import ERRORS
from dlrm_stores.s3_errors import is_unknown_request, status_of
from dlrm_stores.s3_ranges import Version, read, read_into
from dlrm_stores.s3_writes import Writes

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ObjectIdentifierTypeDef

logger = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
"""Objects come back in ranges of this, in parallel, where they go into a buffer."""
PARALLEL_RANGES = 16
MOST_KEYS = 1_000
"""Objects that one request removes: S3 takes no more."""


class S3Store:
    """Keys below ``s3://bucket/prefix`` of any S3 service with strongly consistent reads and listings.

    Args:
        bucket: it must exist.
        prefix: without slashes at its ends; may be empty.
        options: where the service is and who we are.
    """

    def __init__(self, bucket: str, prefix: str, options: StoreOptions) -> None:
        self._calls = Calls(bucket, f"{prefix}/" if prefix else "", options)
        self._writes = Writes(self._calls, options.s3)
        self._readers = ThreadPoolExecutor(PARALLEL_RANGES, "s3-range")
        self._knows_conditions: bool | None = None
        """Whether the service takes conditional writes, honoured or not; None before the first."""
        self._knows_batches = True
        """Whether the service removes many objects by one request, for all that it said so far."""

    @property
    def uri(self) -> str:
        """Where the keys live, without a trailing slash."""
        return self._calls.uri

    def get(self, key: str) -> bytes:
        """The object's bytes, by one request: ``get_into`` reads large objects faster."""
        with self._calls.known(key):
            return self._calls.run(lambda s3: s3.get_object(**self._calls.object(key))["Body"].read())

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a buffer with the object's first bytes, in parallel ranges; returns the object's size."""
        view = buffer.cast("B")
        if not view:
            size = self.size(key)
            if size is None:
                raise NoInputError(f"{self.uri}/{key}: there is no such object")
            return size
        places = range(0, len(view), RANGE_BYTES)
        with self._calls.known(key):
            run = self._readers.map if len(places) > 1 else map
            parts = run(lambda at: self._read_into(key, view[at : at + RANGE_BYTES], at), places)
            versions = {version for version in parts if version is not None}
        if len(versions) > 1:
            raise StoreUnavailableError(f"{self.uri}/{key}: replaced while it was read")
        return versions.pop().size if versions else 0

    def _read_into(self, key: str, view: memoryview, start: int) -> Version | None:
        """Fill ``view`` with bytes from ``start`` on, as far as there are any; None where there are none."""
        try:
            return self._calls.run(lambda s3: read_into(s3, self._calls.place, self._calls.object(key), start, view))
        except ERRORS as error:
            if status_of(error) == 416:
                return None
            raise

    def get_range_of(self, key: str, etag: str, start: int, length: int) -> bytes | None:
        """Bytes [start, start + length) of the very object that a listing showed; None where another one is there.

        Raises:
            NoInputError: there is none.
        """
        wanted = {**self._calls.object(key), "IfMatch": etag}
        with self._calls.known(key):
            try:
                return self._calls.run(lambda s3: read(s3, self._calls.place, wanted, start, length))
            except ERRORS as error:
                if status_of(error) in (412, 416):
                    return None
                raise

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write the object whole: at once, or in parallel parts that are given back if one fails."""
        with self._calls.known(key):
            self._writes.put(key, body, sha256)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless one is there (``If-None-Match: *``), or the service knows no conditions."""
        with self._calls.known(key):
            written = self._put_on_condition(key, body)
            if written is None:
                self._writes.put_whole(key, body)
                self._knows_conditions = False
        return written is not False

    def _put_on_condition(self, key: str, body: Body) -> bool | None:
        """Whether the object was written; None: the service knows no conditions, and nothing was.

        What a service refuses once it took a condition is refused for other reasons.
        """
        if self._knows_conditions is False:
            return None
        try:
            self._writes.put_whole(key, body, IfNoneMatch="*")
        except ERRORS as error:
            if status_of(error) != 412:
                if self._knows_conditions is None and is_unknown_request(error):
                    logger.info("objects are written without conditions", extra={"store": self._calls.uri})
                    return None
                raise
            self._knows_conditions = True
            return False
        self._knows_conditions = True
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in ascending order of their keys."""
        wanted: dict[str, Any] = {"Bucket": self._calls.bucket, "Prefix": self._calls.prefix + prefix}
        more = True
        while more:
            with self._calls.known(prefix):
                page = self._calls.ask(lambda s3: s3.list_objects_v2(**wanted), "IsTruncated")
            for item in page.get("Contents", ()):
                yield ObjectInfo(
                    key=item["Key"].removeprefix(self._calls.prefix),
                    size=item["Size"],
                    modified=item["LastModified"].timestamp(),
                    etag=item["ETag"],
                )
            more = page.get("IsTruncated", False)
            wanted["ContinuationToken"] = page.get("NextContinuationToken")

    def delete(self, key: str) -> None:
        """Remove the object; removing what is not there is success."""
        with contextlib.suppress(NoInputError), self._calls.known(key):
            self._calls.run(lambda s3: s3.delete_object(**self._calls.object(key)))

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove objects, many by one request.

        What the service does not say to be gone then is removed one by one: so an error is that of a single removal,
        and a service that knows no such request does without.
        """
        batches = (keys[start : start + MOST_KEYS] for start in range(0, len(keys), MOST_KEYS))
        delete_each(self.delete, [key for batch in batches for key in self._delete_batch(batch)])

    def _delete_batch(self, keys: Sequence[str]) -> Sequence[str]:
        """Ask for all at once; returns those that the service does not say to be gone."""
        if not self._knows_batches:
            return keys
        names = [self._calls.prefix + key for key in keys]
        with self._calls.known(f"the removal of {len(keys)} objects"):
            try:
                objects: list[ObjectIdentifierTypeDef] = [{"Key": name} for name in names]
                answer = self._calls.run(
                    lambda s3: s3.delete_objects(Bucket=self._calls.bucket, Delete={"Objects": objects})
                )
            except ERRORS as error:
                if not is_unknown_request(error):
                    raise
                self._knows_batches = False
                logger.info("objects are removed one by one", extra={"store": self._calls.uri, "error": str(error)})
                return keys
        gone = {each["Key"] for each in answer.get("Deleted", ())}
        return [key for key, name in zip(keys, names, strict=True) if name not in gone]

    def size(self, key: str) -> int | None:
        """The object's bytes, None where there is none, by a listing: a refusal of HEAD would not say why."""
        wanted: dict[str, Any] = {"Bucket": self._calls.bucket, "Prefix": self._calls.prefix + key, "MaxKeys": 1}
        with self._calls.known(key):
            page = self._calls.ask(lambda s3: s3.list_objects_v2(**wanted), "IsTruncated")
        return next((item["Size"] for item in page.get("Contents", ()) if item["Key"] == wanted["Prefix"]), None)

    def sweep_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads below our prefix that were begun longer ago than this."""
        return self._writes.sweep(older_than_s)
