"""Refine a profile from runs: scale the loops so that predicted stages take what was measured.

The unknowns are logarithms of scales, one for each kind of loop of each number of ranks, and one for each tier. Each
stage of each run gives one equation: how many percent it takes more than predicted. Gauss-Newton steps solve them in
the sense of least absolute errors, so that a disturbed run among several counts little. They start from a node that is
slower as a whole: where stages leave open which loops are slow, scales differ little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log
from typing import Any, NamedTuple

import numpy as np

from dlrm_api.base import ApiModel
from dlrm_api.errors import InvalidSpecError
from dlrm_api.fields import is_s3
from dlrm_api.hardware import HardwareProfile, RankLoops, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, StepStage
from dlrm_api.tiers import FILE_TIERS
from dlrm_api.trace import TableTrace
from dlrm_planner.choose import read_problem
from dlrm_planner.predict import Solution, step_work
from dlrm_planner.replan import read_solution
from dlrm_planner.timeline import lay_out
from dlrm_planner.types import Floats

LOOPS: Mapping[str, tuple[str, ...]] = {
    "interpreted code": ("step", "part"),
    "lookups": ("lookup", "lookup_value", "lookup_bag"),
    "row updates": ("update", "update_value", "update_bag"),
    "dense layers": ("layer", "layers", "pair_value"),
    "dense updates": ("parameter",),
    "messages": ("packs",),
    "collectives": ("collectives",),
    "sent ids": ("sent_id",),
    "readers": ("readers",),
}
"""Kinds of loops, each with its fields: a stage cannot tell the loops of a kind apart."""
TRAINING_STAGES: tuple[StepStage, ...] = ("compute", "exchange", "update", "other")
"""Work of the training thread; in the other stages it waits."""
MIN_SHARE = 0.005
"""A stage that takes less of a step, measured or predicted, says nothing of its loops."""
MIN_WAIT_SHARE = 0.02
"""A step that waits so long for its reader, or for rows of tiers, is bound by them."""
MAX_SCALE = 10.0
ROUNDS, STEP = 16, 1e-3
ERROR_FLOOR = 0.02
"""Errors below it count by their squares."""
EVENNESS = 0.001
"""Weight of differences between the scales of loops against that of errors."""
SETTLED = 1e-3


class Scaled(NamedTuple):
    """Name what is scaled: a kind of loops of so many ranks of a node, or the tier of that name, with no ranks."""

    processes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """Hold a run on one node: what was planned, and what its stages took."""

    name: str
    spec: DLRMJobSpec
    plan: Plan
    stage_seconds: Mapping[StepStage, float]
    """Median seconds of a step by stage, of its slowest rank."""
    traces: Mapping[str, TableTrace]

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(self.stage_seconds.values())


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    """Compare the stages of a run with their predictions (s)."""

    name: str
    measured: Mapping[StepStage, float]
    before: Mapping[StepStage, float]
    after: Mapping[StepStage, float]


@dataclass(frozen=True, kw_only=True)
class ProfileFit:
    """Hold a refined profile."""

    profile: HardwareProfile
    scales: Mapping[Scaled, float]
    runs: tuple[FittedRun, ...]


def fit_profile(profile: HardwareProfile, runs: Sequence[PastRun]) -> ProfileFit:
    """Return the profile with its loops scaled to what runs measured.

    Raises:
        InvalidSpecError: a run tells nothing of this profile; names the run and the fix.
    """
    for run in runs:
        _check(profile, run)
    fits = [_Run(run, profile) for run in runs]
    kinds = list(dict.fromkeys(kind for each in fits for kind in each.kinds))
    scales = best = _as_a_whole(fits, kinds, profile)
    least = inf
    for _ in range(ROUNDS):
        equations = _equations(fits, kinds, scales, profile)
        if equations.loss < least:
            best, least = scales, equations.loss
        step = equations.step(scales)
        if float(np.abs(step).max(initial=0.0)) < SETTLED:
            break
        scales = np.clip(scales + step, -log(MAX_SCALE), log(MAX_SCALE))
    found = dict(zip(kinds, np.clip(np.exp(best), 1 / MAX_SCALE, MAX_SCALE).tolist(), strict=True))
    found = {kind: scale for kind, scale in found.items() if abs(scale - 1) >= SETTLED}
    fitted = scale_profile(profile, found)
    return ProfileFit(
        profile=fitted,
        scales=found,
        runs=tuple(
            FittedRun(
                name=each.run.name,
                measured=each.run.stage_seconds,
                before=each.stages_s(profile),
                after=each.stages_s(fitted),
            )
            for each in fits
        ),
    )


def _check(profile: HardwareProfile, run: PastRun) -> None:
    """Refuse a run whose predictions do not rest on the loops of the profile."""
    spec, measured = run.spec, sorted({each.processes for each in profile.spec.loops})
    if not measured:
        problem = f"HardwareProfile {profile.metadata.name} has no loops: write one with dlrmctl profile measure"
        raise InvalidSpecError("spec.loops", problem)
    if run.plan.device == "cuda":
        problem = "it ran on GPUs, and loops are of CPUs: leave it out"
    elif spec.replicas > 1:
        problem = (
            f"it ran {spec.replicas} replicas on one node: give a run of one replica, with "
            "trainer.processesPerReplica ranks"
        )
    elif spec.world_size not in measured:
        problem = (
            f"it ran {spec.world_size} ranks on its node, and the profile has loops of "
            f"{' and '.join(map(str, measured))}: leave it out, or set trainer.processesPerReplica"
        )
    elif not any(loops.reader(spec.data.format) for loops in profile.spec.loops):
        problem = f"the profile has no loops.readers of {spec.data.format}: leave it out"
    else:
        return
    raise InvalidSpecError(run.name, problem)


class _Run:
    """Predict the plan of one run by variants of a profile."""

    def __init__(self, run: PastRun, profile: HardwareProfile) -> None:
        self.run = run
        self._found = read_solution(read_problem(run.spec, profile, run.traces, codecs=run.plan.row_codecs), run.plan)

    @cached_property
    def kinds(self) -> tuple[Scaled, ...]:
        """Return what may be scaled by this run."""
        tiers = (tier for tier in self._found.estimate.misses if tier in FILE_TIERS)
        return (*(Scaled(self.run.spec.world_size, kind) for kind in LOOPS), *(Scaled(0, tier) for tier in tiers))

    def solution(self, profile: HardwareProfile) -> Solution:
        """Return the run's plan with the rates of a profile."""
        return self._found.under(replace(self._found.problem, profile=profile))

    def stages_s(self, profile: HardwareProfile) -> Mapping[StepStage, float]:
        """Return the predicted seconds of a step by stage."""
        return self.solution(profile).timeline.stages_s

    def predicted_s(self, profile: HardwareProfile) -> Floats:
        """Return the (E,) predicted seconds of what was measured."""
        work = step_work(self.solution(profile))
        stages, bound_s = lay_out(work).stages_s, work.done_s
        if work.prefetches:
            bound_s = max(bound_s, sum(each.device_s for each in work.tiers.values()))
        return np.array([*(stages[stage] for stage in self.stages), bound_s])

    @cached_property
    def stages(self) -> tuple[StepStage, ...]:
        """Return the stages that take time whatever runs beside them."""
        return TRAINING_STAGES if self._found.estimate.prefetches else (*TRAINING_STAGES, "tiers")

    @cached_property
    def measured_s(self) -> Floats:
        """Return the (E,) measured seconds: of each of ``stages``, and of the slowest thread beside them.

        A step that waits takes as long as the thread that it waits for; if it does not wait, this is the longest that
        such a thread may take.
        """
        stages = self.run.stage_seconds
        return np.array([*(stages.get(stage, 0.0) for stage in self.stages), self.run.step_s])

    def weights(self, predicted: Floats) -> Floats:
        """Return the (E,) shares of a step that each time explains, by what is predicted now."""
        step_s, waited_s = self.run.step_s, self._waited_s
        if waited_s < MIN_WAIT_SHARE * step_s or any(map(is_s3, self.run.spec.data.train.uris)):
            # Readers of an object store wait for it, and not for their loops.
            waited_s = max(0.0, float(predicted[-1]) - step_s)
        shares = np.array([*self.measured_s[:-1], waited_s]) / step_s
        return np.where((shares >= MIN_SHARE) & (predicted >= MIN_SHARE * step_s), np.minimum(shares, 1.0), 0.0)

    @cached_property
    def _waited_s(self) -> float:
        waits = {"read", "tiers"} - set(self.stages)
        return sum(seconds for stage, seconds in self.run.stage_seconds.items() if stage in waits)


@dataclass(frozen=True, kw_only=True)
class _Equations:
    """Hold what all runs say of the (K,) logarithms of scales, near some scales."""

    slopes: Floats
    """(E, K) relative change of each predicted time with each logarithm."""
    errors: Floats  # (E,) logarithms of measured over predicted times
    weights: Floats  # (E,)

    @property
    def loss(self) -> float:
        """Return the sum of errors by the time that they explain."""
        return float((self.weights * np.abs(self.errors)).sum())

    def step(self, scales: Floats) -> Floats:
        """Return the (K,) change that lowers the errors."""
        weight = self.weights / np.maximum(np.abs(self.errors), ERROR_FLOOR)
        size = (np.abs(self.slopes) * weight[:, None]).sum(axis=0)
        matters, found = size > 0, np.zeros(len(scales))
        if matters.any():
            slopes, size = self.slopes[:, matters], size[matters]
            # Scales are held to their mean, weighted by time: a machine that is slower as a whole stays in proportion.
            apart = np.eye(len(size)) - size / size.sum()
            held = EVENNESS * float(size.mean()) * apart.T @ apart
            normal = slopes.T @ (weight[:, None] * slopes) + held
            gradient = slopes.T @ (weight * self.errors) - held @ scales[matters]
            found[matters] = np.linalg.lstsq(normal, gradient, rcond=None)[0]
        return found


def _as_a_whole(fits: Sequence[_Run], kinds: Sequence[Scaled], profile: HardwareProfile) -> Floats:
    """Return the (K,) logarithms by which nodes are slower as a whole: of each kind, in the median of its runs."""
    slower = [log(float(each.measured_s[:-1].sum() / each.predicted_s(profile)[:-1].sum())) for each in fits]
    medians = [
        np.median([log_ for each, log_ in zip(fits, slower, strict=True) if kind in each.kinds]) for kind in kinds
    ]
    return np.clip(np.array(medians, np.float64), -log(MAX_SCALE), log(MAX_SCALE))


def _equations(fits: Sequence[_Run], kinds: Sequence[Scaled], scales: Floats, profile: HardwareProfile) -> _Equations:
    """Return what runs say of a profile with such logarithms of scales."""

    def scaled(logs: Floats) -> HardwareProfile:
        return scale_profile(profile, dict(zip(kinds, np.exp(logs).tolist(), strict=True)))

    now = scaled(scales)
    moved = {kind: scaled(scales + STEP * unit) for kind, unit in zip(kinds, np.eye(len(kinds)), strict=True)}
    slopes, errors, weights = [], [], []
    for each in fits:
        predicted = each.predicted_s(now)
        weight = each.weights(predicted)
        counts = weight > 0
        row = np.zeros((int(counts.sum()), len(kinds)))
        for k, kind in enumerate(kinds):
            if kind in each.kinds:
                row[:, k] = (each.predicted_s(moved[kind])[counts] / predicted[counts] - 1) / STEP
        slopes.append(row)
        errors.append(np.log(each.measured_s[counts] / predicted[counts]))
        weights.append(weight[counts])
    return _Equations(slopes=np.concatenate(slopes), errors=np.concatenate(errors), weights=np.concatenate(weights))


def scale_profile(profile: HardwareProfile, scales: Mapping[Scaled, float]) -> HardwareProfile:
    """Return a profile with times of loops and tiers multiplied."""
    spec = profile.spec
    loops = tuple(_scale_loops(each, scales) for each in spec.loops)
    tiers = {
        kind: _scale_tier(known, scale)
        for (processes, kind), scale in scales.items()
        if not processes and (known := getattr(spec.tiers, kind)) is not None
    }
    update = {"loops": loops, "tiers": spec.tiers.model_copy(update=tiers)}
    return profile.model_copy(update={"spec": spec.model_copy(update=update)})


def _scale_loops(loops: RankLoops, scales: Mapping[Scaled, float]) -> RankLoops:
    update = dict[str, Any]()
    for kind, names in LOOPS.items():
        scale = scales.get(Scaled(loops.processes, kind), 1.0)
        if scale != 1.0:
            update |= {name: _scale_times(getattr(loops, name), scale) for name in names}
    return loops.model_copy(update=update)


def _scale_times(known: ApiModel | tuple[ApiModel, ...], scale: float) -> Any:
    """Return all times of one loop, or of several, multiplied."""
    if isinstance(known, tuple):
        return tuple(_scale_times(each, scale) for each in known)
    names = [name for name in type(known).model_fields if name.endswith("seconds")]
    return known.model_copy(update={name: scale * getattr(known, name) for name in names})


def _scale_tier(tier: TierSpec, scale: float) -> TierSpec:
    rates = ("read_bytes_per_second", "write_bytes_per_second", "read_iops", "write_iops")
    update = {name: rate / scale for name in rates if (rate := getattr(tier, name)) is not None}
    if tier.row_processor_seconds is not None:
        update["row_processor_seconds"] = scale * tier.row_processor_seconds
    return tier.model_copy(update=update)
