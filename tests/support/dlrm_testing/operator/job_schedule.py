"""Random jobs that share a namespace, as a function of a seed: their specs, fates, users and faults."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from dlrm_testing.operator.job_model import HALTS, RECOVERABLE, USER_ERRORS, Budget, Fate, Kind, Stuck, over
from dlrm_testing.operator.operator_cluster import job_document
from dlrm_testing.operator.unruly_proxy import Weather

LAST_STEP = 100
MAX_FATES = 4
"""Number of failures of one job, without the one that ends it."""
CRASHES = (1, 70, 74, 134, 137, 139)
NAMES = ("demo", "demo-1", "demo-trainer")
"""Each one is a prefix of names of the first one's children."""
HANG_TIMEOUT = "2s"


@dataclass(frozen=True, kw_only=True)
class Script:
    """Hold everything that happens to one job."""

    seed: int
    name: str
    sizes: tuple[int, ...]
    """Number of pods of each attempt."""
    budget: Budget
    backoff_s: int
    fates: tuple[Fate, ...]
    """Fate of each attempt; after one that fails the job its user edits it."""
    gang: str = "none"
    """``spec.scheduling.gang``."""
    keeps: bool = False
    """Whether failed pods are kept."""
    ttl_s: int | None = None
    """When the finished job is deleted."""
    deleted_in: int = 0
    """Attempt during which the user deletes the job; 0: never."""
    reborn: bool = False
    """Whether a job of the same name is created right after the deletion."""
    edits: bool = False
    """Whether the user keeps editing fields that do not change how the job ends."""
    sloppy: bool = False
    """Whether pods give random answers: errors, garbage, none."""

    @property
    def is_retried(self) -> bool:
        """Return whether its user edits it after it failed."""
        return any(over(self.fates[:number], self.budget) for number in range(1, len(self.fates)))

    def document(self) -> dict[str, Any]:
        """Return the job that a user applies."""
        rules = [{"exitCodes": [code], "action": action} for code, action in self.budget.rules]
        restart = {
            "maxRestarts": self.budget.max_charged,
            "maxFreeRestarts": self.budget.max_free,
            "backoff": f"{self.backoff_s}s",
            "maxBackoff": "2s",
            "progressResets": self.budget.resets,
            "rulesByExitCode": rules,
            # What runs in place has been admitted and its image pulled.
            "inPlace": not any(fate.kind in (Kind.NEVER_STARTED, Kind.NOT_PULLED) for fate in self.fates),
        }
        lifecycle: dict[str, Any] = {"restart": restart, "terminationGracePeriod": "30s", "keepFailedPods": self.keeps}
        if self.ttl_s is not None:
            lifecycle["ttlAfterFinished"] = f"{self.ttl_s}s"
        if any(fate.kind is Kind.HUNG for fate in self.fates):
            lifecycle["hangTimeout"] = HANG_TIMEOUT
        scheduling = {} if self.gang == "none" else {"gang": self.gang, "schedulerName": "default-scheduler"}
        return job_document(self.name, self.sizes[0], lifecycle=lifecycle, scheduling=scheduling)

    def __str__(self) -> str:
        fates = "; ".join(
            f"{n}: {size} pods, {describe(fate)}"
            for n, (size, fate) in enumerate(zip(self.sizes, self.fates, strict=True), 1)
        )
        has = ", ".join(trait for trait, there in self.traits().items() if there)
        return f"{self.name}: {self.budget}, {has or 'plain'}; ttl {self.ttl_s}, deleted in {self.deleted_in}; {fates}"

    def traits(self) -> dict[str, bool]:
        """Return which traits the job has."""
        return {
            f"gang by {self.gang}": self.gang != "none",
            "failed pods kept": self.keeps,
            "deleted after its end": self.ttl_s is not None,
            "failed, edited, continues": self.is_retried,
            "deleted by the user": self.deleted_in > 0,
            "created again under its name": self.reborn,
            "edited all the time": self.edits,
            "sloppy pods": self.sloppy,
        }


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Hold the jobs that run at the same time in one namespace."""

    seed: int
    scripts: tuple[Script, ...]
    weather: Weather
    slow_kubelet_s: float = 0.3
    """Longest time in which a kubelet starts or ends a pod."""

    def __str__(self) -> str:
        return "\n  ".join(
            [f"schedule {self.seed}, {self.weather.rate:.0%} of requests at fault", *map(str, self.scripts)]
        )


def traits(schedule: Schedule) -> Counter[str]:
    """Count the traits and fates of a schedule."""
    found = Counter({"jobs": len(schedule.scripts), "schedules of several jobs": len(schedule.scripts) > 1})
    for script in schedule.scripts:
        found.update(fate.kind.value for fate in script.fates)
        found.update(fate.stuck.value for fate in script.fates if fate.stuck)
        found.update(trait for trait, there in script.traits().items() if there)
    return +found


def describe(fate: Fate) -> str:
    """Return a fate as text."""
    code = f" {fate.code}" if fate.code else ""
    committed = f", committed {fate.committed}" if fate.committed is not None else ""
    stuck = f", {fate.stuck.value}" if fate.stuck else ""
    return f"{fate.kind.value}{code} (pod {fate.index}{committed}{', early' if fate.early else ''}{stuck})"


def random_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    weather = Weather(
        seed=seed,
        rate=dice.choice([0.0, 0.03, 0.08, 0.15]),
        max_delay_s=dice.choice([0.05, 0.8, 2.0]),
        half_open=0.03 if dice.random() < 0.15 else 0.0,
    )
    scripts = tuple(_script(dice, seed, name) for name in NAMES[: dice.choice([1, 1, 1, 2, 3])])
    return Schedule(seed=seed, scripts=scripts, weather=weather, slow_kubelet_s=dice.choice([0.05, 0.3, 2.0]))


def _script(dice: random.Random, seed: int, name: str) -> Script:
    budget = _budget(dice)
    sizes, fates = _fates(dice, budget)
    deleted_in = dice.randint(1, len(fates)) if dice.random() < 0.2 else 0
    return Script(
        seed=seed,
        name=name,
        sizes=sizes,
        budget=budget,
        backoff_s=dice.choice([0, 0, 1]),
        fates=fates,
        gang=dice.choice(["none", "none", "none", "volcano", "coscheduling"]),
        keeps=dice.random() < 0.25,
        ttl_s=dice.choice([0, 1, 3]) if dice.random() < 0.25 else None,
        deleted_in=deleted_in,
        reborn=deleted_in > 0 and dice.random() < 0.5,
        edits=dice.random() < 0.25,
        sloppy=dice.random() < 0.3,
    )


def _budget(dice: random.Random) -> Budget:
    rules: dict[int, str] = {}
    if dice.random() < 0.3:
        for code in dice.sample([1, 65, 70, 75, 137], dice.randint(1, 2)):
            rules[code] = dice.choice(["fail", "restart", "restart-free"])
    return Budget(
        max_charged=dice.randint(0, 3),
        max_free=dice.choice([0, 1, 100, 100, 100]),
        resets=dice.random() < 0.7,
        rules=tuple(sorted(rules.items())),
    )


def _fates(dice: random.Random, budget: Budget) -> tuple[tuple[int, ...], tuple[Fate, ...]]:
    """Return the sizes of the gangs and their fates."""
    sizes, fates, step = [dice.choice([1, 2, 2, 3])], [], 0
    retries = dice.random() < 0.5
    while len(fates) < MAX_FATES and dice.random() < 0.7:
        fate = _fate(dice, sizes[-1], (step + dice.choice([0, 0, 10])) or None)
        if fate.kind in HALTS:
            # The cut that is requested from it.
            fate = replace(fate, committed=step + 10)
        fates.append(fate)
        step = max(step, fate.committed or 0)
        failed = over(fates, budget)
        if failed and not retries:
            break
        others = [size for size in (1, 2, 3) if size != sizes[-1]]
        changes = fate.kind is Kind.RESIZED or ((failed or fate.kind is Kind.SUSPENDED) and dice.random() < 0.4)
        sizes.append(dice.choice(others) if changes else sizes[-1])
    if not over(fates, budget) or retries:
        fates.append(Fate(kind=Kind.DONE, committed=LAST_STEP))
    return tuple(sizes), tuple(fates)


def _fate(dice: random.Random, replicas: int, committed: int | None) -> Fate:
    kind = dice.choice([kind for kind in Kind if kind is not Kind.DONE] + [Kind.CRASH] * 4)
    stuck = dice.choice([Stuck.HELD, Stuck.SILENT, Stuck.BOTH]) if dice.random() < 0.15 else Stuck.NO
    fate = Fate(kind=kind, index=dice.randrange(replicas), stuck=stuck)
    early = dice.random() < 0.3
    match kind:
        case Kind.CRASH:
            # Before a commit it depends on the last poll whether the operator knows of a step.
            coded = (*CRASHES, *USER_ERRORS, *(RECOVERABLE if committed else ()))
            code = dice.choice(coded) if dice.random() < 0.5 else dice.choice(CRASHES)
            reason = dice.choice(["", "Boom", "NumberOfWords"])
            return replace(fate, code=code, reason=reason, committed=committed, early=early)
        case Kind.OOM:
            return replace(fate, code=137, committed=committed, early=early)
        case Kind.PEERS_LOST:
            return replace(fate, code=dice.choice([75, 143]), committed=committed)
        case Kind.UNCOMMITTED:
            return replace(fate, committed=committed)
        case Kind.SIDECAR_REFUSED:
            return replace(fate, committed=committed or 10)
    return fate
