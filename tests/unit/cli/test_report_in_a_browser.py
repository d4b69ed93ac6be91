"""The report as a real browser shows it: in both colour schemes, wide and narrow, without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dlrm_cli.report.collect import read_work_folder
from dlrm_cli.report.page import render_page

pytestmark = pytest.mark.slow

TIMEOUT_S = 60
SCHEMES = {"dark": "0", "light": "1"}
MEASURE = """<pre id="measured"></pre><script>
const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
const over = (a, b) =>
  Math.min(a[2], b[2]) - Math.max(a[0], b[0]) > 2 && Math.min(a[3], b[3]) - Math.max(a[1], b[1]) > 4;
const shown = [...document.querySelectorAll("svg.plot")].filter((plot) => plot.getClientRects().length);
const plots = shown.map((plot) => {
  const frame = box(plot), texts = [...plot.querySelectorAll("text")];
  const overlaps = [];
  texts.forEach((one, i) => texts.slice(i + 1).forEach((other) => {
    if (over(box(one), box(other))) overlaps.push(one.textContent + " | " + other.textContent); }));
  const drawn = [...plot.querySelectorAll('[id*="-series-"]')].map(box);
  return { title: plot.querySelector("title").textContent, width: frame[2] - frame[0], overlaps,
    outside: texts.filter((text) => { const b = box(text); return b[0] < frame[0] - 1 || b[2] > frame[2] + 1; })
      .map((text) => text.textContent),
    shapes: drawn.length, reach: Math.max(...drawn.map((b) => b[2])) - Math.min(...drawn.map((b) => b[0])) }; });
document.getElementById("measured").textContent = JSON.stringify({ plots,
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  background: getComputedStyle(document.body).backgroundColor,
  resources: performance.getEntriesByType("resource").map((entry) => entry.name) });
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("no browser here: install the package chromium")
    return found


@pytest.fixture
def shown(chromium: str, kept_run: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Opens the report, changed if asked; returns the resulting document and the browser's console."""
    text = render_page(read_work_folder(kept_run()), "made now")

    def show(scheme: str, width: int = 1_000, change: Callable[[str], str] = str) -> tuple[str, str]:
        file = tmp_path / f"{scheme}.html"
        file.write_text(change(text), "utf-8")
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1400", "--enable-logging=stderr"]
        command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)

    return show


def measured(text: str) -> str:
    """The page with a script in it that measures what is drawn; the page itself has none."""
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    return opened.replace("</body>", MEASURE + "</body>")


def measures(document: str) -> dict[str, Any]:
    found = re.search(r'<pre id="measured">(.*?)</pre>', document, re.DOTALL)
    assert found is not None
    value = json.loads(unescape(found[1]))
    assert isinstance(value, dict)
    return value


def test_the_page_opens_without_a_word_on_the_console(shown: Callable[..., tuple[str, str]]) -> None:
    document, console = shown("light")

    assert console == ""  # a request that the page's policy refuses would be told here
    for words in ("Loss and quality", "Throughput", "Snapshots", "gang restarted", "Plan against measured", "0.86000"):
        assert words in document


def test_a_request_to_another_host_would_be_refused_and_recorded(shown: Callable[..., tuple[str, str]]) -> None:
    _, console = shown(
        "light", change=lambda text: text.replace("</main>", '<img src="http://127.0.0.1:9/x.png"></main>')
    )

    assert "Content Security Policy" in console


@pytest.mark.parametrize(
    ("scheme", "width", "background"), [("light", 1_400, "rgb(255, 255, 255)"), ("dark", 500, "rgb(20, 24, 29)")]
)
def test_every_plot_is_drawn_and_readable(
    shown: Callable[..., tuple[str, str]], scheme: str, width: int, background: str
) -> None:
    document, console = shown(scheme, width, measured)

    found = measures(document)
    assert console == ""
    assert found["background"] == background
    assert found["resources"] == []
    assert found["wider"] <= 0
    titles = [plot["title"] for plot in found["plots"]]
    assert titles == [
        "Training loss",
        "Normalized entropy",
        "Samples per second",
        "Time of a step by stage",
        "Hit rate",
        "Bytes of snapshots",
    ]
    for plot in found["plots"]:
        assert plot["overlaps"] == [], plot["title"]
        assert plot["outside"] == [], plot["title"]
        assert plot["shapes"] > 0, plot["title"]
        assert plot["reach"] > 0.5 * plot["width"], plot["title"]
