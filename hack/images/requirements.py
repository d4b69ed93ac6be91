"""Print what extras of pyproject.toml install besides this project, one requirement a line.

It runs inside image builds, before the project is there: a layer of dependencies then changes with this list alone.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path


def requirements(project: Mapping[str, object], chosen: Sequence[str]) -> list[str]:
    """Return the project's own requirements and those of some extras, with the extras that they name."""
    extras: Mapping[str, Sequence[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    own: Sequence[str] = project["dependencies"]  # type: ignore[assignment]
    found, waiting, seen = set(own), [*chosen], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in extras[name]:
            if requirement.startswith(f"{project['name']}["):
                waiting += requirement.partition("[")[2].rstrip("]").split(",")
            else:
                found.add(requirement)
    return sorted(found)


if __name__ == "__main__":
    document = tomllib.loads(Path(sys.argv[1]).read_text())
    print("\n".join(requirements(document["project"], sys.argv[2].split(","))))
