"""A store that knows what was written to it and the most that was ever in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from dlrm_stores import ObjectStore
from dlrm_stores.base import Body, ObjectInfo


class MeteredStore:
    """Passes everything on; looks what is there after each object that was put.

    Args:
        store: the job's.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._lock = store, threading.Lock()
        self.written_bytes = 0
        self.peak_bytes = 0
        """Most that a listing ever showed."""

    @property
    def uri(self) -> str:
        """Return the wrapped store's URI."""
        return self._store.uri

    def _wrote(self, size: int) -> None:
        with self._lock:
            self.written_bytes += size
            self.peak_bytes = max(self.peak_bytes, sum(info.size for info in self._store.list("")))

    def get(self, key: str) -> bytes:
        """See ``ObjectStore``, as for all that follows."""
        return self._store.get(key)

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Delegate."""
        return self._store.get_into(key, buffer)

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Delegate and count."""
        self._store.put(key, body, sha256)
        self._wrote(len(body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Delegate and count writes."""
        written = self._store.put_if_absent(key, body)
        if written:
            self._wrote(len(body))
        return written

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Delegate."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """Delegate."""
        self._store.delete(key)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delegate."""
        self._store.delete_all(keys)

    def size(self, key: str) -> int | None:
        """Delegate."""
        return self._store.size(key)

    def sweep_uploads(self, older_than_s: float) -> int:
        """Delegate."""
        return self._store.sweep_uploads(older_than_s)
