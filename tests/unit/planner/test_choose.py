"""Every plan: covers each row once, keeps the caps, counts its bytes, honours pins and earlier column blocks."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.data import DataSpec
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device, Plan, parse_plan, plan_from_parts, plan_to_parts
from dlrm_api.training import TrainingSpec
from dlrm_planner import plan_job, working_set_bytes
from dlrm_planner.tables import activation_bytes, exchange_bytes
from dlrm_testing.repeats import repeats
from dlrm_testing.split_rows import range_bytes

MIB, GIB = 2**20, 2**30
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]

tables = st.lists(
    st.fixed_dictionaries(
        {"rows": st.integers(1, 2_000_000), "dim": st.sampled_from([4, 16, 64, 128]), "maxLookups": st.integers(1, 20)},
        optional={"pin": st.sampled_from([{"sharding": "data"}, {"sharding": "table"}, {"ranks": [0]}])},
    ),
    min_size=1,
    max_size=25,
)


def named(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": f"t{i}", **table} for i, table in enumerate(found)]


def table(name: str, rows: int, dim: int = 16, **more: Any) -> dict[str, Any]:
    return {"name": name, "rows": rows, "dim": dim, **more}


def homes(plan: Plan, name: str) -> list[int]:
    [shards] = [found.shards for found in plan.tables if found.name == name]
    return list(range(plan.world_size)) if shards[0].kind == "data" else [shard.rank for shard in shards]


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(40, soak=500))
@given(found=tables, replicas=st.integers(1, 5), processes=st.integers(1, 3), budget=st.integers(2 * MIB, 2 * GIB))
def test_no_pod_holds_more_than_its_budget(
    make_spec: MakeSpec, found: list[dict[str, Any]], replicas: int, processes: int, budget: int
) -> None:
    spec = make_spec(named(found), replicas=replicas, processesPerReplica=processes, tierBudgets={"ddr": budget})

    try:
        plan = plan_job(spec)
    except InfeasiblePlanError:
        return

    for pod in range(plan.nodes):
        assert sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks if rank.node == pod) <= budget


@given(found=tables, replicas=st.integers(1, 4), processes=st.integers(1, 3))
def test_a_pod_s_bytes_are_its_rows_its_state_and_its_hand_off(
    make_spec: MakeSpec, found: list[dict[str, Any]], replicas: int, processes: int
) -> None:
    spec = make_spec(named(found), replicas=replicas, processesPerReplica=processes)

    plan = plan_job(spec)

    assert [rank.node for rank in plan.ranks] == [rank // processes for rank in range(plan.world_size)]
    for pod in range(plan.nodes):
        held = cut = 0
        for planned in plan.tables:
            for shard in planned.shards:
                if shard.kind != "data" and shard.rank // processes != pod:
                    continue
                rows, width = shard.row_end - shard.row_start, shard.column_end - shard.column_start
                copies = processes if shard.kind == "data" else 1
                held += copies * rows * (4 * width + 4 + 1)
                held += copies * rows * 4 * (width + 1) if shard.kind == "data" else 0
                held += range_bytes(spec, planned, shard) if "row" in shard.kind else 0
                cut += rows * (4 * width + 4 + 8) + 512 * -(-rows // 65_536)
        planned_bytes = sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks if rank.node == pod)
        assert planned_bytes == held + plan.handoff_bytes[pod]
        assert cut < plan.handoff_bytes[pod] < cut + processes * 2 * MIB + 4 * MIB
        assert plan.handoff_bytes[pod] % MIB == 0


@pytest.mark.parametrize(("processes", "replicas"), [(1, 4), (4, 1), (2, 16)])
def test_ranges_of_rows_count_vectors_of_the_whole_batch(make_spec: MakeSpec, processes: int, replicas: int) -> None:
    def held(sharding: str, batch: int) -> int:
        spec = make_spec(
            named([{"rows": 10**6, "dim": 64, "maxLookups": 2, "pin": {"sharding": sharding}}] * 32),
            batch=batch,
            replicas=replicas,
            processesPerReplica=processes,
        )
        return sum(rank.bytes_per_tier["ddr"] for rank in plan_job(spec).ranks if rank.node == 0)

    vectors = 32 * 64 * 4 * (2**16 - 2**12) * processes  # more of them in the larger batch
    ranks = processes * replicas
    copies = 2 + 2 * (1 - (1 - 1 / ranks) ** 2) - 4 / ranks

    assert held("table", 2**16) == held("table", 2**12)
    assert held("row", 2**16) - held("row", 2**12) == pytest.approx(copies * vectors, rel=1e-6)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(30, soak=300))
@given(found=tables, replicas=st.integers(1, 4))
def test_equal_input_gives_an_equal_plan(make_spec: MakeSpec, found: list[dict[str, Any]], replicas: int) -> None:
    spec, again = make_spec(named(found), replicas=replicas), make_spec(named(found), replicas=replicas)

    assert plan_job(spec) == plan_job(again)


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_process_that_makes_it() -> None:
    program = """
from dlrm_api.job import parse_job
from dlrm_planner import plan_job
tables = [{"name": f"t{i}", "rows": 1000 + i * i, "dim": 16, "maxLookups": 1 + i % 7} for i in range(60)]
model = {"tables": tables, "interaction": "dcn"}
data = {"format": "synthetic"}
spec = {"model": model, "data": data, "trainer": {"replicas": 8}, "checkpoint": {"uri": "file:///s"}}
print(plan_job(parse_job({"metadata": {"name": "a"}, "spec": spec}).spec).model_dump_json())
"""
    made = [
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True)
        for seed in ("1", "2")
    ]

    assert made[0].stdout == made[1].stdout
    assert parse_plan(made[0].stdout).world_size == 8


def test_one_rank_holds_everything_whole(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("small", 10), table("pinned", 10, pin={"sharding": "data"}), table("big", 10**6)]))

    assert {shard.kind for planned in plan.tables for shard in planned.shards} == {"table"}
    assert plan.predicted.imbalance == 1.0
    assert any("mean nothing on one rank" in reason for reason in plan.reasons)


def test_a_small_table_is_replicated_and_a_large_one_is_not(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("small", 100), table("big", 10**6)], replicas=2, batch=1_024))

    assert homes(plan, "small") == [0, 1]
    assert len(homes(plan, "big")) == 1
    assert any("all-reducing their gradient moves fewer bytes: small" in reason for reason in plan.reasons)


def test_a_plan_grows_by_no_shard_with_the_ranks_that_hold_a_replica(make_spec: MakeSpec) -> None:
    found = [table(f"t{i}", 100, pin={"sharding": "data"}) for i in range(50)]

    few, many = (plan_job(make_spec(found, replicas=replicas)) for replicas in (2, 64))

    assert [each.shards for each in few.tables] == [each.shards for each in many.tables]


def test_a_table_beyond_the_size_threshold_is_never_replicated(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("t", 4 * MIB // (16 * 4) + 1), table("u", 9)], replicas=2, batch=2**24))

    assert "data" not in {shard.kind for shard in plan.tables[0].shards}


def test_replicas_of_many_widths_are_limited_by_their_host_work(make_spec: MakeSpec) -> None:
    widths = [4 * width for width in range(1, 61)]
    found = [table(f"t{width}", 16, dim=width) for width in widths]
    pinned = [table(f"p{width}", 16, dim=width, pin={"sharding": "data"}) for width in widths[:3]]

    plan = plan_job(make_spec([*found, *pinned], replicas=2))

    replicated = {each.name for each in plan.tables if each.shards[0].kind == "data"}
    assert {"p4", "p8", "p12"} <= replicated
    assert len(replicated) < 30
    # What pinned ones leave goes to the tables that gain most.
    assert "t240" in replicated


def test_small_tables_stay_whole_if_replicas_do_not_fit(make_spec: MakeSpec) -> None:
    small, big = [table(f"s{i}", 1_000) for i in range(40)], table("big", 10**5, pin={"sharding": "table"})
    ample = plan_job(make_spec([*small, big], replicas=2))
    tight = (
        max(sum(rank.bytes_per_tier["ddr"] for rank in ample.ranks if rank.node == pod) for pod in range(ample.nodes))
        - 3 * MIB
    )

    plan = plan_job(make_spec([*small, big], replicas=2, tierBudgets={"ddr": tight}))

    assert {shard.kind for planned in ample.tables for shard in planned.shards} == {"data", "table"}
    assert {shard.kind for planned in plan.tables for shard in planned.shards} == {"table"}


def test_pins_are_honoured(make_spec: MakeSpec) -> None:
    plan = plan_job(
        make_spec(
            [
                table("here", 10**6, pin={"ranks": [2]}),
                table("either", 10**6, pin={"ranks": [1, 3]}),
                table("whole", 10, pin={"sharding": "table"}),
                table("everywhere", 10**5, pin={"sharding": "data", "tier": "ddr"}),
                *(table(f"t{i}", 10**5, maxLookups=1 + i) for i in range(9)),
            ],
            replicas=2,
            processesPerReplica=2,
        )
    )

    assert homes(plan, "here") == [2]
    assert homes(plan, "either") in ([1], [3])
    assert len(homes(plan, "whole")) == 1
    assert homes(plan, "everywhere") == [0, 1, 2, 3]
    assert any("pinned to data: everywhere" in reason for reason in plan.reasons)
    assert any("pinned to: here, either" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("pin", "message"), [({"ranks": [0, 2]}, "rank 2"), ({"sharding": "data", "ranks": [0]}, "sharding data")]
)
def test_a_pin_that_cannot_be_honoured_is_refused(make_spec: MakeSpec, pin: dict[str, Any], message: str) -> None:
    spec = make_spec([table("u", 10), table("t", 10, pin=pin)], replicas=2)

    with pytest.raises(InvalidSpecError) as refused:
        plan_job(spec)

    assert refused.value.path == "spec.model.tables[1].pin.ranks"
    assert message in str(refused.value)


def test_each_column_block_has_a_row_state_of_its_own(make_spec: MakeSpec) -> None:
    spec = make_spec([table("t", 1_000, dim=32, columnBlock=8), table("u", 1_000, dim=32)])
    plain = plan_job(make_spec([table("t", 1_000, dim=32), table("u", 1_000, dim=32)]))

    plan = plan_job(spec)

    assert [planned.column_blocks for planned in plan.tables] == [(0, 8, 16, 24, 32), (0, 32)]
    more = plan.ranks[0].bytes_per_tier["ddr"] - plain.ranks[0].bytes_per_tier["ddr"]
    assert more - (plan.handoff_bytes[0] - plain.handoff_bytes[0]) == 1_000 * 3 * (4 + 1)  # and a flag


@pytest.mark.slow
def test_five_thousand_tables_over_sixty_four_ranks(make_spec: MakeSpec) -> None:
    many = [table(f"t{i}", 100 + i * i % 90_001, dim=16 * (1 + i % 4), maxLookups=1 + i % 9) for i in range(5_000)]

    plan = plan_job(make_spec(many, replicas=16, processesPerReplica=4))

    assert len(plan.tables) == 5_000
    assert plan.predicted.imbalance < 1.01
    assert plan_from_parts(plan_to_parts(plan)) == plan


@pytest.mark.parametrize(
    ("pin", "trainer", "shards"),
    [
        ({"sharding": "row"}, {"replicas": 10}, 40),
        ({"sharding": "row", "ranks": [1, 2, 3]}, {"replicas": 10}, 12),
        ({"sharding": "column"}, {"replicas": 10}, 16),  # of four blocks
        ({"sharding": "table-row"}, {"replicas": 5, "processesPerReplica": 2}, 8),
    ],
)
def test_shards_that_pins_ask_for_are_counted_before_any_is_made(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, pin: dict[str, Any], trainer: dict[str, int], shards: int
) -> None:
    spec = make_spec([table(f"t{i}", 1_000, columnBlock=4, pin=pin) for i in range(4)], **trainer)
    monkeypatch.setattr("dlrm_planner.enumerate.MAX_SHARDS", shards)
    plan = plan_job(spec)
    monkeypatch.setattr("dlrm_planner.enumerate.MAX_SHARDS", shards - 1)
    monkeypatch.setattr("dlrm_planner.choose.choose", None)

    with pytest.raises(InvalidSpecError) as refused:
        plan_job(spec)

    assert sum(len(planned.shards) for planned in plan.tables) == shards
    assert refused.value.path == "spec.model.tables[0].pin.sharding"
    assert f"{shards} shards with all other tables, and the planner places at most {shards - 1}: pin" in str(
        refused.value
    )


def test_a_plan_with_too_many_ranges_is_refused(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec([table(f"t{i}", 1_000) for i in range(4)], replicas=2)
    monkeypatch.setattr("dlrm_planner.write.MAX_RANGES", 3)

    with pytest.raises(InvalidSpecError, match="the tables take 4 ranges of shards over 2 ranks"):
        plan_job(spec)


def test_the_costliest_table_is_named_where_it_sets_the_pace(make_spec: MakeSpec) -> None:
    hot = table("hot", 10**6, maxLookups=90, pin={"sharding": "table"})

    plan = plan_job(make_spec([hot, table("t", 10**6), table("u", 10**6)], replicas=2))

    assert 1.8 < plan.predicted.imbalance < 90 / 46
    assert (
        f"table hot alone costs {plan.predicted.imbalance:.2f} times the mean of a rank: it is the bottleneck"
        in plan.reasons
    )


def test_the_largest_tables_that_the_api_allows_can_be_planned(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table(f"t{i}", 2**40, dim=4_096) for i in range(600)], replicas=2))

    assert sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks) > 2**63


def test_the_hand_off_size_is_that_of_the_pod_with_the_largest_cut(make_spec: MakeSpec) -> None:
    pinned = [table("small", 10_000, pin={"ranks": [0]}), table("large", 100_000, pin={"ranks": [1]})]
    spec = make_spec(pinned, replicas=2)

    with pytest.raises(InfeasiblePlanError, match="on node 1 takes") as refused:
        plan_job(with_handoff_budget(spec, 1))

    enough = int(refused.value.reasons[1].split()[4])
    assert plan_job(with_handoff_budget(spec, enough)).handoff_bytes == (enough, enough)
    with pytest.raises(InfeasiblePlanError):
        plan_job(with_handoff_budget(spec, enough - 1))


def with_handoff_budget(spec: DLRMJobSpec, size: int) -> DLRMJobSpec:
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"handoff_budget": size})})


def test_a_hand_off_budget_of_the_user_is_kept(make_spec: MakeSpec) -> None:
    spec = make_spec([table("t", 100_000), table("u", 100_000)], replicas=2)
    needed = max(plan_job(spec).handoff_bytes)

    plan = plan_job(with_handoff_budget(spec, needed + 5))

    assert plan.handoff_bytes == (needed + 5, needed + 5)
    more = sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks)
    assert more - sum(rank.bytes_per_tier["ddr"] for rank in plan_job(spec).ranks) == sum(
        needed + 5 - sized for sized in plan_job(spec).handoff_bytes
    )


def test_a_hand_off_budget_below_a_full_cut_is_used_down_to_a_floor(make_spec: MakeSpec) -> None:
    spec = make_spec([table("t", 10**6), table("u", 10**6)], replicas=2)
    floor = 66 * MIB  # 64 MiB of rows, the dense state and the headers of a rank, in whole MiB

    assert plan_job(with_handoff_budget(spec, floor)).handoff_bytes == (floor, floor)
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(with_handoff_budget(spec, floor - 1))

    assert refused.value.path == "spec.checkpoint.handoffBudget"
    assert "the budget is 1 bytes short" in str(refused.value)
    assert f"raise handoffBudget to {floor} " in refused.value.reasons[1]


def test_a_small_table_s_hand_off_budget_need_only_hold_its_full_cut(make_spec: MakeSpec) -> None:
    spec = make_spec([table("t", 1_000)])
    needed = plan_job(spec).handoff_bytes[0]

    assert plan_job(with_handoff_budget(spec, needed)).handoff_bytes == (needed,)
    with pytest.raises(InfeasiblePlanError, match="takes 2097152 bytes"):
        plan_job(with_handoff_budget(spec, needed - 1))


def test_cuts_are_handed_over_in_slices_if_tables_need_the_memory(make_spec: MakeSpec) -> None:
    budget = 400 * MIB
    whole = plan_job(make_spec([table("t", 4 * 10**6)]))
    assert whole.ranks[0].bytes_per_tier["ddr"] > budget

    plan = plan_job(make_spec([table("t", 4 * 10**6)], tierBudgets={"ddr": budget}))

    assert plan.handoff_bytes == (66 * MIB,)
    assert plan.tables[0].shards[0].tiers.levels == ()
    assert any("handed over in segments: 66.0 MiB" in reason for reason in plan.reasons)


def test_rows_of_two_bytes_and_adams_moments_are_counted(make_spec: MakeSpec) -> None:
    def held(kind: str, dtype: str) -> int:
        spec = make_spec([table("t", 1_000, dim=64)])
        rows = spec.training.row_optimizer.model_copy(update={"kind": kind})
        training = spec.training.model_copy(update={"row_optimizer": rows})
        tables = tuple(found.model_copy(update={"dtype": dtype}) for found in spec.model.tables)
        model = spec.model.model_copy(update={"tables": tables})
        plan = plan_job(spec.model_copy(update={"training": training, "model": model}))
        return plan.ranks[0].bytes_per_tier["ddr"] - plan.handoff_bytes[0]

    assert held("rowwise-adagrad", "fp32") == 1_000 * (64 * 4 + 4 + 1)
    assert held("sgd", "fp16") == 1_000 * (64 * 2 + 1)
    assert held("adam", "fp32") == 1_000 * (64 * 4 + 4 * (2 * 64 + 1) + 1)


def test_an_unchecked_plan_says_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table("t", 1_000)])

    assert "not checked against memory" in plan_job(spec).reasons[-1]
    assert "of 62.7 GiB: 64.0 GiB DDR of a big node less 1.3 GiB" in plan_job(spec, make_profile("64Gi")).reasons[-1]
    assert plan_job(spec, make_profile("64Gi")).hardware == "big"


def test_a_reserve_leaves_tables_less(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, node = make_spec([table("t", 1_000)], tierBudgets={"ddr": "2Gi"}), make_profile("64Gi")

    reasons = plan_job(spec, node, reserve=2**30).reasons[-1]

    assert "of 1.0 GiB: trainer.tierBudgets.ddr of 2.0 GiB, less 1.0 GiB that stay free" in reasons
    with pytest.raises(InfeasiblePlanError, match=r"raise trainer\.tierBudgets\.ddr"):
        plan_job(spec, node, reserve=2**31)


@pytest.mark.parametrize(("limit", "shown"), [("3Gi", "3.0 GiB"), (str(3 * 2**30), "3.0 GiB")])
def test_a_containers_limit_bounds_what_a_plan_gives_it(make_spec: MakeSpec, limit: str, shown: str) -> None:
    spec = make_spec([table("t", 1_000)], resources={"limits": {"memory": limit}})
    large = make_spec([table("t", 10**8)], resources={"limits": {"memory": limit}})

    assert f"trainer.resources.limits.memory of {shown} less" in plan_job(spec).reasons[-1]
    with pytest.raises(InfeasiblePlanError, match=r"raise trainer\.resources\.limits\.memory by"):
        plan_job(large)


def test_the_working_set_counts_processes_dense_parameters_and_activations(make_spec: MakeSpec) -> None:
    one, two = (working_set_bytes(make_spec([table("t", 10)], processesPerReplica=n)) for n in (1, 2))

    assert one > 768 * MIB + 512 * MIB
    assert 768 * MIB < two - one < 769 * MIB


def test_the_working_set_counts_inner_activations_of_a_micro_batch_alone(make_spec: MakeSpec) -> None:
    share, layers = 2**16, 4_096 + 1 + 16 + 1  # of the top MLP, and of one cross layer over 16 columns, of rank 1
    whole = make_spec([table("t", 10)], batch=share)
    model = whole.model.model_copy(update={"top_mlp": (4_096, 1)})
    whole = whole.model_copy(update={"model": model})
    micro, larger = (
        whole.model_copy(update={"training": TrainingSpec(micro_batch_size=size)}) for size in (256, 2 * share)
    )

    spared = activation_bytes(whole) - activation_bytes(micro)

    assert activation_bytes(larger) == activation_bytes(whole)
    assert working_set_bytes(whole) - working_set_bytes(micro) == spared
    assert spared == 4 * (2 * layers + 3 * 16) * (share - 256)  # 16 columns go into the interaction


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_working_set_counts_the_ids_of_long_bags(make_spec: MakeSpec, device: Device) -> None:
    def working(replicas: int, lookups: int) -> int:
        bags = table("t", 10, maxLookups=1_000, avgLookups=lookups, features=["a", "b"])
        spec = make_spec([bags], batch=2**16, replicas=replicas, cache={"lookahead": 0})
        return working_set_bytes(spec, device)

    assert working(1, 101) - working(1, 1) == 32 * 100 * 2 * 2**16
    assert working(2, 101) - working(2, 1) == 96 * 100 * 2 * 2**15


def test_the_working_set_counts_what_files_are_read_ahead_and_what_travels(make_spec: MakeSpec) -> None:
    synthetic = make_spec([table("t", 10)])
    files = {"format": "parquet", "train": {"uris": ["/train"]}, "prefetchBytes": 64 * MIB}
    trained, evaluated = (
        synthetic.model_copy(update={"data": DataSpec.model_validate(files | more)})
        for more in ({}, {"eval": {"uris": ["/eval"]}})
    )
    lone, gang = (make_spec([table("t", 10, dim=256)], batch=2**16, replicas=n) for n in (1, 2))

    assert working_set_bytes(trained) - working_set_bytes(synthetic) == 64 * MIB
    assert working_set_bytes(evaluated) - working_set_bytes(synthetic) == 128 * MIB
    assert exchange_bytes(lone) == 0
    assert exchange_bytes(gang) == 4 * 4 * 256 * 2**15
    for processes, replicas, copies in ((4, 1, 4), (2, 2, 4 + 3)):
        both = {"processesPerReplica": processes, "replicas": replicas}
        spec = gang.model_copy(update={"trainer": gang.trainer.model_validate(both)})
        assert exchange_bytes(spec) == copies * 4 * 256 * 2**14
