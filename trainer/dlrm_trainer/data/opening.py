"""Opens the reader that a job's spec asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from dlrm_api.data import DataSpec
from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.objects import is_s3
from dlrm_trainer.data.batch import NoSamples, RowSource
from dlrm_trainer.data.criteo import SUFFIXES as CRITEO_SUFFIXES
from dlrm_trainer.data.criteo import CriteoSource
from dlrm_trainer.data.files import DataFile, LocalFile
from dlrm_trainer.data.line_index import default_cache_folder
from dlrm_trainer.data.lookups import hashing_of
from dlrm_trainer.data.parquet import SUFFIXES as PARQUET_SUFFIXES
from dlrm_trainer.data.parquet import ParquetSource
from dlrm_trainer.data.reader import Reader, Split, sample_order, source_share
from dlrm_trainer.data.row_group import Columns
from dlrm_trainer.data.synthetic import SyntheticSource
from dlrm_trainer.data.uris import find_files
from dlrm_trainer.settings import read_settings

LOCAL_THREADS, REMOTE_THREADS = 2, 4
NAMED = 3
"""URIs of many that a message names."""


def open_reader(
    spec: DLRMJobSpec, split: Split, rank: int, world_size: int, cache_folder: Path | None = None
) -> Reader:
    """Open one rank's view of a split; every rank must open it with the same spec.

    An evaluation split without URIs has no samples. Line indexes are kept in ``cache_folder``; by default in a folder
    of this user's among the temporary files.

    Raises:
        NoInputError: a file is not there.
        NoPermissionError: a file can't be read.
        BadDataError: the data can't be used; the message names the file, the row or column, and the mend.
    """
    source = _source(spec, split, cache_folder or default_cache_folder())
    if split == "train" and not source.num_samples:
        raise BadDataError(f"{_first_few(spec.data.train.uris)}: the training data has no rows: check data.train.uris")
    return Reader(
        source,
        sample_order(spec, split, source.num_samples),
        spec.model,
        len(spec.model.dense_features),
        spec.data.dense,
        rank,
        world_size,
        int(spec.data.prefetch_bytes),
    )


def _source(spec: DLRMJobSpec, split: Split, cache_folder: Path) -> RowSource:
    data = spec.data
    if data.format == "synthetic":
        return SyntheticSource(spec, split)
    uris = data.train.uris if split == "train" else data.eval.uris
    if not uris:
        return NoSamples()
    dense, features = spec.model.dense_features, spec.model.all_features()
    tables = spec.model.all_tables()
    bags, weights = [each.column for each in features], [each.weights for each in features]
    budget = source_share(int(data.prefetch_bytes))
    if data.format == "criteo-tsv":
        files = _files(data, uris, CRITEO_SUFFIXES)
        return CriteoSource(files, dense, bags, data.lenient, cache_folder, budget, _threads(uris))
    _check_renames(data.columns.rename, {*dense, *bags, *filter(None, weights)})
    rename = data.columns.rename
    columns = Columns(
        label=data.columns.label,
        dense=[rename.get(name, name) for name in dense],
        bags=[rename.get(name, name) for name in bags],
        weights=[rename.get(name, name) if name else None for name in weights],
        hashings=[hashing_of(tables[each.table]) for each in features],
    )
    return ParquetSource(_files(data, uris, PARQUET_SUFFIXES), columns, budget, _threads(uris))


def _files(data: DataSpec, uris: Sequence[str], suffixes: Sequence[str]) -> list[DataFile]:
    """Files that the URIs name, in order of name."""
    local = [uri for uri in uris if not is_s3(uri)]
    files: list[DataFile] = [LocalFile(path) for path in find_files(local, suffixes)]
    if len(local) < len(uris):
        from dlrm_trainer.data.objects import find_objects  # only where it is needed: it loads the store

        remote = [uri for uri in uris if is_s3(uri)]
        files += find_objects(remote, suffixes, data.s3, read_settings().data_credentials_dir)
    return sorted(files, key=lambda file: file.path)


def _first_few(uris: Sequence[str]) -> str:
    rest = len(uris) - NAMED
    return ", ".join(uris[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _threads(uris: Sequence[str]) -> int:
    """That make blocks ahead. More where files are elsewhere: they mostly wait for answers."""
    return REMOTE_THREADS if any(map(is_s3, uris)) else LOCAL_THREADS


def _check_renames(rename: Mapping[str, str], features: Set[str]) -> None:
    unknown = sorted(set(rename) - features)
    if unknown:
        raise InvalidSpecError(
            f"spec.data.columns.rename.{unknown[0]}",
            f"the model has no feature {unknown[0]}: it has {', '.join(sorted(features)[:20])}",
        )
