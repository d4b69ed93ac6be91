"""Read what a spec refers to: its HardwareProfiles and traces, or why they cannot be used.

Profiles are objects of the cluster. An operator without rights beyond one namespace takes them from a ConfigMap there;
each value holds one or more HardwareProfile documents as YAML (``kubectl create configmap NAME --from-file=FOLDER``).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml

from dlrm_api import names
from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TRACE_KEY
from dlrm_api.trainer import MAX_PROFILES
from dlrm_operator.api_client import Api, ClusterRefusedError, NotFoundError
from dlrm_planner import trace_references

CONFIG_MAP_SCHEME = "configmap:"
CONFIG_MAP_PATH = "/api/v1/namespaces/{}/configmaps/{}"
PROFILES_PATH = f"/apis/{names.API_VERSION}/hardwareprofiles"
GRANT = "grant it, or start the operator with --profiles"
MAX_PROFILE_CHARACTERS = 2**17
"""Limit of one value of the profiles' ConfigMap: parsing takes 15 us and 300 bytes per character."""


@dataclass(frozen=True)
class ProfileSource:
    """Name the ConfigMap that holds the profiles instead of the cluster's objects."""

    namespace: str
    config_map: str

    def __str__(self) -> str:
        return f"ConfigMap {self.config_map} in namespace {self.namespace}"


@dataclass(frozen=True)
class ProfilesSeen:
    """Hold the profiles of a spec, or why they cannot be used; empty if it names none."""

    profiles: tuple[HardwareProfile, ...] = ()
    version: str = ""
    """Versions of all of them."""
    problem: str = ""


class ReferenceReader:
    """Read profiles and traces live."""

    def __init__(self, api: Api, profiles: ProfileSource | None = None) -> None:
        self._api, self._profiles = api, profiles

    async def profiles(self, spec: DLRMJobSpec) -> ProfilesSeen:
        """Read the profiles that ``spec.trainer`` names or selects.

        Raises:
            ClusterUnavailableError: the API server did not answer; repeat the call later.
        """
        trainer = spec.trainer
        if trainer.hardware_selector is not None:
            return await self._selected(trainer.hardware_selector)
        if trainer.hardware is not None:
            return await self._named(trainer.hardware, "spec.trainer.hardware")
        names_ = enumerate(trainer.hardware_profiles or ())
        found = await asyncio.gather(*(self._named(name, f"spec.trainer.hardwareProfiles[{i}]") for i, name in names_))
        profiles = tuple(profile for each in found for profile in each.profiles)
        problem = next((each.problem for each in found if each.problem), "")
        return ProfilesSeen(profiles, ",".join(each.version for each in found), problem)

    async def _named(self, name: str, field: str) -> ProfilesSeen:
        try:
            if self._profiles is None:
                document = await self._api.call("GET", f"{PROFILES_PATH}/{_path_segment(name)}")
                return _parsed([document])
            return await asyncio.to_thread(_in_config_map, await self._config_map(), {"name": name}, self._profiles)
        except NotFoundError:
            where = f" in {self._profiles}" if self._profiles else ""
            problem = f"{field}: HardwareProfile {name} not found{where}; create it or name another"
        except ClusterRefusedError as error:
            problem = f"{field}: permission denied: get HardwareProfile {name}: {error}; {GRANT}"
        except (InvalidSpecError, BadDataError) as error:
            problem = f"HardwareProfile {name}: {error}"
        return ProfilesSeen(problem=problem)

    async def _selected(self, labels: Mapping[str, str]) -> ProfilesSeen:
        field, wanted = "spec.trainer.hardwareSelector", ",".join(f"{key}={value}" for key, value in labels.items())
        try:
            if self._profiles is None:
                items, _ = await self._api.list_all(PROFILES_PATH, {})
                found = _parsed([item for item in items if _matches(item, {"labels": labels})])
            else:
                values = await self._config_map()
                found = await asyncio.to_thread(_in_config_map, values, {"labels": labels}, self._profiles)
        except NotFoundError:
            found = ProfilesSeen()
        except ClusterRefusedError as error:
            return ProfilesSeen(problem=f"{field}: permission denied: list HardwareProfiles: {error}; {GRANT}")
        except (InvalidSpecError, BadDataError) as error:
            return ProfilesSeen(problem=f"HardwareProfiles with labels {wanted}: {error}")
        if 0 < len(found.profiles) <= MAX_PROFILES:
            return found
        where, fix = f" in {self._profiles}" if self._profiles else "", "change labels, or use hardwareProfiles"
        count = f"{len(found.profiles)} HardwareProfiles{where} have labels {wanted}"
        return ProfilesSeen(problem=f"{field}: {count}, expected 1 to {MAX_PROFILES}: {fix}")

    async def _config_map(self) -> dict[str, str]:
        assert self._profiles is not None
        path = CONFIG_MAP_PATH.format(self._profiles.namespace, self._profiles.config_map)
        return (await self._api.call("GET", path)).get("data") or {}

    async def traces(self, namespace: str, spec: DLRMJobSpec) -> tuple[dict[str, str], str]:
        """Read the traces that the spec refers to; return them by reference, or why one cannot be read.

        Raises:
            ClusterUnavailableError: the API server did not answer; repeat the call later.
        """
        found, references = {}, trace_references(spec)
        for reference, field in references.items():
            if not reference.startswith(CONFIG_MAP_SCHEME):
                return {}, (
                    f"{field}: the operator reads no files, got {reference!r}: store the trace in the job's namespace "
                    f"with dlrmctl trace FILE --configmap NAME and refer to it as {CONFIG_MAP_SCHEME}NAME"
                )
        for reference, field in references.items():
            name = reference.removeprefix(CONFIG_MAP_SCHEME)
            path = CONFIG_MAP_PATH.format(_path_segment(namespace), _path_segment(name))
            try:
                found[reference] = str((await self._api.call("GET", path))["data"][TRACE_KEY])
            except NotFoundError:
                hint = f"create it with dlrmctl trace FILE --configmap {name}"
                return {}, f"{field}: ConfigMap {name} not found in namespace {namespace}; {hint}"
            except KeyError:
                return {}, f"{field}: ConfigMap {name} has no key {TRACE_KEY}; write the trace there"
        return found, ""


def _path_segment(name: str) -> str:
    """Quote a name for a path: anybody who reaches the webhook may send a review with any name in it."""
    return quote(name, safe="")


class _PlainLoader(yaml.SafeLoader):
    """Load YAML without aliases: a few nested ones stand for more than any memory holds."""

    def fetch_alias(self) -> None:
        problem = "aliases are not supported: write out the value"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())


def _parsed(documents: Sequence[Any]) -> ProfilesSeen:
    """Read profiles; their version is that of the server, or a digest."""
    versions = [
        document["metadata"].get("resourceVersion")
        or hashlib.sha256(yaml.safe_dump(document).encode()).hexdigest()[:16]
        for document in documents
    ]
    return ProfilesSeen(tuple(map(parse_profile, documents)), ",".join(versions))


def _in_config_map(values: Mapping[str, str], wanted: Mapping[str, Any], source: ProfileSource) -> ProfilesSeen:
    """Read the profiles with some metadata; only the first of a name counts."""
    found = dict[str, Any]()
    for document in _documents(values, source):
        if _matches(document, wanted):
            found.setdefault(str(document["metadata"].get("name")), document)
    if not found:
        raise NotFoundError(404, f"no HardwareProfile with {dict(wanted)}")
    return _parsed(list(found.values()))


def _matches(document: Any, wanted: Mapping[str, Any]) -> bool:
    """Return whether the metadata of a document has a name, or some labels among others."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        return False
    if (labels := wanted.get("labels")) is None:
        return bool(metadata.get("name") == wanted["name"])
    has = metadata.get("labels")
    return isinstance(has, dict) and all(has.get(key) == value for key, value in labels.items())


def _documents(values: Mapping[str, str], source: ProfileSource) -> Iterator[Any]:
    for key, text in sorted(values.items()):
        where = f"{source}, key {key}"
        if len(text) > MAX_PROFILE_CHARACTERS:
            problem = f"expected at most {MAX_PROFILE_CHARACTERS} characters, got {len(text)}: use one key per profile"
            raise InvalidSpecError(where, problem)
        try:
            yield from list(yaml.load_all(text, Loader=_PlainLoader))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InvalidSpecError(where, f"invalid YAML: {' '.join(str(error).split())}") from error
