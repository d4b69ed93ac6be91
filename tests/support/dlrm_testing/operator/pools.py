"""Hardware to choose from, and jobs that may run on each of it."""

from typing import Any

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_testing.operator.model_cluster import ModelCluster


def pool(name: str, price: float, ddr: str = "64Gi", speed: float = 1.0) -> HardwareProfile:
    """Return hardware with all rates, and nodes of its own."""
    rate = 1e9 * speed
    term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": [name]}]}
    return parse_profile(
        {
            "metadata": {"name": name},
            "spec": {
                "nodeAffinityTerms": [term],
                "flopsPerSecond": rate,
                "tiers": {"ddr": {"bytes": ddr, "readBytesPerSecond": rate, "writeBytesPerSecond": rate}},
                "network": {"intraNodeBytesPerSecond": rate, "interNodeBytesPerSecond": rate},
                "pricePerHour": price,
            },
        }
    )


CHEAP, DEAR = pool("cheap", 1), pool("dear", 9)


def job_of_pools(*profiles: HardwareProfile, **objective: Any) -> ModelCluster:
    """Return a cluster with a job that may run on each of some hardware."""
    names = [profile.metadata.name for profile in profiles]
    trainer = {"objective": {"maxReplicas": 2, **objective}, "hardwareProfiles": names}
    cluster = ModelCluster(trainer=trainer, lifecycle={"restart": {"backoff": "0s"}})
    cluster.profiles = profiles
    return cluster
