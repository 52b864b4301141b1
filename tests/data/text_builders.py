"""What tests of data make: files of other engines, written by hand, and small texts and tokenizers."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16", modes: bool = False, **changes: Any
) -> Path:
    """Documents of sequences of tokens, as preprocess_data.py leaves them; `changes` spoil one field of the index."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    width = np.dtype(dtype).itemsize
    pointers, place = [], 0
    for length in lengths:
        pointers.append(place * width)
        place += length
    marks = [0]
    for document in documents:
        marks.append(marks[-1] + len(document))
    lengths, pointers, marks = (
        changes.get(name, value) for name, value in (("lengths", lengths), ("pointers", pointers), ("marks", marks))
    )
    index = changes.get("magic", b"MMIDIDX\x00\x00") + struct.pack("<Q", changes.get("version", 1))
    index += struct.pack("<B", changes.get("code", CODES[dtype])) + struct.pack("<QQ", len(lengths), len(marks))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(marks)}q", *marks)
    if modes:
        index += bytes(len(lengths))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    tokens = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    return prefix


def json_lines(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    content = "".join(json.dumps({"id": number, field: text}, ensure_ascii=False) + "\n" for number, text in enumerate(texts))
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def parquet(path: Path, texts: Sequence[Any], field: str = "text", rows: int = 7) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(len(texts))), field: list(texts)}), path, row_group_size=rows)
    return path


def words(count: int, seed: int = 0) -> list[str]:
    """Texts of different lengths: words, lines, signs of several bytes."""
    random = np.random.default_rng(seed)
    known = ["alpha", "beta", "gamma", "délta", "ε", "zeta\n", "naïve", "火", "and", "the", "\n\n", "🜂"]
    return [" ".join(random.choice(known, size=random.integers(1, 60))) for _ in range(count)]


def tokenizer(path: Path, special: Sequence[str] = ("<|endoftext|>",), size: int = 300) -> Path:
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(words(200), trainer)
    trained.enable_truncation(8)  # must not cut documents
    trained.save(str(path))
    return path
