"""Choose the number of replicas, and one of several kinds of hardware, by ``trainer.objective``.

Each kind of hardware is searched for the number of replicas that serves the objective best; then the kinds compete. The
smallest number that meets a target leaves the other nodes to jobs that wait (PAC-ML, arXiv 2301.13799).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

from dlrm_api.choice import MAX_LACKS_LENGTH, MAX_REJECTED, Candidate, Choice, RejectedCandidate
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError, ObjectiveNotMetError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_api.progress import DataFiles
from dlrm_api.trace import TableTrace
from dlrm_api.training import RowCodecs
from dlrm_planner.choose import plan_job, plan_or_shortage
from dlrm_planner.predict import missing_rates
from dlrm_planner.replan import Check, PastPlan, continue_plan, with_reason
from dlrm_planner.virtual_shards import max_replicas, with_kept

MAX_EXACT = 16
"""Up to so many numbers of replicas are judged one by one."""
GRID_SIZES = 12
"""Of more sizes so many are judged first, each larger by the same factor."""
FALLING_SIZES = 3
"""Sizes in a row below the best one, after which larger ones are skipped."""
MAX_REFINED = 8
"""Sizes between the neighbours of the best one that are judged if none is enough."""
SHOWN_SIZES = 3
"""Sizes next to the chosen one that are shown."""
FIELD = "spec.trainer.objective"


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """Hold what of a job is done: its deadline is for the rest."""

    samples: int = 0
    """Samples up to the snapshot from which training continues."""
    seconds: float = 0.0
    """Run time so far."""


def choose_plan(
    spec: DLRMJobSpec,
    profiles: Sequence[HardwareProfile] = (),
    *,
    traces: Mapping[str, TableTrace] | None = None,
    reserve: int = 0,
    virtual_shards: int | None = None,
    data: DataFiles | None = None,
    done: WorkDone | None = None,
    kept: str = "",
    before: PastPlan | None = None,
    check: Check | None = None,
) -> Plan:
    """Return the plan that meets ``trainer.objective``, with the choice of replicas and hardware in it.

    Without an objective, or with nothing to choose, it is :func:`plan_job`'s. An attempt of as many replicas on the
    same hardware as the one before continues with its plan, by ``lifecycle.replan``. The same arguments give the same
    plan.

    Args:
        spec: A validated job.
        profiles: The kinds of hardware to choose from, at most one without an objective.
        traces: See :func:`plan_job`.
        reserve: See :func:`plan_job`.
        virtual_shards: See :func:`plan_job`.
        data: See :func:`plan_job`.
        done: What of the job is done.
        kept: Hardware of an earlier attempt, which is kept if it holds the job.
        before: Plan of the attempt before.
        check: Refuses plans that their hardware cannot run; default: none.

    Raises:
        InfeasiblePlanError: nothing in the bounds holds all tables.
        ObjectiveNotMetError: everything costs more than ``maxPricePerBillionSamples``.
        InvalidSpecError: a rate or price that the objective needs is missing in a profile; see :func:`plan_job` too.
    """
    trainer, traces = spec.trainer, traces or {}

    codecs = before.chosen_codecs if before else None
    next_plan = partial(continue_plan, before, traces=traces, reserve=reserve, data=data, check=check)
    is_fixed = trainer.replicas is not None and len(profiles) < 2 and not trainer.chooses_hardware
    if trainer.objective is None or is_fixed:
        (profile,) = profiles or (None,)
        continued = next_plan(spec, profile)
        if isinstance(continued, Plan):
            return continued
        plan = plan_job(
            spec, profile, traces=traces, reserve=reserve, virtual_shards=virtual_shards, data=data, codecs=codecs
        )
        if check is not None:
            check(plan, profile)
        return with_reason(plan, continued)
    goal = _read_goal(spec, done or WorkDone())

    def chosen(several: Sequence[HardwareProfile | None], *, is_kept: bool = False) -> Plan:
        kinds = [
            _Kind(spec, goal, profile, traces, reserve, virtual_shards, data, codecs, check) for profile in several
        ]
        return _choose(spec, goal, kinds, is_kept=is_kept)

    best: Plan | None = None
    of_before = [profile for profile in profiles if profile.metadata.name == kept]
    if of_before and len(profiles) > 1:
        with suppress(InvalidSpecError):
            best = chosen(of_before, is_kept=True)
    best = best or chosen(profiles or (None,))
    of_best = next((profile for profile in profiles if profile.metadata.name == best.hardware), None)
    continued = next_plan(spec.with_replicas(best.nodes), of_best)
    if isinstance(continued, Plan):
        return continued.model_copy(update={"choice": best.choice})
    return with_reason(best, continued)


@dataclass(frozen=True, kw_only=True)
class _Goal:
    """Hold what a choice must reach."""

    name: str  # the objective's field and value
    field: str
    min_rate: float = 0.0
    max_price: float = inf
    """Price of 1e9 samples. If finite, the highest rate within it wins, else the lowest price."""
    samples_left: int = 0
    seconds_left: float = 0.0

    @property
    def needs_rates(self) -> bool:
        return self.min_rate > 0 or self.is_capped

    @property
    def is_capped(self) -> bool:
        return self.max_price < inf

    def is_met(self, found: Candidate) -> bool:
        if self.is_capped:
            return _price(found) <= self.max_price
        return _rate(found) >= self.min_rate

    def value(self, found: Candidate) -> float:
        """Return the rate; of what costs too much the negative price, so that the cheapest comes closest."""
        return -_price(found) if self.is_capped and not self.is_met(found) else _rate(found)

    def cost(self, found: Candidate) -> float:
        """Return the price to compare: of the samples left with a deadline, else per hour."""
        return _price(found) if self.samples_left else found.price_per_hour or 0.0

    def order(self, found: Candidate) -> tuple[float, ...]:
        """Return the key by which the best candidate comes first."""
        if self.is_met(found) and not self.is_capped:
            return 0.0, self.cost(found), found.replicas
        return float(not self.is_met(found)), -self.value(found), self.cost(found), found.replicas

    def lacks(self, found: Candidate, chosen: Candidate) -> str:
        """Say in numbers why another candidate was chosen."""
        if not self.is_met(found):
            return self.shortage(found)
        if self.is_capped and _rate(found) < _rate(chosen):
            return f"lacks {_rate(chosen) - _rate(found):,.0f} of {_rate(chosen):,.0f} samples/s"
        if (more := self.cost(found) - self.cost(chosen)) > 0:
            return f"costs {more:,.2f} more {'per 1e9 samples' if self.samples_left else 'per hour'}"
        more_replicas = found.replicas - chosen.replicas
        return f"needs {more_replicas} more replicas" if more_replicas > 0 else "is no better"

    def shortage(self, found: Candidate) -> str:
        """Say in numbers what a candidate lacks of the target."""
        if self.is_capped:
            return f"costs {_price(found) - self.max_price:,.2f} per 1e9 samples too much"
        if self.samples_left:
            needed_s = self.samples_left / _rate(found) if _rate(found) else inf
            late = _span(needed_s - self.seconds_left)
            return f"takes {_span(needed_s)} for {self.samples_left:,} samples, {late} too long"
        return f"lacks {self.min_rate - _rate(found):,.0f} of {self.min_rate:,.0f} samples/s"


def _read_goal(spec: DLRMJobSpec, done: WorkDone) -> _Goal:
    objective = spec.trainer.objective
    assert objective is not None
    if (rate := objective.samples_per_second) is not None:
        return _Goal(name=f"samplesPerSecond {rate:,.0f}", field=f"{FIELD}.samplesPerSecond", min_rate=rate)
    if (price := objective.max_price_per_billion_samples) is not None:
        field_ = f"{FIELD}.maxPricePerBillionSamples"
        return _Goal(name=f"maxPricePerBillionSamples {price:,.2f}", field=field_, max_price=price)
    if objective.deadline is None:
        return _Goal(name="holding all tables", field=FIELD)
    total = spec.total_samples
    assert total is not None, "a rule of the spec"
    # At least one sample: what comes after the last one takes time too.
    samples, seconds = max(1, total - done.samples), objective.deadline - done.seconds
    name = f"deadline in {_span(seconds)} for {samples:,} samples"
    rate = samples / seconds if seconds > 0 else inf
    return _Goal(name=name, field=f"{FIELD}.deadline", min_rate=rate, samples_left=samples, seconds_left=seconds)


@dataclass(frozen=True)
class _Kind:
    """Judge numbers of replicas of one kind of hardware."""

    spec: DLRMJobSpec
    goal: _Goal
    profile: HardwareProfile | None
    traces: Mapping[str, TableTrace]
    reserve: int
    virtual_shards: int | None
    data: DataFiles | None
    codecs: RowCodecs | None
    check: Check | None
    judged: dict[int, Candidate | str] = field(default_factory=dict)
    """By number of replicas; what hardware that does not hold all tables lacks."""

    @property
    def name(self) -> str:
        return self.profile.metadata.name if self.profile else ""

    @property
    def hourly(self) -> float | None:
        """Return the price of one node per hour."""
        return self.profile.spec.price_per_hour if self.profile else None

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Return the smallest and the largest number of replicas."""
        objective, replicas = self.spec.trainer.objective, self.spec.trainer.replicas
        assert objective is not None
        if replicas is not None:
            return replicas, replicas
        kept = with_kept(self.spec, self.virtual_shards)
        return objective.min_replicas, min(objective.max_replicas, max_replicas(kept))

    @cached_property
    def best(self) -> Candidate | None:
        """Return the candidate that serves the objective best; None if none holds all tables."""
        found = choose_replicas(*self.sizes, inf if self.goal.is_capped else self.goal.min_rate, self._value)
        return None if found.replicas is None else self._candidate(found.replicas)

    def _candidate(self, size: int) -> Candidate | None:
        found = self.judged[size]
        return found if isinstance(found, Candidate) else None

    def _value(self, size: int) -> float | None:
        self.judged[size] = self._judge(size)
        found = self._candidate(size)
        return None if found is None else self.goal.value(found)

    def _judge(self, size: int) -> Candidate | str:
        fixed = self.spec.with_replicas(size)
        given = self.profile, self.traces, self.reserve, self.virtual_shards, self.data, self.codecs
        plan = plan_or_shortage(fixed, *given)
        if isinstance(plan, str):
            return plan
        try:
            if self.check is not None:
                self.check(plan, self.profile)
        except InvalidSpecError as error:
            return str(error)
        is_unknown = plan.predicted.samples_per_second is None
        if self.goal.needs_rates and (is_unknown or plan.predicted.uncalibrated):
            missing = missing_rates(fixed, self.profile, plan)
            what = "throughput" if is_unknown else "throughput and price"
            raise InvalidSpecError(
                self.goal.field,
                f"{what} of {size} replicas {'cannot be predicted' if is_unknown else 'are not calibrated'}: {missing};"
                " measure it on a node of this kind (dlrmctl profile measure), or remove the target for the fewest "
                "replicas that hold all tables",
            )
        return Candidate(
            hardware=self.name,
            replicas=size,
            samples_per_second=plan.predicted.samples_per_second,
            price_per_hour=None if self.hourly is None else self.hourly * size,
            price_per_billion_samples=plan.predicted.price_per_billion_samples,
            uncalibrated=bool(plan.predicted.uncalibrated),
        )

    def plan(self, size: int) -> Plan:
        """Return a plan again: keeping all of them would take the memory of two dozen."""
        field_ = "trainer.objective.maxReplicas" if self.spec.trainer.replicas is None else "trainer.replicas"
        plan = plan_job(
            self.spec.with_replicas(size),
            self.profile,
            traces=self.traces,
            reserve=self.reserve,
            virtual_shards=self.virtual_shards,
            data=self.data,
            codecs=self.codecs,
            replicas_field=field_,
        )
        if self.check is not None:
            self.check(plan, self.profile)
        return plan

    def unfit(self) -> RejectedCandidate:
        """Return the largest number of replicas, which does not hold all tables either."""
        size = max(self.judged)
        return _rejected(Candidate(hardware=self.name, replicas=size), str(self.judged[size]))

    def next_to(self, chosen: Candidate) -> list[RejectedCandidate]:
        """Return the rejected sizes that are next to the chosen one; to a target, larger ones add nothing."""
        sizes = [size for size in self.judged if size != chosen.replicas]
        if self.goal.is_met(chosen) and not self.goal.is_capped:
            sizes = [size for size in sizes if size < chosen.replicas]
        nearest = sorted(sizes, key=lambda size: (abs(size - chosen.replicas), size))[:SHOWN_SIZES]
        found = []
        for size in sorted(nearest):
            judged = self.judged[size]
            if isinstance(judged, str):
                found.append(_rejected(Candidate(hardware=self.name, replicas=size), judged))
            else:
                found.append(_rejected(judged, self.goal.lacks(judged, chosen)))
        return found


def _choose(spec: DLRMJobSpec, goal: _Goal, kinds: Sequence[_Kind], *, is_kept: bool) -> Plan:
    """Return the plan of the best candidate of all kinds of hardware."""
    _refuse_without_prices(goal, kinds)
    fitting = [(goal.order(kind.best), number) for number, kind in enumerate(kinds) if kind.best is not None]
    if not fitting:
        _refuse_misfits(kinds)
    kind = kinds[min(fitting)[1]]
    chosen = kind.best
    assert chosen is not None
    others = [each for each in kinds if each is not kind]
    rejected = kind.next_to(chosen)
    rejected += [_rejected(each.best, goal.lacks(each.best, chosen)) if each.best else each.unfit() for each in others]
    choice = Choice(
        **chosen.model_dump(by_alias=False),
        objective=goal.name,
        met=goal.is_met(chosen),
        lacks="" if goal.is_met(chosen) else goal.shortage(chosen),
        kept=is_kept,
        rejected=tuple(rejected[:MAX_REJECTED]),
    )
    if not choice.met and goal.is_capped:
        raise ObjectiveNotMetError(goal.field, choice.summary)
    reason = f"trainer.objective: {choice.summary}"
    if spec.trainer.objective and spec.trainer.replicas is None and kind.sizes[1] < spec.trainer.objective.max_replicas:
        count = with_kept(spec, kind.virtual_shards).data.virtual_shards
        bound = f"data.virtualShards {count}" if count else f"data.globalBatchSize {spec.data.global_batch_size}"
        reason += f"; {bound} allows no more than {kind.sizes[1]} replicas"
    plan = kind.plan(chosen.replicas)
    return plan.model_copy(update={"choice": choice, "reasons": (reason, *plan.reasons)})


def _refuse_without_prices(goal: _Goal, kinds: Sequence[_Kind]) -> None:
    """Refuse profiles without the price that they are compared by."""
    for kind in kinds if goal.is_capped or len(kinds) > 1 else ():
        if kind.hourly is None:
            what = f"HardwareProfile {kind.name} has no pricePerHour" if kind.profile else "no HardwareProfile is given"
            raise InvalidSpecError(goal.field, f"{what}: its price is needed to choose by; set it")


def _refuse_misfits(kinds: Sequence[_Kind]) -> None:
    """Refuse a job whose tables no hardware holds.

    Raises:
        InfeasiblePlanError: always; of one kind of hardware it says what would fix it.
        InvalidSpecError: the hardware is not what the job needs.
    """
    fewest, most = kinds[0].sizes
    refused = f"no number of replicas from {fewest} to {most} holds all tables"
    if len(kinds) > 1:
        unfit = [each.unfit() for each in kinds]
        fix = "fix: raise trainer.objective.maxReplicas, or give hardware with more memory"
        raise InfeasiblePlanError(FIELD, [refused, *(f"{each.name}: {each.lacks}" for each in unfit), fix])
    try:
        kinds[0].plan(most)
    except InfeasiblePlanError as error:
        first, *others = error.reasons
        raise InfeasiblePlanError(FIELD, [f"{refused}; with {most}: {first}", *others]) from error


@dataclass(frozen=True, kw_only=True)
class ChosenSize:
    """Hold how the search for a number of replicas ended."""

    replicas: int | None
    """The fewest that reach the target; else those of the highest value; None if nothing fits."""
    reached: bool
    judged: Mapping[int, float | None]
    """Value of every size that was judged, None if it does not fit: at most ``GRID_SIZES`` and twelve more."""


def choose_replicas(fewest: int, most: int, target: float, judge: Callable[[int], float | None]) -> ChosenSize:
    """Return the fewest replicas in a range that reach ``target``, else the best of those judged.

    Between two neighbours of the grid the answer is assumed to change once, from no to yes; and a value that has
    fallen over several larger sizes is assumed not to rise above its peak again. Neither holds in general (a table may
    split badly over one size and well over the next), so up to ``MAX_EXACT`` sizes are all judged.
    """
    judged: dict[int, float | None] = {}

    def is_enough(size: int) -> bool:
        value = judged[size] = judge(size)
        return value is not None and value >= target

    before = fewest - 1
    for size in size_grid(fewest, most):
        if is_enough(size):
            while size - before > 1:
                middle = (before + size) // 2
                before, size = (before, middle) if is_enough(middle) else (middle, size)
            return ChosenSize(replicas=size, reached=True, judged=judged)
        values = [value for _, value in sorted(judged.items()) if value is not None]
        is_falling = len(values) > FALLING_SIZES and max(values[-FALLING_SIZES:]) < max(values[:-FALLING_SIZES])
        if most - fewest >= MAX_EXACT and is_falling:
            break
        before = size
    for _ in range(MAX_REFINED):
        best = _best(judged)
        between = None if best is None else _middle_next_to(best, judged)
        if between is None:
            break
        if is_enough(between):
            return ChosenSize(replicas=between, reached=True, judged=judged)
    return ChosenSize(replicas=_best(judged), reached=False, judged=judged)


def _best(judged: Mapping[int, float | None]) -> int | None:
    fitting = {size: value for size, value in judged.items() if value is not None}
    return max(fitting, key=lambda size: (fitting[size], -size), default=None)


def _middle_next_to(best: int, judged: Mapping[int, float | None]) -> int | None:
    """Return the middle of the wider gap next to a judged size; None without a gap."""
    below = max((size for size in judged if size < best), default=best)
    above = min((size for size in judged if size > best), default=best)
    middle = (best + above) // 2 if above - best >= best - below else (best + below + 1) // 2
    return None if middle in judged else middle


def size_grid(fewest: int, most: int) -> list[int]:
    """Return the sizes to judge first, ascending, with both ends."""
    if most - fewest < MAX_EXACT:
        return list(range(fewest, most + 1))
    steps = (round(fewest * (most / fewest) ** (i / (GRID_SIZES - 1))) for i in range(GRID_SIZES))
    return sorted({fewest, most, *steps})


def _rejected(found: Candidate, lacks: str) -> RejectedCandidate:
    return RejectedCandidate(**found.model_dump(by_alias=False), lacks=lacks[:MAX_LACKS_LENGTH])


def _rate(found: Candidate) -> float:
    return found.samples_per_second or 0.0


def _price(found: Candidate) -> float:
    return inf if found.price_per_billion_samples is None else found.price_per_billion_samples


def _span(seconds: float) -> str:
    """Write a time span for people."""
    for unit, name in ((3_600, "h"), (60, "min")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.1f} s"
