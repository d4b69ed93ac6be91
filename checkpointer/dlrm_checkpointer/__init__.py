"""Make consistent cuts of a training job durable snapshots in object storage, and read them back.

Other packages import these names and no submodule.
"""

from dlrm_checkpointer.codec.digest import (
    PartialDigest,
    add_digests,
    rows_digest,
    shard_digest,
    state_digest,
    table_digest,
)
from dlrm_checkpointer.codec.initializer import id_seed, initial_rows, table_key, table_scale
from dlrm_checkpointer.codec.rows import CodedRows, decode_rows, place_weights
from dlrm_checkpointer.format.attempts import (
    JobIdentity,
    claim_attempt,
    find_attempt,
    is_claimed,
    last_attempt,
    newest_attempt,
    read_attempts,
)
from dlrm_checkpointer.format.chain import Chain, load_chain
from dlrm_checkpointer.format.data_index import DataIndex, file_identity, index_fingerprint, put_index, read_index
from dlrm_checkpointer.format.documents import get_document, put_document
from dlrm_checkpointer.format.manifest import ChainLink, ObjectEntry, manifest_key
from dlrm_checkpointer.handoff.cut import Cut, CutWithdrawnError, HandedOver
from dlrm_checkpointer.handoff.protocol import HandoffDir
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.publish.follower import Follower
from dlrm_checkpointer.read.catalog import (
    ListedSnapshot,
    VerifiedSnapshot,
    find_snapshot,
    list_snapshots,
    pick_snapshot,
    verify_snapshot,
    walk_table,
)
from dlrm_checkpointer.read.diff import TableDiff, diff_snapshots
from dlrm_checkpointer.read.export import (
    ExportOptions,
    Precision,
    Safetensors,
    TableFile,
    TableFormat,
    export_tables,
    restore_to_folder,
    select_tables,
)
from dlrm_checkpointer.read.fetch import Check, check_bytes
from dlrm_checkpointer.read.restore import (
    PARALLEL_DECODES,
    PartialCut,
    PartialSnapshot,
    Snapshot,
    find_partial,
    newest_snapshot,
    open_partial,
)
from dlrm_checkpointer.settings import PUBLISH_FIELDS, open_publish_store, read_job, store_options
from dlrm_checkpointer.types import (
    PEERS_TIMEOUT_S,
    CutMeta,
    CutRows,
    CutRowSource,
    CutSize,
    GoneRows,
    ShardId,
    ShardRows,
    SnapshotName,
    TableMeta,
    load_rows,
)
from dlrm_checkpointer.write.convert import Conversion, ConvertedTable, convert_snapshot
from dlrm_checkpointer.write.retention import Retention, RetentionPlan, RetentionPolicy

__all__ = [
    "PARALLEL_DECODES", "PEERS_TIMEOUT_S", "PUBLISH_FIELDS", "Chain", "ChainLink", "Check", "CodedRows", "Conversion",
    "ConvertedTable", "Cut", "CutMeta", "CutRowSource", "CutRows", "CutSize", "CutWithdrawnError", "DataIndex",
    "ExportOptions", "Follower", "GoneRows", "HandedOver", "HandoffDir", "HandoffWriter", "JobIdentity",
    "ListedSnapshot", "ObjectEntry", "PartialCut", "PartialDigest", "PartialSnapshot", "Precision", "Retention",
    "RetentionPlan", "RetentionPolicy", "Safetensors", "ShardId", "ShardRows", "Snapshot", "SnapshotName", "TableDiff",
    "TableFile", "TableFormat", "TableMeta", "VerifiedSnapshot", "add_digests", "check_bytes", "claim_attempt",
    "convert_snapshot", "decode_rows", "diff_snapshots", "export_tables", "file_identity", "find_attempt",
    "find_partial", "find_snapshot", "get_document", "id_seed", "index_fingerprint", "initial_rows", "is_claimed",
    "last_attempt", "list_snapshots", "load_chain", "load_rows", "manifest_key", "newest_attempt", "newest_snapshot",
    "open_partial", "open_publish_store", "pick_snapshot", "place_weights", "put_document", "put_index",
    "read_attempts", "read_index", "read_job", "restore_to_folder", "rows_digest", "select_tables", "shard_digest",
    "state_digest", "store_options", "table_digest", "table_key", "table_scale", "verify_snapshot", "walk_table",
]  # fmt: skip
