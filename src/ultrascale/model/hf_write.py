"""Writer of Hugging Face folders: config.json, sharded safetensors with their index, and optionally the tokenizer.

A safetensors file is the length of a JSON header, that header, and raw bytes. All sizes are known beforehand, so tensors are
streamed: only one is in memory, however large a shard is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ultrascale.model.hf import HFTensor, stored, whole_shapes
from ultrascale.model.hf_folder import CONFIG, INDEX, SINGLE
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import MAX_TOKENIZER_BYTES, read_text
from ultrascale.specs.folders import free_bytes, new_folder
from ultrascale.specs.hf_config import config_of
from ultrascale.specs.model import Model
from ultrascale.specs.units import GIB

Progress = Callable[[int, int], None]
"""called with bytes written and total bytes"""

Shapes = Mapping[str, tuple[int, ...]]
SHARD_BYTES = 5 * GIB
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_KINDS = {"bf16": (torch.bfloat16, "BF16"), "fp32": (torch.float32, "F32")}


def write(
    out: Path,
    model: Model,
    tensor: Callable[[str], Tensor],
    dtype: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the whole folder or nothing; `tensor` returns one whole parameter by our name."""
    config = config_of(model, dtype)
    copies = _tokenizer_files(tokenizer)
    out_dtype, dtype_name = _KINDS[dtype]
    shapes = whole_shapes(model)
    sizes = {one: math.prod(one.shape(shapes)) * out_dtype.itemsize for one in stored(model)}
    total = sum(sizes.values())
    if (free := free_bytes(out)) < total:
        raise SpecError(f"{out} needs {total / GIB:,.2f} GiB but its disk has {free / GIB:,.2f} GiB free: name another disk")
    with new_folder(out) as folder:
        done = 0
        tensor = _cache_last(tensor)
        shards = _shards(sizes, shard_bytes)
        names = _names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            with open(folder / name, "wb") as file:
                file.write(_header(shard, sizes, shapes, dtype_name))
                for one in shard:
                    _write_tensor(file, one, tensor, out_dtype, shapes)
                    done += sizes[one]
                    if progress is not None:
                        progress(done, total)
        if len(shards) > 1:
            _write_index(folder, names, shards, total)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, source in copies.items():
            shutil.copyfile(source, folder / name)


def _cache_last(tensor: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Caches the last parameter: experts are written one by one but stacked in one parameter."""
    cached: dict[str, Tensor] = {}

    def last(name: str) -> Tensor:
        if name not in cached:
            cached.clear()
            cached[name] = tensor(name)
        return cached[name]

    return last


def _shards(sizes: Mapping[HFTensor, int], limit: int) -> list[list[HFTensor]]:
    """Groups tensors in the model's order; a tensor larger than `limit` bytes has its own shard."""
    shards: list[list[HFTensor]] = []
    room = -1
    for one, size in sizes.items():
        if size > room:
            shards.append([])
            room = limit
        shards[-1].append(one)
        room -= size
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    stem = SINGLE.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _header(shard: Sequence[HFTensor], sizes: Mapping[HFTensor, int], shapes: Shapes, dtype_name: str) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for one in shard:
        end = begin + sizes[one]
        fields[one.name] = {"dtype": dtype_name, "shape": one.shape(shapes), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write_tensor(
    file: BinaryIO, one: HFTensor, tensor: Callable[[str], Tensor], out_dtype: torch.dtype, shapes: Shapes
) -> None:
    parts = []
    for ours in one.ours:
        part = tensor(ours).detach().to(device="cpu", dtype=out_dtype)
        if tuple(part.shape) != shapes[ours]:
            raise SpecError(f"weights of '{ours}' are {list(part.shape)} but the model asks for {list(shapes[ours])}")
        parts.append(part)
    whole = one.joined(parts).contiguous()
    file.write(whole.flatten().view(torch.uint8).numpy().data)


def _write_index(folder: Path, names: Sequence[str], shards: Sequence[Sequence[HFTensor]], total: int) -> None:
    weight_map = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tokenizer_files(tokenizer: Path | None) -> dict[str, Path]:
    """Names in the new folder -> source files: a tokenizer.json, or all tokenizer files of a folder."""
    if tokenizer is None:
        return {}
    if tokenizer.is_dir():
        found = {name: tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()}
        if not {TOKENIZER, "tokenizer.model", "vocab.json"} & found.keys():
            raise SpecError(f"tokenizer folder {tokenizer} has no {TOKENIZER}: give a folder with one, or the file itself")
        return found
    if not tokenizer.is_file():
        raise SpecError(f"tokenizer {tokenizer} does not exist: give a {TOKENIZER}, or a folder with one")
    _refuse_no_tokenizer(tokenizer)
    return {TOKENIZER: tokenizer}


def _refuse_no_tokenizer(file: Path) -> None:
    try:
        data = json.loads(read_text(file, MAX_TOKENIZER_BYTES))
    except (ValueError, OSError, RecursionError):
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise SpecError(f"tokenizer {file} is no {TOKENIZER}: give one that the tokenizers library wrote")
