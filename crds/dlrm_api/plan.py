"""The plan: which rows and columns of which table live on which rank, in which tier. Plain data, made once."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from dlrm_api.base import ApiModel, stopping_early
from dlrm_api.errors import InvalidSpecError, invalid_spec
from dlrm_api.tiers import Tier

Device = Literal["cpu", "cuda"]
ShardKind = Literal["table", "row", "column", "data", "table-row"]

PART_BYTES = 900_000
"""A ConfigMap holds 1 MiB; a part leaves room for the rest of the object."""
PART = re.compile(r"plan\.([0-9a-f]{16})\.([0-9]{1,4})-of-([0-9]{1,4})\.gz")
"""Key of a part: digest, number and how many there are."""
MOST_SHARDS = 2**16
"""Of one plan, all tables together; with four levels each they take nearly all of MOST_PLAN_BYTES."""
MOST_PLAN_BYTES = 2**25
"""Of a plan as text; whatever a ConfigMap holds, no more is unpacked."""
MOST_SUMMARY_BYTES = 2**22
"""Of a plan's text without its tables: ranks take some 60 bytes each."""
TABLES, AFTER_TABLES = b'"tables":[', b'],"lookahead":'


class TierLevel(ApiModel):
    """One level of a shard's stack."""

    tier: Tier = Field(description="Memory that it lies in.")
    rows: int = Field(ge=1, description="Rows that it may hold.")
    expected_hit_rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Share of accesses, one for each distinct row of a batch, that this level and those above are expected "
            "to serve; None where nothing is known."
        ),
    )


class TierShare(ApiModel):
    """Where the rows of one shard live. Each of its column blocks has levels of its own, of these sizes."""

    levels: tuple[TierLevel, ...] = Field(
        (),
        max_length=4,
        description=(
            "Levels, fastest first; together they hold every row, and a row is in one of them at a time. The kernels "
            "compute on the first. The last has a place for every row, even where the first holds them all; hbm alone "
            "holds all. Empty: all rows are in host memory; those of data shards where ranks compute."
        ),
    )
    policy: Literal["lru", "lfu", "mixed"] = Field("lru", description="Which row leaves the first level.")
    ways: int = Field(0, ge=0, le=1_024, description="Slots of a set of the first level; 0: fully associative.")

    @property
    def is_stack(self) -> bool:
        """Whether rows move between levels."""
        return len(self.levels) > 1


class Shard(ApiModel):
    """A rectangle of one table on one rank; a ``data`` shard is the whole table, and stands for one on each rank."""

    rank: int = Field(ge=0, description="Rank that holds it; 0 of a data shard, which each rank holds.")
    kind: ShardKind = Field(description="How the table was split.")
    row_start: int = Field(ge=0, description="First global row.")
    row_end: int = Field(ge=0, description="One past the last global row.")
    column_start: int = Field(ge=0, description="First column.")
    column_end: int = Field(ge=0, description="One past the last column.")
    tiers: TierShare = Field(TierShare(), description="Where its rows live.")


class TablePlan(ApiModel):
    """The shards of one table."""

    name: str = Field(description="Table.")
    column_blocks: tuple[int, ...] = Field(
        description="Edges of the column blocks that each keep a row state of their own: (0, dim) for one block."
    )
    shards: tuple[Shard, ...] = Field(min_length=1, description="Shards.")


class RankPlan(ApiModel):
    """One rank: its node and the bytes that it will hold."""

    rank: int = Field(ge=0, description="Rank.")
    node: int = Field(ge=0, description="Index of its pod in the gang.")
    bytes_per_tier: dict[str, int] = Field(
        description=(
            "Bytes of rows, row state, maps, vectors of ranges of rows and hand-off, by tier; in hbm all that the rank "
            "takes of its GPU's memory."
        )
    )


class Prediction(ApiModel):
    """What the plan's cost model expects of one step."""

    compute_seconds: float | None = Field(None, ge=0, description="Dense compute of the slowest rank (s).")
    lookup_seconds: dict[str, float] = Field({}, description="Lookups and updates of the slowest rank, by tier (s).")
    communication_seconds: float | None = Field(None, ge=0, description="Exposed communication (s).")
    samples_per_second: float | None = Field(None, ge=0, description="Throughput (samples/s).")
    price_per_billion_samples: float | None = Field(None, ge=0, description="Price of 1e9 samples.")
    imbalance: float = Field(1.0, ge=0, description="Cost of the slowest rank over the mean.")


class Plan(ApiModel):
    """The whole plan of one attempt."""

    format_version: Literal[1] = Field(1, description="Version of this document.")
    world_size: int = Field(ge=1, description="Ranks.")
    processes_per_node: int = Field(ge=1, description="Ranks of one pod.")
    hardware: str = Field("", description="HardwareProfile that it was made for.")
    device: Device = Field(
        "cpu",
        description=(
            "Where ranks compute: cuda on a GPU of each process's own, which slots in hbm need; cpu on the host."
        ),
    )
    ranks: tuple[RankPlan, ...] = Field(description="Ranks, in order.")
    tables: tuple[TablePlan, ...] = Field(description="Tables, in the model's order.")
    lookahead: int = Field(
        0, ge=0, le=8, description="Batches whose rows are fetched ahead of the one that is computed."
    )
    handoff_bytes: tuple[int, ...] = Field(description="Budget of shared memory for cuts, by pod (bytes).")
    predicted: Prediction = Field(Prediction(), description="What the cost model expects.")
    reasons: tuple[str, ...] = Field((), description="Why the plan is as it is, in words.")

    @property
    def nodes(self) -> int:
        """Pods of the gang."""
        return self.world_size // self.processes_per_node


def parse_plan(text: str | bytes) -> Plan:
    """Read a plan.

    Raises:
        InvalidSpecError: the text is no plan of this version; names the field.
    """
    try:
        plan: Plan = stopping_early(Plan).validate_json(text)
    except ValidationError as error:
        raise invalid_spec(error, "plan") from error
    return plan


def plan_to_parts(plan: Plan) -> dict[str, bytes]:
    """Compress a plan and cut it into parts that each fit a ConfigMap; keys are ``plan.<sha256>.<i>-of-<n>.gz``.

    Equal plans give equal bytes, so that a repeated turn of the operator writes what is already there.

    Raises:
        InvalidSpecError: the plan is larger than what is read back.
    """
    text = plan.model_dump_json(exclude_defaults=False).encode()
    for size, most, what in (
        (len(text), MOST_PLAN_BYTES, f"the plan of {sum(len(table.shards) for table in plan.tables)} shards"),
        (len(_without_tables(text)), MOST_SUMMARY_BYTES, f"the plan's list of {plan.world_size} ranks"),
    ):
        if size > most:
            raise InvalidSpecError(
                "spec.trainer", f"{what} takes {size} bytes, at most {most} are kept: use fewer ranks"
            )
    body = gzip.compress(text, mtime=0)
    digest = hashlib.sha256(body).hexdigest()[:16]
    pieces = [body[i : i + PART_BYTES] for i in range(0, len(body), PART_BYTES)]
    return {f"plan.{digest}.{i}-of-{len(pieces)}.gz": piece for i, piece in enumerate(pieces)}


def plan_from_parts(parts: Mapping[str, bytes]) -> Plan:
    """Join what :func:`plan_to_parts` cut.

    Raises:
        InvalidSpecError: a part is missing, its bytes are not those that were written, or they are no plan.
    """
    return parse_plan(_joined(parts))


def plan_without_tables(parts: Mapping[str, bytes]) -> Plan:
    """The same with no tables: all that the operator needs, in a fraction of the time and memory.

    Raises:
        InvalidSpecError: as of :func:`plan_from_parts`.
    """
    text = _without_tables(_joined(parts))
    if len(text) > MOST_SUMMARY_BYTES:
        raise _damaged(f"without its tables it takes {len(text)} bytes, at most {MOST_SUMMARY_BYTES} are read")
    return parse_plan(text)


def _joined(parts: Mapping[str, bytes]) -> bytes:
    """The text of a plan, however it was put into its parts."""
    if not parts:
        raise InvalidSpecError("plan", "no part of the plan is there: mount all of its ConfigMaps")
    found: dict[int, str] = {}
    kinds = set[tuple[str, int]]()
    for name in parts:
        key = PART.fullmatch(name)
        if key is None:
            raise _damaged(f"{name[:100]!r} is no name of a part")
        found[int(key[2])] = name
        kinds.add((key[1], int(key[3])))
    digest, total = min(kinds)
    body = b"".join(parts[found[number]] for number in sorted(found))
    whole = len(kinds) == 1 and sorted(found) == list(range(total)) and len(parts) == total
    if not whole or hashlib.sha256(body).hexdigest()[:16] != digest:
        raise InvalidSpecError("plan", f"{len(parts)} of {total} parts are there, or one is damaged: write them again")
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = unpacking.decompress(body, MOST_PLAN_BYTES + 1)
    except zlib.error as error:
        raise _damaged(f"its parts can't be unpacked ({error})") from error
    if len(text) > MOST_PLAN_BYTES:
        raise _damaged(f"it takes more than {MOST_PLAN_BYTES} bytes")
    if not unpacking.eof:
        raise _damaged("its parts end too soon")
    return text


def _without_tables(text: bytes) -> bytes:
    """The text that :func:`plan_to_parts` wrote, its list of tables emptied: in strings, quotes would be escaped."""
    start, end = text.find(TABLES), text.rfind(AFTER_TABLES)
    return text[: start + len(TABLES)] + text[end:] if 0 <= start < end else text


def _damaged(how: str) -> InvalidSpecError:
    return InvalidSpecError("plan", f"the plan is damaged: {how}: delete its ConfigMaps, and the operator plans anew")
