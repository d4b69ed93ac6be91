"""Plans for ranks that compute on the host: what they were before plans knew of GPUs, and on every processor."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_planner import hit_rates, plan_job, policy

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
DIGESTS = Path(__file__).with_name("host_plans.json")
SEEDS, PLANS_OF_A_SEED = range(8), 30
MIB, GIB = 2**20, 2**30
DDR_RATES = {"readBytesPerSecond": 1e10, "writeBytesPerSecond": 5e9}
RATES: dict[str, Any] = {
    "flopsPerSecond": 1e12,
    "network": {"intraNodeBytesPerSecond": 1e10, "interNodeBytesPerSecond": 1e9},
    "pricePerHour": 3.6,
}


def _table(draw: random.Random, number: int) -> dict[str, Any]:
    dim = draw.choice([4, 16, 64, 128])
    table: dict[str, Any] = {
        "name": f"t{number}",
        "rows": int(10 ** draw.uniform(1, 7)),
        "dim": dim,
        "maxLookups": draw.randint(1, 20),
    }
    if draw.random() < 0.3:
        table["distribution"] = draw.choice([{"prior": "uniform"}, {"prior": "zipf", "alpha": 0.7}])
    if draw.random() < 0.3:
        table["columnBlock"] = dim // draw.choice([1, 1, 2]) if dim > 4 else dim
    if draw.random() < 0.2:
        table["dtype"] = "fp16"
    if draw.random() < 0.3:
        table["pin"] = draw.choice([{"tier": "ddr"}, {"tier": "block"}, {"sharding": "row"}, {"sharding": "data"}])
    return table


def _asked(seed: int) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]]:
    """Tables, trainer and hardware of each plan."""
    draw = random.Random(seed)
    for _ in range(PLANS_OF_A_SEED):
        tables = [_table(draw, number) for number in range(draw.randint(1, 12))]
        trainer: dict[str, Any] = {
            "replicas": draw.randint(1, 4),
            "processesPerReplica": draw.randint(1, 3),
            "cache": {"ways": draw.choice([0, 0, 8]), "lookahead": draw.randint(0, 2)},
        }
        budgets: dict[str, Any] = {"block": draw.randint(1, 60) * GIB}
        if draw.random() < 0.7:
            budgets["ddr"] = draw.randint(200, 4_000) * MIB
        if draw.random() < 0.3:
            budgets["scm"] = draw.randint(1, 4) * GIB
        profile = None
        if draw.random() < 0.5:
            ddr = {"bytes": draw.randint(4, 64) * GIB, **DDR_RATES}
            block = {"bytes": draw.randint(10, 500) * GIB, "readBytesPerSecond": 1e9, "readIops": 1e5}
            scm = {"bytes": draw.randint(1, 50) * GIB, "readBytesPerSecond": 5e9}
            profile = {"tiers": {"ddr": ddr, "block": block, "scm": scm}, **RATES}
        yield tables, {**trainer, "tierBudgets": budgets}, profile


def _rounded(value: Any) -> Any:
    """Without the last digits of floats, which depend on the order in which a processor adds."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def plans(seed: int, make_spec: MakeSpec, make_profile: MakeProfile) -> list[Any]:
    """The plans of one seed, or the words that refuse them."""
    found: list[Any] = []
    for tables, trainer, hardware in _asked(seed):
        profile = None
        if hardware is not None:
            rest = {key: value for key, value in hardware.items() if key != "tiers"}
            profile = make_profile("1Gi", **rest)
            tiers = type(profile.spec.tiers).model_validate(hardware["tiers"])
            profile = profile.model_copy(update={"spec": profile.spec.model_copy(update={"tiers": tiers})})
        spec = make_spec(tables, **trainer)
        try:
            found.append(_rounded(plan_job(spec, profile).model_dump(mode="json")))
        except InvalidSpecError as refused:
            found.append(str(refused))
    return found


def digest(found: list[Any]) -> str:
    """SHA-256 over plans."""
    return hashlib.sha256(b"".join(json.dumps(each, sort_keys=True).encode() for each in found)).hexdigest()


class OtherProcessor:
    """numpy as it might be on a processor with other vectors: the last bit of what is no plain arithmetic differs."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if name not in ("expm1", "log", "exp", "power"):
            return function

        def rounded_otherwise(*given: Any) -> Any:
            exact = function(*given)
            return exact * (1 + np.finfo(float).eps * self._draw.integers(-1, 2, np.shape(exact)))

        return rounded_otherwise


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_the_host_are_what_they_were(make_spec: MakeSpec, make_profile: MakeProfile, seed: int) -> None:
    known: list[str] = json.loads(DIGESTS.read_text())

    assert digest(plans(seed, make_spec, make_profile)) == known[seed]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_processor_that_rounds_otherwise_makes_the_same_plans(
    make_spec: MakeSpec, make_profile: MakeProfile, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    here = plans(seed, make_spec, make_profile)

    for other in (1, 2):
        for module in (hit_rates, policy):
            monkeypatch.setattr(module, "np", OtherProcessor(other))
        assert plans(seed, make_spec, make_profile) == here
