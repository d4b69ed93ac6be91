"""Share keys and values through rank 0's store that nobody can name or forge without the attempt's secret.

Whoever reaches the store's port may list its keys, read them and write others. So each key is a keyed hash of its name,
and each value carries one of its name and itself: a value that is not signed is ignored.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from torch._C._distributed_c10d import PrefixStore, TCPStore

SIGNATURE_DIGITS = 64


class GangStore:
    """Hold the values of the ranks of one attempt.

    Args:
        store: that rank 0 serves.
        secret: of the attempt; without one, anybody can read and write.
    """

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._store, self._secret = store, secret.encode()

    def clone(self) -> GangStore:
        """Return the same store on a connection of its own."""
        line: TCPStore = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        return GangStore(line, self._secret.decode())

    def without_secret(self) -> GangStore:
        """Return the same store as ranks without a secret see it."""
        return GangStore(self._store, "")

    def for_torch(self, name: str) -> PrefixStore:
        """Return a namespace for torch's own keys, which can be listed once the first exists, and are not signed."""
        return PrefixStore(self._key(name), self._store)

    def set(self, name: str, value: str) -> None:
        """Write a value, replacing the one that exists."""
        self._store.set(self._key(name), self._signed(name, value))

    def set_first(self, name: str, value: str) -> str | None:
        """Write a value unless one exists; return the one that exists then, None if it is not signed by this gang."""
        return self._verified(name, self._store.compare_set(self._key(name), "", self._signed(name, value)))

    def get(self, name: str) -> str | None:
        """Return a value; None if this gang has not written one."""
        return self._verified(name, self._store.get(self._key(name))) if self.has([name]) else None

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all keys exist: one request, however many they are."""
        return bool(self._store.check([self._key(name) for name in names]))

    def append(self, name: str, value: str) -> None:
        """Append a line to a value."""
        self._store.append(self._key(name), self._signed(name, value) + "\n")  # type: ignore[attr-defined]  # as above

    def read_lines(self, name: str) -> list[str]:
        """Return all lines that this gang appended, oldest first, by two requests."""
        lines = self._store.get(self._key(name)).splitlines() if self.has([name]) else []
        return [value for value in (self._verified(name, line) for line in lines) if value is not None]

    def _key(self, name: str) -> str:
        return self._hash(f"key {name}")

    def _signed(self, name: str, value: str) -> str:
        return self._hash(f"word {name} {value}") + value

    def _verified(self, name: str, signed: bytes) -> str | None:
        text = signed.decode(errors="replace")
        value = text[SIGNATURE_DIGITS:]
        return value if hmac.compare_digest(text.encode(), self._signed(name, value).encode()) else None

    def _hash(self, what: str) -> str:
        return hmac.digest(self._secret, what.encode(), "sha256").hex()
