"""Commands in the docs: the lines of their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = tuple(
    sorted(path for path in ROOT.rglob("*.md") if not {".venv", "node_modules"} & set(path.relative_to(ROOT).parts))
)
FENCED = re.compile(r"^```(?:console|sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(doc: Path) -> list[list[str]]:
    """The lines of each block of a shell's commands; one that is continued is one line."""
    found = FENCED.findall(doc.read_text())
    return [[line for line in block.replace("\\\n", " ").splitlines() if line.strip()] for block in found]
