"""Token files: ours byte by byte, Megatron's by a writer of our own, flat ones; and the facts of a dataset."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from text_builders import megatron

from builders import write_tokens
from ultrascale.data.sets import info, open_set

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10], [11], [12]]]


def test_our_file_matches_its_description(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_tokens(path, [1, 2, 300], [1, 3], vocab=512)
    fields = struct.pack("<8sIIQQQ", b"ultratok", 1, 2, 3, 2, 512)
    header = fields + struct.pack("<I", zlib.crc32(fields)) + bytes(20)
    tokens = struct.pack("<3H", 1, 2, 300) + bytes(2)
    assert path.read_bytes() == header + tokens + struct.pack("<2Q", 1, 3)
    found = open_set(path)
    assert (found.kind, found.vocab, found.tokens.tolist(), found.ends.tolist()) == ("ultrascale", 512, [1, 2, 300], [1, 3])
    assert not found.tokens.flags.writeable


@pytest.mark.parametrize(("vocab", "width"), [(65_536, 2), (65_537, 4)])
def test_token_width_is_the_least_for_the_vocabulary(tmp_path: Path, vocab: int, width: int) -> None:
    write_tokens(tmp_path / "a.bin", [0, vocab - 1], [2], vocab)
    found = open_set(tmp_path / "a.bin")
    assert found.tokens.itemsize == width
    assert found.tokens.tolist() == [0, vocab - 1]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("modes", [False, True])
def test_megatron_files_of_every_type(tmp_path: Path, dtype: str, modes: bool) -> None:
    prefix = megatron(tmp_path / "web_text_document", DOCUMENTS, dtype, modes)
    for name in (prefix, tmp_path / "web_text_document.bin"):
        found = open_set(name)
        assert (found.kind, found.vocab) == ("megatron", None)
        assert found.tokens.tolist() == list(range(1, 13))
        assert found.ends.tolist() == [4, 6, 12]


def test_megatron_prefixes_may_have_dots_and_documents_may_be_empty(tmp_path: Path) -> None:
    found = open_set(megatron(tmp_path / "web.v2", [[], [[1], []], [[]], [[2, 3]]]))
    assert (found.tokens.tolist(), found.ends.tolist()) == ([1, 2, 3], [1, 3])


def test_a_flat_file_is_one_document_of_two_byte_tokens(tmp_path: Path) -> None:
    np.array([50256, 1, 2], dtype=np.uint16).tofile(tmp_path / "train.bin")
    found = open_set(tmp_path / "train.bin")
    assert (found.kind, found.tokens.tolist(), found.ends.tolist()) == ("flat", [50256, 1, 2], [3])


def test_dataset_facts(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", range(10), [2, 9, 10], vocab=256)
    found = info(tmp_path / "a.bin")
    assert (found.tokens, found.documents, found.dtype, found.vocab) == (10, 3, "uint16", 256)
    assert (found.longest_document, found.mean_document, found.largest_seen) == (7, 10 / 3, 9)
