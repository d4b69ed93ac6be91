"""Training on a GPU: which one a rank takes, and that all of a step is computed there as on the host."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import DeviceError, InvalidSpecError, PeerLostError
from dlrm_api.job import DLRMJob
from dlrm_api.names import ExitCode
from dlrm_api.plan import Plan, TierLevel, TierShare
from dlrm_api.training import DenseOptimizerSpec
from dlrm_testing.repeats import repeats
from dlrm_testing.trainer.failing_gpu import FAILURES
from dlrm_testing.trainer.gangs import Pod, hand_plan, job_document, plan_document, run_ranks, small_job
from dlrm_testing.trainer.gpus import gpu_of
from dlrm_testing.trainer.sharded_runs import ShardedRun, job_of, train_plan
from dlrm_testing.trainer.shardings import every_shard_in, random_plan, without_levels
from dlrm_testing.trainer.stacked import ALONE, Shape, make_learner, train_run
from dlrm_trainer import learner as learners
from dlrm_trainer.compute_device import HOST, HostCopy, take_device
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.rendezvous import backends
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import VOTES, Learner
from dlrm_trainer.metrics import stages
from dlrm_trainer.model.dense import DenseParameters
from dlrm_trainer.model.dlrm import DevicePairs, HostPairs, build_model, pair_places

SUPPORT = Path(__file__).parents[2] / "support"

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a run takes a second: shrinking would take minutes
QUIET = [HealthCheck.function_scoped_fixture]
STEPS = 6
KINDS = ["rowwise-adagrad", "sgd", "adam"]


def test_ranks_of_a_plan_for_hosts_compute_there() -> None:
    assert take_device("cpu", 3) == HOST


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_plan_for_gpus_is_refused_without_gpus() -> None:
    with pytest.raises(InvalidSpecError, match=r"plan.device: expected a CUDA device, found none"):
        take_device("cuda", 0)


OLD = "The NVIDIA driver on your system is too old (found version 12040)."
NOT_READY = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("Found no NVIDIA driver on your system."), InvalidSpecError, "Found no .* runtimeClass"),
        (RuntimeError(OLD), InvalidSpecError, r"too old \(found version 12040\).*; fix the node's driver"),
        (RuntimeError("No CUDA GPUs are available"), InvalidSpecError, "No CUDA GPUs are available; fix"),
        (AssertionError("Torch not compiled with CUDA enabled"), InvalidSpecError, "not compiled with CUDA"),
        (RuntimeError(NOT_READY), DeviceError, "Error 802: system not yet initialized; the job is retried"),
        (RuntimeError("CUDA driver initialization failed"), DeviceError, "initialization failed; the job is retried"),
        (None, DeviceError, "have become available; the job is retried"),
    ],
)
def test_missing_gpus_are_retried_or_refused_with_the_drivers_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, kind: type[Exception], message: str
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)

    with pytest.raises(kind, match=message):
        take_device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has this process see two CUDA devices; those that it takes."""
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda each: taken.append(str(each)))
    return taken


@pytest.mark.parametrize("local_rank", [0, 1])
def test_each_process_of_a_pod_takes_a_gpu_of_its_own(two_gpus: list[str], local_rank: int) -> None:
    assert take_device("cuda", local_rank) == torch.device("cuda", local_rank)
    assert two_gpus == [f"cuda:{local_rank}"]


@pytest.mark.usefixtures("two_gpus")
def test_a_pod_with_fewer_gpus_than_processes_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match=r"processesPerReplica: expected at most 2, .* process 2 has none"):
        take_device("cuda", 2)


@pytest.mark.parametrize("failure", FAILURES.values())
def test_a_gpu_that_fails_during_a_wait_is_not_blamed_on_others(failure: Exception) -> None:
    def wait() -> None:
        raise failure

    arriving = Collectives(0, 2, lambda: "rank 1 died")._waiting(
        "all_reduce", SimpleNamespace(wait=wait), torch.ones(1)
    )

    with pytest.raises(type(failure)):
        arriving()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("full", r"the rank's GPU is full: .* Tried to allocate 2.00 GiB.*; set or lower spec.trainer.tierBudgets.hbm"),
        ("failing", r"the rank's GPU failed: CUDA error: uncorrectable ECC error encountered; drain the node"),
    ],
)
def test_a_rank_whose_gpu_is_full_or_failing_says_so_and_what_to_do(tmp_path: Path, fault: str, words: str) -> None:
    doubles = {"PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))}
    pod = Pod(tmp_path, job_document(tmp_path), plan_document(small_job(tmp_path)), FAULT=fault, **doubles)
    pod.module = "dlrm_testing.trainer.failing_gpu"

    code, ended = pod.run(checkpointer=False), pod.termination()

    assert (code, ended.exit_code, ended.reason, ended.rank) == (ExitCode.DEVICE, ExitCode.DEVICE, "Device", 0)
    assert re.match(words, ended.message)
    assert "Traceback" not in pod.log()


def test_ranks_on_gpus_send_by_nccl_and_what_is_on_their_hosts_by_gloo() -> None:
    assert backends(HOST) == "cpu:gloo"
    assert backends(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_rows_in_hbm_are_refused_where_the_plan_computes_on_hosts(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError, match=r"table users has rows in tier hbm, and plan.device is cpu"):
        train_run(ALONE, small_job(tmp_path), Shape(tiers=("hbm", "ddr")), 1, 0, tmp_path)


def test_rows_of_more_columns_than_a_gpus_kernels_take_are_refused(tmp_path: Path, gpu: torch.device) -> None:
    def start(dim: int) -> None:
        model = {"tables": [{"name": "wide", "rows": 90, "dim": dim}], "interaction": "dcn"}
        make_learner(ALONE, small_job(tmp_path, model=model), Shape(("hbm", "ddr")), tmp_path, gpu).embeddings.close()

    start(2_048)
    with pytest.raises(InvalidSpecError, match=r"table wide: dim 2052 has .* at most 2048 columns; .* columnBlock"):
        start(2_052)


def mixed_plan(seed: int, job: DLRMJob) -> Plan:
    """Plan shards of every kind, each in hbm, in a stack over it or on the host, or resident there."""
    generator = np.random.default_rng(seed)
    plan = random_plan(generator, job.spec.model, job.spec.world_size, lookahead=seed % 3)
    tables = []
    for table in plan.tables:
        shards = []
        for shard in table.shards:
            rows = shard.row_end - shard.row_start
            tiers = ((), ("hbm",), ("hbm", "ddr"), ("hbm", "ddr", "block"), ("ddr", "ddr"))[generator.integers(5)]
            sizes = [rows] if len(tiers) == 1 else [max(1, rows // 4), *[rows] * (len(tiers) - 1)]
            levels = [TierLevel(tier=tier, rows=count) for tier, count in zip(tiers, sizes, strict=False)]  # type: ignore[arg-type]
            share = TierShare() if shard.kind == "data" else TierShare(levels=tuple(levels))
            shards.append(shard.model_copy(update={"tiers": share}))
        tables.append(table.model_copy(update={"ranges": tuple(shards)}))
    return plan.model_copy(update={"tables": tuple(tables)})


def test_the_plans_of_these_tests_have_shards_of_every_kind_in_every_place(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    shards = [shard for seed in range(40) for table in mixed_plan(seed, job).tables for shard in table.shards]

    assert {shard.kind for shard in shards} == {"data", "table", "row", "column"}
    assert len({tuple(level.tier for level in shard.tiers.levels) for shard in shards}) == 5


@pytest.mark.slow
@settings(max_examples=6, phases=NO_SHRINKING, suppress_health_check=QUIET)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), most=st.sampled_from([None, 7]))
def test_losses_and_rows_are_those_of_the_host(
    tmp_path: Path, gpu: torch.device, seed: int, kind: str, most: int | None
) -> None:
    job = job_of(tmp_path, kind=kind, microBatchSize=most)
    plan = mixed_plan(seed, job)

    host = train_plan(ALONE, job, without_levels(plan), range(STEPS), tmp_path)
    found = train_plan(ALONE, job, plan, range(STEPS), tmp_path, device=gpu)

    np.testing.assert_allclose(found.losses, host.losses, rtol=1e-5)
    assert rows_of(found) == rows_of(host)
    assert found.arrays.keys() == host.arrays.keys()
    for name, array in host.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=1e-3, atol=1e-5)


def rows_of(run: ShardedRun) -> list[tuple[str, tuple[int, int], list[int]]]:
    """Which rows of which column blocks a cut holds."""
    found: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for piece in run.pieces:
        key = (piece.shard.table, (piece.shard.column_start, piece.shard.column_end))
        found.setdefault(key, []).extend(piece.row_ids.tolist())
    return sorted((*key, sorted(rows)) for key, rows in found.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_wholly_in_hbm_has_the_bits_of_one_whose_rows_come_and_go(
    tmp_path: Path, gpu: torch.device, kind: str
) -> None:
    job = job_of(tmp_path, kind=kind)

    whole, stacked = (
        train_plan(ALONE, job, every_shard_in(hand_plan(job), tiers), range(STEPS), tmp_path, device=gpu)
        for tiers in (("hbm",), ("hbm", "ddr"))
    )

    assert whole.losses == stacked.losses
    assert whole.digest == stacked.digest


def test_one_level_alone_is_hbm(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    place(job.spec.model, every_shard_in(hand_plan(job), ["hbm"]), 1)

    with pytest.raises(InvalidSpecError, match="table users: its levels must be two or more, or hbm alone"):
        place(job.spec.model, every_shard_in(hand_plan(job), ["ddr"]), 1)


def train_pretending(collectives: Collectives, *arguments: Any) -> ShardedRun:
    """``train_plan``, in a gang, on the GPU that is pretended."""
    with gpu_of("pretended") as found:
        return train_plan(collectives, *arguments, device=found)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(repeats(2, soak=40)))
def test_gangs_train_as_one_rank_and_sending_ahead_changes_no_bit(tmp_path: Path, seed: int) -> None:
    world_size = 2 + seed % 2
    alone, gang = job_of(tmp_path, 1), job_of(tmp_path, world_size)
    plan = mixed_plan(seed, gang)

    whole = train_plan(ALONE, alone, hand_plan(alone), range(STEPS), tmp_path)
    runs = run_ranks(world_size, train_pretending, gang, plan, range(STEPS), tmp_path)
    pipelined = run_ranks(world_size, train_pretending, gang, plan, range(STEPS), tmp_path, None, True)

    np.testing.assert_allclose(np.sum([run.losses for run in runs], axis=0), whole.losses, rtol=1e-5)
    assert len({run.digest for run in runs}) == 1
    assert [(run.losses, run.digest) for run in pipelined] == [(run.losses, run.digest) for run in runs]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[ShardedRun]:
    """Return the runs of two ranks on GPUs that send all bits."""
    folder = tmp_path_factory.mktemp("exact")
    job = job_of(folder, 2)
    runs: list[ShardedRun] = run_ranks(2, train_pretending, job, mixed_plan(2, job), range(STEPS), folder)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_fewer_bits_travel_between_gpus_too(tmp_path: Path, expected: list[ShardedRun], codec: str) -> None:
    formats = dict.fromkeys(("forward", "backward", "dense"), codec)
    fewer, plan = job_of(tmp_path, 2, communication=formats), mixed_plan(2, job_of(tmp_path, 2))

    runs = run_ranks(2, train_pretending, fewer, plan, range(STEPS), tmp_path)

    np.testing.assert_allclose(*(np.sum([run.losses for run in each], axis=0) for each in (runs, expected)), rtol=0.02)
    for what in ("pooled", "gradients"):
        assert runs[0].bytes_sent[what] < 0.8 * expected[0].bytes_sent[what]
    assert len({run.digest for run in runs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_between_steps_leave_no_trace(tmp_path: Path, gpu: torch.device, kind: str) -> None:
    job, shape = job_of(tmp_path, kind=kind), Shape(("hbm", "ddr"), slots=40)

    seen, unseen = (train_run(ALONE, job, shape, STEPS, every, tmp_path, gpu) for every in (2, 0))

    assert seen.evaluations
    assert (seen.losses, seen.digest) == (unseen.losses, unseen.digest)


def test_bf16_products_train_nearly_as_fp32_ones(tmp_path: Path, gpu: torch.device) -> None:
    exact, fewer = (job_of(tmp_path, precision=precision) for precision in ("fp32", "bf16"))

    losses = [
        train_plan(ALONE, job, hand_plan(job), range(STEPS), tmp_path, device=gpu).losses for job in (exact, fewer)
    ]

    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.02)


class SlowCopy(HostCopy):
    """Takes two seconds of a clock: the GPU makes a step meanwhile."""

    def __init__(self, values: torch.Tensor, clock: SimpleNamespace) -> None:
        super().__init__(values)
        self._clock = clock

    def read(self, check: Callable[[], None] = lambda: None) -> torch.Tensor:
        self._clock.now += 2.0
        return super().read(check)


@pytest.mark.parametrize("others_s", [0.0, 0.5])
def test_gpu_time_is_the_ranks_own_but_for_its_waits_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_s: float
) -> None:
    job, clock = small_job(tmp_path), SimpleNamespace(now=100.0)
    ranks = Collectives(0, 1, lambda: "")
    for module in (stages, learners):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with gpu_of("pretended") as found:
        times = stages.Stages()
        learner = Learner(job.spec, place(job.spec.model, hand_plan(job), 1), ranks, stages=times, device=found)
        prepared = learner.prepare(learner.send(open_reader(job.spec, "train", 0, 1).read(0)))
        sums = learner.apply(learner.compute(prepared, 64), factor=1.0)
        ranks.device_waits.seconds = others_s
        learner.read(sums._replace(values=SlowCopy(torch.zeros(1 + VOTES), clock)))
    learner.embeddings.close()

    assert times.own_seconds() == pytest.approx(2.0 - others_s)


def test_the_host_hears_of_a_lost_rank_while_it_waits_for_a_gpu() -> None:
    ranks, copy = Collectives(0, 2, lambda: ""), HostCopy(torch.ones(1))
    never = SimpleNamespace(query=lambda: False)
    copy.end, ranks.verdict = never, lambda: "rank 1 died"  # type: ignore[assignment]

    with pytest.raises(PeerLostError, match="rank 1 died"):
        copy.read(ranks.check)


@pytest.mark.parametrize("with_bottom", [True, False])
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_pairs_and_their_gradients_are_the_hosts(with_bottom: bool, samples: int) -> None:
    generator = torch.Generator().manual_seed(7)
    bottom = torch.randn(samples, 8, generator=generator) if with_bottom else None
    features = torch.randn(samples, 6 * 8, generator=generator)
    places = pair_places(6 + with_bottom)

    def of(function: Any, *more: Any) -> list[torch.Tensor]:
        inputs = [each.clone().requires_grad_() for each in (bottom, features) if each is not None]
        out = function.apply(inputs[0] if with_bottom else None, inputs[-1], 8, *more)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
        return [out.detach(), *(each.grad for each in inputs)]

    for found, expected in zip(of(DevicePairs, torch.float32, places), of(HostPairs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_pairs_are_those_of_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    bottom, features = (torch.randn(3, n, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 12))

    assert torch.autograd.gradcheck(
        lambda *given: DevicePairs.apply(*given, 4, torch.float64, pair_places(4)), (bottom, features)
    )


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_dense_parameters_and_their_state_leave_a_gpu_and_come_back(
    tmp_path: Path, gpu: torch.device, kind: str
) -> None:
    model_spec, spec = job_of(tmp_path).spec.model, DenseOptimizerSpec(kind=kind)  # type: ignore[arg-type]
    held = []
    for target in (HOST, gpu):
        model = build_model(model_spec, 3, target)
        gradient = torch.linspace(-1, 1, DenseParameters.elements(model)).to(target)
        dense = DenseParameters(model, spec, gradient)
        for _ in range(3):
            gradient.copy_(torch.linspace(-1, 1, len(gradient)))
            dense.update(1.0)
        held.append(dense)
    again = DenseParameters(build_model(model_spec, 4, gpu), spec, torch.zeros_like(held[1]._gradient))
    again.restore(held[1].arrays())

    for name, array in held[1].arrays().items():
        np.testing.assert_allclose(array, held[0].arrays()[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(again.arrays()[name], array)
