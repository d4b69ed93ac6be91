"""Read what a spec refers to: its HardwareProfile and traces, or why they cannot be used.

Profiles are objects of the cluster. An operator without rights beyond one namespace takes them from a ConfigMap there;
each value holds one or more HardwareProfile documents as YAML (``kubectl create configmap NAME --from-file=FOLDER``).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml

from dlrm_api import names
from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TRACE_KEY
from dlrm_operator.api_client import Api, ClusterRefusedError, NotFoundError
from dlrm_planner import trace_references

CONFIG_MAP_SCHEME = "configmap:"
CONFIG_MAP_PATH = "/api/v1/namespaces/{}/configmaps/{}"
PROFILE_PATH = f"/apis/{names.API_VERSION}/hardwareprofiles/{{}}"
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
class ProfileSeen:
    """Hold the profile that a spec names, or why it cannot be used; empty if it names none."""

    profile: HardwareProfile | None = None
    version: str = ""
    problem: str = ""


class ReferenceReader:
    """Read profiles and traces live."""

    def __init__(self, api: Api, profiles: ProfileSource | None = None) -> None:
        self._api, self._profiles = api, profiles

    async def profile(self, spec: DLRMJobSpec) -> ProfileSeen:
        """Read the profile of ``spec.trainer.hardware``.

        Raises:
            ClusterUnavailableError: the API server did not answer; repeat the call later.
        """
        name = spec.trainer.hardware
        if name is None:
            return ProfileSeen()
        try:
            if self._profiles is None:
                document = await self._api.call("GET", PROFILE_PATH.format(_path_segment(name)))
                return ProfileSeen(parse_profile(document), document["metadata"]["resourceVersion"])
            path = CONFIG_MAP_PATH.format(self._profiles.namespace, self._profiles.config_map)
            values = (await self._api.call("GET", path)).get("data") or {}
            return await asyncio.to_thread(_find_profile, values, name, self._profiles)
        except NotFoundError:
            where = f" in {self._profiles}" if self._profiles else ""
            problem = f"spec.trainer.hardware: HardwareProfile {name} not found{where}; create it or name another"
        except ClusterRefusedError as error:
            problem = (
                f"spec.trainer.hardware: permission denied: get HardwareProfile {name}: {error}; grant it, or start "
                "the operator with --profiles"
            )
        except (InvalidSpecError, BadDataError) as error:
            problem = f"HardwareProfile {name}: {error}"
        return ProfileSeen(problem=problem)

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


def _find_profile(values: Mapping[str, str], name: str, source: ProfileSource) -> ProfileSeen:
    for document in _documents(values, source):
        metadata = document.get("metadata") if isinstance(document, dict) else None
        if isinstance(metadata, dict) and metadata.get("name") == name:
            profile = parse_profile(document)
            return ProfileSeen(profile, hashlib.sha256(yaml.safe_dump(document).encode()).hexdigest()[:16])
    raise NotFoundError(404, f"HardwareProfile {name} not found")


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
