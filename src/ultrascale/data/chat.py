"""Conversations: chat records and the chat template of a tokenizer, which renders them and tells what the assistant wrote."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from ultrascale.data.sources import SUFFIXES, DocumentChunk, Spans
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import MAX_TOKENIZER_BYTES, mapping_of, read_named
from ultrascale.specs.validate import kind_of, shown

Message = Mapping[str, Any]

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT's records
_LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
_PAIR = ("prompt", "completion")

# What `{% generation %}` and `{% endgeneration %}` leave in the text; no text can hold them by chance.
_START, _END = (f"\0{name} {secrets.token_hex(16)}\0" for name in ("start", "end"))


# Of a tokenizer of bytes, which has no special tokens: a zero byte ends an answer.
BYTES_TEMPLATE = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '\\0' }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""


class Conversations:
    """Records with `messages` (role, content), ShareGPT's `conversations` (from, value), or `prompt` and `completion`."""

    name = "messages"
    suffixes: tuple[str, ...] = SUFFIXES[1:]  # a .txt has no fields

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def columns(self, path: Path, schema: Any) -> list[str]:
        found = [name for name in (*_LISTS, *_PAIR, "tools") if name in schema.names]
        _refuse_without_messages(f"{path} ", found, schema.names)
        return found

    def chunks(self, record: Mapping[str, Any], place: int) -> Iterator[DocumentChunk]:
        tools = record.get("tools")
        text, answers = self.template.render(_messages(record), tools or None)
        yield DocumentChunk(text, True, place, answers)


def _messages(record: Mapping[str, Any]) -> list[Message]:
    _refuse_without_messages("", list(record), list(record))
    field = next((name for name in _LISTS if record.get(name) is not None), None)
    if field is None:
        prompt, completion = (record[name] for name in _PAIR)
        if isinstance(prompt, list) and isinstance(completion, list):
            return _checked("prompt", _LISTS["messages"], [*prompt, *completion])
        pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return _checked("prompt", _LISTS["messages"], pair)
    return _checked(field, _LISTS[field], record[field])


def _refuse_without_messages(where: str, fields: Sequence[str], known: Sequence[str]) -> None:
    if not set(_LISTS) & set(fields) and not set(_PAIR) <= set(fields):
        others = ", ".join(map(str, known[:8])) or "none"
        raise SpecError(
            f"{where}has none of the fields {', '.join(_LISTS)}, or {' and '.join(_PAIR)} (it has: {others}): "
            "name files of conversations"
        )


def _checked(field: str, names: tuple[str, str], messages: Any) -> list[Message]:
    role_name, content_name = names
    if not isinstance(messages, list) or not messages:
        raise SpecError(f"has {shown(messages)} in its field {field!r} but must have messages there: take it out")
    found: list[Message] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise SpecError(f"has {kind_of(message)} as message {number} but it must have a {role_name} and a {content_name}")
        role = message.get(role_name)
        role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else shown(role)
        if role not in ROLES:
            known = ROLES if field != "conversations" else (*ROLES, *_OTHER_ROLES)
            raise SpecError(
                f"has {shown(message.get(role_name))} as the {role_name} of message {number}: {nearest(role, known)}"
            )
        content = message.get(content_name)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise SpecError(f"has {shown(content)} as the {content_name} of message {number} but must have text: take it out")
        others = {name: value for name, value in message.items() if name not in names and value is not None}
        found.append({"role": role, "content": content, **others})
    if not any(message["role"] == "assistant" for message in found):
        raise SpecError("has no answer, a message of the assistant: take it out")
    return found


class ChatTemplate:
    """A chat template in Jinja, rendered in a sandbox with the names and filters that transformers gives it.

    Answers are what stands between `{% generation %}` and `{% endgeneration %}`; in a template without them, what a message of
    the assistant adds to the text of the messages before and the generation prompt.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self.special_tokens, self.where = dict(special_tokens), where
        self.sha256 = sha256(json.dumps([source, self.special_tokens]).encode()).hexdigest()
        self._marked = re.search(r"\{%-?\s*generation\b", source) is not None
        self._template = _compiled(source, where)

    @classmethod
    def load(cls, folder: Path | None, file: Path | None = None) -> ChatTemplate:
        """The template of a tokenizer's folder (None: of bytes), or of a file; special tokens are the folder's."""
        if folder is None:
            text = BYTES_TEMPLATE if file is None else read_named(file, f"--template {file}", "name a Jinja file")
            return cls(text, {}, "of bytes" if file is None else str(file))
        config = folder / CONFIG
        content = {}
        if config.exists():
            text = read_named(config, str(config), "expected a tokenizer's config", MAX_TOKENIZER_BYTES)
            content = mapping_of(text, str(config), "JSON")
        texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in content.items())
        special = {name: text for name, text in texts if name.endswith("_token") and isinstance(text, str)}
        own = folder / TEMPLATE
        if file is not None or own.exists():
            named = file or own
            return cls(read_named(named, f"--template {named}" if file else str(own), "name a Jinja file"), special, str(named))
        source = content.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((one.get("template") for one in source if one.get("name") == "default"), None)
        if not isinstance(source, str):
            raise SpecError(
                f"{folder} has no chat template (neither {TEMPLATE} nor chat_template in {CONFIG}): name one with --template, "
                "such as --template chat.jinja"
            )
        return cls(source, special, str(config))

    def render(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, Spans]:
        """The text of a conversation, and where in it the answers are."""
        text = self._text(messages, tools)
        if self._marked:
            text, spans = _without_marks(text)
        else:
            spans = tuple(self._answer(messages, place, text, tools) for place in _places(messages))
        spans = tuple((start, stop) for start, stop in spans if start < stop)
        if not spans:
            raise SpecError(f"has no answer in what the chat template makes of it ({self.where}): take it out")
        return text, spans

    def _answer(self, messages: Sequence[Message], place: int, text: str, tools: Any) -> tuple[int, int]:
        """The part of the text that message `place` adds."""
        before, alone = self._text(messages[:place], tools), self._text(messages[: place + 1], tools)
        # The prompt may begin what a template leaves out of the past, such as a thought.
        prompt = self._text(messages[:place], tools, prompt=True)
        start = _common(prompt, text)
        if start >= _common(prompt, before) and text.startswith(alone[:start]):
            if text.startswith(alone):
                return start, len(alone)
            # Templates leave thoughts out of all answers but the last: find the answer, and what closes it.
            content = (messages[place]["content"] or "").strip()
            closing, found = alone.rpartition(content)[2], text.find(content, start)
            if content and found >= 0 and text.startswith(closing, found + len(content)):
                return start, found + len(content) + len(closing)
        raise SpecError(
            f"has an answer (message {place + 1}) that the chat template ({self.where}) writes otherwise when others follow: "
            "mark answers in the template with {% generation %} and {% endgeneration %}"
        )

    def _text(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str:
        try:
            return str(
                self._template.render(
                    messages=[dict(message) for message in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompt,
                    **self.special_tokens,
                )
            )
        except Exception as error:  # a template runs what it wants: its own refusals, and errors of Python
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise SpecError(f"is refused by the chat template {self.where} ({reason}): repair it or take it out") from None


def _places(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _common(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _without_marks(text: str) -> tuple[str, Spans]:
    parts = re.split(f"{re.escape(_START)}|{re.escape(_END)}", text)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return "".join(parts), tuple(list(pairwise(ends))[1::2])


def _compiled(source: str, where: str) -> Any:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise SpecError(
            "a chat template needs the jinja2 package, which is not installed: try pip install 'ultrascale[data]'"
        ) from None

    class Generation(Extension):
        """`{% generation %}`: marks where its content begins and ends."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            start, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_START, _END))
            return nodes.Scope([start, *body, end]).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(
            f"{where} is no chat template that can be read ({error.message}, line {error.lineno}): repair it, or name another "
            "with --template"
        ) from None


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **_: Any) -> str:
    """As it is: Jinja's own filter escapes signs of HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
