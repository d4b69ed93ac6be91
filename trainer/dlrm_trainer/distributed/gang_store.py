"""Rank 0's store as ranks use it: keys that nobody can name, and words that nobody can write, without the secret.

Who reaches the store's port may list its keys, read them and write others. So each key is a keyed hash of its name, and
each word carries one of the key and itself: a key that is not there yet can't be guessed, and a word from elsewhere is
passed over.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from torch._C._distributed_c10d import PrefixStore, TCPStore

MARK_DIGITS = 64


class GangStore:
    """Words of the ranks of one attempt.

    Args:
        store: that rank 0 serves.
        secret: of the attempt; empty where its pods were given none, and then anybody can name and write.
    """

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._store, self._secret = store, secret.encode()

    def on_its_own_line(self) -> GangStore:
        """The same store, on a connection that nobody else uses."""
        line: TCPStore = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        return GangStore(line, self._secret.decode())

    def without_secret(self) -> GangStore:
        """The same store, as ranks see it that were given no secret."""
        return GangStore(self._store, "")

    def for_torch(self, name: str) -> PrefixStore:
        """A place for torch's own keys. They can be listed once the first is there, and torch's words have no mark."""
        return PrefixStore(self._key(name), self._store)

    def set(self, name: str, word: str) -> None:
        """Write a word over the one that is there."""
        self._store.set(self._key(name), self._marked(name, word))

    def set_first(self, name: str, word: str) -> str | None:
        """Write a word where none is; the first one's, None where that is not of this gang."""
        return self._word(name, self._store.compare_set(self._key(name), "", self._marked(name, word)))

    def get(self, name: str) -> str | None:
        """A word; None where there is none of this gang."""
        return self._word(name, self._store.get(self._key(name))) if self.has([name]) else None

    def has(self, names: Iterable[str]) -> bool:
        """Whether all of some keys are there: one request, however many they are."""
        return bool(self._store.check([self._key(name) for name in names]))

    def append(self, name: str, word: str) -> None:
        """Add a word, of one line, to those that are there."""
        self._store.append(self._key(name), self._marked(name, word) + "\n")  # type: ignore[attr-defined]  # as above

    def words(self, name: str) -> list[str]:
        """All words of this gang that were added, oldest first; two requests."""
        lines = self._store.get(self._key(name)).splitlines() if self.has([name]) else []
        return [word for word in (self._word(name, line) for line in lines) if word is not None]

    def _key(self, name: str) -> str:
        return self._hash(f"key {name}")

    def _marked(self, name: str, word: str) -> str:
        return self._hash(f"word {name} {word}") + word

    def _word(self, name: str, marked: bytes) -> str | None:
        text = marked.decode(errors="replace")
        word = text[MARK_DIGITS:]
        return word if hmac.compare_digest(text.encode(), self._marked(name, word).encode()) else None

    def _hash(self, what: str) -> str:
        return hmac.digest(self._secret, what.encode(), "sha256").hex()
