"""Reader and writer of Hugging Face folders: config.json, safetensors and, when written, the tokenizer.

Opening reads only headers. A folder that opens has every tensor of its model in the right shape, and is read tensor by tensor;
a folder with which the engine would compute something else than `transformers` is refused. A written folder has sharded
safetensors with their index. Such a file is the length of a JSON header, that header, and raw bytes. All sizes are known
beforehand, so tensors are streamed: only one is in memory, however large a shard is.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ultrascale.model.hf import HFTensor, first_of_prediction, stored, whole, whole_shapes
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import MAX_TOKENIZER_BYTES, read_mapping, read_text
from ultrascale.specs.folders import free_bytes, new_folder
from ultrascale.specs.hf_config import config_of
from ultrascale.specs.model import Model
from ultrascale.specs.units import GIB, groups_up_to
from ultrascale.specs.validate import shown

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that older releases stored beside the parameters: masks and wavelengths, which every release computes itself.
_BUFFERS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_ROWS = 4096  # rows compared at a time


@dataclass(frozen=True)
class _Entry:
    """A tensor in a safetensors file, from its header."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HFFolder:
    path: Path
    model: Model
    shapes: Mapping[str, tuple[int, ...]]
    """of all whole parameters by our name, without a tied head"""
    places: Mapping[str, Sequence[tuple[HFTensor, _Entry]]]
    """the tensors in which each of our parameters is stored: one, or one per expert"""

    @classmethod
    def open(cls, path: str | Path, name: str | None = None) -> HFFolder:
        """Validates and opens a folder; raises SpecError for anything wrong with it. `name`: of the model, not the folder's."""
        path = Path(path)
        if not os.path.isdir(path):  # os.path returns False where pathlib raises, such as for a name that is too long
            state = "is a file" if os.path.exists(path) else "does not exist"
            raise SpecError(f"Hugging Face folder {path} {state}: give a folder with {CONFIG} and {SINGLE}")
        model = _model(path, name)
        found = _entries(path)
        if model.mtp_depth and not any(tensor.startswith(first_of_prediction(model)) for tensor in found):
            model = model.model_copy(update={"mtp_depth": 0})  # transformers drops the layers, but not their number
        wanted = _wanted(path, model, found)
        _refuse_extra(path, model, wanted, found)
        shapes = whole_shapes(model)
        for name, one in wanted.items():
            _refuse_misshapen(found[name], one.shape(shapes))
        places: dict[str, list[tuple[HFTensor, _Entry]]] = {}
        _refuse_other_copies(path, wanted, found)
        for name, one in wanted.items():
            for ours in () if one.copy else one.ours:
                places.setdefault(ours, []).append((one, found[name]))
        return cls(path, model, shapes, places)

    def tensor(self, ours: str) -> Tensor:
        """One whole parameter in the file's dtype; the file is memory-mapped until the tensor is freed."""
        return whole([one.part(ours, _read(entry), self.shapes) for one, entry in self.places[ours]])


def _model(path: Path, name: str | None) -> Model:
    file = path / CONFIG
    if not file.is_file():
        raise SpecError(f"Hugging Face folder {path} has no {CONFIG}: give a folder that save_pretrained wrote")
    config = read_mapping(file, "config")
    if config.get("quantization_config") is not None:
        raise SpecError(
            f"config.quantization_config is {shown(config['quantization_config'])} in {file} but the engine only computes "
            "without it: give the folder of a model without it"
        )
    return Model.from_hf(config, name or path.resolve().name or None)


def _entries(path: Path) -> dict[str, _Entry]:
    """Every tensor of the folder by its name there, from one file or from those in the index."""
    if (path / SINGLE).is_file():
        return _header(path / SINGLE)
    if not (path / INDEX).is_file():
        if pickles := sorted(file.name for file in path.glob("*.bin")):
            raise SpecError(
                f"Hugging Face folder {path} has {pickles[0]} but no {SINGLE}: pickles are not read, since they run code; "
                "save it anew with save_pretrained(…, safe_serialization=True)"
            )
        raise SpecError(f"Hugging Face folder {path} has neither {SINGLE} nor {INDEX}: give a folder with the weights")
    index = _weight_map(path / INDEX)
    headers = {name: _header(_beside(path, name)) for name in sorted(set(index.values()))}
    for tensor, name in index.items():
        if tensor not in headers[name]:
            raise SpecError(f"{INDEX} of {path} says that {name} holds '{tensor:.80}' but it does not: download both anew")
    for name, header in headers.items():
        for tensor in header:
            if index.get(tensor) != name:
                raise SpecError(f"{name} of {path} holds '{tensor:.80}' but {INDEX} does not say so: download both anew")
    return {tensor: headers[name][tensor] for tensor, name in index.items()}


def _weight_map(file: Path) -> dict[str, str]:
    found = read_mapping(file, "index").get("weight_map")
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found.values()):
        raise SpecError(f"index file {file} has no weight_map of tensors to files: download it anew")
    return dict(found)


def _beside(path: Path, name: str) -> Path:
    """The path of a file in the folder itself: the index is untrusted and must not name any other."""
    if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
        raise SpecError(f"{INDEX} of {path} names {shown(name)} but may only name .safetensors files of its own folder")
    if not (path / name).is_file():
        raise SpecError(f"{INDEX} of {path} names {name} but there is no such file: download it")
    return path / name


def _header(file: Path) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (no dict)
            found = {name: _Entry(file, name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise SpecError(f"{file} cannot be read as safetensors ({_first_line(error)}): download it anew") from None
    for name, entry in found.items():
        if entry.dtype not in FLOATS and not _BUFFERS.fullmatch(name):
            raise SpecError(f"tensor '{name:.80}' of {file} is {entry.dtype} but weights must be one of {', '.join(FLOATS)}")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _wanted(path: Path, model: Model, found: Mapping[str, _Entry]) -> dict[str, HFTensor]:
    """The tensors of the model by their names in the folder; raises if one is missing."""
    # GPT-2 on the hub was saved from the model without its head: names lack the first word.
    first = "transformer."
    bare = not any(name.startswith(first) for name in found)
    wanted: dict[str, HFTensor] = {}
    for one in stored(model):
        name = one.name.removeprefix(first) if bare else one.name
        if name not in found:
            if one.copy:
                continue
            raise SpecError(
                f"Hugging Face folder {path} has no tensor '{name}' but its {CONFIG}, with {model.layers} layers, needs it: "
                "give the weights of that config"
            )
        wanted[name] = one
    return wanted


def _refuse_extra(path: Path, model: Model, wanted: Mapping[str, HFTensor], found: Mapping[str, _Entry]) -> None:
    extra = [name for name in found if name not in wanted and not _BUFFERS.fullmatch(name)]
    if model.tied_embeddings and "lm_head.weight" in extra:
        tokens = next(name for name, one in wanted.items() if one.ours == ("embed.tokens.weight",))
        if not _equal(found["lm_head.weight"], found[tokens]):
            raise SpecError(
                f"config.tie_word_embeddings is true in {path / CONFIG} but lm_head.weight differs from {tokens}: try false"
            )
        extra.remove("lm_head.weight")
    if extra:
        more = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
        raise SpecError(
            f"Hugging Face folder {path} has the tensor '{extra[0]:.80}'{more}, for which the model of its {CONFIG} "
            "has no place: give the config of these weights"
        )


def _refuse_other_copies(path: Path, wanted: Mapping[str, HFTensor], found: Mapping[str, _Entry]) -> None:
    """Layers of multi-token prediction share embedding and head with the model."""
    originals = {one.ours: name for name, one in wanted.items() if not one.copy}
    for name, one in wanted.items():
        if one.copy and not _equal(found[name], found[originals[one.ours]]):
            raise SpecError(
                f"tensor '{name}' of {path} differs from {originals[one.ours]} but the model has one for both: try "
                f"num_nextn_predict_layers: 0 in {CONFIG}, and the folder without that layer"
            )


def _refuse_misshapen(entry: _Entry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise SpecError(
            f"tensor '{entry.name}' of {entry.file} is {list(entry.shape)} but {CONFIG} asks for {list(shape)}: "
            "give the config of these weights"
        )


def _equal(one: _Entry, other: _Entry) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pieces = [slice(first, first + _ROWS) for first in range(0, one.shape[0], _ROWS)]
    return all(torch.equal(_read(one, piece), _read(other, piece)) for piece in pieces)


def _read(entry: _Entry, rows: slice = slice(None)) -> Tensor:
    from safetensors import safe_open

    with safe_open(entry.file, framework="pt") as opened:
        tensor: Tensor = opened.get_slice(entry.name)[rows]
    return tensor


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
        shards = groups_up_to(shard_bytes, sizes, sizes.__getitem__)  # in the model's order
        names = _names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            with open(folder / name, "wb") as file:
                file.write(_packed_header(shard, sizes, shapes, dtype_name))
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


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    stem = SINGLE.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _packed_header(shard: Sequence[HFTensor], sizes: Mapping[HFTensor, int], shapes: Shapes, dtype_name: str) -> bytes:
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
