"""What a job's spec refers to: its HardwareProfile and the traces of its tables, read live, or why they can't be used.

Profiles are objects of the cluster. An operator that may read nothing beyond one namespace takes them from a
ConfigMap there: each value holds one or more HardwareProfile documents in YAML, as files of a folder
(``kubectl create configmap NAME --from-file=FOLDER``).
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

CONFIG_MAP = "configmap:"
CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps/{}"
PROFILES = f"/apis/{names.API_VERSION}/hardwareprofiles/{{}}"
MOST_CHARACTERS = 2**17
"""Of one value of the profiles' ConfigMap: reading takes 15 us and 300 bytes for each."""


@dataclass(frozen=True)
class ProfileSource:
    """The ConfigMap that holds the profiles in place of the cluster's objects."""

    namespace: str
    config_map: str


@dataclass(frozen=True)
class ProfileSeen:
    """The profile that a spec names, its version, and why it can't be used; all empty where it names none."""

    profile: HardwareProfile | None = None
    version: str = ""
    problem: str = ""


class References:
    """Reads what specs refer to."""

    def __init__(self, api: Api, profiles: ProfileSource | None = None) -> None:
        self._api = api
        self._profiles = profiles

    async def profile(self, spec: DLRMJobSpec) -> ProfileSeen:
        """The profile of ``spec.trainer.hardware``.

        Raises:
            ClusterUnavailableError: nobody can tell.
        """
        name = spec.trainer.hardware
        if name is None:
            return ProfileSeen()
        try:
            if self._profiles is None:
                document = await self._api.call("GET", PROFILES.format(_step(name)))
                return ProfileSeen(parse_profile(document), document["metadata"]["resourceVersion"])
            return await self._from_config_map(self._profiles, name)
        except NotFoundError:
            return ProfileSeen(problem=f"spec.trainer.hardware: {self._mend(name)}")
        except ClusterRefusedError as error:
            words = f"the operator may not read HardwareProfile {name}: {error}: let it, or give it --profiles"
            return ProfileSeen(problem=f"spec.trainer.hardware: {words}")
        except (InvalidSpecError, BadDataError) as error:
            return ProfileSeen(problem=f"HardwareProfile {name}: {error}")

    async def traces(self, namespace: str, spec: DLRMJobSpec) -> tuple[dict[str, str], str]:
        """The documents of the traces that the spec refers to, or why one can't be read.

        Raises:
            ClusterUnavailableError: nobody can tell.
        """
        found, asked = {}, trace_references(spec)
        for reference, field in asked.items():
            if not reference.startswith(CONFIG_MAP):
                words = f"{reference}: the operator reads no files: put the trace into the job's namespace with "
                return {}, f"{field}: {words}dlrmctl trace FILE --configmap NAME, and refer to it as {CONFIG_MAP}NAME"
        for reference, field in asked.items():
            name = reference.removeprefix(CONFIG_MAP)
            try:
                document = await self._api.call("GET", CONFIG_MAPS.format(_step(namespace), _step(name)))
                found[reference] = str(document["data"][TRACE_KEY])
            except NotFoundError:
                words = f"there is no ConfigMap {name} in namespace {namespace}: create it with "
                return {}, f"{field}: {words}dlrmctl trace FILE --configmap {name}"
            except KeyError:
                return {}, f"{field}: ConfigMap {name} has no key {TRACE_KEY}: write the trace there"
        return found, ""

    async def _from_config_map(self, source: ProfileSource, name: str) -> ProfileSeen:
        """The profile of that name among all values.

        Raises:
            NotFoundError: no value holds it, or there is no ConfigMap.
            InvalidSpecError: a value can't be read, or the profile is none.
        """
        config_map = await self._api.call("GET", CONFIG_MAPS.format(source.namespace, source.config_map))
        place = f"ConfigMap {source.config_map} in namespace {source.namespace}"
        return await asyncio.to_thread(_find_profile, config_map.get("data") or {}, name, place)

    def _mend(self, name: str) -> str:
        if self._profiles is None:
            return f"there is no HardwareProfile {name}: create it or name another"
        place = f"ConfigMap {self._profiles.config_map} in namespace {self._profiles.namespace}"
        return f"{place} holds no HardwareProfile {name}: add it there or name another"


def _step(name: str) -> str:
    """A name as one step of a path, whatever it holds: it may come from a review that the API server did not send."""
    return quote(name, safe="")


def _name_of(document: dict[str, Any]) -> object:
    meta = document.get("metadata")
    return meta.get("name") if isinstance(meta, dict) else None


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML without aliases: a few of them, each of a list of others, stand for more than any memory holds."""

    def fetch_alias(self) -> None:
        """Take up an alias.

        Raises:
            yaml.YAMLError: always.
        """
        problem = "aliases are not read here: write out what this one stands for"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())


def _find_profile(values: Mapping[str, str], name: str, place: str) -> ProfileSeen:
    for document in _documents(values, place):
        if isinstance(document, dict) and _name_of(document) == name:
            profile = parse_profile(document)
            return ProfileSeen(profile, hashlib.sha256(yaml.safe_dump(document).encode()).hexdigest()[:16])
    raise NotFoundError(404, f"no profile {name}")


def _documents(values: Mapping[str, str], place: str) -> Iterator[Any]:
    for key, text in sorted(values.items()):
        where = f"{place}, key {key}"
        if len(text) > MOST_CHARACTERS:
            words = f"{len(text)} characters, where at most {MOST_CHARACTERS} are read: give profiles keys of their own"
            raise InvalidSpecError(where, words)
        try:
            yield from list(yaml.load_all(text, Loader=_PlainLoader))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InvalidSpecError(where, f"this is no YAML: {' '.join(str(error).split())}") from error
