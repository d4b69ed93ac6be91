"""``spec.data``: the source, format and order of samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from dlrm_api.base import RULES, ApiModel, Rule
from dlrm_api.fields import BatchSize, Bytes, LocalPath, ObjectName, S3Spec, Share, Uri, file_path, is_s3
from dlrm_api.model import ColumnName

REMOTE_THREADS = 4
"""Threads of a rank that read blocks of rows of remote files ahead: they mostly wait for answers."""
MAX_VIRTUAL_SHARDS = 65_536


def _readable(uri: str) -> str:
    if not is_s3(uri) and file_path(uri) is None:
        raise PydanticCustomError("rule", "{message}", {"message": READABLE["message"]})
    return uri


READABLE = {
    "rule": "!self.contains('://') || self.startsWith('s3://') || self.startsWith('file:///') || "
    "self.startsWith('file://localhost/')",
    "message": "expected a path, file:///path or s3://bucket/prefix",
}
DataUri = Annotated[Uri, AfterValidator(_readable), Field(json_schema_extra={RULES: [READABLE]})]


class SplitSpec(ApiModel):
    """List the files of one split."""

    uris: tuple[DataUri, ...] = Field(
        (),
        max_length=10_000,
        description="Files, directories or glob patterns: file:///data/*.parquet, s3://bucket/prefix/*.parquet or a "
        "plain path. They are read in the order of their names.",
    )


class SyntheticSpec(ApiModel):
    """Configure generated samples of the model's shape, with labels from a hidden teacher model."""

    samples: int = Field(1_000_000, ge=1, le=2**40, description="Training samples per epoch.")
    eval_samples: int = Field(100_000, ge=0, le=2**40, description="Samples of the evaluation set.")
    alpha: float = Field(1.05, ge=0, le=3, description="Zipf exponent of the ids. Used if reuseHistogram is absent.")
    reuse_histogram: LocalPath | None = Field(None, description="File with a reuse histogram from which ids are drawn.")
    ids_per_row: float = Field(
        1.0,
        ge=1e-6,
        le=1e6,
        description="Distinct ids in use at once, per row of the table. Tables with embedding.hash none ignore it: "
        "their ids are row numbers.",
    )
    drift: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="How often each of these ids is replaced by a new one in an epoch, on average, after a random "
        "time. Evaluation samples have the ids of the epoch's end. Needs shuffle.windowRows 0.",
    )
    noise: float = Field(0.5, ge=0, le=100, description="Standard deviation of the noise on the teacher's logit.")
    positive_rate: float = Field(0.25, ge=0.001, le=0.999, description="Approximate share of positive labels.")


class ShuffleSpec(ApiModel):
    """Configure the shuffle: a pure function of seed and epoch, the same at any world size."""

    window_rows: int = Field(
        65_536,
        ge=0,
        le=2**31,
        description="Rows shuffled together in each virtual shard. 0 keeps the order of the files.",
    )
    block_rows: int = Field(
        4_096, ge=1, le=2**31, description="Rows per block. Blocks are permuted before rows are shuffled."
    )


class ColumnsSpec(ApiModel):
    """Map features to columns of Parquet files and tables."""

    label: ColumnName = Field("label", description="Column of the label, which is 0 or 1.")
    rename: dict[str, ColumnName] = Field(
        {}, max_length=10_000, description="Column of each feature, if named differently."
    )


class DenseInputSpec(ApiModel):
    """Configure the transform of dense values before the bottom MLP."""

    transform: Literal["none", "log1p"] = Field(
        "none", description="log1p: log(1 + max(x, 0)), as is usual for the counts in Criteo data."
    )
    missing: float = Field(0.0, ge=-1e9, le=1e9, description="Value of an empty field, before the transform.")


class BadRowsSpec(ApiModel):
    """Configure what follows a row that cannot be used.

    Such a row has a field that cannot be parsed or is out of range, a label other than 0 or 1, an id outside its table
    (``embedding.hash: none``), or a bag above ``maxLookups``.
    """

    action: Literal["fail", "skip", "truncate"] = Field(
        "fail",
        description="fail: the job fails and names the row. skip: the row takes no part in its batch, whose loss is "
        "still divided by all of its rows; all other rows keep their places. truncate: a bag keeps its first "
        "maxLookups ids; rows with any other defect are skipped. A damaged file or row group fails the job in any "
        "case.",
    )
    max_fraction: Share = Field(
        0.001,
        description="Largest share of skipped and truncated rows among all rows trained on so far, over all attempts "
        "(at least 10,000 rows or an epoch's are assumed). Beyond it the job fails and names the first ones. An "
        "evaluation fails by the share of its own rows that are skipped.",
    )


class DataSpec(ApiModel):
    """Configure the source, format and order of samples."""

    format: Literal["criteo-tsv", "delta", "iceberg", "parquet", "synthetic"] = Field(
        description="Format of the samples. delta, iceberg: each URI is the folder of a table, for iceberg also a "
        "metadata.json; the job keeps the version at which it started."
    )
    train: SplitSpec = Field(SplitSpec(), description="Files to train on.")
    eval: SplitSpec = Field(SplitSpec(), description="Files to evaluate on.")
    synthetic: SyntheticSpec = Field(SyntheticSpec(), description="Properties of synthetic data.")
    new_files: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="Files, or versions of a table, that appear after the first snapshot. ignore: those of the "
        "snapshot remain the data set; refuse: the job fails and names them.",
    )
    columns: ColumnsSpec = Field(ColumnsSpec(), description="Column mapping, for Parquet, Delta and Iceberg.")
    dense: DenseInputSpec = Field(DenseInputSpec(), description="Transform of dense values.")
    lenient: bool = Field(False, description="criteo-tsv: accept lines that lack trailing empty fields.")
    bad_rows: BadRowsSpec = Field(BadRowsSpec(), description="Rows that cannot be used.")
    epochs: int = Field(1, ge=1, le=100_000, description="Passes over the training data.")
    shuffle: ShuffleSpec = Field(ShuffleSpec(), description="Shuffling of samples.")
    global_batch_size: BatchSize = Field(2_048, description="Samples per step over all ranks.")
    virtual_shards: int | None = Field(
        None,
        ge=1,
        le=MAX_VIRTUAL_SHARDS,
        description="Number of equal parts of the data, and the maximum number of ranks. Must divide globalBatchSize. "
        "Default: the plan chooses it by globalBatchSize and the number of ranks, 64 for small jobs. It then stays for "
        "the job's life: status.plan.virtualShards.",
    )
    prefetch_bytes: Bytes = Field(
        2**30,
        description="Memory of each rank's reader for decoded row groups and batches (bytes). If it is smaller than "
        "what one batch touches in all virtual shards of a rank, row groups are decoded repeatedly.",
    )
    credentials_secret: ObjectName | None = Field(
        None, description="Secret with accessKeyId, secretAccessKey and optionally sessionToken for s3:// data."
    )
    s3: S3Spec = Field(S3Spec(), description="Service of s3:// data.")

    rules = (
        Rule(
            cel="!has(self.virtualShards) || self.globalBatchSize % self.virtualShards == 0",
            holds=lambda data: data.virtual_shards is None or data.global_batch_size % data.virtual_shards == 0,
            message="virtualShards must divide globalBatchSize: change one of them",
        ),
        Rule(
            cel="self.format == 'synthetic' || (has(self.train) && has(self.train.uris) && size(self.train.uris) > 0)",
            holds=lambda data: data.format == "synthetic" or bool(data.train.uris),
            message="train.uris is empty: set it, or use format synthetic",
        ),
        Rule(
            cel="self.format != 'synthetic' || "
            "(!(has(self.train) && has(self.train.uris) && size(self.train.uris) > 0) && "
            "!(has(self.eval) && has(self.eval.uris) && size(self.eval.uris) > 0))",
            holds=lambda data: data.format != "synthetic" or not (data.train.uris or data.eval.uris),
            message="format synthetic reads no files: remove train.uris and eval.uris, or set the format of the files "
            "(criteo-tsv, delta, iceberg or parquet)",
        ),
        Rule(
            cel="self.format != 'synthetic' || self.synthetic.drift == 0.0 || self.shuffle.windowRows == 0",
            holds=lambda data: data.format != "synthetic" or not (data.synthetic.drift and data.shuffle.window_rows),
            message="synthetic.drift needs samples in the order of time: set shuffle.windowRows to 0",
        ),
    )
