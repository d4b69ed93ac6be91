"""Nodes that a model needs with and without SCM: ``python -m benchmarks.scm_nodes [--only MODEL]``.

The planner is asked for the fewest nodes of two kinds that hold a model's tables and reach the same samples/s: nodes of
eight GPUs, and the same with half of the DDR in exchange for storage-class memory (``examples/cluster/profiles``). Each
model has two lines: at the rate of the fewest nodes with SCM that hold it, as for a job that is bound by capacity, and
at the rate that was published for 16 nodes; where neither kind reaches it, the nodes are those of the highest rate. The
MTrainS paper reports 4 to 8 times fewer nodes for its models.

Modelled: nothing runs, the rates are the profiles' published ones, host work of a step is not calibrated, and readers
are left out, as on machines of their own. Lines compare kinds of nodes, not machines.

Sources: Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
Models", arXiv 2104.05158 (Neo), for the models' shapes and rates: figures of models are secondary, some approximate.
"MTrainS: Improving DLRM Training Efficiency Using Heterogeneous Memories", arXiv 2305.01515.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from benchmarks.measure import Pairs, report, tell
from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.plan import Plan
from dlrm_planner import choose_plan, plan_job
from dlrm_planner.objective import choose_replicas

PROFILES = Path(__file__).parents[1] / "examples/cluster/profiles"
GPUS = 8
MAX_NODES = 128
GLOBAL_BATCH = 65_536
"""512 samples for each of 128 GPUs, on any number of nodes."""
GROUPS = 10
"""Groups of equal tables of a model with tables of several dims."""
GROUP_ORDER = 3
"""Step between the ranks by rows of groups whose dims are next to each other: wide tables are not the large ones."""
ROWS_SPREAD = 100.0
"""Rows of the largest tables over those of the smallest."""
PAPER_RATIO = (4.0, 8.0)


@dataclass(frozen=True)
class Published:
    """Describe a published model."""

    name: str
    parameters: float
    tables: int
    min_dim: int
    mean_dim: int
    max_dim: int
    lookups: int
    layers: int
    width: int
    samples_per_second: float
    """On 16 nodes of eight GPUs."""


MODELS = (
    Published("A1", 95e9, 100, 4, 68, 192, 27, 26, 914, 1.2e6),
    Published("A2", 793e9, 1_000, 4, 93, 384, 15, 20, 3_375, 622e3),
    Published("A3", 845e9, 1_000, 4, 231, 960, 17, 26, 3_210, 360e3),
    Published("F1", 12e12, 20, 256, 256, 256, 20, 7, 490, 1.7e6),
)


def groups_of(model: Published) -> list[tuple[int, int]]:
    """Return the dim and the rows of a table of each group of a model's tables.

    Dims are quantiles of a power of uniform numbers with the published mean, in multiples of four.
    """
    power = (
        (model.max_dim - model.min_dim) / (model.mean_dim - model.min_dim) - 1 if model.min_dim < model.mean_dim else 0
    )
    places = [(number + 0.5) / GROUPS for number in range(GROUPS)]
    dims = [4 * round((model.min_dim + (model.max_dim - model.min_dim) * place**power) / 4) for place in places]
    sizes = [ROWS_SPREAD ** places[number * GROUP_ORDER % GROUPS] for number in range(GROUPS)]
    unit = model.parameters / (model.tables / GROUPS * sum(dim * size for dim, size in zip(dims, sizes, strict=True)))
    return [(dim, round(size * unit)) for dim, size in zip(dims, sizes, strict=True)]


def spec_of(model: Published, hardware: str) -> DLRMJobSpec:
    """Return a job that needs the fewest nodes that hold the model."""
    groups = [
        {
            "name": f"g{number}",
            "count": model.tables // GROUPS,
            "template": {"rows": rows, "dim": dim, "maxLookups": model.lookups, "dtype": "fp16"},
        }
        for number, (dim, rows) in enumerate(groups_of(model))
    ]
    hidden = [model.width] * (model.layers // 2)
    document = {
        "kind": "DLRMJob",
        "metadata": {"name": model.name.lower()},
        "spec": {
            "model": {
                "denseFeatures": [f"I{i}" for i in range(13)],
                "bottomMlp": hidden,
                "topMlp": [*hidden, 1],
                "interaction": "dcn",
                "tableGroups": groups,
            },
            "data": {
                "format": "parquet",
                "train": {"uris": ["file:///data/*.parquet"]},
                "globalBatchSize": GLOBAL_BATCH,
            },
            "trainer": {"hardware": hardware, "processesPerReplica": GPUS, "objective": {"maxReplicas": MAX_NODES}},
            "checkpoint": {"uri": "file:///tmp/modelled"},
        },
    }
    return parse_job(document).spec


def plan_on(model: Published, profile: HardwareProfile, samples_per_second: float | None = None) -> Plan:
    """Plan a model on the fewest nodes of a kind that hold it, and reach a rate if there is one.

    trainer.objective refuses to choose by rates that were not measured on GPUs, as the profiles' are.

    Raises:
        InfeasiblePlanError: ``MAX_NODES`` do not hold it.
    """
    spec = spec_of(model, profile.metadata.name)
    fewest = choose_plan(spec, (profile,))
    if samples_per_second is None:
        return fewest

    def rate(size: int) -> float | None:
        return plan_job(spec.with_replicas(size), profile).predicted.samples_per_second

    found = choose_replicas(fewest.nodes, MAX_NODES, samples_per_second, rate)
    assert found.replicas is not None, "the fewest nodes hold it"
    return plan_job(spec.with_replicas(found.replicas), profile)


@dataclass(frozen=True)
class Setting:
    """Describe a line."""

    model: Published
    rate: str
    benchmark: ClassVar[str] = "scm_nodes"
    against: ClassVar[str] = "gpu-hbm"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``benchmarks.measure.Described``."""
        return {"model": self.model.name, "rate": self.rate, "kind": "modelled"}


def compare(model: Published, with_scm: HardwareProfile, without: HardwareProfile) -> None:
    """Print both lines of a model."""
    tell(f"{model.name}: {asdict(model)}; tables (dim, rows): {groups_of(model)}")
    fewest = plan_on(model, with_scm)
    rate = fewest.predicted.samples_per_second
    assert rate is not None, "the profile states every rate"
    for name, target in (("of the fewest nodes with SCM", rate), ("published", model.samples_per_second)):
        plans = [fewest if target == rate else plan_on(model, with_scm, target), plan_on(model, without, target)]
        nodes, pairs = [plan.world_size // GPUS for plan in plans], Pairs()
        pairs.add(*map(float, nodes))
        rates = [plan.predicted.samples_per_second or 0.0 for plan in plans]
        report(
            Setting(model, name),
            "nodes",
            pairs,
            target=target,
            samples_per_second=rates[0],
            samples_per_second_theirs=rates[1],
            times_fewer=nodes[1] / nodes[0],
            paper_least=PAPER_RATIO[0],
            paper_most=PAPER_RATIO[1],
        )


def main() -> None:
    """Compare every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="MODEL", help="A1, A2, A3 or F1")
    chosen = parser.parse_args()
    kinds = [
        parse_profile(yaml.safe_load((PROFILES / f"{name}.yaml").read_text())) for name in ("gpu-hbm-scm", "gpu-hbm")
    ]
    for kind in kinds:
        tell(f"{kind.metadata.name}: {kind.spec.model_dump(mode='json', by_alias=True, exclude_unset=True)}")
    for model in MODELS:
        if chosen.only in ("", model.name):
            try:
                compare(model, *kinds)
            except InfeasiblePlanError as error:
                tell(f"{model.name}: {error}")


if __name__ == "__main__":
    main()
