"""Conversations: ids and masks are those of transformers' chat templates, and what cannot be used is refused."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_builders import tokenizer
from transformers import PreTrainedTokenizerFast

from ultrascale.data import chat, corpora
from ultrascale.data.corpora import ConversationCorpus, packed_windows
from ultrascale.data.sets import open_set
from ultrascale.data.tokenize import tokenize_chats
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
# As Qwen3's: the last answer alone has its thought.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' and loop.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4: naïve 🜂 火."}],
    [
        {"role": "system", "content": "Be alpha."},
        {"role": "user", "content": "beta <|im_end|> gamma"},
        {"role": "assistant", "content": "delta"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "zeta\n\nε "},
    ],
]


def write_tokenizer(folder: Path, template: str | None) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer(folder / "tokenizer.json", SPECIAL)
    config: dict[str, Any] = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, records: list[Any]) -> Path:
    content = "".join(json.dumps(one) + "\n" for one in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def theirs(folder: Path, template: str) -> PreTrainedTokenizerFast:
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": template}
    found = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    found.backend_tokenizer.no_truncation()
    return found


def conversations(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens and the mask of each conversation of a set."""
    found = open_set(folder)
    assert found.answers is not None
    cuts = found.ends[:-1].astype(int)
    parts = zip(np.split(found.tokens, cuts), np.split(found.answers, cuts), strict=True)
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in parts]


def test_ids_and_masks_of_a_template_with_generation_tags_equal_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", MARKED)
    facts = tokenize_chats(write_chats(tmp_path / "a.jsonl", [{"messages": one} for one in CHATS]), tmp_path / "out", folder)
    reference = theirs(folder, MARKED)
    for (tokens, mask), messages in zip(conversations(tmp_path / "out"), CHATS, strict=True):
        wanted = reference.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
        assert tokens == wanted["input_ids"]
        assert mask == wanted["assistant_masks"]
        assert 0 < sum(mask) < len(mask)
    assert facts.answers == sum(sum(mask) for _, mask in conversations(tmp_path / "out"))


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["chatml", "thinking"])
def test_answers_of_a_template_without_tags_are_what_each_adds(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path / "model", template)
    tokenize_chats(write_chats(tmp_path / "a.jsonl", [{"messages": one} for one in CHATS]), tmp_path / "out", folder)
    reference = theirs(folder, template)
    for (tokens, mask), messages in zip(conversations(tmp_path / "out"), CHATS, strict=True):
        assert tokens == reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        answered = reference.decode([token for token, counts in zip(tokens, mask, strict=True) if counts])
        thought = "<think>\n\n</think>\n\n" if template == THINKING else ""
        answers = [message["content"] + "<|im_end|>\n" for message in messages if message["role"] == "assistant"]
        assert answered == "".join([*answers[:-1], thought + answers[-1]])


def test_every_form_of_a_conversation_and_of_a_file_gives_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = write_tokenizer(tmp_path / "model", CHATML)
    chats = [
        [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "yes"}] for number in range(9)
    ]
    names = {"user": "human", "assistant": "gpt"}
    shared = [[{"from": names[one["role"]], "value": one["content"]} for one in messages] for messages in chats]
    forms = [
        write_chats(tmp_path / "a.jsonl", [{"messages": one} for one in chats]),
        write_chats(tmp_path / "b.jsonl.gz", [{"conversations": one} for one in shared]),
        write_chats(tmp_path / "c.jsonl", [{"prompt": one["content"], "completion": "yes"} for one, _ in chats]),
        write_chats(tmp_path / "d.jsonl", [{"prompt": one[:1], "completion": one[1:]} for one in chats]),
        tmp_path / "e.parquet",
    ]
    pq.write_table(pa.Table.from_pylist([{"id": 1, "messages": one} for one in chats]), forms[-1], row_group_size=2)
    found = []
    for number, path in enumerate(forms):
        tokenize_chats(path, tmp_path / f"out{number}", folder, workers=1 + number % 2, part_bytes=200)
        found.append(conversations(tmp_path / f"out{number}"))
    assert len(found[0]) == 9
    assert all(one == found[0] for one in found[1:])


def test_a_template_file_comes_before_the_tokenizers_own(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "{{ raise_exception('not this one') }}")
    source = write_chats(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    (tmp_path / "chat.jinja").write_text(CHATML)
    tokenize_chats(source, tmp_path / "one", folder, template=tmp_path / "chat.jinja")
    (folder / "chat_template.jinja").write_text(CHATML)
    tokenize_chats(source, tmp_path / "two", folder / "tokenizer.json")
    assert conversations(tmp_path / "one") == conversations(tmp_path / "two")
    tokenize_chats(source, tmp_path / "one", folder)  # nothing left to do
    with pytest.raises(SpecError, match="holds a set made of"):
        tokenize_chats(source, tmp_path / "one", folder, template=write_template(tmp_path, MARKED))


def write_template(folder: Path, source: str) -> Path:
    path = folder / "other.jinja"
    path.write_text(source)
    return path


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": CHATS[0][:1]}, r"line 2 has no answer, a message of the assistant: take it out"),
        ({"messages": []}, r"line 2 has a list in its field 'messages' but must have messages there"),
        ({"messages": "hi"}, r"line 2 has 'hi' in its field 'messages'"),
        ({"messages": ["hi"]}, r"line 2 has text as message 1 but it must have a role and a content"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            r"'asistant' as the role .* did you mean 'assistant'",
        ),
        ({"conversations": [{"from": "humn", "value": "x"}]}, r"line 2 has 'humn' as the from .* did you mean 'human'"),
        ({"messages": [{"role": "user", "content": 7}]}, r"line 2 has 7 as the content of message 1 but must have text"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"line 2 has a list as the role of message 1"),
        ({"text": "hi"}, r"line 2 has none of the fields messages, conversations, or prompt and completion \(it has: text\)"),
        (["hi"], r"line 2 is a list but must be a mapping of fields to values, such as {'messages': …}"),
        (
            {"messages": [{"role": "tool", "content": "x"}, CHATS[0][1]]},
            r"line 2 is refused by .*no tools here",
        ),
        (
            {"messages": [*CHATS[0], {**CHATS[0][1], "content": None, "tool_calls": [1]}]},
            r"line 2 is refused by the chat template",
        ),
    ],
)
def test_unusable_conversations_are_named(record: Any, says: str, tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
    folder = write_tokenizer(tmp_path / "model", refusing)
    source = write_chats(tmp_path / "a.jsonl", [{"messages": CHATS[0]}, record])
    with pytest.raises(SpecError, match=says):
        tokenize_chats(source, tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            None,
            r"has no chat template \(neither chat_template.jinja nor .* in tokenizer_config.json\): name one with",
        ),
        ("{% for message in messages %}", r"is no chat template that can be read \(Unexpected end of template"),
        ("{% generation %}{% endgeneration %}", r"line 1 has no answer in what the chat template makes of it"),
        ("{{ ''.__class__.__mro__ }}", r"is refused by the chat template"),
        (
            "{{ messages | length }}",
            r"has an answer \(message 3\) that .* writes otherwise when others follow",
        ),
    ],
    ids=["none", "broken", "empty", "unsafe", "changing"],
)
def test_unusable_templates_are_named(template: str | None, says: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", template)
    with pytest.raises(SpecError, match=says):
        tokenize_chats(write_chats(tmp_path / "a.jsonl", [{"messages": CHATS[1]}]), tmp_path / "out", folder)


def test_a_missing_tokenizer_is_named_before_its_template(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothere does not exist"):
        tokenize_chats(write_chats(tmp_path / "a.jsonl", [{"messages": CHATS[1]}]), tmp_path / "out", tmp_path / "nothere")


def test_bytes_have_a_template_of_their_own(tmp_path: Path) -> None:
    tokenize_chats(write_chats(tmp_path / "a.jsonl", [{"messages": one} for one in CHATS]), tmp_path / "out")
    (_, _), (tokens, mask) = conversations(tmp_path / "out")
    says = "<|system|>\nBe alpha.\n<|user|>\nbeta <|im_end|> gamma\n<|assistant|>\ndelta\0\n"
    says += "<|user|>\nand?\n<|assistant|>\nzeta\n\nε \0\n"
    assert bytes(tokens).decode() == says
    assert bytes(token for token, counts in zip(tokens, mask, strict=True) if counts).decode() == "delta\0zeta\n\nε \0"


def test_texts_are_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi")
    folder = write_tokenizer(tmp_path / "model", CHATML)
    with pytest.raises(SpecError, match=re.escape("a.txt is none of .jsonl, .jsonl.gz, .parquet")):
        tokenize_chats(tmp_path / "a.txt", tmp_path / "out", folder)


def test_windows_hold_whole_conversations() -> None:
    """Best-fit decreasing by hand: 5 and 4 share a window, the other 4 opens one, which 3 and 2 fill."""
    windows = packed_windows(np.array([3, 5, 4, 2, 4, 30]), 10)
    rows = [windows.documents[a:b].tolist() for a, b in zip(windows.first[:-1], windows.first[1:], strict=True)]
    assert sorted(rows) == [[0, 3, 4], [1, 2], [5]]


def test_packing_wastes_little_and_spreads_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, size=20_000).astype(np.int64) + 1
    windows = packed_windows(lengths, 2049)
    assert sorted(windows.documents.tolist()) == list(range(len(lengths)))
    clipped = np.minimum(lengths, 2049)
    sums = np.add.reduceat(clipped[windows.documents], windows.first[:-1])
    assert sums.max() <= 2049
    assert clipped.sum() / (2049 * len(sums)) > 0.99
    counts = np.diff(windows.first)
    last = len(counts) // 50  # are held out
    assert abs(counts[-last:].mean() / counts.mean() - 1) < 0.3


def test_a_window_has_its_tokens_documents_and_answers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", MARKED)
    chats = [
        {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b" * n}]} for n in range(1, 9)
    ]
    tokenize_chats(write_chats(tmp_path / "a.jsonl", chats), tmp_path / "out", folder)
    known = conversations(tmp_path / "out")
    training = Training(data=str(tmp_path / "out"))
    ((text, _),) = corpora.corpus(training, 512).parts
    assert isinstance(text, ConversationCorpus)
    seq, seen = 80, list[list[int]]()
    for index in range(text.windows(seq)):
        tokens, documents, counted = text.window(index, seq), text.documents(index, seq), text.counted(index, seq)
        assert (len(tokens), len(documents), len(counted)) == (seq + 1, seq, seq)
        place = 0
        for document in range(documents[-1] + 1):
            length = int((documents == document).sum())
            found = tokens[place : place + length].tolist()
            mine = next((mask for ids, mask in known if ids == found), None)
            if mine is None:  # padding
                assert document == documents[-1]
                assert set(found) == {text.padding}
                mine = [0] * length
            else:
                seen.append(found)
            assert counted[place : place + length - 1].tolist() == [bool(one) for one in mine[1:]]
            place += length
    assert sorted(seen) == sorted(ids for ids, _ in known)
    short = text.window(0, 8)
    assert short.tolist() in [ids[:9] for ids, _ in known]


def test_answers_that_do_not_belong_to_the_tokens_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", CHATML)
    tokenize_chats(write_chats(tmp_path / "a.jsonl", [{"messages": CHATS[0]}]), tmp_path / "out", folder)
    (tmp_path / "out" / "answers.bin").write_bytes(b"\1\1")
    with pytest.raises(SpecError, match=r"answers.bin has 2 bytes but must have one for each of \d+ tokens"):
        open_set(tmp_path / "out")


def test_roles_are_those_that_are_checked() -> None:
    assert set(chat._OTHER_ROLES.values()) <= set(chat.ROLES)
