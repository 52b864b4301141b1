"""The studio as a browser sees it: a real server, and a real headless Chromium where one is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ultrascale import Cluster, Job, Layout, Model, Plan, SpecError, estimate

pytest.importorskip("nicegui")
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Frame
from ultrascale.studio.runs import names

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def a_run(folder: Path, name: str) -> Path:
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("1xh100"), seq=128, batch_tokens=1024)
    layout = Layout(mbs=8)
    run = folder / name
    run.mkdir()
    Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(run / "plan.yaml")
    step(run, 1)
    return run


def step(run: Path, number: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "loss": 5.0 - number, "tokens_per_s_per_gpu": 100.0}) + "\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """As outside of a test: NiceGUI starts another server when it sees pytest."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ultrascale", "studio", "--no-browser", *words]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio")
    (folder / "runs").mkdir()
    a_run(folder / "runs", "first")
    a_run(folder, "outside")
    (folder / "runs" / "link").symlink_to(folder / "outside")
    rows = Path(__file__).parents[2] / "data" / "published.csv"
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "some.csv").write_text("".join(lines[:12]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    port = free_port()
    log = (place / "log").open("w")
    server = subprocess.Popen(
        command("--port", str(port), "--runs", str(place / "runs"), "--accuracy", str(place / "some.csv")),
        stdout=log,
        stderr=log,
        env=environment(),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=10).close()
                break
            except OSError:
                assert server.poll() is None, (place / "log").read_text()
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(10)
        log.close()


def test_every_page_answers_and_foreign_hosts_are_refused(address: str) -> None:
    for path in (
        "/",
        "/schedules",
        "/runs",
        "/accuracy",
        "/?model=nothing&nodes=-3",
        "/runs?run=../outside",
        "/schedules?ranks=x",
    ):
        with urllib.request.urlopen(address + path, timeout=30) as answer:
            assert answer.status == 200
    request = urllib.request.Request(address, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=10)


def handshake(address: str, origin: str | None) -> tuple[int, dict[str, str], bytes]:
    """The first request of socket.io's polling transport, which every browser may send."""
    headers = {} if origin is None else {"Origin": origin}
    query = "EIO=4&transport=polling&client_id=none&document_id=none&tab_id=none&implicit_handshake=false"
    request = urllib.request.Request(f"{address}/_nicegui_ws/socket.io/?{query}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_the_socket_opens_only_for_the_studios_own_pages(address: str) -> None:
    port = address.rsplit(":", 1)[1]
    for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", f"http://[::1]:{port}"):
        status, headers, body = handshake(address, origin)
        assert (status, b'"sid"' in body) == (200, True), origin
        assert headers["access-control-allow-origin"] == origin
    status, headers, body = handshake(address, None)  # a browser sends no Origin with a GET of the page itself
    assert (status, b'"sid"' in body) == (200, True)
    foreign = ("http://evil.example", f"http://evil.example:{port}", f"https://127.0.0.1:{port}", "http://127.0.0.1:1", "null")
    for origin in foreign:
        status, headers, body = handshake(address, origin)
        assert status == 400, origin
        assert b"sid" not in body
        assert "access-control-allow-origin" not in {name.lower() for name in headers}


def websocket_status(address: str, origin: str) -> int:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as opened:
        opened.sendall(
            (
                f"GET /_nicegui_ws/socket.io/?EIO=4&transport=websocket HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {origin}\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            ).encode()
        )
        return int(opened.recv(64).split()[1])


def test_a_websocket_of_another_origin_is_refused(address: str) -> None:
    assert websocket_status(address, address) == 101
    assert websocket_status(address, "http://evil.example") in (400, 403)


NINES = "9" * 5000
QUERIES = [
    f"/?nodes={NINES}",
    f"/?per_node={NINES}&nodes=2",
    "/?nodes=%C2%B2&per_node=%D9%A3",
    f"/?batch={NINES}&seq={NINES}",
    "/?seq=nan&batch=inf",
    f"/?layout=tp%3D{NINES}",
    "/?layout=tp%3D" + "9" * 4000,
    f"/?fix=tp%3D{NINES}&forbid=zero%3D{NINES}",
    "/?shape=" + "%5B" * 2000,
    "/?shape=%7B%22layers%22%3A" + "9" * 4000 + "%7D",
    "/?shape=%00%1b&model=%1b%5B2J&theme=%ff&gpu=%22%3E%3Cscript%3E",
    f"/schedules?ranks={NINES}&chunks=1e999&microbatches=nan&backward=-inf&send={'x' * 500}&schedule=%00",
    f"/explore?nodes={NINES}",
    f"/accuracy?nodes={NINES}",
    "/runs?run=" + "%7C" * 4000 + "..%2F..%00",
]


@pytest.mark.parametrize("query", QUERIES, ids=[query[:30] for query in QUERIES])
def test_no_query_breaks_a_page(address: str, place: Path, query: str) -> None:
    logged = len((place / "log").read_text())
    with urllib.request.urlopen(address + query, timeout=60) as answer:
        page = answer.read().decode()
        assert answer.status == 200
    assert "Internal Server Error" not in page
    assert "Traceback" not in (place / "log").read_text()[logged:]


def test_only_the_folder_it_was_given_is_read(address: str, place: Path) -> None:
    assert (place / "runs" / "link" / "plan.yaml").is_file()
    assert names(place / "runs") == ["first"], "neither a neighbour nor a link that leads to one"
    assert names(place / "nowhere") == []
    with urllib.request.urlopen(f"{address}/runs?run=../outside|link|first", timeout=30) as answer:
        page = answer.read().decode()
    assert "first: 1 steps" in page
    assert "outside: " not in page
    assert "link: " not in page


def test_a_taken_port_is_refused(address: str, place: Path) -> None:
    port = address.rsplit(":", 1)[1]
    done = subprocess.run(command("--port", port), capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")  # no address before it
    assert f"try --port {int(port) + 1}" in done.stderr
    done = subprocess.run(command("--runs", __file__), capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2
    assert "--runs is" in done.stderr
    assert "not a folder" in done.stderr
    done = subprocess.run(command("--accuracy", "nowhere.csv"), capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2
    assert "nowhere.csv does not exist" in done.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven with Playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def tab_without_errors(browser: Any) -> Iterator[Any]:
    """A tab in which no error may appear."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(120_000)
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    yield tab
    tab.close()
    assert not errors


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    yield from tab_without_errors(browser)


@pytest.fixture(scope="module")
def one_tab(browser: Any) -> Iterator[Any]:
    """For many pages: what the browser has read of the first is not read again."""
    yield from tab_without_errors(browser)


ROW = """() => {
  const rows = document.querySelector('.us-layouts table'), row = rows?.querySelector('tbody tr');
  if (!row || !row.children[1] || row.innerText.includes('≈')) return null;
  const heads = [...rows.querySelectorAll('th')].map(head => head.innerText.trim().replace(/\\s+/g, ' '));
  return Object.fromEntries([...row.children].map((cell, place) => [heads[place], cell.innerText.trim()]));
}"""


def first_layout(page: Any, **cells: str) -> dict[str, str]:
    """The first row by column, once it is simulated and has these cells."""
    condition = " && ".join(["row", *(f"row[{name!r}] === {value!r}" for name, value in cells.items())])
    found = page.wait_for_function(f"() => {{ const row = ({ROW})(); return {condition} ? row : null; }}")
    return dict(found.json_value())


def test_controls_change_the_answer_and_the_address(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    first = first_layout(page)
    assert first["Δ best"] == "best"
    assert first["fits"].endswith("%")
    page.get_by_label("Fix, such as tp=8,zero=1").fill("tp=2")
    assert first_layout(page, tp="2") != first
    page.wait_for_url("**/*fix=tp%3D2*")
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    assert first_layout(page)["tp"] == "2"


def test_of_consecutive_requests_the_last_is_answered(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3-8b&nodes=8")
    first_layout(page)
    constraint_input = page.get_by_label("Fix, such as tp=8,zero=1")
    for words in ("tp=2", "tp=8", "pp=2", "tp=4"):
        constraint_input.fill(words)
        page.wait_for_timeout(120)  # long enough for the search to begin, too short for its answer
    first_layout(page, tp="4")
    page.wait_for_selector("text=/tp 4 .*: It fits/")
    page.wait_for_selector("text=/^tp 4$/")  # the controls of the layout follow


def test_a_wrong_field_is_marked_and_the_page_stays_usable(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    first_layout(page)
    page.get_by_label("Nodes", exact=True).fill("many")
    page.wait_for_selector(".q-field--error:has([aria-label='Nodes']) >> text=must be a whole number")
    assert page.locator(".q-field--error").count() == 1
    page.get_by_label("Nodes", exact=True).fill("1")
    page.wait_for_function("!document.body.innerText.includes('must be a whole number')")
    assert page.locator(".q-field--error").count() == 0


def test_a_manual_layout_becomes_a_selected_row(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1&fix=tp=1")
    first_layout(page)
    page.wait_for_selector("#sensitivity .main-svg")  # the last that a search sends
    slider = page.get_by_role("slider", name="tp", exact=True).locator("[tabindex='0']")
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_selector("text=/dp 4 · tp 2 .*: It /")
    page.wait_for_url("**/*layout=tp%3D2*")
    assert first_layout(page, tp="2")["#"] == "manual"
    assert page.locator(".us-layouts tr.selected").count() == 1
    page.reload()
    assert first_layout(page, tp="2")["#"] == "manual"
    page.locator(".us-layouts tbody tr").nth(1).click()  # the best one again
    page.wait_for_selector("text=/dp 8 · .*: It fits/")
    page.wait_for_function("!location.search.includes('layout=')")


def offered(page: Any, label: str) -> list[str]:
    """The options of a select of the layout editor, which is left open."""
    page.locator(f".us-manual .q-field:has([aria-label='{label}']) .q-field__append").click()
    page.wait_for_selector(".q-menu .q-item")
    return [text.strip() for text in page.locator(".q-menu .q-item").all_inner_texts()]


def test_the_dispatcher_of_experts_is_one_that_the_engine_runs(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=tiny-moe&nodes=1&batch=256k&seq=1k&framework=megatron-core&fix=ep=4,dispatcher=alltoall")
    assert first_layout(page)["ep"] == "4 alltoall"
    page.wait_for_selector("#sensitivity .main-svg")
    assert offered(page, "dispatcher") == ["alltoall", "allgather", "deepep", "hybridep"]
    page.locator(".q-menu .q-item", has_text="allgather").click()
    assert first_layout(page, ep="4 allgather")["#"] == "manual"
    page.wait_for_url("**/*layout=dispatcher%3Dallgather*")
    page.reload()
    assert first_layout(page, ep="4 allgather")["#"] == "manual"
    page.goto(f"{address}/?model=tiny-moe&nodes=1&batch=256k&seq=1k&framework=torchtitan&fix=ep=4")
    page.wait_for_selector("#sensitivity .main-svg")
    assert offered(page, "dispatcher") == ["alltoall", "deepep"]
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    page.wait_for_selector("text=/From the GPUs and the batch follow/")
    assert page.get_by_role("combobox", name="dispatcher").count() == 0


def test_back_and_forward_open_the_address_they_lead_to(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    first_layout(page)
    page.get_by_label("Fix, such as tp=8,zero=1").fill("tp=2")
    first_layout(page, tp="2")
    page.go_back()
    assert "fix=" not in page.url
    first_layout(page, tp="1")
    assert page.get_by_label("Fix, such as tp=8,zero=1").input_value() == ""
    page.go_forward()
    first_layout(page, tp="2")


def test_where_nothing_fits_one_click_makes_it_fit(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3-70b&nodes=1")
    page.wait_for_selector("h2:has-text('Nothing fits')")
    page.get_by_role("button", name=re.compile("Use .* GPUs of the same kind")).click()
    assert first_layout(page)["fits"].endswith("%")
    assert "nodes=" in page.url


def test_where_no_layout_is_legal_one_click_removes_the_constraint(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1&fix=tp=7")
    page.get_by_role("button", name="Remove the constraint tp=7").click()
    first_layout(page)
    assert page.get_by_label("Fix, such as tp=8,zero=1").input_value() == ""


def test_the_cluster_shows_the_group_of_the_gpu_pointed_at(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3-8b&nodes=2&fix=tp=4,pp=2")
    page.wait_for_selector("#cluster-map .gpu.mine")
    assert page.locator("#cluster-map .gpu").count() == 16
    page.locator("#cluster-map [data-rank='5']").hover()
    mine = "() => [...document.querySelectorAll('.gpu.mine')].map(gpu => Number(gpu.dataset.rank))"
    assert page.evaluate(mine) == [4, 5, 6, 7]
    page.locator("#cluster-map button", has_text="pp 2").hover()
    assert page.evaluate(mine) == [5, 13]
    assert "GPUs 5, 13" in page.inner_text(".us-said")


def test_controls_and_numbers_stay_in_view(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    first_layout(page)
    page.wait_for_selector(".main-svg")
    page.evaluate("window.scrollTo(0, 1200)")
    page.wait_for_function("window.scrollY > 600")
    for place in (".us-cards", ".us-panel"):
        box = page.locator(place).bounding_box()
        assert 0 <= box["y"] < 100, place


def test_an_exception_is_on_the_page_and_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    frame = object.__new__(Frame)  # without a browser
    frame.path, frame.ask = "/", PlannerQuery(model="llama-3-70b")
    monkeypatch.setattr(frame, "say", said.append)
    with frame.show_errors():
        raise ValueError("5 is not in the options")
    with frame.show_errors():
        raise SpecError("nodes is 'many'")
    assert said[0].startswith("Internal error, ValueError: 5 is not in the options")
    assert said[1] == "nodes is 'many'"
    assert "model=llama-3-70b" in caplog.text
    assert caplog.text.count("Traceback") == 1


PRESETS = list(Model.presets())
CLUSTERS = ("1", "8", "64")


def opens(address: str, place: Path, page: Any, model: str, nodes: str) -> None:
    """The page answers with a layout or with what would fit, and nothing is raised on the way."""
    logged = len((place / "log").read_text())
    page.goto(f"{address}/?model={model}&nodes={nodes}&batch=4M")
    page.wait_for_selector(
        ".us-layouts tr.selected, .us-card h2:has-text('Nothing fits'), .us-card button:has-text('Start again')"
    )
    if page.locator(".us-layouts tr.selected").count():
        page.wait_for_selector("text=/From the GPUs and the batch follow/")
        page.wait_for_selector(".us-reasons li >> nth=2")
    page.wait_for_timeout(300)
    assert "Internal error" not in page.inner_text("body")
    assert "Traceback" not in (place / "log").read_text()[logged:]


@pytest.mark.parametrize(("model", "nodes"), [("llama-3-70b", "8"), ("deepseek-v3", "64"), ("gpt2", "1")])
def test_a_preset_opens(address: str, place: Path, page: Any, model: str, nodes: str) -> None:
    opens(address, place, page, model, nodes)


@pytest.mark.parametrize("framework", ["deepspeed", "nanotron"])
def test_the_editor_opens_for_engines_that_run_few_layouts(address: str, place: Path, page: Any, framework: str) -> None:
    opens(address, place, page, "llama-3.2-1b", f"1&framework={framework}")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", CLUSTERS)
@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_opens(address: str, place: Path, one_tab: Any, model: str, nodes: str) -> None:
    opens(address, place, one_tab, model, nodes)


def test_exports_and_the_report_download(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    first_layout(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="plan.yaml").click()
    assert "llama-3.2-1b" in Path(waiting.value.path()).read_text(encoding="utf-8")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="report.html").click()
    assert "<!doctype html>" in Path(waiting.value.path()).read_text(encoding="utf-8")[:100]
    page.get_by_role("button", name="export").click()
    page.get_by_text("megatron", exact=True).click()
    page.wait_for_selector("text=GiB of 79.1 in Megatron-LM: plan for the engine megatron-core")
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1&framework=megatron-core")
    first_layout(page)
    page.get_by_role("button", name="export").click()
    with page.expect_download() as waiting:
        page.get_by_text("megatron", exact=True).click()
    assert "run.sh" in zipfile.ZipFile(waiting.value.path()).namelist()


@pytest.mark.slow
def test_the_map_of_best_layouts(address: str, page: Any) -> None:
    page.goto(f"{address}/?model=llama-3.2-1b&nodes=1")
    first_layout(page)
    page.get_by_label("Batch (tokens)").fill("256k")
    page.wait_for_url("**/*batch=256k*")
    page.get_by_role("link", name="Explore").click()
    page.wait_for_url("**/explore?*batch=256k*")
    page.wait_for_selector("#scaling .main-svg")
    page.get_by_role("button", name="Draw the map").click()
    page.wait_for_selector("#heat-map .main-svg", timeout=300_000)


def test_a_schedule_is_animated(address: str, page: Any) -> None:
    page.goto(f"{address}/schedules?schedule=afab|1f1b&ranks=4&microbatches=4")
    page.wait_for_selector("text=/afab: bubble 42.9%/")
    page.wait_for_selector("text=/1f1b: bubble 42.9%/")
    slider = page.get_by_role("slider", name="micro-batches").locator("[tabindex='0']")
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_selector("text=/afab: bubble 37.5%/")
    page.wait_for_selector(".main-svg")
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelectorAll('.shapelayer path').length > 0")


def test_a_run_is_shown_live_while_it_trains(address: str, page: Any, place: Path) -> None:
    page.goto(f"{address}/runs")
    page.wait_for_selector("text=/first: [0-9]+ steps/")
    found = re.search(r"first: (\d+) steps", page.inner_text("body"))
    assert found is not None
    step(place / "runs" / "first", int(found[1]) + 1)
    page.wait_for_selector(f"text=first: {int(found[1]) + 1} steps")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/explore", "/schedules", "/runs", "/accuracy"])
def test_screenshots_of_every_page_in_both_themes(address: str, page: Any, path: str, theme: str, tmp_path: Path) -> None:
    width = 390 if theme == "dark" else 900
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}{path}?theme={theme}")
    page.wait_for_selector(".main-svg")
    shot = tmp_path / "page.png"
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 10_000
    paper = page.eval_on_selector(".main-svg", "svg => svg.style.background")
    assert paper.replace(" ", "") == {"light": "rgb(255,255,255)", "dark": "rgb(22,24,29)"}[theme]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
