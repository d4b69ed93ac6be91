"""Where texts of pods meet a person's terminal: no character of theirs may steer it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from dlrm_api.errors import visible


class SafeConsole(Console):
    """A console whose own colours and moves go through, and nobody else's: what is printed on it is made visible."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed, each text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def tell(words: str) -> None:
    """Say a sentence on stderr."""
    print(visible(words), file=sys.stderr)
