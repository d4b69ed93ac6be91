"""Debian's Prometheus as a process of the test, and what it answers."""

from __future__ import annotations

import json
import math
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import refuse
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_cluster.process import Server
from dlrm_testing.operator.operator_cluster import eventually

ROOT = Path(__file__).resolve().parents[4]
RULES = ROOT / "charts" / "dlrm-operator" / "files" / "monitoring" / "rules.yaml"
Object = dict[str, Any]


class Prometheus:
    """Scrapes each second, unless a scrape configuration says otherwise, and evaluates the chart's rules."""

    def __init__(self, folder: Path, scrape_configs: Sequence[Object]) -> None:
        self.address = f"{LOOPBACK}:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": list(scrape_configs),
        }
        folder.mkdir(exist_ok=True)
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        program = shutil.which("prometheus")
        if program is None:
            refuse(MissingToolError("the program 'prometheus' is not on PATH: install Debian's package prometheus"))
        words = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.server = Server("prometheus", [program, *words, f"--web.listen-address={self.address}"], folder)

    def __enter__(self) -> Prometheus:
        self.server.start()
        try:
            eventually(lambda: self.ask("query", query="up"), 30, self.server.log_tail)
        except AssertionError:
            self.server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def ask(self, what: str, **query: str) -> Any:
        """Return ``data`` of an endpoint's answer; None while the server does not answer."""
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None  # it is starting
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        except OSError:
            return None

    def values(self, query: str) -> list[float]:
        """Values of all series that are numbers."""
        found = [float(each["value"][1]) for each in self.ask("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]

    def names(self) -> set[str]:
        """Return the names of all series."""
        return set(self.ask("label/__name__/values"))

    def choices(self, query: str) -> list[str]:
        """Return what a dashboard's variable offers: ``label_values(SERIES, LABEL)``."""
        series, _, label = query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        return list(self.ask(f"label/{label}/values", **{"match[]": series}))
