"""Take pictures of `megadapo report RUN` and `megadapo top RUN --web` for benchmarks/results.

    python tools/report_screenshots.py RUN          the report, on a desktop and on a phone
    python tools/report_screenshots.py RUN --live   the live page of a run that works

This needs chromium on the PATH, and saved responses in the run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from megadapo.observe.report.page import write_report  # noqa: E402 - the repository's own
from tests.support.processes.chromium import Page, chromium  # noqa: E402 - needs the path above

RESULTS = REPOSITORY / "benchmarks" / "results"
SIZE = (1440, 1080)
PHONE = (390, 844)
# Charts and tooltips are drawn some frames after their cause.
SETTLE_S = 0.7
CHANGED = ".response-text .token[style*=ratio-high]"
"""Selector of a token that is coloured because its probability rose."""


def main(run: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = write_report([run], Path(folder) / "report.html")
        with chromium(Path(folder)) as page:
            for scheme in ("light", "dark"):
                page.prefer(scheme)
                page.resize(*SIZE)
                page.open(report)
                picture_curves(page, RESULTS / f"report-curves-{scheme}.png")
                picture_responses(page, RESULTS / f"report-responses-{scheme}.png")
                picture_distributions(page, RESULTS / f"report-distributions-{scheme}.png")
                page.resize(*PHONE, scale=2)
                page.open(report)
                take(page, RESULTS / f"report-phone-{scheme}.png")
                assert not page.errors, page.errors


def picture_live(run: Path) -> None:
    """Show the page after it has read the run again."""
    command = [sys.executable, "-m", "megadapo.cli", "top", str(run), "--web", "--port=0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder)) as page,
    ):
        assert server.stdout is not None
        page.resize(*SIZE)
        page.prefer("light")
        page.open(server.stdout.readline().split()[0])
        page.wait("document.getElementById('live').innerText.startsWith('live')")
        take(page, RESULTS / "report-live.png")
        server.send_signal(signal.SIGTERM)


def picture_curves(page: Page, path: Path) -> None:
    show(page, "#curves")
    page.move("#curves .u-over", x=0.34, scroll=False)
    take(page, path)


def picture_distributions(page: Page, path: Path) -> None:
    show(page, "#time")
    page.move("#distributions .u-over", x=0.4, y=0.45, scroll=False)
    take(page, path)


def picture_responses(page: Page, path: Path) -> None:
    """Show the tooltip of a token that the updates changed much, in a trained group."""
    page.choose("[name=disposition]", "trained")
    _choose_changed_group(page)
    show(page, "#responses")
    page.move(CHANGED, scroll=False)
    take(page, path)


def _choose_changed_group(page: Page) -> None:
    """Choose a group with a token that updates changed; not every step has one."""
    for step in page.js("[...document.querySelector('[name=step]').options].map((o) => o.value)"):
        page.choose("[name=step]", step)
        time.sleep(SETTLE_S)
        for number in range(page.js("document.querySelectorAll('.group-item').length")):
            page.click(f"#responses .group-item:nth-child({number + 1})")
            if page.js(f"document.querySelector('{CHANGED}') !== null"):
                return
    raise SystemExit("no saved response has a token whose probability rose")


def show(page: Page, section: str) -> None:
    page.js(f"document.querySelector('{section}').scrollIntoView()")
    time.sleep(SETTLE_S)


def take(page: Page, path: Path) -> None:
    time.sleep(SETTLE_S)
    page.screenshot(path)
    print(path)


if __name__ == "__main__":
    (picture_live if "--live" in sys.argv else main)(Path(sys.argv[1]))
