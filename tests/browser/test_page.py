"""The page /ui in Chromium, before a real server under load."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from browser.conftest import FLAGS
from e2e.fleet_server import FleetServer
from e2e.server import PROMPT, LiveStream, Server, perturbed

WAIT_MS = 60_000


def wait_text(page: Any, selector: str, text: str) -> None:
    """Wait until an element shows ``text``."""
    page.locator(selector, has_text=text).first.wait_for(timeout=WAIT_MS)


def wait_state(page: Any, state: str) -> None:
    page.locator(f"#state[data-state='{state}']").wait_for(timeout=WAIT_MS)


def load(server: Server, count: int) -> list[LiveStream]:
    """Start requests, and wait until each has a token."""
    streams = [LiveStream(server, [*PROMPT, 30 + i], request_id=f"load-{i}") for i in range(count)]
    return [stream.wait_for_tokens() for stream in streams]


def colored_pixels(page: Any) -> list[int]:
    """Return how many pixels of the timeline have the colour of each version of the legend."""
    return page.evaluate(
        """() => {
        const canvas = document.getElementById("timeline");
        const probe = document.createElement("canvas").getContext("2d");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return [...document.querySelectorAll("#legend rect")].map((box) => {
            probe.fillStyle = box.getAttribute("fill");
            probe.fillRect(0, 0, 1, 1);
            const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
            let found = 0;
            for (let i = 0; i < data.length; i += 4) found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
            return found;
        });
    }"""
    )


def test_without_the_key_the_page_shows_nothing_and_asks_for_it(open_page, ui_server):
    page = open_page(key="")
    page.locator("#state", has_text="needs a key").wait_for(timeout=WAIT_MS)
    assert "Authorization: Bearer" in page.locator("#problem").inner_text()
    assert page.locator("#version").inner_text() == "–"
    page.get_by_label("Key").fill("control-key")
    page.get_by_role("button", name="Use", exact=True).click()
    wait_state(page, "running")
    assert page.locator("#boot").get_attribute("title") == ui_server.weights()["boot_id"]
    assert "control-key" not in page.content() and page.get_by_label("Key").input_value() == ""


def test_pause_and_resume_by_the_buttons(open_page, ui_server):
    page = open_page()
    streams = load(ui_server, 3)
    wait_text(page, "#running", "3")
    page.get_by_label("Mode").select_option("keep")
    page.get_by_role("button", name="Pause", exact=True).click()
    wait_state(page, "paused")
    status = ui_server.get("/v1/is_paused").result
    assert status["is_paused"] and [hold["id"] for hold in status["holds"]] == ["operator"]
    row = page.locator("#holds tbody tr").first.inner_text().split("\t")
    assert row[:4] == ["operator", "engine", "keep · hold", "native"]
    wait_text(page, "#frozen", "3")
    assert page.locator("#is_paused").inner_text() == page.locator("#rejecting").inner_text() == "yes"
    page.get_by_role("button", name="Resume hold operator").click()
    wait_state(page, "running")
    assert not ui_server.get("/v1/is_paused").result["is_paused"]
    assert {reason for stream in streams for reason in stream.wait_end().finals} == {"length"}


def test_a_refused_call_is_told_and_changes_nothing(open_page, ui_server):
    page = open_page()
    wait_state(page, "running")
    page.get_by_label("Hold id").fill("sleep")
    page.get_by_role("button", name="Pause", exact=True).click()
    wait_text(page, "#result.bad", "hold_id")
    assert not ui_server.get("/v1/is_paused").result["rejecting_new_requests"]


def test_bars_have_the_colours_of_the_versions_that_computed_them(open_page, ui_server, tmp_path: Path):
    page = open_page()
    streams = load(ui_server, 4)
    wait_text(page, "#running", "4")
    page.wait_for_timeout(1000)
    before = page.locator("#version").inner_text()
    folder = str(perturbed(tmp_path / "next"))
    report = ui_server.post("/v1/update_weights", {"model_path": folder, "version": "step-9"}).result
    wait_text(page, "#version", "step-9")
    assert page.locator("#epoch").inner_text() == str(report["weight_epoch"])
    wait_text(page, "#legend li", "step-9")
    page.wait_for_timeout(1500)
    names = page.locator("#legend li").all_inner_texts()
    assert names[-2:] == [before, "step-9"]
    assert all(count > 20 for count in colored_pixels(page)[-2:]), "both colours are on the timeline"
    wait_text(page, "#updates td", "step-9")
    assert {reason for stream in streams for reason in stream.wait_end().finals} == {"length"}


def test_the_turns_of_a_session_lie_behind_each_other_in_one_lane(open_page):
    lanes = open_page().evaluate(
        """async () => {
        const { setLanes } = await import("/ui/timeline.js");
        const bar = (session, at, to) => ({ session, at, to, lane: null });
        const [a, b, none] = ["a", "b", ""];
        const bars = [bar(a, 0, 2), bar(b, 0.5, 1), bar(none, 0.6, 0.7), bar(b, 1.1, 3), bar(a, 2, null)];
        bars.push(bar(none, 4, 5));
        setLanes(bars);
        return bars.map((one) => one.lane);
    }"""
    )
    assert lanes == [0, 1, 2, 1, 0, 2]


def test_many_sessions_of_one_request_share_lanes(open_page):
    lanes = open_page().evaluate(
        """async () => {
        const { setLanes } = await import("/ui/timeline.js");
        const bars = Array.from({ length: 2000 }, (_, i) => ({ session: `s${i}`, at: i, to: i + 0.5, lane: null }));
        return setLanes(bars);
    }"""
    )
    assert lanes == 48


def test_a_hold_of_a_trainer_and_a_weight_session_are_shown(open_page, ui_server):
    page = open_page()
    ui_server.post("/v1/pause", {"mode": "wait", "hold_id": "trainer", "ttl_s": 100})
    ui_server.post("/v1/weights/begin", {"version": "step-10"}).ok()
    wait_text(page, "#holds td", "trainer")
    wait_text(page, "#session dd", "step-10")
    assert page.locator("#session dd", has_text="open").count()
    page.locator("#holds tbody tr", has_text="trainer").get_by_role("button").click()
    wait_text(page, "#holds td", "No hold stands")


def test_one_request_and_then_all_are_aborted(open_page, ui_server):
    page = open_page()
    streams = load(ui_server, 3)
    ui_server.post("/v1/pause", {"mode": "keep", "hold_id": "operator"})  # so that none ends by itself
    page.get_by_role("button", name="Abort load-1/0", exact=True).click()
    streams[1].wait_end()
    assert streams[1].finals == ["abort"] and not streams[0].ended.is_set()
    wait_text(page, "#frozen", "2")
    page.get_by_role("button", name="Abort all").click()
    assert not streams[0].ended.is_set(), "the first click only asks"
    page.get_by_role("button", name="Abort 2?").click()
    assert [stream.wait_end().finals for stream in (streams[0], streams[2])] == [["abort"], ["abort"]]
    wait_text(page, "#live td", "No request is in the engine")


def test_the_page_comes_back_after_the_api_server_was_killed(open_page, ui_server):
    page = open_page()
    wait_state(page, "running")
    os.kill(ui_server.api_pids[0], signal.SIGKILL)
    wait_state(page, "disconnected")
    wait_state(page, "running")
    assert page.locator("#problem").is_hidden()


def test_a_restart_of_the_engine_is_shown(open_page, ui_server):
    page = open_page()
    wait_state(page, "running")
    before = page.locator("#boot").get_attribute("title")
    os.kill(ui_server.engine_pid, signal.SIGKILL)
    page.wait_for_function("before => document.getElementById('boot').title !== before", arg=before, timeout=WAIT_MS)
    ui_server.post("/v1/resume", {"hold_id": "republish"})  # the tests before have committed weights
    wait_state(page, "running")


def test_a_second_server_is_shown_only_if_it_allows_the_page(open_page, ui_server):
    with Server("--allowed-origins", ui_server.url, *FLAGS) as allows:
        page = open_page(others=(allows.url,))
        tile = page.locator("#servers button").nth(1)
        tile.locator("span", has_text="running").first.wait_for(timeout=WAIT_MS)
        tile.click()
        page.wait_for_function("boot => document.getElementById('boot').title === boot",
                               arg=allows.get("/health").json["boot_id"], timeout=WAIT_MS)  # fmt: skip
        page.get_by_role("button", name="Pause", exact=True).click()
        wait_state(page, "paused")
        assert allows.get("/v1/is_paused").result["is_paused"]
        assert not ui_server.get("/v1/is_paused").result["is_paused"]


def test_a_server_that_does_not_allow_the_page_is_named_with_the_flag_to_set(open_page, ui_server):
    with Server(*FLAGS) as refuses:
        page = open_page(others=(refuses.url,), tolerated="blocked by CORS policy")
        tile = page.locator("#servers button").nth(1)
        tile.locator("span", has_text="disconnected").first.wait_for(timeout=WAIT_MS)
        tile.click()
        wait_text(page, "#problem", f"--allowed-origins {ui_server.url}")


def test_a_fleet_is_shown_as_one_server_and_one_replica_alone_if_it_is_chosen(browser):
    with FleetServer(2, *FLAGS) as fleet:
        fleet.post("/v1/pause", {"mode": "keep", "hold_id": "both"}).ok()
        streams = [LiveStream(fleet, [60 + i, *PROMPT], max_tokens=4) for i in range(6)]
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{fleet.url}/ui")
        wait_state(page, "paused")
        wait_text(page, "#waiting", "6")
        rows = page.locator("#live tbody tr")
        rows.nth(5).wait_for(timeout=WAIT_MS)
        names = sorted(row.split(": ")[0] for row in rows.all_inner_texts())
        assert names == ["replica-0"] * 3 + ["replica-1"] * 3
        page.get_by_role("button", name="Show replica-1").click()
        wait_text(page, "#shown-replica", "replica-1 only")
        wait_text(page, "#waiting", "3")
        page.get_by_role("button", name="Show all replicas").click()
        wait_text(page, "#waiting", "6")
        assert page.locator("#shown-replica").inner_text() == ""
        fleet.post("/v1/resume", {"hold_id": "both"}).ok()
        assert {reason for stream in streams for reason in stream.wait_end().finals} == {"length"}
        page.close()
