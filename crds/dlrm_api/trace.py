"""Row reuse of a data set, which ``dlrmctl trace`` measures and the planner sizes caches by."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from pydantic import Field, ValidationError

from dlrm_api.base import ApiModel, stopping_early
from dlrm_api.errors import invalid_spec
from dlrm_api.fields import Share

CACHE_SHARES = (0.01, 0.1, 0.5)
"""Caches, as shares of a table's rows, whose hit rates every curve holds."""


class ReuseBin(ApiModel):
    """Count rows with a similar number of lookups."""

    most: int | None = Field(ge=1, description="Maximum lookups of a row of this bin. None in the last bin.")
    rows: int = Field(ge=0, description="Distinct rows.")
    lookups: int = Field(ge=0, description="Lookups of these rows.")


class CurvePoint(ApiModel):
    """Give one point of a hit-rate curve."""

    cache_rows: int = Field(ge=1, description="Rows that the cache holds.")
    hit_rate: Share = Field(description="Share of accesses that find their row in the cache.")


class TableTrace(ApiModel):
    """Describe the row reuse of one table."""

    table: str = Field(description="Table.")
    rows: int = Field(ge=1, description="Rows of the table.")
    lookups: int = Field(ge=0, description="Lookups that were traced.")
    unique_rows: int = Field(
        ge=0, description="Distinct rows among them. Of a unique table: ids that got a row, each time that they did."
    )
    accesses: int = Field(ge=0, description="Distinct rows of each global batch, summed over batches.")
    sample_rate: float = Field(
        1.0, gt=0, le=1, description="Share of rows that were sampled. 1: unique rows, histogram and curve are exact."
    )
    histogram: tuple[ReuseBin, ...] = Field((), description="Rows and lookups by how often a row is looked up.")
    curve: tuple[CurvePoint, ...] = Field(
        (),
        description="Hit rate of a fully associative LRU cache by cache size (ascending), with one access per distinct "
        "row of a batch. First accesses count as misses. Valid for caches that hold at least the rows of one batch.",
    )

    def hit_rate(self, cache_rows: float) -> float:
        """Return the hit rate of a cache of that many rows: linear between points, constant after the last."""
        sizes = [point.cache_rows for point in self.curve]
        after = bisect_left(sizes, cache_rows)
        if after == len(sizes):
            return self.curve[-1].hit_rate if self.curve else 0.0
        before = self.curve[after - 1] if after else CurvePoint.model_construct(cache_rows=0, hit_rate=0.0)
        share = (cache_rows - before.cache_rows) / (sizes[after] - before.cache_rows)
        return before.hit_rate + share * (self.curve[after].hit_rate - before.hit_rate)


class Trace(ApiModel):
    """Result of one run of ``dlrmctl trace``."""

    format_version: Literal[1] = Field(1, description="Version of this document.")
    job: str | None = Field(None, description="Name of the traced job.")
    global_batch_size: int = Field(ge=1, description="Samples of a batch.")
    batches: int = Field(ge=1, description="Global batches that were traced.")
    tables: tuple[TableTrace, ...] = Field(description="Tables, in the model's order.")


def parse_trace(text: str | bytes) -> Trace:
    """Read a trace.

    Raises:
        InvalidSpecError: the text is not a trace of this version; names the field.
    """
    try:
        trace: Trace = stopping_early(Trace).validate_json(text)
    except ValidationError as error:
        raise invalid_spec(error, "trace") from error
    return trace
