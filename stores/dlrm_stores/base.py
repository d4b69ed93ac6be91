"""Define what an object store offers, how one is described, and a bounded parallel map."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from dlrm_api.fields import S3Spec

Body = bytes | bytearray | memoryview
RetryReason = Literal["throttled", "failed", "broken", "credentials"]
"""Why a call is retried: throttled, a server error, a connection or an answer that broke off, credentials not there
yet."""
PARALLEL_GETS = 16
"""Objects that are read at a time, memory allowing: the latency of a distant store does not depend on their size."""
DEFAULT_WORKERS = 4
"""Default number of items at work; their inputs and results are in memory."""
PARALLEL_DELETES = 8
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """Describe one object of a listing."""

    key: str
    size: int
    modified: float
    """Time of the last write by the store's clock (Unix seconds)."""
    etag: str = ""
    """Changes when the object is replaced; S3 only."""


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Name the settings that error messages refer to: fields of a job, by default."""

    uri: str = "spec.checkpoint.uri"
    service: str = "spec.checkpoint.s3"  # holds endpoint, region and caFile
    credentials: str = "spec.checkpoint.credentialsSecret"


CHECKPOINT_FIELDS = FieldNames()
AWS = S3Spec()


def _ignore_retry(reason: RetryReason) -> None:
    """Count nothing."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Describe how to reach an S3 service; a file store needs none of it."""

    s3: S3Spec = AWS
    """A ``SnapshotS3Spec`` also names the encryption of what is written."""
    credentials_dir: Path | None = None
    """Directory with ``accessKeyId``, ``secretAccessKey`` and optionally ``sessionToken``, read again when it changes;
    None: boto3's own credential chain."""
    fields: FieldNames = CHECKPOINT_FIELDS
    on_retry: Callable[[RetryReason], object] = _ignore_retry
    """Called for each retry, in the thread that makes the call."""


class ObjectStore(Protocol):
    """Hold objects under keys below one URI; writes are atomic, and a listing shows every finished write.

    Every method may raise StoreUnavailableError (repeat the call), NoPermissionError or DeviceError.
    """

    @property
    def uri(self) -> str:
        """Return the URI of the keys' parent, without a trailing slash."""

    def get(self, key: str) -> bytes:
        """Return the object's bytes. Raises NoInputError if it does not exist."""

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a contiguous, writable buffer with the object's first bytes and return the object's size.

        The content of the buffer is undefined after an error, and beyond the object's end. Raises NoInputError if the
        object does not exist.
        """

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write or replace the object; readers see the old bytes or the new ones, never a mixture.

        The body is contiguous. Its digest in hexadecimal, if known, is sent along and not computed again.
        """

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless it exists; return False, with nothing written, if it does.

        A store without conditional writes overwrites and returns True: ``attempts.honours_conditions`` finds out.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects with a key that starts with ``prefix``, in ascending order of keys."""

    def delete(self, key: str) -> None:
        """Remove the object if it exists."""

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove those objects that exist, in any order; after an error some are left."""

    def size(self, key: str) -> int | None:
        """Return the object's bytes, or None if it does not exist."""

    def sweep_uploads(self, older_than_s: float) -> int:
        """Remove what unfinished writes of dead writers left, if older than this; return how many."""


def parallel_map(work: Callable[[T], R], items: Iterable[T], workers: int = DEFAULT_WORKERS) -> Iterator[R]:
    """Yield results in order, with ``workers`` items at work and at most as many results in memory.

    A single item needs no thread: starting one takes longer than most work on small objects.
    """
    source = iter(items)
    first = list(islice(source, 2)) if workers > 1 else []
    if len(first) < 2:
        yield from map(work, chain(first, source))
        return
    with ThreadPoolExecutor(workers, "fetch") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in chain(first, source):
                waiting.append(pool.submit(work, item))
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.cancel()
