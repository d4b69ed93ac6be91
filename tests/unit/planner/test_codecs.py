"""Wire formats of rows that the plan chooses: the shortest step within the bound of quality, by class of link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_api.training import CommunicationSpec, LinkCodecs, RowCodecs
from dlrm_api.wire import CODECS, Codec
from dlrm_planner import PastPlan, choose_plan, plan_job

MEGABYTE = 1e6
DDR = {"bytes": "64Gi", "readBytesPerSecond": 20e9}
AUTO = {"forward": "auto", "backward": "auto"}
FP32, INT8 = LinkCodecs(), LinkCodecs(forward="int8", backward="int8")


MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
PlanWith = Callable[..., Plan]


@pytest.fixture(scope="module")
def plan_with(make_spec: MakeSpec, make_profile: MakeProfile) -> PlanWith:
    """Return a planner for nodes with a fast link inside, and one of so many bytes per second between them."""

    def plan(
        communication: dict[str, Any], between: float | None, *, kept: RowCodecs | None = None, replicas: int = 2,
        processes: int = 2, dim: int = 64, batch: int = 2_048,
    ) -> Plan:  # fmt: skip
        tables = [{"name": f"t{i}", "rows": 50_000, "dim": dim, "pin": {"sharding": "table"}} for i in range(8)]
        spec = make_spec(tables, batch=batch, replicas=replicas, processesPerReplica=processes, threadsPerProcess=1)
        found = CommunicationSpec.model_validate(communication)
        spec = spec.model_copy(update={"training": spec.training.model_copy(update={"communication": found})})
        network = {"intraNodeBytesPerSecond": 2e9, **({"interNodeBytesPerSecond": between} if between else {})}
        return plan_job(spec, make_profile(DDR, network=network, flopsPerSecond=2e11), codecs=kept)

    return plan


def codecs_of(plan: Plan) -> RowCodecs:
    assert plan.row_codecs is not None
    return plan.row_codecs


def test_a_slow_link_between_nodes_gets_int8_and_the_fast_one_inside_does_not(plan_with: PlanWith) -> None:
    plan = plan_with(AUTO, 10 * MEGABYTE)

    assert codecs_of(plan) == RowCodecs(intra_node=FP32, inter_node=INT8)
    (reason,) = [each for each in plan.reasons if each.startswith("rows travel")]
    assert "int8 between nodes" in reason
    assert all(f"{codec} " in reason for codec in CODECS)


@settings(max_examples=12, deadline=None)
@given(
    between=st.floats(6, 11).map(lambda power: 10**power),
    processes=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([16, 128]),
    batch=st.sampled_from([256, 8_192]),
)
def test_no_single_format_is_predicted_to_be_faster(
    plan_with: PlanWith, between: float, processes: int, dim: int, batch: int
) -> None:
    shape = {"processes": processes, "dim": dim, "batch": batch}

    chosen = plan_with(AUTO, between, **shape)

    singles = [plan_with({"forward": codec, "backward": codec}, between, **shape) for codec in CODECS]
    seconds = [each.predicted.step_seconds for each in (chosen, *singles)]
    assert all(each is not None for each in seconds)
    # The most exact within half a percent; a table's place may change by as much.
    assert seconds[0] <= 1.01 * min(seconds[1:])  # type: ignore[operator, type-var]


def test_the_bound_of_quality_leaves_formats_out(plan_with: PlanWith) -> None:
    found = codecs_of(plan_with({**AUTO, "maxQualityLoss": 0}, 10 * MEGABYTE)).inter_node

    assert found is not None
    assert {found.forward, found.backward} <= {"fp16", "bf16"}


@pytest.mark.parametrize(("replicas", "processes"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_links_that_do_not_exist_have_no_formats(plan_with: PlanWith, replicas: int, processes: int) -> None:
    found = codecs_of(plan_with(AUTO, 10 * MEGABYTE, replicas=replicas, processes=processes))

    assert (found.intra_node is None, found.inter_node is None) == (processes == 1, replicas == 1)


def test_links_that_nobody_measured_keep_fp32_and_the_plan_names_the_rate(plan_with: PlanWith) -> None:
    plan = plan_with(AUTO, None)

    assert codecs_of(plan).inter_node == FP32
    assert any("network.interNodeBytesPerSecond" in each for each in plan.reasons)


def test_formats_of_a_link_that_are_set_are_not_chosen(plan_with: PlanWith) -> None:
    communication = {"forward": "bf16", "backward": "auto", "interNode": {"forward": "fp32"}}

    found = codecs_of(plan_with(communication, 10 * MEGABYTE))

    assert (found.intra_node and found.intra_node.forward, found.inter_node and found.inter_node.forward) == (
        "bf16",
        "fp32",
    )
    assert found.inter_node is not None
    assert found.inter_node.backward == "int8"


def test_formats_stay_for_a_jobs_life_while_the_spec_allows_them(plan_with: PlanWith) -> None:
    first = codecs_of(plan_with(AUTO, 10 * MEGABYTE))

    faster = plan_with(AUTO, 1e11, kept=first)
    exact = codecs_of(plan_with({**AUTO, "maxQualityLoss": 0}, 1e11, kept=first))
    own = codecs_of(plan_with({**AUTO, "interNode": {"forward": "fp16"}}, 1e11, kept=first))
    larger = codecs_of(plan_with(AUTO, 10 * MEGABYTE, kept=RowCodecs(intra_node=FP32)))

    assert codecs_of(faster) == first
    assert any("as since the job began" in each for each in faster.reasons)
    assert exact.inter_node != INT8
    assert own.inter_node == LinkCodecs(forward="fp16", backward="int8")
    assert larger.inter_node == INT8


@pytest.mark.parametrize("choice", ["auto", "int8"])
def test_a_resized_job_keeps_the_formats_that_its_plan_chose(
    make_spec: MakeSpec, make_profile: MakeProfile, choice: str
) -> None:
    tables = [{"name": f"t{i}", "rows": 50_000, "dim": 64} for i in range(8)]
    spec, profiles = make_spec(tables, replicas=2), []
    for rate in (10 * MEGABYTE, 1e11):
        profiles.append(make_profile(DDR, network={"interNodeBytesPerSecond": rate}, flopsPerSecond=2e11))

    def with_choice(choice: str) -> DLRMJobSpec:
        communication = CommunicationSpec.model_validate({"forward": choice, "backward": choice})
        return spec.model_copy(update={"training": spec.training.model_copy(update={"communication": communication})})

    first = plan_job(with_choice(choice), profiles[0])
    before = PastPlan(spec=with_choice(choice), plan=first)
    larger = choose_plan(with_choice("auto").with_replicas(3), profiles[1:], before=before)

    # What the user set is no choice of the plan.
    assert codecs_of(first).inter_node == INT8
    assert (codecs_of(larger).inter_node == INT8) is (choice == "auto")


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_fewer_bytes_on_one_link_shorten_only_its_part(plan_with: PlanWith, codec: Codec) -> None:
    exact = plan_with({}, 10 * MEGABYTE).predicted.exposed_communication_seconds
    inside = plan_with({"forward": codec, "interNode": {"forward": "fp32"}}, 10 * MEGABYTE)
    between = plan_with({"interNode": {"forward": codec}}, 10 * MEGABYTE)

    found = [each.predicted.exposed_communication_seconds for each in (inside, between)]

    assert exact is not None
    assert found[0] == pytest.approx(exact, rel=0.02)
    share = {"fp16": 1 / 2, "int8": (64 + 8) / 256}[codec]
    # Half of what travels are gradients, which stay as they are; sums of dense parameters are few.
    assert found[1] == pytest.approx(exact * (1 + share) / 2, rel=0.05)
