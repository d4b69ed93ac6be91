"""HardwareProfiles as objects of the cluster, or in a ConfigMap of one namespace."""

import asyncio
import threading
from typing import Any, cast

import pytest
import yaml

from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_operator.api_client import Api, ClusterRefusedError, NotFoundError
from dlrm_operator.clients.references import ProfileSource, ProfilesSeen, ReferenceReader
from dlrm_operator.settings import read_settings
from dlrm_testing.operator.operator_cluster import job_document

SOURCE = ProfileSource("team", "pools")
POOL = """
apiVersion: dlrm.dev/v1alpha1
kind: HardwareProfile
metadata: {name: %s}
spec: {tiers: {ddr: {bytes: %s}}}
"""


class Cluster:
    """Objects by path."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self._objects = objects

    async def call(self, _: str, path: str) -> dict[str, Any]:
        if path not in self._objects:
            raise NotFoundError(404, path)
        found: dict[str, Any] = self._objects[path]
        return found


def spec(hardware: str | None) -> DLRMJobSpec:
    trainer = {"replicas": 1, **({"hardware": hardware} if hardware else {})}
    return parse_job(job_document("demo", trainer=trainer)).spec


def seen(data: dict[str, str] | None, hardware: str | None = "big") -> ProfilesSeen:
    """The profile as the ConfigMap's ``data`` shows it; None: there is no ConfigMap."""
    objects = {} if data is None else {"/api/v1/namespaces/team/configmaps/pools": {"data": data}}
    return asyncio.run(ReferenceReader(cast("Api", Cluster(objects)), SOURCE).profiles(spec(hardware)))


def test_a_profile_comes_from_any_document_of_the_config_map() -> None:
    found = seen(
        {"small.yaml": POOL % ("small", "1Gi"), "rest.yaml": f"{POOL % ('mid', '2Gi')}---{POOL % ('big', '8Gi')}"}
    )

    assert found.problem == ""
    (profile,) = found.profiles
    assert profile.metadata.name == "big"
    assert profile.spec.tiers.ddr.bytes == 8 * 2**30


def test_its_version_changes_with_its_own_document_alone() -> None:
    first = seen({"all": POOL % ("big", "8Gi")})

    assert seen({"all": POOL % ("big", "8Gi"), "other": POOL % ("small", "1Gi")}).version == first.version
    assert seen({"all": POOL % ("big", "9Gi")}).version != first.version


@pytest.mark.parametrize("data", [None, {}, {"all": POOL % ("small", "1Gi")}, {"all": "- a list\n--- 7"}])
def test_a_missing_profile_is_reported_with_its_field(data: dict[str, str] | None) -> None:
    words = "spec.trainer.hardware: HardwareProfile big not found in ConfigMap pools in namespace team"

    assert not seen(data).profiles
    assert words in seen(data).problem


def test_invalid_yaml_is_reported_with_its_key() -> None:
    problem = seen({"broken.yaml": "a: [1"}).problem

    assert "ConfigMap pools in namespace team, key broken.yaml: invalid YAML" in problem
    assert "\n" not in problem


def test_yaml_aliases_are_refused() -> None:
    lists = "".join(f"z{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 30))
    bomb = f"z0: &a0 [x]\n{lists}{POOL % ('big', '8Gi')}"

    problem = seen({"bomb.yaml": bomb}).problem

    assert "ConfigMap pools in namespace team, key bomb.yaml: invalid YAML: aliases" in problem
    assert "line 2" in problem


def test_an_unused_anchor_is_ignored() -> None:
    assert seen({"all": (POOL % ("big", "8Gi")).replace("tiers: {", "tiers: &all {")}).profiles


@pytest.mark.slow
def test_a_value_that_is_too_long_or_too_deep_is_refused() -> None:
    assert "at most 131072 characters" in seen({"all": "#" * 131_073}).problem
    assert "key all: invalid YAML: maximum recursion depth" in seen({"all": "[" * 10_000}).problem


def test_the_config_map_is_parsed_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    kept = yaml.load_all

    def watched(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return kept(*arguments, **named)

    monkeypatch.setattr(yaml, "load_all", watched)

    assert seen({"all": POOL % ("big", "8Gi")}).profiles
    assert threading.main_thread() not in threads
    assert threads


def test_an_invalid_profile_is_reported_with_its_field() -> None:
    assert "spec.tiers.ddr.bytes" in seen({"all": POOL % ("big", "-1")}).problem
    assert "keys must be str" in seen({"all": POOL.replace("bytes", "2026-01-01") % ("big", "1Gi")}).problem
    assert "key all: invalid YAML: month must be in 1..12" in seen({"all": "day: 2026-13-45"}).problem


def test_a_missing_permission_is_reported_in_the_servers_words() -> None:
    class Forbidding(Cluster):
        async def call(self, _: str, path: str) -> dict[str, Any]:
            raise ClusterRefusedError(403, "hardwareprofiles.dlrm.dev is forbidden")

    found = asyncio.run(ReferenceReader(cast("Api", Forbidding({}))).profiles(spec("big")))

    assert "get HardwareProfile big: hardwareprofiles.dlrm.dev is forbidden" in found.problem
    assert "--profiles" in found.problem


def test_a_namespace_is_one_step_of_the_path_whatever_a_review_holds() -> None:
    job = job_document("demo")
    job["spec"]["model"]["tables"][0]["distribution"] = {"reference": "configmap:reuse"}
    asked: list[str] = []

    class Asked(Cluster):
        async def call(self, _: str, path: str) -> dict[str, Any]:
            asked.append(path)
            return {"data": {"trace.json": "{}"}}

    asyncio.run(ReferenceReader(cast("Api", Asked({}))).traces("a/secrets/b", parse_job(job).spec))

    assert asked == ["/api/v1/namespaces/a%2Fsecrets%2Fb/configmaps/reuse"]


class Pools(Cluster):
    """HardwareProfiles of the cluster, which can be listed too."""

    def __init__(self, *names_and_zones: tuple[str, str]) -> None:
        self.items = [
            {
                **yaml.safe_load(POOL % (name, "1Gi")),
                "metadata": {"name": name, "resourceVersion": "7", "labels": labels},
            }
            for name, zone in names_and_zones
            for labels in ({"zone": zone, "tier": "x"},)
        ]
        path = "/apis/dlrm.dev/v1alpha1/hardwareprofiles"
        super().__init__({f"{path}/{item['metadata']['name']}": item for item in self.items})

    async def list_all(self, path: str, _: object) -> tuple[list[dict[str, Any]], str]:
        assert path == "/apis/dlrm.dev/v1alpha1/hardwareprofiles"
        return self.items, "9"


def among(cluster: Cluster, source: ProfileSource | None = None, **trainer: Any) -> ProfilesSeen:
    """The profiles that a job may choose from."""
    chosen = {"objective": {"maxReplicas": 2}, **trainer}
    asked = parse_job(job_document("demo", trainer=chosen)).spec
    return asyncio.run(ReferenceReader(cast("Api", cluster), source).profiles(asked))


def test_several_profiles_come_in_the_order_of_their_names_in_the_spec() -> None:
    pools = Pools(("a", "1"), ("b", "2"), ("c", "1"))

    found = among(pools, hardwareProfiles=["c", "a"])
    missing = among(pools, hardwareProfiles=["c", "d"])

    assert [profile.metadata.name for profile in found.profiles] == ["c", "a"]
    assert found.version == "7,7"
    assert "spec.trainer.hardwareProfiles[1]: HardwareProfile d not found" in missing.problem


def test_a_selector_finds_the_profiles_that_have_all_of_its_labels() -> None:
    pools = Pools(("a", "1"), ("b", "2"), ("c", "1"))
    data = {f"{item['metadata']['name']}.yaml": yaml.safe_dump(item) for item in pools.items}
    in_map = Cluster({"/api/v1/namespaces/team/configmaps/pools": {"data": data}})
    labels = {"zone": "1", "tier": "x"}

    for found in (among(pools, hardwareSelector=labels), among(in_map, SOURCE, hardwareSelector=labels)):
        assert [profile.metadata.name for profile in found.profiles] == ["a", "c"]
        assert found.version == "7,7"


@pytest.mark.parametrize(("count", "zone"), [(2, "9"), (17, "1"), (0, "1")])
@pytest.mark.parametrize("source", [None, SOURCE])
def test_a_selector_that_finds_none_or_too_many_is_refused(count: int, zone: str, source: ProfileSource | None) -> None:
    pools = Pools(*((f"p{i}", "1") for i in range(count)))
    data = {item["metadata"]["name"]: yaml.safe_dump(item) for item in pools.items}
    in_map = Cluster({"/api/v1/namespaces/team/configmaps/pools": {"data": data}})

    found = among(in_map if source else pools, source, hardwareSelector={"zone": zone})

    assert not found.profiles
    assert f"spec.trainer.hardwareSelector: {count if zone == '1' else 0} HardwareProfiles" in found.problem
    assert f"zone={zone}" in found.problem


def test_a_job_that_names_none_asks_nobody() -> None:
    assert seen(None, hardware=None) == ProfilesSeen()


def test_the_place_comes_from_the_flag_or_the_environment() -> None:
    assert read_settings(["--profiles", "team/pools"], {}).profiles == SOURCE
    assert read_settings([], {"DLRM_PROFILES": "team/pools"}).profiles == SOURCE
    assert read_settings([], {}).profiles is None
    with pytest.raises(SystemExit):
        read_settings(["--profiles", "pools"], {})
