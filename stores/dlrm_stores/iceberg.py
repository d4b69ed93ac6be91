"""Find the files of Iceberg tables at one snapshot.

The package pyiceberg reads the table's metadata. What would make its files give other rows than the table is refused by
name.
"""

from __future__ import annotations

import io
import re

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile
from pyiceberg.manifest import FileFormat, ManifestContent, ManifestFile
from pyiceberg.serializers import FromInputFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform

from dlrm_api.errors import BadDataError, DLRMError, NoInputError
from dlrm_stores.base import PARALLEL_GETS, parallel_map
from dlrm_stores.data_files import DataFile, TableColumns
from dlrm_stores.locations import Places, TableVersion, list_objects, plain_name, table_folder

ENDING = ".metadata.json"
_METADATA = re.compile(r"v?(\d+)(?:-[^/]*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
NO_SNAPSHOT = -1
"""Version of a table without rows."""


def find_iceberg(places: Places, uri: str, version: int | None) -> tuple[TableVersion, list[DataFile]]:
    """List the files of a table at a snapshot, by default its current one.

    ``uri`` names the table's folder, or a file of metadata as catalogs give it.

    Raises:
        NoInputError: no table is there, the snapshot has expired, or a file is gone.
        NoPermissionError: metadata or files cannot be read.
        BadDataError: the metadata is damaged, or the table has a feature that is not supported.
        StoreUnavailableError: the S3 service does not answer.
    """
    where = table_folder(uri)
    if not where.endswith(ENDING):
        where = _newest_metadata(places, uri, where)
    reader = _Reader(places)
    try:
        metadata = FromInputFile.table_metadata(reader.new_input(where))
        newest = metadata.current_snapshot_id or NO_SNAPSHOT
        read = TableVersion(uri=uri, version=newest if version is None else version, newest=newest)
        if read.version == NO_SNAPSHOT:
            return read, []
        if (snapshot := metadata.snapshot_by_id(read.version)) is None:
            raise NoInputError(
                f"{uri}: snapshot {read.version} has expired; restore it, or set another spec.checkpoint.uri to start "
                "from step 0 with the current one"
            )
        sizes = _sizes(uri, snapshot.manifests(reader), reader)
    except DLRMError:
        raise
    except Exception as error:  # pyiceberg passes on what its parts raise, zlib.error and SystemError among them
        reason = str(error).partition("\n")[0]
        raise BadDataError(f"{where}: damaged, or an Iceberg format that is not supported: {reason}") from error
    return read, places.files(sizes, uri, _columns(metadata, snapshot))


def _newest_metadata(places: Places, uri: str, folder: str) -> str:
    store, key = places.store(f"{folder}/metadata/")
    names = [item.key.removeprefix(key) for item in list_objects(store, key)]
    numbered = [(int(match[1]), name) for name in names if (match := _METADATA.fullmatch(name))]
    if not numbered:
        problem = f"Iceberg table not found: {uri} has no metadata/*{ENDING}"
        raise NoInputError(f"{problem}; check data.train.uris and data.eval.uris")
    newest = max(number for number, _ in numbered)
    candidates = sorted(name for number, name in numbered if number == newest)
    if len(candidates) > 1:
        raise BadDataError(
            f"{uri}: two files of metadata are the newest: {' and '.join(candidates)}; give the one that the catalog "
            "names as URI"
        )
    return f"{folder}/metadata/{candidates[0]}"


def _sizes(uri: str, manifests: list[ManifestFile], reader: _Reader) -> dict[str, int]:
    """Return the sizes of a snapshot's data files by name."""
    for manifest in manifests:
        has_files = manifest.has_added_files() or manifest.has_existing_files()
        if manifest.content == ManifestContent.DELETES and has_files:
            raise BadDataError(
                f"{uri}: delete files are not supported: the data files hold rows that were deleted; compact the table "
                "with the procedure rewrite_data_files and delete-file-threshold 1"
            )
    sizes: dict[str, int] = {}
    data = [manifest for manifest in manifests if manifest.content == ManifestContent.DATA]
    for entries in parallel_map(lambda manifest: manifest.fetch_manifest_entry(reader), data, PARALLEL_GETS):
        for file in (entry.data_file for entry in entries):
            if file.file_format != FileFormat.PARQUET:
                raise BadDataError(f"{file.file_path}: {file.file_format} files are not supported; write Parquet")
            sizes[plain_name(file.file_path)] = file.file_size_in_bytes
    return sizes


def _columns(metadata: TableMetadata, snapshot: Snapshot) -> TableColumns:
    schemas = {schema.schema_id: schema for schema in metadata.schemas}
    schema = schemas.get(metadata.current_schema_id if snapshot.schema_id is None else snapshot.schema_id)
    ids = {field.name: field.field_id for field in (schema or metadata.schema()).fields}
    sources = {
        field.source_id
        for spec in metadata.partition_specs
        for field in spec.fields
        if isinstance(field.transform, IdentityTransform)
    }
    return TableColumns(partitioned_by=frozenset(name for name, each in ids.items() if each in sources), ids=ids)


class _Reader(FileIO):
    """Let pyiceberg read through our stores: it knows neither our credentials nor our CA."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def new_input(self, location: str) -> InputFile:
        return _Input(location, self.places)

    def new_output(self, location: str) -> OutputFile:
        raise io.UnsupportedOperation(f"read-only: {location}")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise io.UnsupportedOperation(f"read-only: {location}")


class _Input(InputFile):
    """Read one file of metadata."""

    def __init__(self, location: str, places: Places) -> None:
        super().__init__(location)
        self._store, self._key = places.store(plain_name(location))

    def __len__(self) -> int:
        return self._store.size(self._key) or 0

    def exists(self) -> bool:
        return self._store.size(self._key) is not None

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002  memory is seekable
        return io.BytesIO(self._store.get(self._key))
