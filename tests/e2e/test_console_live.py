"""The console on a run that trains, with every real process: switch with a slider, see the curve, undo, inspect."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, expect

from sao.archive import Archive
from sao.rows import read_rows
from tests.conftest import ROOT
from tests.support.browser import DESK, PHONE, Visit, visit
from tests.support.engine import ENGINE_PYTHON
from tests.support.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]
PATIENCE_S = 420
LEAST_DROP = 0.1


@dataclass(frozen=True)
class LiveRun:
    folder: Path
    url: str
    """Of the console, as `sao up` prints it."""

    def trained_under(self, *versions: int) -> int:
        """Trajectories that were trained on under these preference versions."""
        rows = (row for row, _ in read_rows(self.folder / "updates.jsonl"))
        return sum(one.trained_under in versions for row in rows for one in row.trajectories)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    if not ENGINE_PYTHON.exists():
        pytest.skip("the engine environment is missing: run `make setup`")
    folder = tmp_path_factory.mktemp("console") / "run"
    log = folder.parent / "up.log"
    command = [sys.executable, "-m", "sao.cli.main", "up", "--preset", "tiny-writing", "--run-dir", str(folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def console() -> str | None:
        assert process.poll() is None, f"sao up ended early with {process.returncode}:\n{log.read_text()[-4000:]}"
        found = re.search(r"in a browser: (http://\S+/console)", log.read_text())
        return found[1] if found else None

    try:
        wait_until(lambda: console() is not None, timeout_s=PATIENCE_S, what="the console's address", poll_s=0.5)
        yield LiveRun(folder, console() or "")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 128 + signal.SIGINT
        left = [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])]
        assert left == []
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def test_a_person_switches_sees_undoes_and_inspects(live: LiveRun, browser: Browser, artefacts: Path) -> None:
    with visit(browser, live.url, artefacts, DESK) as seen:
        page = seen.page
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#preference-now")).to_have_text("Now: cute (version 1)")
        wait_until(lambda: live.trained_under(1) >= 100, timeout_s=PATIENCE_S, what="100 trained trajectories")
        expect(page.locator("#engines")).to_contain_text("engine-0", timeout=30_000)
        before = reward(seen)
        seen.shoot("live-desk-before")

        # Every text of the warm start holds some words of some style: what was worth half of each now costs all of it.
        page.get_by_role("slider", name="style_cute", exact=True).fill("-1")
        page.get_by_role("slider", name="style_classical", exact=True).fill("-1")
        page.get_by_label("Name", exact=True).fill("plain")
        page.get_by_label("Reason").fill("to see the curve react")
        page.get_by_role("button", name="Try it").click()
        expect(page.locator("#dry-run")).to_be_visible()
        seen.shoot("live-desk-tried")
        page.get_by_role("button", name="Apply as version 2").click()
        expect(page.locator("#preference-message")).to_contain_text("Version 2, “plain”, is in force")
        wait_until(lambda: live.trained_under(2) >= 100, timeout_s=PATIENCE_S, what="100 trajectories under version 2")
        expect(page.locator("#chart .switch[data-version='2']")).to_have_count(1)
        page.wait_for_function(
            "least => Number(document.querySelector('#figures dd').textContent) < least", arg=before - LEAST_DROP
        )
        seen.shoot("live-desk-switched")

        page.reload()
        expect(page.locator("#preference-now")).to_have_text("Now: plain (version 2)")
        followed = r"scored after \d+\.\d s, trained after \d+\.\d s, serving after \d+\.\d s"
        expect(page.locator("#history > li", has_text="v2 plain")).to_contain_text(re.compile(followed))
        page.get_by_role("button", name=re.compile("^Undo: back to v1")).click()
        expect(page.locator("#preference-now")).to_have_text("Now: cute (version 3)")
        page.locator("#trajectories button.row", has_text="trained").first.click()
        expect(page.locator("#inspect-title")).to_be_focused()
        token = page.locator("#inspect .tokens.action .token").nth(2)
        token.hover()
        expect(page.locator("#token-facts")).to_contain_text("log-prob")
        seen.shoot("live-desk-inspected")
        assert (seen.errors, seen.elsewhere) == ([], [])
    with visit(browser, live.url, artefacts, PHONE) as seen:
        expect(seen.page.locator("#connection")).to_have_text("live")
        expect(seen.page.locator("#trajectories button.row").first).to_be_visible()
        assert seen.overflow() <= 0
        seen.shoot("live-phone")
        assert (seen.errors, seen.elsewhere) == ([], [])
    steps = Archive(live.folder / "archive")
    assert {steps.load(name).preference_version for name in steps.steps()} >= {1, 2}


def reward(seen: Visit) -> float:
    """The moving average that the page shows."""
    shown = seen.page.locator("#figures dd").first
    expect(shown).to_have_text(re.compile(r"^\d\.\d+$"))
    return float(shown.inner_text())
