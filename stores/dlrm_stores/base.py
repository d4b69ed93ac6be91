"""What a snapshot asks of an object store, and how a URI becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import InvalidSpecError
from dlrm_api.objects import S3Spec
from dlrm_stores.repeats import OnRepeat, count_nothing

Body = bytes | bytearray | memoryview
PARALLEL_DELETES = 8


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    size: int
    modified: float
    """When it was written, by the store's clock (Unix seconds)."""
    etag: str = ""
    """Another one where the object was written anew; of S3 alone."""


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """How a user says where objects are and how they are reached: fields of a job, by default."""

    uri: str = "spec.checkpoint.uri"
    service: str = "spec.checkpoint.s3"
    """Holds ``endpoint``, ``region`` and ``caFile``."""
    credentials: str = "spec.checkpoint.credentialsSecret"
    """What is to be set for credentials."""


CHECKPOINT_FIELDS = FieldNames()
PUBLISH_FIELDS = FieldNames(uri="spec.checkpoint.publish.uri")
AWS = S3Spec()


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to reach an S3 service; a file store needs none of it."""

    s3: S3Spec = AWS
    """A ``SnapshotS3Spec`` also says how what is written is encrypted."""
    credentials_dir: Path | None = None
    """Folder with ``accessKeyId``, ``secretAccessKey`` and optionally ``sessionToken``, read again when it changes;
    boto3's own chain where None."""
    fields: FieldNames = CHECKPOINT_FIELDS
    """What messages call all this."""
    on_repeat: OnRepeat = count_nothing
    """PodReport of each call that is repeated, in the thread that makes it."""


class ObjectStore(Protocol):
    """A flat space of keys under one URI; every write is whole or absent, and a listing sees every finished write.

    All methods may raise StoreUnavailableError (repeat the call), NoPermissionError or DeviceError.
    """

    @property
    def uri(self) -> str:
        """Where the keys live, without a trailing slash."""
        ...

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises NoInputError where there is none."""
        ...

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a contiguous, writable buffer with the object's first bytes; returns the object's size.

        The size tells whether the object is as long as the buffer. What is in the buffer after an error, or beyond
        the object's end, is not defined. Raises NoInputError where there is none.
        """
        ...

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write the object, replacing one that is there; readers see the old bytes or the new, never a mixture.

        Args:
            key: of the object.
            body: its bytes, contiguous.
            sha256: of them, in hexadecimal, where it is known: it travels with them and is not computed once more.
        """
        ...

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless one is there; False, and nothing written, where one is.

        A store that knows no conditions overwrites and answers True: ``attempts.honours_conditions`` tells.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in ascending order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; removing what is not there is success."""
        ...

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove objects, in any order; after an error some of them are gone. What is not there is success."""
        ...

    def size(self, key: str) -> int | None:
        """The object's bytes, None where there is none."""
        ...

    def sweep_uploads(self, older_than_s: float) -> int:
        """Give back what unfinished writes of dead writers hold, if older than this; how many were removed."""
        ...


def delete_each(delete: Callable[[str], None], keys: Sequence[str]) -> None:
    """Remove objects one by one, several at a time; an error is raised once no removal is under way any more."""
    with ThreadPoolExecutor(PARALLEL_DELETES, "delete") as pool:
        list(pool.map(delete, keys))


def open_store(uri: str, options: StoreOptions | None = None) -> ObjectStore:
    """Open ``file:///folder`` or ``s3://bucket/prefix``; nothing is contacted or created yet.

    Raises:
        InvalidSpecError: the URI is of another kind, or has a part that names no folder.
    """
    options = options or StoreOptions()
    if cut := next((mark for mark in "?#" if mark in uri), None):
        raise InvalidSpecError(options.fields.uri, f"{uri}: {cut} ends the path of a URI: name the folder without it")
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        from dlrm_stores.files import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from dlrm_stores.s3 import S3Store  # imported here: boto3 takes most of a second to load

        return S3Store(parts.netloc, parts.path.strip("/"), options)
    raise InvalidSpecError(options.fields.uri, f"{uri} is neither file:///folder nor s3://bucket/prefix")


def open_made_store(uri: str, options: StoreOptions | None = None) -> ObjectStore:
    """Open a store that a job has written to; of an S3 service nothing is contacted yet.

    Raises:
        InvalidSpecError: see ``open_store``.
        NoInputError: the folder of a ``file:///`` URI is not there, or is a file.
        NoPermissionError: it may not be looked for.
    """
    from dlrm_stores.files import FileStore

    store = open_store(uri, options)
    if isinstance(store, FileStore):
        store.check_folder()
    return store


def open_target(uri: str, options: StoreOptions, snapshots: ObjectStore) -> ObjectStore:
    """The store that deltas go to.

    Args:
        uri: that the job gives.
        options: of the job's store, by which this one is reached too.
        snapshots: the job's store.

    Raises:
        InvalidSpecError: the URI can't be used, or is that of the snapshots.
    """
    target = open_store(uri, replace(options, fields=replace(options.fields, uri=PUBLISH_FIELDS.uri)))
    if target.uri == snapshots.uri:  # however the job writes it
        raise InvalidSpecError(
            PUBLISH_FIELDS.uri,
            f"{target.uri} holds the job's snapshots, whose retention would remove deltas: give another folder",
        )
    return target
