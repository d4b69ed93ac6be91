"""Objects whose keys hold the SHA-256 of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dlrm_checkpointer.format.manifest import ObjectEntry
from dlrm_stores.base import Body, ObjectStore


def put_by_digest(store: ObjectStore, key_of: Callable[[str], str], body: Body) -> ObjectEntry:
    """Put an object whose key holds the SHA-256 of its bytes.

    Args:
        store: takes it.
        key_of: its key, from the digest in hexadecimal.
        body: its bytes, contiguous.
    """
    sha256 = hashlib.sha256(body).hexdigest()
    key = key_of(sha256)
    store.put(key, body, sha256)
    return ObjectEntry(key=key, bytes=len(body), sha256=sha256)
