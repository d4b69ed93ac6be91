"""Predicted times, from the profile's rates by hand."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import ModelSpec
from dlrm_api.trace import TableTrace
from dlrm_api.wire import CODECS, Codec
from dlrm_planner import plan_job
from dlrm_planner.choose import choose, read_problem
from dlrm_planner.estimate import PartCost, read_costs
from dlrm_planner.hit_rates import collisions
from dlrm_planner.predict import Solution
from dlrm_planner.rates import read_rates
from dlrm_planner.write import write_plan

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]

RATES: dict[str, Any] = {
    "flopsPerSecond": 1e9,
    "network": {"intraNodeBytesPerSecond": 1e9, "interNodeBytesPerSecond": 1e8},
    "pricePerHour": 3.6,
}
DDR = {"bytes": "64Gi", "readBytesPerSecond": 1e9, "writeBytesPerSecond": 5e8}
TABLES = [{"name": f"t{i}", "rows": 10**6, "dim": 16, "maxLookups": 2} for i in range(2)]
DENSE = (2 * 32 * 1 + 32) + (32 + 1)
"""Weights of one cross layer of rank 1 over two tables of 16, and of a top MLP of one layer."""


def test_times_of_one_rank(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile(DDR, **RATES)

    predicted = plan_job(make_spec(TABLES, batch=1_024), profile).predicted

    compute = 6 * 1_024 * DENSE / 1e9
    loops, id_times = read_rates(profile, 1, 1, None).alone, (10**6 * 16 * 4 / 2**24) ** 0.15
    id_s, value_s, bag_s = loops.looked_up
    assert value_s == pytest.approx(4 * (2 / 1e9 + 1 / 5e8))
    lookups = 2 * (1_024 * (2 * (id_s * id_times + 16 * value_s) + bag_s) + loops.part_s)
    assert predicted.compute_seconds == pytest.approx(compute)
    assert predicted.lookup_seconds == {"ddr": pytest.approx(lookups)}
    assert predicted.communication_seconds == 0
    assert predicted.step_seconds is not None
    assert predicted.step_seconds > compute + lookups  # and interpreted code
    assert predicted.samples_per_second == pytest.approx(1_024 / predicted.step_seconds)
    price = 3.6 / 3_600 * 1e9 / (1_024 / predicted.step_seconds)
    assert predicted.price_per_billion_samples == pytest.approx(price)


@pytest.mark.parametrize(("alpha", "ranks"), [(1.05, 2), (1.05, 4), (0.8, 8), (0.0, 4)])
def test_the_busiest_range_of_rows_exceeds_its_mean_as_scattered_hot_rows_make_it(
    make_spec: MakeSpec, alpha: float, ranks: int
) -> None:
    rows, draw = 20_000, np.random.default_rng(0)
    table = {"name": "t", "rows": rows, "dim": 16, "maxLookups": 4, "distribution": {"prior": "zipf", "alpha": alpha}}
    spec = make_spec([{**table, "pin": {"sharding": "row"}}], batch=1_024, replicas=ranks)
    found = choose(read_problem(spec, None, {}))
    assert isinstance(found, Solution)
    shapes = found.placement.shards.shapes
    of_ids_s = found.costs.of_ids_s(shapes.table, shapes.share, shapes.width, shapes.blocks)

    excess = found.costs.excess_s(found.placement, of_ids_s) / found.placement.by_rank(of_ids_s, ranks)

    popularity = np.arange(1, rows + 1) ** -alpha
    popularity /= popularity.sum()
    drawn = [draw.permutation(popularity).reshape(ranks, -1).sum(axis=1).max() * ranks - 1 for _ in range(300)]
    assert excess == pytest.approx(np.mean(drawn), rel=0.25, abs=0.01)


def test_a_trace_says_how_uneven_ranges_are(make_spec: MakeSpec) -> None:
    spec = make_spec([{"name": "t", "rows": 100, "dim": 16, "distribution": {"reference": "file:///t"}}])
    bins = ({"most": 1, "rows": 40, "lookups": 40}, {"most": None, "rows": 2, "lookups": 60})
    trace = TableTrace(table="t", rows=100, lookups=100, unique_rows=42, accesses=42, histogram=bins)

    assert collisions(read_problem(spec, None, {"t": trace})) == pytest.approx(40 * 0.01**2 + 2 * 0.3**2 - 1 / 100)


def test_ids_take_longer_in_larger_tables_within_bounds(make_spec: MakeSpec) -> None:
    rows = [10**4, 10**5, 10**6, 10**7, 10**8, 10**9]
    tables = [{"name": f"t{count}", "rows": count, "dim": 16, "maxLookups": 1} for count in rows]

    costs = read_costs(read_problem(make_spec(tables), None, {}))

    times = costs.lookup_s(np.arange(len(rows)), 1.0, costs.dims, costs.blocks)
    assert (np.diff(times) > 0).tolist() == [True, True, True, True, False]
    assert times[-1] < 3 * times[0]


def test_projections_cost_a_product_for_each_feature_and_travel_once(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    table = {"name": "t", "rows": 10**6, "dim": 8, "project": True, "features": ["a", "b"]}
    model = ModelSpec.model_validate({"tables": [table], "denseFeatures": ["x"], "bottomMlp": [16], "topMlp": [1]})
    spec = make_spec(TABLES, batch=1_024, replicas=2).model_copy(update={"model": model})

    predicted = plan_job(spec, make_profile(DDR, **RATES)).predicted

    mlps, dot = 2 * 16 + (16 + 3 + 1), 3**2 * 16
    assert predicted.compute_seconds == pytest.approx(6 * 512 * (mlps + dot + 2 * 8 * 16) / 1e9)
    exchanged = 1_024 * 2 * (4 + 1 + 2 * 8 * 4) / 2
    assert predicted.communication_seconds == pytest.approx((exchanged + 4 * (mlps + 8 * 16)) / 1e8)


@pytest.mark.parametrize(("trainer", "rate"), [({"processesPerReplica": 2}, 1e9), ({"replicas": 2}, 1e8)])
def test_communication_of_two_ranks_takes_the_link_between_them(
    make_spec: MakeSpec, make_profile: MakeProfile, trainer: dict[str, int], rate: float
) -> None:
    predicted = plan_job(make_spec(TABLES, batch=1_024, **trainer), make_profile(DDR, **RATES)).predicted

    exchanged = 1_024 * (2 * 4 + 1 + 2 * 16 * 4) / 2  # ids of four bytes, a length of one, a vector there and back
    reduced = 4 * DENSE
    assert predicted.communication_seconds == pytest.approx((exchanged + reduced) / rate)


def test_ranks_of_a_node_share_its_link_and_pass_messages_on_inside(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    tables = [{**TABLES[0], "pin": {"sharding": "table", "ranks": [rank]}} for rank in (0, 1)]
    tables = [{**table, "name": f"t{i}"} for i, table in enumerate(tables)]
    spec = make_spec(tables, batch=1_024, replicas=2, processesPerReplica=2)

    predicted = plan_job(spec, make_profile(DDR, **RATES)).predicted

    # Half of the samples are on the other node; half are of the other number there, and pass the node's memory.
    exchanged = 1_024 * (2 * 4 + 1 + 2 * 16 * 4) / 2
    reduced = 2 * 0.75 * 4 * DENSE
    assert predicted.communication_seconds == pytest.approx((2 * exchanged + reduced) / 1e8 + exchanged / 1e9)


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["table", "row", "column", "table-row", "grid"]), min_size=1, max_size=4),
    gang=st.sampled_from([(2, 2), (3, 2), (2, 3)]),
    lookups=st.integers(1, 2),
    codec=st.sampled_from(["fp32", "int8"]),
)
def test_bytes_between_nodes_are_those_of_an_exchange(
    make_spec: MakeSpec, kinds: list[str], gang: tuple[int, int], lookups: int, codec: Codec
) -> None:
    (nodes, processes), rows = gang, 7
    # Every rank has each possible bag once, so that means are counts.
    bags = list(product(range(rows), repeat=lookups))
    tables = [
        {"name": f"t{i}", "rows": rows, "dim": 16, "columnBlock": 4, "maxLookups": lookups, "pin": {"sharding": kind}}
        for i, kind in enumerate(kinds)
    ]
    spec = make_spec(tables, batch=len(bags) * nodes * processes, replicas=nodes, processesPerReplica=processes)
    formats = spec.training.communication.model_copy(update={"forward": codec, "backward": codec})
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"communication": formats})})
    found = choose(read_problem(spec, None, {}))
    assert isinstance(found, Solution)
    between, inside = np.zeros(nodes), 0.0
    shards = [shard for table in write_plan(found).tables for shard in table.shards]
    for shard, (node, number) in product(shards, product(range(nodes), range(processes))):
        held = [sum(shard.row_start <= each < shard.row_end for each in bag) for bag in bags]
        width = shard.column_end - shard.column_start
        vector = width * CODECS[codec].value_bytes + width // 4 * CODECS[codec].row_bytes
        # Ids and gradients come to the shard's rank, pooled rows go back, all through a rank of the receiver's number.
        size = 4 * sum(held) + len(bags) + 2 * vector * sum(count > 0 for count in held)
        between[shard.rank // processes] += size * (node != shard.rank // processes)
        inside += size * (number != shard.rank % processes)

    sent, links = found.costs.sent_by_rank(found.placement), found.costs.links

    np.testing.assert_allclose(links.between_bytes(sent), between)
    assert links.inside * sent.sum() == pytest.approx(inside)
    direct = replace(links, has_two_levels=False)
    assert (direct.inside + direct.between) * sent.sum() == pytest.approx(sent.sum())


def test_twice_the_nodes_cost_twice_the_price_an_hour(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    predicted = plan_job(make_spec(TABLES, replicas=2), make_profile(DDR, **RATES)).predicted

    assert predicted.samples_per_second
    assert predicted.price_per_billion_samples == pytest.approx(2 * 3.6 / 3_600 * 1e9 / predicted.samples_per_second)


@pytest.mark.parametrize("missing", ["flopsPerSecond", "network", "ddr"])
def test_without_a_rate_there_is_no_time_that_needs_it(
    make_spec: MakeSpec, make_profile: MakeProfile, missing: str
) -> None:
    rates = {name: value for name, value in RATES.items() if name != missing}
    profile = make_profile("64Gi" if missing == "ddr" else DDR, **rates)

    predicted = plan_job(make_spec(TABLES, replicas=2), profile).predicted

    assert predicted.samples_per_second is None
    assert predicted.price_per_billion_samples is None
    assert (predicted.compute_seconds is None) == (missing == "flopsPerSecond")
    assert (predicted.lookup_seconds == {}) == (missing == "ddr")
    assert (predicted.communication_seconds is None) == (missing == "network")


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(1, 40), st.floats(0.01, 0.99))
def test_the_largest_share_of_a_part_takes_no_longer_than_it_may(
    linear_s: float, vectors_s: float, ids: float, wanted: float
) -> None:
    cost = PartCost(fixed_s=0.0, linear_s=linear_s, vectors_s=vectors_s, ids=ids)
    may_s = cost.seconds(wanted)

    found = cost.share(may_s)

    assert 0 <= found <= 1
    assert cost.seconds(found) <= may_s * (1 + 1e-9)
    assert cost.share(cost.seconds(1.0)) == 1.0
