"""The live page in a browser, while steps are added to its run."""

from dataclasses import replace

import pytest

from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.rollouts.files import rollouts_path, write_rollouts
from tests.support.rollout.saved_groups import saved_group, saved_response
from tests.support.runs.demo_run import HOSTILE, demo_run
from tests.support.runs.live_pages import live_page

pytestmark = pytest.mark.browser

ITEMS = "#responses .group-item"
FIRST = "document.querySelector('#curves .plot')?.plot"


@pytest.fixture
def live(browser, tmp_path):
    with live_page(tmp_path / "run") as address:
        browser.open(address)
        yield browser
        assert not browser.errors
    browser.wait("document.getElementById('live').innerText.startsWith('not live')")
    browser.open("about:blank?")
    assert set(browser.requests) - {"about:blank?"} == {address, f"{address}data.json"}
    browser.requests.clear()
    browser.errors.clear()


def test_steps_appear_while_the_page_is_open(live, tmp_path):
    """Also the first ones; what a reader has opened, chosen and scrolled to stays."""
    assert "0 steps \u00b7 running" in live.text("#overview")
    assert "No step has ended yet" in live.text("#overview")
    folder = demo_run(tmp_path / "run")
    live.wait(f"{FIRST}?.data[0].at(-1) === 6")
    live.wait("document.querySelector('[name=step]')?.options.length === 4")
    live.click("#overview summary")
    live.drag("#curves .u-over", 0.2, 0.6)
    live.wait(f"{FIRST}.scales.x.max < 6")
    live.choose("[name=step]", "2")
    live.wait(f"document.querySelectorAll('{ITEMS}').length === 3")
    live.click(f"{ITEMS}:nth-child(2)")
    live.wait("document.querySelector('#responses .group h3')?.innerText.includes('group 4')")
    place = "document.querySelector('#responses .group').getBoundingClientRect().top"
    before = live.js(place)
    live.js("document.querySelector('#responses .group > div').mark = true")
    # not every browser keeps the place in the window by itself
    live.js("document.documentElement.style.overflowAnchor = 'none'")
    with MetricsLog(folder) as log:
        log.record(dict.fromkeys(METRIC_NAMES, 0.5) | {"step": 7, "policy_version": 7})
    group = saved_group(saved_response(HOSTILE), prompt_index=7)
    write_rollouts(rollouts_path(folder, 7), [replace(group, step=7)])
    live.wait(f"{FIRST}.data[0].at(-1) === 7")
    live.wait("document.querySelector('[name=step]').innerText.includes('step 7')")
    assert abs(live.js(place) - before) <= 1
    assert live.js("document.querySelector('#overview details').open")
    assert live.js(f"{FIRST}.scales.x.max") < 6
    assert live.js("document.querySelector('[name=step]').value") == "2"
    assert live.js(f"document.querySelectorAll('{ITEMS}')[1].ariaSelected") == "true"
    assert live.js("document.querySelector('#responses .group > div').mark")
    assert live.text("#live").startswith("live, ")
    live.choose("[name=step]", "7")
    body = "document.querySelector('#responses .response-text')"
    live.wait(f"{body}?.textContent === {HOSTILE!r}")
    assert live.js("document.images.length + document.querySelectorAll('script').length") == 4
