"""Names of modules and parameters in several programs, matched: our own, Hugging Face's, torchtitan's and Megatron's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ultrascale.model.hf import LLAMA_NAMES
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_mapping
from ultrascale.specs.validate import shown

# By engine: the prefix of a layer, and its modules by our names. Only what means the same: torchtitan has the rows of queries
# and keys in another order than the rest, Megatron has queries, keys and values in one matrix, and gate and up in another.
_LAYER_NAMES: dict[str, dict[str, str]] = {
    "model.layers": {"attention": "self_attn", "mlp": "mlp", **LLAMA_NAMES},
    "layers": {
        "attention_norm": "attention_norm",
        "attention": "attention",
        "attention.q_norm": "attention.q_norm",
        "attention.k_norm": "attention.k_norm",
        "attention.core": "attention.inner_attention",
        "attention.out": "attention.wo",
        "mlp_norm": "ffn_norm",
        "mlp": "feed_forward",
        "mlp.inputs.gate": "feed_forward.w1",
        "mlp.inputs.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
        "embed.tokens": "tok_embeddings",
        "head.norm": "norm",
        "head.linear": "lm_head",
    },
    "decoder.layers": {
        "attention_norm": "input_layernorm",
        "attention": "self_attention",
        "attention.core": "self_attention.core_attention",
        "attention.out": "self_attention.linear_proj",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp": "mlp",
        "mlp.down": "mlp.linear_fc2",
        "mlp.router": "mlp.router",
        "embed.tokens": "embedding.word_embeddings",
        "head.norm": "decoder.final_layernorm",
        "head.linear": "output_layer",
    },
}


def _known() -> dict[str, str]:
    """Names of all engines, `{}` in the place of the layer, to ours."""
    found = {
        "layers.{}.attention.qkv_linear.wv": "blocks.{}.attention.qkv.v",
        "layers.{}.attention.wv": "blocks.{}.attention.qkv.v",
        "output": "head.linear",
        "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight": "blocks.{}.attention_norm.weight",
        "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight": "blocks.{}.mlp_norm.weight",
    }
    for prefix, modules in _LAYER_NAMES.items():
        found[f"{prefix}.{{}}"] = "blocks.{}"
        for ours, theirs in modules.items():
            outside = ours.startswith(("embed.", "head."))
            found[theirs if outside else f"{prefix}.{{}}.{theirs}"] = ours if outside else f"blocks.{{}}.{ours}"
    return found


_KNOWN = _known()
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def our_name(name: str) -> str:
    """A module's or parameter's name in our engine; the name itself, if no known engine has it."""
    numbers = _NUMBER.findall(name)
    pattern = _NUMBER.sub("{}", name, count=1)
    module, _, kind = pattern.rpartition(".")
    found = _KNOWN.get(pattern)
    if found is None and kind in ("weight", "bias") and module in _KNOWN:
        found = f"{_KNOWN[module]}.{kind}"
    return name if found is None else found.replace("{}", numbers[0] if numbers else "")


@dataclass(frozen=True)
class NameMap:
    """Patterns from one program's names to the other's: `*` is any text, `{}` a number."""

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def of(cls, names: Mapping[str, str]) -> NameMap:
        found = []
        for theirs, ours in names.items():
            if len(re.findall(r"\*|\{\}", theirs)) < len(re.findall(r"\*|\{\}", ours)):
                raise SpecError(f"map {shown(theirs)}: {shown(ours)} has more * and {{}} on the right: try 'model.*': '*'")
            pattern = re.escape(theirs).replace(r"\*", "(.*)").replace(r"\{\}", r"(\d+)")
            found.append((re.compile(pattern), re.sub(r"\*|\{\}", "\0", ours)))
        return cls(tuple(found))

    @classmethod
    def load(cls, file: Path) -> NameMap:
        data = read_mapping(file, "map")
        for name, value in data.items():
            if not isinstance(value, str):
                raise SpecError(f"map.{name} is {shown(value)} but must be a name, such as 'layers.{{}}.attention.wo'")
        return cls.of(data)

    def __call__(self, name: str) -> str:
        for pattern, target in self.patterns:
            if match := pattern.fullmatch(name):
                found = target
                for group in match.groups():
                    found = found.replace("\0", group, 1)
                return found
        return name


@dataclass(frozen=True)
class Matches:
    """Keys of one dump by keys of another, in the order of the second; and the rest of both."""

    pairs: dict[str, str]
    """second's key to first's"""
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def match(first: Iterable[str], second: Iterable[str], names: NameMap) -> Matches:
    """Match keys `SECTION/NAME`: by the map, by equal names, by names in our engine."""
    given, wanted = list(first), list(second)
    mapped = {key: _renamed(key, names) for key in given}
    own = {name: key for key, name in mapped.items()}
    ours = {_renamed(name, our_name): key for key, name in mapped.items()}
    pairs: dict[str, str] = {}
    for key in wanted:
        found = own.get(key) or ours.get(_renamed(key, our_name))
        if found is not None:
            pairs[key] = found
    used = set(pairs.values())
    return Matches(pairs, tuple(key for key in given if key not in used), tuple(key for key in wanted if key not in pairs))


def _renamed(key: str, rename: Callable[[str], str]) -> str:
    section, slash, name = key.partition("/")
    return f"{section}{slash}{rename(name)}" if slash else key
