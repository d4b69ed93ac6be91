"""Objects of an S3 service as files of a data set: read by ranges, each of the very object that was found at first."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import urlsplit

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_random_exponential

from dlrm_api.errors import BadDataError, NoInputError, StoreUnavailableError
from dlrm_api.names import Env
from dlrm_api.objects import S3Spec
from dlrm_stores.base import FieldNames, ObjectInfo, StoreOptions
from dlrm_trainer.data.files import CHANGED
from dlrm_trainer.data.uris import ANY_DEPTH, is_passed_over, pattern_parts

if TYPE_CHECKING:
    from dlrm_stores.s3 import S3Store

FIELDS = FieldNames(
    uri="data.train.uris and data.eval.uris",
    service="spec.data.s3",
    credentials=(
        f"spec.data.credentialsSecret in a cluster, elsewhere {Env.DATA_CREDENTIALS_DIR} to a folder with accessKeyId "
        "and secretAccessKey"
    ),
)
PATIENCE_S = 300.0
"""How long a service that does not answer is asked again."""
_MAGIC = re.compile(r"[*?\[]")
_SET = re.compile(r"\[!?[^\]]+\]")
_PATTERNS = {"*": r"[^/]*", "?": r"[^/]"}
_FOLDERS = r"(?:[^/._][^/]*/)*"
"""Any below, hidden ones passed over."""


class S3Object:
    """One object, as a listing showed it."""

    def __init__(self, store: S3Store, bucket: str, found: ObjectInfo) -> None:
        self._store, self._key, self._etag = store, found.key, found.etag
        self.path = PurePosixPath("/", bucket, found.key)
        self.name = f"s3://{bucket}/{found.key}"
        self.size = found.size
        self.stamp = f"{found.size}\x00{found.etag}"

    def check(self) -> None:
        """Ask for one byte of it, if it has any."""
        if self.size:
            self.read(0, 1)

    def open(self) -> BinaryIO:
        """To be read by ranges."""
        return cast(BinaryIO, _Ranges(self.size, self.read))

    @retry(
        retry=retry_if_exception_type(StoreUnavailableError),
        stop=stop_after_delay(PATIENCE_S),
        wait=wait_random_exponential(0.5, max=15),
        reraise=True,
    )
    def read(self, start: int, length: int) -> bytes:
        """Some bytes.

        Raises:
            NoInputError: it is gone.
            BadDataError: it was changed.
            NoPermissionError: it may not be read, or not any longer.
            StoreUnavailableError: the service did not answer for a long time.
        """
        try:
            body = self._store.get_range_of(self._key, self._etag, start, length)
        except NoInputError as error:
            raise NoInputError(f"{self.name}: it was there before and is gone: put it back ({error})") from error
        if body is None:
            raise BadDataError(f"{self.name}: its ETag is not {self._etag} any longer: it {CHANGED}")
        return body


class _Ranges(io.RawIOBase):
    """A file that is read by ranges."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read, self._at = size, read, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size < 0 else min(size, left)
        body = self._read(self._at, wanted) if wanted else b""
        self._at += len(body)
        return body


def find_objects(
    uris: Sequence[str], suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None
) -> list[S3Object]:
    """Objects that ``s3://`` URIs name, each once.

    A URI that names no object is a pattern, or a folder: that stands for all objects below it that end in one of
    ``suffixes``; hidden ones are passed over.

    Raises:
        NoInputError: a URI names nothing, or its bucket is not there.
        NoPermissionError: the credentials don't allow to list or to read.
        StoreUnavailableError: the service does not answer.
    """
    found: dict[str, S3Object] = {}
    for uri in uris:
        for item in _expand(uri, suffixes, s3, credentials_dir):
            found.setdefault(item.name, item)
    return list(found.values())


def _expand(uri: str, suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None) -> list[S3Object]:
    from dlrm_stores.s3 import S3Store  # boto3 takes most of a second to load

    parts = urlsplit(uri, allow_fragments=False)
    bucket, key = parts.netloc, uri.removeprefix(f"s3://{parts.netloc}").lstrip("/")
    if not bucket:
        raise NoInputError(f"{uri}: no bucket: write s3://bucket/prefix")
    store = S3Store(bucket, "", StoreOptions(s3=s3, credentials_dir=credentials_dir, fields=FIELDS))
    magic = _MAGIC.search(key)
    prefix = key[: magic.start()] if magic else key.rstrip("/")
    listed = [item for item in _listed(store, prefix) if not item.key.endswith("/")]  # what marks a folder is no file
    if chosen := [item for item in listed if item.key == key]:
        return [S3Object(store, bucket, chosen[0])]
    if magic:
        wanted = _expression(key, uri)
        chosen = [item for item in listed if wanted.fullmatch(item.key)]
        problem = "no object matches the pattern"
    else:
        folder = f"{prefix}/" if prefix else ""
        chosen = [item for item in listed if item.key.startswith(folder) and _wanted(item.key[len(folder) :], suffixes)]
        problem = f"no such object, and below it is none that ends in {' or '.join(suffixes)}"
    if not chosen:
        raise NoInputError(f"{uri}: {problem}: check data.train.uris and data.eval.uris")
    return [S3Object(store, bucket, item) for item in chosen]


@retry(
    retry=retry_if_exception_type(StoreUnavailableError),
    stop=stop_after_delay(60),
    wait=wait_random_exponential(0.5, max=15),
    reraise=True,
)
def _listed(store: S3Store, prefix: str) -> list[ObjectInfo]:
    return list(store.list(prefix))


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    return name.endswith(tuple(suffixes)) and not any(map(is_passed_over, name.split("/")))


def _expression(pattern: str, uri: str) -> re.Pattern[str]:
    """A regular expression for a pattern, which means what it does of files.

    Raises:
        NoInputError: brackets hold no set of characters, or ``**`` is only a piece of a part.
    """
    *above, last = pattern_parts(pattern, uri)
    folders = "".join(_FOLDERS if part == ANY_DEPTH else f"{_of_part(part)}/" for part in above)
    try:
        return re.compile(folders + _of_part(last))
    except re.error as error:
        raise NoInputError(f"{uri}: no pattern ({error.msg}): mend what stands in its brackets") from error


def _of_part(part: str) -> str:
    return "".join(_PATTERNS.get(piece) or _of_piece(piece) for piece in re.split(rf"(\*|\?|{_SET.pattern})", part))


def _of_piece(piece: str) -> str:
    return piece.replace("\\", r"\\").replace("[!", "[^") if _SET.fullmatch(piece) else re.escape(piece)
