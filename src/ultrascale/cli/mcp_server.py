"""Verbs as tools for agents, by the Model Context Protocol on standard input and output.

A call runs the verb in a process of its own and answers with what it printed. Tools, their schemas and their descriptions are
read from the verbs' functions, so that they say what `--help` says.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typer.models import OptionInfo

from ultrascale import __version__
from ultrascale.cli.common import BAD_INPUT, NO, app
from ultrascale.specs.errors import SpecError

VERBS = ("plan", "explain", "presets", "rehearse", "verify", "profile", "compare", "export", "import", "runs", "doctor")
MAX_TEXT = 200_000
PROGRESS_EVERY_S = 2.0
Say = Callable[[float, str], Awaitable[None]]


@dataclass(frozen=True)
class Answer:
    """What a verb printed, its figures if it wrote any, and how it ended."""

    text: str
    figures: Any
    code: int


@dataclass(frozen=True)
class Tool:
    """A verb as an agent sees it."""

    verb: str
    description: str
    arguments: type[BaseModel]
    flags: Mapping[str, str | None]
    """an argument's option; None: it has none, its place tells it"""
    writes_figures: bool
    """its `--json` takes a file"""

    @property
    def schema(self) -> dict[str, Any]:
        return self.arguments.model_json_schema()

    def command(self, given: Mapping[str, Any], folder: Path) -> list[str]:
        """The words after `ultrascale`; refuses what the verb does not take, and files outside the folder."""
        try:
            values = self.arguments.model_validate(given).model_dump(by_alias=True, exclude_unset=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise SpecError(
                f"{'.'.join(map(str, first['loc']))} of the tool {self.verb}: {first['msg']}; it takes {', '.join(self.flags)}"
            ) from None
        options: list[str] = []
        positional: list[str] = []
        for name, value in values.items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, str):
                    _refuse_outside(name, each, folder)
                flag = self.flags[name]
                if flag is None:
                    positional.append(str(each))
                elif not isinstance(each, bool):
                    options.append(f"{flag}={each}")
                elif each:
                    options.append(flag)
        return [self.verb, *options, *(["--", *positional] if positional else [])]


def _refuse_outside(name: str, value: str, folder: Path) -> None:
    """A path, alone or after `field=`, must stay in the folder; other words do, whatever they mean."""
    for path in (value, value.partition("=")[2]):
        if not Path(os.path.realpath(folder / path)).is_relative_to(folder):
            raise SpecError(f"{name} is {value!r:.80} but must be inside {folder}: try a path relative to it")


@cache
def tools() -> dict[str, Tool]:
    commands = {command.name or command.callback.__name__: command for command in app.registered_commands if command.callback}
    return {verb: _tool(verb, commands[verb].callback) for verb in VERBS}


def _tool(verb: str, function: Any) -> Tool:
    fields: dict[str, Any] = {}
    flags: dict[str, str | None] = {}
    defaults, writes_figures = _defaults(function), False
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name == "return":
            continue
        kind, info = get_args(hint)[:2]
        named = (info.default, *(info.param_decls or ()))  # typer keeps the first name of an annotation there
        option = next((word for word in named if isinstance(word, str) and word.startswith("--")), None)
        if option is None and isinstance(info, OptionInfo):
            option = "--" + name.replace("_", "-")
        if option == "--json" and kind is not bool:
            writes_figures = True
            continue
        shown = (option or name).removeprefix("--").partition("/")[0].replace("-", "_")
        flags[shown] = option and option.partition("/")[0]
        text = _plain(info.help or "") if info.metavar is None else f"{info.metavar}: {_plain(info.help or '')}"
        limits = {"ge": info.min, "le": info.max}
        fields[name] = (_as_text(kind), Field(defaults.get(name, ...), alias=shown, description=text, **limits))
    arguments = create_model(verb, __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(verb, _plain(function.__doc__ or ""), arguments, flags, writes_figures)


def _defaults(function: Any) -> dict[str, Any]:
    found = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    found = {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if value is not inspect.Parameter.empty}


def _as_text(kind: Any) -> Any:
    """Paths are texts in JSON."""
    if kind is Path:
        return str
    if inner := get_args(kind):
        parts = [_as_text(one) for one in inner]
        return list[parts[0]] if get_origin(kind) is list else reduce(or_, parts)  # type: ignore[valid-type]
    return kind


def _plain(text: str) -> str:
    """Help without its markup."""
    from rich.text import Text

    lines = (line.strip() for line in Text.from_markup(text).plain.strip().splitlines())
    return "\n".join(lines)


# A call.


async def answer(tool: Tool, given: Mapping[str, Any], folder: Path, timeout_s: float, say: Say) -> Answer:
    """Run the verb; `say` hears after how many seconds it still runs, and what it said last on its error stream."""
    try:
        command = tool.command(given, folder)
    except SpecError as error:
        return Answer(f"error: {error}", None, BAD_INPUT)
    with tempfile.TemporaryDirectory(prefix="ultrascale-mcp-") as place:
        file = Path(place, "figures.json") if tool.writes_figures else None
        words = [command[0], *([f"--json={file}"] if file else []), *command[1:]]
        printed, errors, code = await _run([sys.executable, "-m", "ultrascale", *words], folder, timeout_s, say)
        figures = _figures(file.read_text(encoding="utf-8") if file and file.exists() else printed)
    text = printed if code == 0 and printed else f"{printed}{errors}"
    if code is None:
        longer = f"took longer than {timeout_s:.0f} s: try `ultrascale mcp --timeout {2 * timeout_s:.0f}`"
        return Answer(f"{text}\nerror: `{tool.verb}` {longer}", None, NO)
    return Answer(_shortened(text), figures, code)


async def _run(words: list[str], folder: Path, timeout_s: float, say: Say) -> tuple[str, str, int | None]:
    """What it printed, what on its error stream, and its exit code; None: it was killed after the timeout."""
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    printed: list[bytes] = []
    errors: list[bytes] = []
    null = subprocess.DEVNULL  # our own input is the protocol's
    process = await anyio.open_process(words, cwd=folder, env=environment, stdin=null, start_new_session=True)

    async def read(stream: Any, parts: list[bytes]) -> None:
        size = 0
        async for part in stream:
            size += len(part)
            if size <= 4 * MAX_TEXT:
                parts.append(part)

    async def tell() -> None:
        waited = 0.0
        while True:
            await anyio.sleep(PROGRESS_EVERY_S)
            waited += PROGRESS_EVERY_S
            lines = _decoded(errors[-1:]).split("\n")
            await say(waited, next((line.strip() for line in reversed(lines) if line.strip()), "running"))

    code = None
    try:
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as group:
                group.start_soon(tell)
                async with anyio.create_task_group() as readers:
                    readers.start_soon(read, process.stdout, printed)
                    readers.start_soon(read, process.stderr, errors)
                code = await process.wait()
                group.cancel_scope.cancel()
    finally:
        if process.returncode is None:  # too long, or the agent cancelled: its ranks are of the same process group
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    return _decoded(printed), _decoded(errors), code


def _decoded(parts: list[bytes]) -> str:
    return b"".join(parts).decode(errors="replace")


def _figures(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else {"result": found}


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n… {len(text) - MAX_TEXT:,} more characters"


# The server.


def server(folder: Path, timeout_s: float) -> Server[Any]:
    async def list_tools(context: Any, request: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=list(_listed()))

    def _listed() -> Iterator[types.Tool]:
        for tool in tools().values():
            yield types.Tool(name=tool.verb, description=tool.description, input_schema=tool.schema)

    async def call_tool(context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        if request.name not in tools():
            text = f"error: there is no tool {request.name!r:.80}: try {', '.join(VERBS)}"
            return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
        say = partial(_progress, context.session)
        found = await answer(tools()[request.name], request.arguments or {}, folder, timeout_s, say)
        content: list[Any] = [types.TextContent(text=found.text)]
        return types.CallToolResult(content=content, structured_content=found.figures, is_error=found.code not in (0, NO))

    return Server("ultrascale", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)


async def _progress(session: Any, seconds: float, text: str) -> None:
    await session.report_progress(seconds, message=text)


async def serve(folder: Path, timeout_s: float) -> None:
    served = server(folder, timeout_s)
    async with stdio_server() as (reads, writes):
        await served.run(reads, writes, served.create_initialization_options())
