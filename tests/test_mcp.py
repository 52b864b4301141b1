"""Verbs as tools of the Model Context Protocol: the real server in a process of its own, the SDK's own client."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from ultrascale.cli import mcp_server
from ultrascale.specs.errors import SpecError

PLAN = {"model": "tiny", "cluster": "2xh100", "batch_tokens": "4k", "seq": "128"}


def with_session(folder: Path, use: Callable[[ClientSession], Awaitable[Any]]) -> Any:
    """What `use` returns, given a session with a server of that folder."""

    async def main() -> Any:
        words = ["-m", "ultrascale", "mcp", "--folder", str(folder)]
        source = str(Path(mcp_server.__file__).parents[2])
        parameters = StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": source})
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()
            return await use(session)

    return anyio.run(main)


def test_an_agent_plans_explains_and_rehearses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    async def use(session: ClientSession) -> list[Any]:
        calls: list[tuple[str, dict[str, Any]]] = [
            ("plan", {**PLAN, "fix": ["tp=2"], "output": "plan.yaml"}),
            ("explain", {"file": "plan.yaml"}),
            ("explain", {"file": "plan.yaml", "json": True}),
            ("rehearse", {"words": ["plan.yaml"]}),
            ("explain", {"file": "absent.yaml"}),
            ("train", {}),
        ]
        return [await session.list_tools(), *[await session.call_tool(*call) for call in calls]]

    listed, planned, explained, as_json, rehearsed, absent, unknown = with_session(tmp_path, use)
    assert [tool.name for tool in listed.tools] == list(mcp_server.VERBS)
    assert not planned.is_error
    assert "Why the first one" in planned.content[0].text
    monkeypatch.chdir(tmp_path)
    assert explained.content[0].text == run("explain", "plan.yaml")[1]
    assert as_json.structured_content["layout"]["tp"] == 2
    assert not rehearsed.is_error
    assert rehearsed.structured_content["ranks"]
    assert "rehearsed" in rehearsed.content[0].text
    assert absent.is_error
    assert absent.content[0].text == run("explain", "absent.yaml")[2]
    assert unknown.is_error
    assert "there is no tool 'train': try plan, " in unknown.content[0].text


def test_schemas_say_what_the_verbs_take() -> None:
    plan = mcp_server.tools()["plan"].schema
    assert plan["required"] == ["model"]
    assert plan["properties"]["batch_tokens"]["description"].startswith("Tokens in one optimizer step: 4M is 4 x 2^20")
    assert plan["properties"]["top"] == {
        "default": 10,
        "description": "How many layouts to show.",
        "title": "Top",
        "type": "integer",
    }
    imbalance = plan["properties"]["expert_imbalance"]["anyOf"][0]
    assert (imbalance["minimum"], imbalance["maximum"]) == (1, 64)
    verify = mcp_server.tools()["verify"]
    assert verify.writes_figures
    assert "json" not in verify.schema["properties"]
    assert {name: verify.flags[name] for name in ("words", "all")} == {"words": None, "all": "--all"}


def test_arguments_become_the_words_of_a_command(tmp_path: Path) -> None:
    tools = mcp_server.tools()
    words = tools["plan"].command({**PLAN, "fix": ["tp=2", "zero=1"], "json": True, "all_reasons": False}, tmp_path)
    assert words == [
        "plan",
        *("--cluster=2xh100", "--batch-tokens=4k", "--seq=128", "--fix=tp=2", "--fix=zero=1", "--json"),
        "--",
        "tiny",
    ]
    assert tools["verify"].command({"words": ["-x", "layout.tp=2"]}, tmp_path) == ["verify", "--", "-x", "layout.tp=2"]


@pytest.mark.parametrize(
    ("verb", "given", "sentence"),
    [
        ("plan", {"cluster": "8xh100"}, "model of the tool plan: Field required; it takes model, cluster, "),
        ("plan", {**PLAN, "top": "many"}, "top of the tool plan: Input should be a valid integer"),
        ("plan", {**PLAN, "layouts": 3}, "layouts of the tool plan: Extra inputs are not permitted; it takes model"),
        ("explain", {"file": "/etc/passwd"}, "file is '/etc/passwd' but must be inside .*: try a path relative to it"),
        ("explain", {"file": "../plan.yaml"}, "file is '../plan.yaml' but must be inside "),
        ("explain", {"file": "link/plan.yaml"}, "file is 'link/plan.yaml' but must be inside "),
        ("profile", {"words": ["plan.yaml", "train.data=/etc"]}, "words is 'train.data=/etc' but must be inside "),
    ],
)
def test_arguments_that_cannot_be_used(verb: str, given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(SpecError, match=sentence):
        mcp_server.tools()[verb].command(given, tmp_path)


def test_a_call_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, time\npid = os.fork()\nif pid: open({str(file)!r}, 'w').write(str(pid))\ntime.sleep(60)"
    heard: list[tuple[float, str]] = []

    async def say(seconds: float, text: str) -> None:
        heard.append((seconds, text))

    async def main() -> Any:
        return await mcp_server._run([sys.executable, "-c", code], tmp_path, 3.0, say)

    assert anyio.run(main) == ("", "", None)
    assert heard[0] == (2.0, "running")
    state = Path(f"/proc/{file.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_without_the_sdk_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    monkeypatch.delitem(sys.modules, "ultrascale.cli.mcp_server", raising=False)
    monkeypatch.delattr("ultrascale.cli.mcp_server", raising=False)
    code, _, err = run("mcp")
    assert (code, err) == (2, "error: `ultrascale mcp` needs the extra mcp: pip install 'ultrascale[mcp]'\n")
    code, _, err = run("mcp", "--folder", "nowhere")
    assert (code, err) == (2, "error: --folder is 'nowhere' but must be a folder: try .\n")
