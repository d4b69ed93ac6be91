"""Store JSON documents under their digest: what many snapshots share is written once, not in each manifest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_stores import ObjectStore

DOCUMENTS = "documents/"


def document_key(digest: str) -> str:
    """Return the key of the document with this SHA-256."""
    return f"{DOCUMENTS}{digest}.json"


def put_document(store: ObjectStore, value: Any) -> str:
    """Write a document of JSON types unless the store has it, and return its digest: equal values share one."""
    body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    if store.size(document_key(digest)) != len(body):
        store.put(document_key(digest), body, digest)
    return digest


def get_document(store: ObjectStore, digest: str) -> Any:
    """Read a document.

    Raises:
        SnapshotError: it is absent or damaged.
    """
    key = document_key(digest)
    try:
        body = store.get(key)
    except NoInputError as error:
        raise SnapshotError(f"{store.uri}/{key}: not found, but snapshots refer to it; restore the object") from error
    if hashlib.sha256(body).hexdigest() != digest:
        raise SnapshotError(f"{store.uri}/{key}: corrupt: its SHA-256 is not its name; restore the object")
    return json.loads(body)
