"""Store objects under keys, in a directory or in S3, behind one protocol."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import InvalidSpecError
from dlrm_stores.base import ObjectStore, StoreOptions
from dlrm_stores.file import FileStore

__all__ = ["ObjectStore", "StoreOptions", "open_existing_store", "open_store"]


def open_store(uri: str, options: StoreOptions | None = None) -> ObjectStore:
    """Open ``file:///directory`` or ``s3://bucket/prefix``. Nothing is contacted or created yet.

    Raises:
        InvalidSpecError: the URI has another scheme, or a query or fragment.
    """
    options = options or StoreOptions()
    if mark := next((mark for mark in "?#" if mark in uri), None):
        raise InvalidSpecError(options.fields.uri, f"expected a URI without {mark!r}, got {uri!r}")
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        # boto3 takes most of a second to load, and dlrmctl must start fast.
        from dlrm_stores.s3 import S3Store

        return S3Store(parts.netloc, parts.path.strip("/"), options)
    raise InvalidSpecError(options.fields.uri, f"expected file:///directory or s3://bucket/prefix, got {uri!r}")


def open_existing_store(uri: str, options: StoreOptions | None = None) -> ObjectStore:
    """Open a store that a job has written to. An S3 service is not contacted yet.

    Raises:
        InvalidSpecError: see ``open_store``.
        NoInputError: the directory of a ``file:///`` URI does not exist, or is a file.
        NoPermissionError: it cannot be looked up.
    """
    store = open_store(uri, options)
    if isinstance(store, FileStore):
        store.check_folder()
    return store
