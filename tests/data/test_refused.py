"""Unusable input: each has a one-sentence error with the file and what would work, and leaves no files."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_builders import json_lines, megatron, parquet, tokenizer

from builders import write_tokens
from ultrascale.data.corpora import check
from ultrascale.data.sets import info
from ultrascale.data.tokenize import tokenize
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training

Case = tuple[str, Callable[[Path], object], str]


def ours(path: Path, tokens: Any = range(100), ends: Any = (40, 100), vocab: int = 256) -> Path:
    write_tokens(path, tokens, ends, vocab)
    return path


def spoilt(path: Path, start: int, content: bytes) -> Path:
    """One of our files with other bytes at some place."""
    whole = bytearray(ours(path).read_bytes())
    whole[start : start + len(content)] = content
    path.write_bytes(whole)
    return path


def fake_header(path: Path, width: int = 2, version: int = 1, tokens: int = 100) -> Path:
    """A header with the right check sum and the wrong content."""
    fields = struct.pack("<8sIIQQQ", b"ultratok", version, width, tokens, 2, 256)
    path.write_bytes((fields + struct.pack("<I", zlib.crc32(fields))).ljust(64, b"\0") + ours(path).read_bytes()[64:])
    return path


def with_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cut(path: Path, count: int) -> Path:
    path.write_bytes(path.read_bytes()[:count])
    return path


def write_set(folder: Path, **changes: str) -> Path:
    """A tokenized folder, its data.json changed."""
    tokenize(json_lines(folder.with_suffix(".jsonl"), ["some text"] * 9), folder)
    text = (folder / "data.json").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "data.json").write_text(text)
    return folder


def trains(data: str | Path, vocab: int = 256, seq: int = 8, **more: Any) -> None:
    check(Training(data=str(data), **more), vocab, seq)


def makes(source: Path | str, **options: Any) -> None:
    tokenize(source, Path(os.environ["REFUSED_OUT"]), **options)


def not_utf8(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([b"fine", b"\xff"]).view(pa.string())}), path)
    return path


def damaged(path: Path) -> Path:
    """A parquet file whose end, which lists its content, is whole, and whose content is not."""
    parquet(path, [str(number) * 50 for number in range(1000)])
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    path.write_bytes(content)
    return path


def unreadable(path: Path) -> Path:
    path.symlink_to(path)  # a loop, which not even root can open
    return path


READ: list[Case] = [
    ("missing path", lambda t: trains(t / "none.bin"), r"none.bin does not exist: name a file or a folder"),
    ("misspelt word", lambda t: trains("stdlob"), r"'stdlob': stdlob does not exist.*train.data is stdlib or synthetic"),
    ("folder without data", lambda t: trains(t), r"holds no data.json .*: make one: ultrascale data tokenize TEXTS -o"),
    ("folder of loose files", lambda t: trains(ours(t / "x.bin").parent), r"name one of its files, such as .*x.bin"),
    ("no .bin", lambda t: trains(with_bytes(t / "a.txt", b"x")), r"a.txt is no token file \(.bin\): make some"),
    ("empty file", lambda t: trains(with_bytes(t / "a.bin", b"")), r"a.bin is empty: name a file that holds tokens"),
    ("odd byte count", lambda t: trains(with_bytes(t / "a.bin", bytes(7))), r"a.bin has 7 bytes, an odd number"),
    (
        "parquet named .bin",
        lambda t: trains(with_bytes(t / "a.bin", b"PAR1" + bytes(8))),
        r"a.bin is a parquet file, not a row",
    ),
    ("gzip named .bin", lambda t: trains(with_bytes(t / "a.bin", b"\x1f\x8b" + bytes(8))), r"a.bin is a gzip file"),
    ("llm.c header", lambda t: trains(with_bytes(t / "a.bin", struct.pack("<IQ", 20240520, 1))), r"token file of llm.c"),
    ("unreadable", lambda t: trains(unreadable(t / "a.bin")), r"a.bin cannot be read \("),
    ("no path at all", lambda t: trains("a\0b"), r"cannot be read \(.*null"),
    ("header cut short", lambda t: trains(cut(ours(t / "a.bin"), 30)), r"ends after 30 of the header's 64 bytes"),
    ("tokens cut short", lambda t: trains(cut(ours(t / "a.bin"), 200)), r"has 200 bytes but its header tells of 280"),
    ("bytes too many", lambda t: trains(with_bytes(t / "a.bin", ours(t / "a.bin").read_bytes() + b"x")), r"281 bytes but its"),
    ("other version", lambda t: trains(fake_header(t / "a.bin", version=2)), r"version 2 but this reads version 1"),
    ("three bytes a token", lambda t: trains(fake_header(t / "a.bin", width=3)), r"says 3 bytes a token but must say 2 or 4"),
    ("more tokens than bytes", lambda t: trains(fake_header(t / "a.bin", tokens=2**60)), r"but its header tells of"),
    ("header bit flipped", lambda t: trains(spoilt(t / "a.bin", 16, b"\x65")), r"a damaged header \(its check sum"),
    ("last document elsewhere", lambda t: trains(ours(t / "a.bin", ends=(40, 99))), r"its last document ends elsewhere"),
    ("no documents", lambda t: trains(ours(t / "a.bin", ends=())), r"its last document ends elsewhere"),
    ("no tokens", lambda t: trains(ours(t / "a.bin", tokens=(), ends=())), r"a.bin holds no tokens"),
    ("documents out of order", lambda t: info(ours(t / "a.bin", ends=(40, 30, 100))), r"number 2 ends before it begins"),
    ("data.json not JSON", lambda t: trains(write_set(t / "s", **{"{": "("})), r"data.json is not JSON"),
    (
        "data.json lacks a field",
        lambda t: trains(write_set(t / "s", **{'"vocab"': '"vocabulary"'})),
        r"data.json.vocab is missing",
    ),
    (
        "data.json of another set",
        lambda t: trains(write_set(t / "s", **{'"tokens": 90': '"tokens": 91'})),
        r"tells of 91 tokens",
    ),
    (
        "set without tokens",
        lambda t: (write_set(t / "s") / "tokens.bin").unlink() or trains(t / "s"),
        r"tokens.bin does not exist",
    ),
    ("index of another kind", lambda t: trains(megatron(t / "m", [[[1, 2]]], magic=b"TNTIDX\0\0\0")), r"no index of Megatron"),
    (
        "index of another version",
        lambda t: trains(megatron(t / "m", [[[1, 2]]], version=2)),
        r"version 2 but this reads version 1",
    ),
    (
        "tokens that are floats",
        lambda t: trains(megatron(t / "m", [[[1, 2]]], code=7)),
        r"tokens are float32 but they must be whole",
    ),
    ("unknown type of tokens", lambda t: trains(megatron(t / "m", [[[1, 2]]], code=9)), r"tokens are type 9 but they must be"),
    (
        "index cut short",
        lambda t: (megatron(t / "m", [[[1, 2]]]), cut(t / "m.idx", 40), trains(t / "m")),
        r"m.idx has 40 bytes but",
    ),
    (
        "index header cut short",
        lambda t: (megatron(t / "m", [[[1]]]), cut(t / "m.idx", 20), trains(t / "m")),
        r"after 20 of the header",
    ),
    (
        "idx and bin disagree",
        lambda t: (megatron(t / "m", [[[1, 2]]]), cut(t / "m.bin", 2), trains(t / "m")),
        r"m.bin has 2 bytes but",
    ),
    ("sequences apart", lambda t: trains(megatron(t / "m", [[[1], [2]]], pointers=[0, 8])), r"do not lie one after the other"),
    ("negative length", lambda t: trains(megatron(t / "m", [[[1], [2]]], lengths=[3, -1])), r"do not lie one after the other"),
    (
        "documents beyond the end",
        lambda t: trains(megatron(t / "m", [[[1], [2]]], marks=[0, 3])),
        r"do not cover its 2 sequences",
    ),
    ("index without tokens", lambda t: trains(megatron(t / "m", [[[]]])), r"m.idx holds no tokens"),
    (
        "index without its .bin",
        lambda t: (megatron(t / "m", [[[1]]]), (t / "m.bin").unlink(), trains(t / "m")),
        r"m.bin does not exist",
    ),
    (
        "vocabulary too small",
        lambda t: trains(ours(t / "a.bin"), vocab=128),
        r"has a vocabulary of 256 but model.vocab is 128: try a",
    ),
    ("flat tokens too large", lambda t: trains(with_bytes(t / "a.bin", b"\xff\xff" * 99)), r"up to a vocabulary of 65,536 but"),
    (
        "too short for seq",
        lambda t: trains(ours(t / "a.bin"), seq=64),
        r"job.seq is 64 but the data .*a.bin\) must hold two .* try 32",
    ),
    ("mixture without a weight", lambda t: trains(f"{t},stdlib:1"), r"has no weight: write each as PATH:WEIGHT"),
    ("mixture of nothing", lambda t: trains("stdlib:1,"), r"'' has no weight"),
    (
        "weight zero",
        lambda t: trains("stdlib:1,synthetic:0"),
        r"'synthetic:0' has no weight: .* above 0, such as synthetic:0.7",
    ),
    ("weight negative", lambda t: trains("stdlib:1,synthetic:-1"), r"'synthetic:-1' has no weight"),
    ("weight not a number", lambda t: trains("stdlib:1,synthetic:nan"), r"'synthetic:nan' has no weight"),
    ("weight infinite", lambda t: trains("stdlib:inf,synthetic:1"), r"'stdlib:inf' has no weight"),
    ("mixture of a missing set", lambda t: trains(f"stdlib:1,{t / 'none'}:2"), r"none does not exist"),
    ("mixture of too many", lambda t: trains(",".join(["stdlib:1"] * 1001)), r"mixes 1,001 texts but at most 1,000"),
    ("evaluation on nothing", lambda t: trains("stdlib", eval_data=str(t / "none")), r"train.eval_data is .* does not exist"),
]

MAKE: list[Case] = [
    ("input missing", lambda t: makes(t / "none"), r"none does not exist"),
    (
        "input of another kind",
        lambda t: makes(with_bytes(t / "a.md", b"x")),
        r"a.md is none of .txt, .jsonl, .jsonl.gz, .parquet",
    ),
    ("folder without texts", lambda t: makes(t), r"holds no file that ends in .txt"),
    ("link that leads nowhere", lambda t: makes((t / "a.txt").symlink_to(t / "b") or t), r"a.txt does not exist"),
    ("only empty files", lambda t: makes(with_bytes(t / "a.txt", b"")), r"a.txt holds no text: name files that are not empty"),
    ("only empty texts", lambda t: makes(json_lines(t / "a.jsonl", ["", ""])), r"a.jsonl holds no text"),
    ("text not UTF-8", lambda t: makes(with_bytes(t / "a.txt", b"ab\xffc")), r"a.txt is not UTF-8 at byte 2"),
    ("broken line", lambda t: makes(with_bytes(t / "a.jsonl", b'{"text": "a"}\n{"text": \n')), r"a.jsonl, line 2 is not JSON"),
    ("line not UTF-8", lambda t: makes(with_bytes(t / "a.jsonl", b'\n{"text": "\xff"}\n')), r"a.jsonl, line 2 is not UTF-8"),
    (
        "line without the field",
        lambda t: makes(json_lines(t / "a.jsonl", ["x"], "body")),
        r"line 1 has no field 'text' \(it has: id, body",
    ),
    (
        "field not text",
        lambda t: makes(with_bytes(t / "a.jsonl", b'{"text": 3}\n')),
        r"line 1 has 3 in its field 'text' but must have text",
    ),
    ("line not a record", lambda t: makes(with_bytes(t / "a.jsonl", b'["a"]\n')), r"line 1 is a list but must be a mapping"),
    ("half a character", lambda t: makes(with_bytes(t / "a.jsonl", b'{"text": "\\ud800"}')), r"line 1 has half a character"),
    ("nested too deeply", lambda t: makes(with_bytes(t / "a.jsonl", b"[" * 100_000)), r"line 1 is no record"),
    (
        "gzip cut short",
        lambda t: (json_lines(t / "a.jsonl.gz", ["x" * 99] * 99), makes(cut(t / "a.jsonl.gz", 60))),
        r"gz cannot be read",
    ),
    (
        "gzip that is none",
        lambda t: makes(with_bytes(t / "a.jsonl.gz", b"plain")),
        r"a.jsonl.gz cannot be read \(not a gzipped",
    ),
    ("parquet that is none", lambda t: makes(with_bytes(t / "a.parquet", b"PAR1 no")), r"a.parquet is no parquet file"),
    (
        "parquet without the column",
        lambda t: makes(parquet(t / "a.parquet", ["x"], "body")),
        r"no column 'text' \(it has: id, body",
    ),
    (
        "column of numbers",
        lambda t: makes(parquet(t / "a.parquet", [1, 2])),
        r"holds int64 in its column 'text' but must hold text",
    ),
    (
        "row without text",
        lambda t: makes(parquet(t / "a.parquet", ["x", None])),
        r"a.parquet, row 2 has null in its field 'text'",
    ),
    ("row not UTF-8", lambda t: makes(not_utf8(t / "a.parquet")), r"a.parquet, row 2 is not UTF-8"),
    ("parquet damaged", lambda t: makes(damaged(t / "a.parquet")), r"a.parquet cannot be read \("),
    ("tokenizer missing", lambda t: makes("stdlib", tokenizer=t / "none.json"), r"--tokenizer: .*none.json does not exist"),
    (
        "tokenizer that is none",
        lambda t: makes("stdlib", tokenizer=with_bytes(t / "t.json", b"{}")),
        r"it is no tokenizer.json \(",
    ),
    ("tokenizer is a folder", lambda t: makes("stdlib", tokenizer=t), r"a folder: name the file in it"),
    (
        "no end of document",
        lambda t: makes("stdlib", tokenizer=tokenizer(t / "t.json", ["<pad>"])),
        r"name it, such as --eod '<pad>'",
    ),
    (
        "unknown end",
        lambda t: makes("stdlib", tokenizer=tokenizer(t / "t.json"), eod="<end>"),
        r"no such token: .*<\|endoftext\|>",
    ),
    ("an end for bytes", lambda t: makes("stdlib", eod="</s>"), r"--eod is '</s>' but bytes end a document with a zero byte"),
    ("no workers", lambda t: makes("stdlib", workers=0), r"--workers is 0 but must be from 1 to 1024"),
    (
        "out holds other files",
        lambda t: tokenize("stdlib", with_bytes(t / "x", b"").parent),
        r"holds other files \(x\): name a new one",
    ),
    ("out is where we are", lambda t: tokenize("stdlib", "."), r"-o is . but that folder holds other files"),
    ("out is a file", lambda t: tokenize("stdlib", with_bytes(t / "x", b"")), r"x, a file: name a folder"),
    (
        "out holds another set",
        lambda t: tokenize("stdlib", write_set(t / "s")),
        r"holds a set made of .*s.jsonl: name a new one",
    ),
    (
        "out below a file",
        lambda t: tokenize("stdlib", with_bytes(t / "x", b"") / "y"),
        r"no folder can be made at .*not a directory",
    ),
]


@pytest.mark.parametrize(
    ("action", "sentence"), [pytest.param(action, sentence, id=name) for name, action, sentence in READ + MAKE]
)
def test_unusable_data_is_refused_without_output(
    action: Callable[[Path], object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = tmp_path / "given", tmp_path / "made" / "out"
    given.mkdir()
    out.parent.mkdir()
    monkeypatch.setenv("REFUSED_OUT", str(out))
    with pytest.raises(SpecError, match=sentence) as caught:
        action(given)
    assert "\n" not in str(caught.value)
    assert not list(out.parent.iterdir())
    assert not list(given.rglob("*.partial"))


def test_a_token_beyond_the_vocabulary_is_reported_with_its_position(tmp_path: Path) -> None:
    """Only samples of a large flat file are checked before a run: the rest is checked when it is read."""
    from ultrascale.data.corpora import TokenFileCorpus
    from ultrascale.data.sets import open_set

    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[777] = 600
    tokens.tofile(tmp_path / "a.bin")
    text = TokenFileCorpus(open_set(tmp_path / "a.bin"), vocab=512)
    text.window(0, 100)
    with pytest.raises(SpecError, match=r"token 777 of .*a.bin is 600 but model.vocab is 512: try model.vocab=601"):
        text.window(7, 100)
