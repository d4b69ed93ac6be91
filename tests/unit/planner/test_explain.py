"""Tables that do not fit: which, where, by how many bytes, and fixes that are enough."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dlrm_api.data import DataSpec
from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.trainer import ResourcesSpec
from dlrm_api.training import TrainingSpec
from dlrm_planner import plan_job, working_set_bytes

MIB, GIB = 2**20, 2**30
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]


def tables(*rows: int) -> list[dict[str, Any]]:
    return [{"name": f"t{i}", "rows": count, "dim": 16, "pin": {"sharding": "table"}} for i, count in enumerate(rows)]


def refusal(spec: DLRMJobSpec, profile: HardwareProfile | None = None) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(spec, profile)
    assert refused.value.path == "spec.trainer"
    return refused.value


def test_a_table_larger_than_any_node_is_named_with_missing_bytes(make_spec: MakeSpec) -> None:
    spec = make_spec(tables(10, 10**6), replicas=2, processesPerReplica=2, tierBudgets={"ddr": "100Mi"})

    reasons = refusal(spec).reasons

    taken = 10**6 * (16 * 4 + 4 + 1)
    slices = 67 * MIB  # 64 MiB of rows, the dense state and headers of two ranks, in whole MiB
    free = 100 * MIB - slices
    assert reasons[0] == (
        f"table t1 (1000000 rows x 16) does not fit on rank 0 on node 0, which has most free memory: with row "
        f"state it takes {taken} bytes, and {free} bytes are free: {taken - free} bytes short"
    )
    assert reasons[1] == "a pod has 104857600 bytes for tables: trainer.tierBudgets.ddr of 100.0 MiB"
    assert reasons[2].startswith("fix: raise trainer.tierBudgets.ddr by ")
    assert reasons[3] == (
        "fix: leave out spec.model.tables[1].pin.sharding: the planner then splits the table over nodes"
    )
    assert reasons[4] == "more replicas do not help: table t1 stays where its pin puts it, and is split no further"
    assert len(reasons) == 5


def test_a_table_that_fits_only_alone_is_named_with_what_is_left(make_spec: MakeSpec) -> None:
    spec = make_spec(tables(200_000, 200_000, 200_000), replicas=2, tierBudgets={"ddr": "40Mi"})

    reasons = refusal(spec).reasons

    assert re.fullmatch(
        r"table t2 \(200000 rows x 16\) does not fit on rank 1 on node 1, which has most free memory: with row "
        r"state and hand-off it takes 29002048 bytes, and \d+ bytes are free next to other tables: \d+ bytes short",
        reasons[0],
    )
    assert reasons[-1] == "fix: trainer.replicas: 3 of the same hardware hold all tables"


def test_a_pinned_table_is_refused_on_its_own_rank(make_spec: MakeSpec) -> None:
    crowded = [{**found, "pin": {"ranks": [1]}} for found in tables(200_000, 200_000)]
    spec = make_spec(crowded, replicas=4, tierBudgets={"ddr": "40Mi"})

    reasons = refusal(spec).reasons

    assert "does not fit on rank 1 on node 1" in reasons[0]
    assert not any("trainer.replicas" in reason for reason in reasons)


def test_a_node_too_small_for_what_every_node_holds_is_said_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(tables(10), replicas=1)

    reasons = refusal(spec, make_profile("1Gi")).reasons

    assert "replicated tables, the hand-off and buffers already take" in reasons[0]
    assert reasons[1].startswith("a pod has 0 bytes for tables: 1.0 GiB DDR of a big node less 1.3 GiB")
    assert reasons[2].startswith("fix: raise DDR per node (HardwareProfile big) by ")


def test_the_checkpointers_request_is_named_if_memory_is_short(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, node = make_spec(tables(10_000_000)), make_profile("4Gi")
    resources = ResourcesSpec(requests={"memory": "3Gi"})
    greedy = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resources": resources})})

    assert plan_job(spec, node)
    assert "(3.0 GiB of it by checkpoint.resources)" in refusal(greedy, node).reasons[1]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("rows", [(10**6, 10), (200_000, 200_000, 200_000, 50_000), (3,) * 70])
def test_the_memory_fix_is_enough_and_slightly_less_is_not(
    make_spec: MakeSpec, rows: tuple[int, ...], processes: int
) -> None:
    budget = 3 * MIB
    spec = make_spec(tables(*rows), replicas=2, processesPerReplica=processes, tierBudgets={"ddr": budget})
    try:
        plan_job(spec)
    except InfeasiblePlanError as refused:
        more = next(int(found[1]) for reason in refused.reasons if (found := re.search(r"ddr by (\d+) bytes", reason)))
    else:
        more = 0

    def with_budget(size: int) -> DLRMJobSpec:
        return make_spec(tables(*rows), replicas=2, processesPerReplica=processes, tierBudgets={"ddr": size})

    assert plan_job(with_budget(budget + more)).world_size == 2 * processes
    if more:
        with pytest.raises(InfeasiblePlanError):
            plan_job(with_budget(budget + more - 2 * MIB))


@pytest.mark.parametrize("count", [5, 17, 40])
def test_the_replica_fix_is_enough(make_spec: MakeSpec, count: int) -> None:
    rows = tuple(100_000 + 7_919 * i % 50_000 for i in range(count))
    reasons = refusal(make_spec(tables(*rows), replicas=2, tierBudgets={"ddr": "32Mi"})).reasons
    replicas = int(reasons[-1].removeprefix("fix: trainer.replicas: ").split()[0])

    plan = plan_job(make_spec(tables(*rows), replicas=replicas, tierBudgets={"ddr": "32Mi"}))

    assert plan.world_size == replicas


@pytest.mark.parametrize("short", [GIB, 5 * GIB, 7 * GIB])
def test_the_micro_batch_fix_is_enough_and_one_piece_fewer_is_not(
    make_spec: MakeSpec, make_profile: MakeProfile, short: int
) -> None:
    share = 2**20
    spec = make_spec(tables(10**6), batch=share)
    model = spec.model.model_copy(update={"top_mlp": (1_024, 1)})
    spec = spec.model_copy(update={"model": model})
    node = make_profile(working_set_bytes(spec) - short)

    def micro_batch(size: int) -> DLRMJobSpec:
        return spec.model_copy(update={"training": TrainingSpec(micro_batch_size=size)})

    said = next(reason for reason in refusal(spec, node).reasons if "microBatchSize" in reason)
    size = int(said.removeprefix("fix: training.microBatchSize: ").split()[0])

    assert said.endswith(f"{size} holds the activations of so many samples at a time")
    assert plan_job(micro_batch(size), node).world_size == 1
    with pytest.raises(InfeasiblePlanError):
        plan_job(micro_batch(-(-share // (-(-share // size) - 1))), node)


def test_a_micro_batch_does_not_fix_a_short_table_budget(make_spec: MakeSpec) -> None:
    reasons = refusal(make_spec(tables(10**6), batch=2**20, tierBudgets={"ddr": "64Mi"})).reasons

    assert not any("microBatchSize" in reason for reason in reasons)


@pytest.mark.parametrize("evaluates", [False, True])
def test_less_read_ahead_is_named_where_that_is_enough(
    make_spec: MakeSpec, make_profile: MakeProfile, evaluates: bool
) -> None:
    spec = make_spec(tables(10**6), processesPerReplica=2)
    read = {"train": {"uris": ["/a"]}, "eval": {"uris": ["/b"] if evaluates else []}}

    def reads_ahead(size: int) -> DLRMJobSpec:
        data = DataSpec.model_validate({"format": "parquet", "prefetchBytes": size, **read})
        return spec.model_copy(update={"data": data})

    node = make_profile(working_set_bytes(reads_ahead(200 * MIB)) + 2 * GIB)
    said = [reason for reason in refusal(reads_ahead(3 * GIB), node).reasons if "prefetchBytes" in reason]
    size = int(said[0].removeprefix("fix: data.prefetchBytes: ").split()[0])

    assert plan_job(reads_ahead(size), node).world_size == 2
    with pytest.raises(InfeasiblePlanError):
        plan_job(reads_ahead(size + (3 * GIB - size) // 64), node)


def test_a_shorter_lookahead_is_not_named_if_it_fixes_nothing(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    reads = DataSpec.model_validate({"format": "parquet", "train": {"uris": ["/a"]}})

    for data in ({}, {"data": reads}):
        spec = make_spec(tables(10**8)).model_copy(update=data)
        assert not any("prefetchBytes" in reason for reason in refusal(spec, make_profile("4Gi")).reasons)


def test_more_replicas_are_not_a_fix_on_one_machine(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, node = make_spec(tables(3 * 10**7, 3 * 10**7)), make_profile("4Gi")

    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(spec, node, shared=True)

    assert any(reason.startswith("fix: trainer.replicas: ") for reason in refusal(spec, node).reasons)
    assert refused.value.reasons[-1] == "more replicas do not help: they share this machine's memory"
    assert not any("trainer.replicas" in reason for reason in refused.value.reasons)


def test_one_machine_gets_fixes_by_free_memory_and_by_files(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, node = make_spec(tables(6 * 10**7)), make_profile("4Gi")

    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(spec, node, shared=True)

    words = "; ".join(refused.value.reasons)
    assert re.search(r"fix: free \d+ bytes \(.*\) more of this machine's memory for each pod;", words)
    assert "HardwareProfile" not in words
    assert re.search(r"fix: trainer\.tierBudgets\.block: \d+ .* does not hold into files below --tier-dir;", words)


def test_replicas_beyond_the_virtual_shards_are_not_proposed(make_spec: MakeSpec) -> None:
    rows = (100_000,) * 70

    reasons = refusal(make_spec(tables(*rows), batch=64, replicas=2, tierBudgets={"ddr": "20Mi"})).reasons

    assert not any(reason.startswith("fix: trainer.replicas") for reason in reasons)


def test_the_tighter_of_profile_and_budget_counts(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(tables(10**6), tierBudgets={"ddr": "64Mi"})
    ample = make_spec(tables(10**6), tierBudgets={"ddr": "64Gi"})
    node = make_profile(working_set_bytes(ample) + 64 * MIB)

    assert "trainer.tierBudgets.ddr of 64.0 MiB" in refusal(spec, make_profile("1Ti")).reasons[1]
    assert "a big node less" in refusal(ample, node).reasons[1]


def test_rows_that_nearly_fit_ddr_are_refused_by_what_they_lack_there(make_spec: MakeSpec) -> None:
    spec = make_spec(tables(50_000), tierBudgets={"ddr": "6Mi", "block": "1Gi"})

    reasons = refusal(spec).reasons

    short, more = (int(re.search(r"(\d+) bytes (?:short|\()", reasons[i])[1]) for i in (0, 2))  # type: ignore[index]
    assert "with row state and hand-off it takes" in reasons[0]
    assert short <= more < short + 2 * MIB


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    replicas=st.integers(1, 3),
    sizes=st.fixed_dictionaries(
        {tier: st.none() | st.integers(MIB, 300 * MIB) for tier in ("scm", "block")},
        optional={tier: st.integers(MIB, 300 * MIB) for tier in ("ddr", "node", "limit")},
    ),
)
def test_all_limits_that_the_fixes_raise_are_enough_together(
    make_spec: MakeSpec, make_profile: MakeProfile, rows: list[int], replicas: int, sizes: dict[str, int | None]
) -> None:
    working = working_set_bytes(make_spec(tables(*rows), replicas=replicas))

    def planned(more: dict[str, int]) -> None:
        size = {name: found + more.get(name, 0) for name, found in sizes.items() if found is not None}
        budgets = {tier: size[tier] for tier in ("ddr", "scm", "block") if tier in size}
        memory = {"limits": {"memory": str(working + size["limit"])}} if "limit" in size else {}
        node = make_profile(working + size["node"]) if "node" in size else None
        free = [{**each, "pin": None} for each in tables(*rows)]
        plan_job(make_spec(free, replicas=replicas, tierBudgets=budgets, resources=memory), node)

    fields = {"trainer.tierBudgets.ddr": "ddr", "DDR per node (HardwareProfile big)": "node"}
    try:
        planned({})
    except InfeasiblePlanError as refused:
        fix = next(reason for reason in refused.reasons if reason.startswith("fix: raise "))
        raised = re.findall(r"(?:raise|and) (.+?) by (\d+) bytes", fix)

        planned({fields.get(field, "limit"): int(more) for field, more in raised})


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=st.lists(
        st.fixed_dictionaries(
            {"rows": st.integers(1, 300_000), "maxLookups": st.integers(1, 20)},
            optional={
                "pin": st.sampled_from([{"sharding": "row"}, {"sharding": "row", "ranks": [0, 1]}, {"ranks": [1]}])
            },
        ),
        min_size=1,
        max_size=6,
    ),
    gang=st.tuples(st.integers(2, 4), st.integers(1, 3)),
    batch=st.sampled_from([2_048, 65_536]),
    budget=st.integers(20, 140),
)
@example(
    found=[{"rows": 366_986, "maxLookups": 4}, {"rows": 241_589, "maxLookups": 3}], gang=(2, 1), batch=65_536, budget=31
)
@example(found=[{"rows": 23_002, "maxLookups": 5, "pin": {"sharding": "row"}}], gang=(2, 2), batch=65_536, budget=11)
def test_a_refused_table_is_short_of_at_least_one_byte(
    make_spec: MakeSpec, found: list[dict[str, Any]], gang: tuple[int, int], batch: int, budget: int
) -> None:
    named = [{"name": f"t{i}", "dim": 16, **each} for i, each in enumerate(found)]
    spec = make_spec(
        named, batch=batch, replicas=gang[0], processesPerReplica=gang[1], tierBudgets={"ddr": budget * MIB}
    )
    try:
        plan_job(spec)
    except InfeasiblePlanError as refused:
        if "already take" in refused.reasons[0]:
            return
        held, free, short = map(
            int, re.search(r"takes (\d+) bytes, and (\d+) bytes .*: (-?\d+) bytes short", refused.reasons[0]).groups()
        )  # type: ignore[union-attr]
        assert held - free == short > 0


def test_a_short_tier_is_reported_with_fixes_that_spread_tables(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    found = [{"name": f"t{i}", "rows": 10**8, "dim": 64} for i in range(40)]
    profile = make_profile("64Gi")

    def asked(block: int) -> DLRMJobSpec:
        return make_spec(found, batch=8_192, replicas=4, tierBudgets={"block": block})

    reasons = refusal(asked(320 * GIB), profile).reasons

    short = int(reasons[0].split(" block is ")[1].split()[0])
    enough = int(next(r for r in reasons if r.startswith("fix: block of ")).split()[3])
    assert 320 * GIB + short <= enough < 1.01 * (320 * GIB + short)
    assert any(r.startswith("fix: trainer.replicas: 5 ") for r in reasons)
    assert plan_job(asked(enough), profile)


def test_no_single_fix_is_named_if_two_tiers_are_too_small(make_spec: MakeSpec) -> None:
    found = [
        {"name": "in-memory", "rows": 10**6, "dim": 64, "pin": {"tier": "ddr", "ranks": [0]}},
        {"name": "below", "rows": 10**6, "dim": 64, "pin": {"tier": "block", "ranks": [0]}},
    ]
    spec = make_spec(found, tierBudgets={"ddr": 200 * MIB, "block": 100 * MIB})

    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(spec)

    assert not any(reason.startswith("fix: ") for reason in refused.value.reasons)
    assert refused.value.reasons[-1].startswith("no single change is enough: ")


def test_no_fix_is_tried_by_placing_too_many_shards(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = [{"name": f"t{i}", "rows": 10**6, "dim": 64, "pin": {"sharding": "row"}} for i in range(4)]
    spec = make_spec(pinned, replicas=4, tierBudgets={"ddr": "100Mi"})
    monkeypatch.setattr("dlrm_planner.explain.MAX_TRIED_SHARDS", 15)
    monkeypatch.setattr("dlrm_planner.choose.is_feasible", None)

    reasons = refusal(spec).reasons

    assert "table t0" in reasons[0]
    assert reasons[1].startswith("a pod has 104857600 bytes for tables")
    assert reasons[2].startswith("no fix was tried, since a try places 16 shards")
    assert len(reasons) == 3
