"""A random life of one job, as a function of a seed: its spec, the fates of its gangs, its users, its weather."""

import random
from dataclasses import dataclass, replace
from typing import Any

from life_model import USER_ERRORS, Budget, Fate, Kind, over
from operator_cluster import job_document
from unruly_proxy import Weather

LAST_STEP = 100
MOST_FAILURES = 4
CRASHES = (1, 70, 74, 134, 137, 139)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One life."""

    seed: int
    replicas: int
    budget: Budget
    backoff_s: int
    fates: tuple[Fate, ...]
    """The last one ends the job."""
    weather: Weather
    deleted_in: int = 0
    """Attempt in whose course the user deletes the job; 0: never."""
    reborn: bool = False
    """Whether a job of the same name follows the deleted one at once."""
    edits: bool = False
    """Whether the user edits, all the time, what changes nothing of the end."""
    sloppy: bool = False
    """Whether pod 0 answers at random: errors, rubbish, silence."""
    slow_kubelet_s: float = 0.3
    """Longest time that a kubelet takes to start or end a pod."""

    def document(self, name: str) -> dict[str, Any]:
        """The job that a user applies."""
        rules = [{"exitCodes": [code], "action": action} for code, action in self.budget.rules]
        restart = {
            "maxRestarts": self.budget.most,
            "maxFreeRestarts": self.budget.most_free,
            "backoff": f"{self.backoff_s}s",
            "maxBackoff": "2s",
            "progressResets": self.budget.heals,
            "rulesByExitCode": rules,
        }
        lifecycle = {"restart": restart, "terminationGracePeriod": "30s"}
        return job_document(name, self.replicas, lifecycle=lifecycle)

    def __str__(self) -> str:
        fates = "; ".join(f"{n}: {describe(fate)}" for n, fate in enumerate(self.fates, 1))
        deleted = f", deleted in attempt {self.deleted_in}{' and made anew' if self.reborn else ''}"
        return (
            f"schedule {self.seed}: {self.replicas} pods, {self.budget}, {self.weather.rate:.0%} of requests at fault"
            f"{deleted if self.deleted_in else ''}{', edited' if self.edits else ''}; fates: {fates}"
        )


def describe(fate: Fate) -> str:
    """The fate in words."""
    code = f" {fate.code}" if fate.code else ""
    committed = f", committed {fate.committed}" if fate.committed is not None else ""
    return f"{fate.kind.value}{code} (pod {fate.index}{committed}{', early' if fate.early else ''})"


def random_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    dice = random.Random(seed)
    replicas = dice.choice([1, 2, 2, 3])
    rules: dict[int, str] = {}
    if dice.random() < 0.3:
        for code in dice.sample([1, 65, 70, 75, 137], dice.randint(1, 2)):
            rules[code] = dice.choice(["fail", "restart", "restart-free"])
    budget = Budget(
        most=dice.randint(0, 3),
        most_free=dice.choice([0, 1, 100, 100, 100]),
        heals=dice.random() < 0.7,
        rules=tuple(sorted(rules.items())),
    )
    fates: list[Fate] = []
    step = 0
    while len(fates) < MOST_FAILURES and not over(fates, budget) and dice.random() < 0.7:
        fate = _failure(dice, replicas, (step + dice.choice([0, 0, 10])) or None)
        if fate.kind is Kind.SUSPENDED:
            fate = replace(fate, committed=step + 10)  # the cut that it is asked for
        fates.append(fate)
        step = max(step, fate.committed or 0)
    if not over(fates, budget):
        fates.append(Fate(kind=Kind.DONE, committed=LAST_STEP))
    deleted_in = dice.randint(1, len(fates)) if dice.random() < 0.2 else 0
    weather = Weather(
        seed=seed,
        rate=dice.choice([0.0, 0.03, 0.08, 0.15]),
        longest_delay_s=dice.choice([0.05, 0.8, 2.0]),
        half_open=0.03 if dice.random() < 0.15 else 0.0,
    )
    return Schedule(
        seed=seed,
        replicas=replicas,
        budget=budget,
        backoff_s=dice.choice([0, 0, 1]),
        fates=tuple(fates),
        weather=weather,
        deleted_in=deleted_in,
        reborn=deleted_in > 0 and dice.random() < 0.5,
        edits=dice.random() < 0.25,
        sloppy=dice.random() < 0.3,
        slow_kubelet_s=dice.choice([0.05, 0.3, 2.0]),
    )


def _failure(dice: random.Random, replicas: int, committed: int | None) -> Fate:
    kind = dice.choice([kind for kind in Kind if kind is not Kind.DONE] + [Kind.CRASH] * 4)
    index, early = dice.randrange(replicas), dice.random() < 0.3
    match kind:
        case Kind.CRASH:
            code = dice.choice([*CRASHES, *USER_ERRORS]) if dice.random() < 0.5 else dice.choice(CRASHES)
            word = dice.choice(["", "Boom", "NumberOfWords"])
            return Fate(kind=kind, index=index, code=code, word=word, committed=committed, early=early)
        case Kind.OOM:
            return Fate(kind=kind, index=index, code=137, committed=committed, early=early)
        case Kind.PEERS_LOST:
            return Fate(kind=kind, index=index, code=dice.choice([75, 143]), committed=committed)
        case Kind.NEVER_STARTED:
            return Fate(kind=kind, index=index)
        case Kind.UNCOMMITTED | Kind.SIDECAR_REFUSED | Kind.SUSPENDED:
            return Fate(kind=kind, index=index, committed=committed)
    return Fate(kind=kind, index=index)
