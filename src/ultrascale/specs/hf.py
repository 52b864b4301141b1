"""Hugging Face config.json -> fields of a Model and back: keys and groups of keys, each read and written in one place.

Only what changes the shape, the count of parameters or what a layer computes is read. A config that asks for something a Model
cannot say is refused: a wrong count would be a silent guess. The families are in hf_families.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ultrascale.specs.blocks import ROPE_FIELDS
from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

if TYPE_CHECKING:
    from ultrascale.specs.model import Model

Config = Mapping[str, Any]
Fields = dict[str, Any]
"""fields of a Model by dotted name, `moe.top_k`"""

REQUIRED: Any = object()
"""the default of a key that every config must have"""
OMITTED: Any = object()
"""the default of a key without which Model derives its field as transformers does"""

# In transformers "gelu" is the exact one; the others are names of the tanh approximation.
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ACTIVATIONS: dict[str, dict[str, str]] = {
    "gated": {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu_exact", **dict.fromkeys(reversed(_TANH), "geglu")},
    "plain": {"gelu": "gelu_exact", **dict.fromkeys(_TANH, "gelu"), "relu": "relu", "relu2": "relu2"},
}
"""a config's words for activations of MLPs with and without a gate; the first of several is written"""

Kind = Literal["count", "count or zero", "number", "number or zero", "flag", "text", "gated", "plain"]


class ConfigReading(dict[str, Any]):
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys that no part read and that might change what the model computes."""
        unread = [key for key, value in self.items() if key not in self.keys_read and value]
        return tuple(
            sorted(key for key in unread if key not in _KEYS_WITHOUT_EFFECT and not key.startswith(_PREFIXES_WITHOUT_EFFECT))
        )


# Keys of transformers' classes that a family reads in other branches, or that say nothing of what a layer computes.
_KEYS_WITHOUT_EFFECT = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "model_type", "return_dict"),
    *("tokenizer_class", "torch_dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *(
        "attn_implementation",
        "_attn_implementation_autoset",
        "classifier_dropout",
        "initializer_range",
        "num_logits_to_keep",
        "pretraining_tp",
    ),
    *("router_aux_loss_coef", "use_mamba_kernels", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "rescale_prenorm_residual"),
    *("moe_shared_expert_overlap", "chunk_size", "time_step_floor", "time_step_limit", "time_step_max", "expand"),
    *("head_dim", "intermediate_size", "qk_head_dim", "max_window_layers", "no_rope_layer_interval"),
    *("original_max_position_embeddings", "sliding_window_pattern", "_sliding_window_pattern"),
    *("mtp_layers_block_type", "mtp_use_dedicated_embeddings"),
}
_PREFIXES_WITHOUT_EFFECT = ("output_", "summary_", "vision_", "image_")


class ConfigPart(Protocol):
    """What one or several keys of a config say."""

    def read(self, config: Config) -> Fields: ...

    def write(self, model: Model) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Key:
    """One key and the fields that have its value."""

    key: str
    fields: str | tuple[str, ...]
    kind: Kind = "count"
    default: Any = REQUIRED
    """of the family's class, where the key is missing or null"""
    aliases: tuple[str, ...] = ()
    """other names of the key, which other releases write"""
    inverse: bool = False
    """the field is 1 / value"""
    nullable: bool = True
    """transformers takes null for it"""

    def read(self, config: Config) -> Fields:
        key = next((name for name in (self.key, *self.aliases) if name in config), self.key)
        if config.get(key) is None and self.default is not REQUIRED:
            value = self.default
        else:
            value = checked(config, key, self.kind, self.default)
        if self.inverse:
            value = 1 / value
        return {} if value is OMITTED else dict.fromkeys(self._fields, value)

    def write(self, model: Model) -> dict[str, Any]:
        value = _value(model, self._fields[0])
        if value is None and not self.nullable:
            return {}
        if self.kind in ACTIVATIONS:
            words = ACTIVATIONS[self.kind]
            value = next((word for word, ours in words.items() if ours == value), value)
        return {self.key: 1 / value if self.inverse and value is not None else value}

    @property
    def _fields(self) -> tuple[str, ...]:
        return (self.fields,) if isinstance(self.fields, str) else self.fields


@dataclass(frozen=True)
class Only:
    """A key that may have one value alone: with another, the model would compute something else."""

    key: str
    allowed: Any

    def read(self, config: Config) -> Fields:
        if config.get(self.key, self.allowed) != self.allowed:
            raise SpecError(
                f"config.{self.key} is {shown(config[self.key])} but only {shown(self.allowed)} can be planned, which is "
                f"another model: give one with {self.key}: {shown(self.allowed)}"
            )
        return {}

    def write(self, model: Model) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Rope:
    """Rotary wavelengths: newer releases write in rope_parameters what rope_theta and rope_scaling held."""

    theta: float = 10_000.0
    partial: float | None = None
    """share of a head's dimensions that is rotated, unless the config says another; None: the family rotates all"""
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"
    head_dim: int | None = None
    """of the family's class, where the config has none"""
    local_theta: float | None = None
    """of layers with a window, whose wavelengths are never scaled (Gemma 3, OLMo 3); None: layers are alike"""
    default: Config = field(default_factory=dict)
    """rope_parameters of the family's class, where the config has none"""

    def read(self, config: Config) -> Fields:
        where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # transformers reads the former first
        rope = config.get(where) or self.default
        if not isinstance(rope, Mapping):
            raise SpecError(f"config.{where} is {shown(rope)} but must be a mapping, as transformers writes it")
        local: Config = {}
        if any(isinstance(value, Mapping) for value in rope.values()):
            kinds = {"full_attention", "sliding_attention"}
            if self.local_theta is None or not kinds >= rope.keys():
                raise SpecError(
                    f"config.{where} has a mapping for each kind of layer, but only models whose layers are alike can be "
                    "planned, which are other models: give one of these"
                )
            rope, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
        theta = checked({"rope_theta": config.get(self.theta_key), **rope}, "rope_theta", "number", self.theta)
        fields: Fields = {"rope_theta": theta, **self._scaling(config, rope, where), **self._rotary_dim(config, rope)}
        if self.local_theta is not None:
            base = local.get("rope_theta") or config.get("rope_local_base_freq") or self.local_theta
            if local.get("rope_type", "default") != "default":
                raise SpecError(
                    f"config.{where}.sliding_attention.rope_type is {shown(local['rope_type'])} but layers with a window can "
                    "only have unscaled positions, which is another model: give one with rope_type: default"
                )
            fields |= {"local_rope_theta": base} if base != theta or "rope_scaling" in fields else {}
        return fields

    def _scaling(self, config: Config, rope: Config, where: str) -> Fields:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return {}
        if not isinstance(kind, str) or kind not in _SCALINGS:
            known = ", ".join(["'default'", *(f"'{name}'" for name in _SCALINGS)])
            raise SpecError(
                f"config.{where}.rope_type is {shown(kind)} but only {known} can be computed, and each computes something "
                "else: give a model with one of these"
            )
        return {"rope_scaling": {"rope_type": kind, **_SCALINGS[kind](config, rope)}}

    def _rotary_dim(self, config: Config, rope: Config) -> Fields:
        key = "partial_rotary_factor"
        share = checked({key: config.get(self.partial_key), **rope}, key, "number", self.partial or 1.0)
        if self.partial is None:
            Only(key, 1.0).read({key: share})
        if share == 1:
            return {}
        heads = checked(config, "num_attention_heads", "count")
        head_dim = checked(config, "head_dim", "count", self.head_dim or checked(config, "hidden_size", "count") // heads)
        return {"rotary_dim": int(head_dim * share)}

    def write(self, model: Model) -> dict[str, Any]:
        scaling, share = _scaling_of(model), model.rotated_dim / model.head_dim
        scaling = scaling or ({"rope_type": "default"} if self.default else None)
        partial = {} if self.partial is None else {self.partial_key: share}
        if self.local_theta is None:
            return {self.theta_key: model.rope_theta, "rope_scaling": scaling, **partial}
        theta = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
        full = {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})}
        return {
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_theta": theta, "rope_type": "default"},
            }
        }


@dataclass(frozen=True)
class LayerTypes:
    """Which layers have the sliding window: `layer_types`, or what the family's class derives where that is missing."""

    derived: Callable[[Config, int], list[bool]]
    """of a config and its number of layers: whether each has the window"""
    window: int | None = None
    """of the family's class; 0: null is none"""
    rotates_local_only: bool = False
    """layers with full attention have no positions (Cohere 2)"""
    rotates_without_window: bool = False
    """where there is no window, they have (EXAONE 4)"""
    switch: str = ""
    """a key that switches the window on"""
    word: str = "sliding_attention"
    key: str = "sliding_window"
    """its length"""
    chunked: bool = False
    """the window is a chunk of the sequence (Llama 4)"""

    def read(self, config: Config) -> Fields:
        layers = checked(config, "num_hidden_layers", "count")
        given = config.get("layer_types")
        if given is None:
            local = self.derived(config, layers)
        elif isinstance(given, list) and len(given) >= layers and set(given) <= {"full_attention", self.word}:
            local = [word == self.word for word in given[:layers]]
        else:
            raise SpecError(
                f"config.layer_types is {given!r:.80} but must name full_attention or {self.word} for each of {layers} layers"
            )
        window = config.get(self.key, self.window)
        if self.switch and not checked(config, self.switch, "flag", False):
            window = None
        fields: Fields = {}
        if any(local) and window is not None:
            fields["sliding_window"] = checked({self.key: window}, self.key, "count")
            fields |= {"chunked_window": True} if self.chunked else {}
            if not all(local):
                fields["attention_pattern"] = shortest_cycle(["local" if one else "full" for one in local])
        if self.rotates_local_only and not all(local) and not (self.rotates_without_window and window is None):
            fields["rope_pattern"] = shortest_cycle(local)
        return fields

    def write(self, model: Model) -> dict[str, Any]:
        words = ["full_attention" if model.window(layer) is None else self.word for layer in range(model.layers)]
        # Some classes of transformers make the mask of a window that no layer has.
        window = model.sliding_window
        if window is None and not (self.rotates_without_window and model.rotates(0)):
            window = self.window
        found = {"layer_types": words, self.key: window}
        return found | ({self.switch: model.sliding_window is not None} if self.switch else {})


class LinearLayers:
    """Which layers have linear attention, by `layer_types`; where it is missing, all but every fourth."""

    def read(self, config: Config) -> Fields:
        layers = checked(config, "num_hidden_layers", "count")
        interval = checked(config, "full_attention_interval", "count", 4)
        words = {"linear_attention": "linear", "full_attention": "full"}
        usual = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
        given = config.get("layer_types") or usual
        if not isinstance(given, list) or len(given) < layers or not {"linear_attention"} <= set(given) <= set(words):
            raise SpecError(
                f"config.layer_types is {given!r:.80} but must name full_attention or linear_attention for each of {layers} "
                "layers"
            )
        return {"attention_pattern": shortest_cycle([words[word] for word in given[:layers]])}

    def write(self, model: Model) -> dict[str, Any]:
        kinds = ["linear_attention" if kind.mixer == "linear" else "full_attention" for kind in model.each_kind]
        return {"layer_types": kinds}


@dataclass(frozen=True)
class ParallelResidual:
    """A key that says whether attention and MLP read the same input; the family's number of norms for that."""

    key: str
    norms: str
    default: bool

    def read(self, config: Config) -> Fields:
        return {"parallel_residual": self.norms if checked(config, self.key, "flag", self.default) else "none"}

    def write(self, model: Model) -> dict[str, Any]:
        return {self.key: model.parallel_residual == self.norms}


@dataclass(frozen=True)
class Window:
    """A sliding window of all layers; null or missing: none."""

    default: int | None = None

    def read(self, config: Config) -> Fields:
        words = config.get("layer_types")
        if words is not None and (not isinstance(words, list) or len(set(map(str, words))) > 1):
            raise SpecError(
                f"config.layer_types is {words!r:.80} but layers of this family must be alike: give the config of a "
                "model whose layers are"
            )
        if words and words[0] == "full_attention":
            return {}
        value = config.get("sliding_window", self.default)
        return {} if value is None else {"sliding_window": checked({"sliding_window": value}, "sliding_window", "count")}

    def write(self, model: Model) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window}


class RopeLayers:
    """SmolLM 3: layers without positions, every `no_rope_layer_interval`-th or those with a 0 in `no_rope_layers`."""

    def read(self, config: Config) -> Fields:
        given = config.get("no_rope_layers")
        if given is None or given == []:
            interval = checked(config, "no_rope_layer_interval", "count", 4)
            layers = checked(config, "num_hidden_layers", "count")
            given = [(layer + 1) % interval for layer in range(layers)]
        elif not isinstance(given, list):
            raise SpecError(f"config.no_rope_layers is {shown(given)} but must be a list of ones and zeros, one for each layer")
        rotates = [bool(one) for one in given]
        return {} if all(rotates) else {"rope_pattern": shortest_cycle(rotates)}

    def write(self, model: Model) -> dict[str, Any]:
        return {"no_rope_layers": [int(model.rotates(layer)) for layer in range(model.layers)]}


class Temperature:
    """Llama 4's factors of queries, in layers without positions."""

    def read(self, config: Config) -> Fields:
        scale = checked(config, "attn_scale", "number", 0.1)
        tokens = checked(config, "floor_scale", "count", 8192)
        # Published configs have 4 for true.
        used = bool(config.get("attn_temperature_tuning", True)) and "rope_pattern" in RopeLayers().read(config)
        return {"attention_temperature": {"scale": scale, "tokens": tokens}} if used else {}

    def write(self, model: Model) -> dict[str, Any]:
        found = model.attention_temperature
        if found is None:
            return {"attn_temperature_tuning": False}
        return {"attn_temperature_tuning": True, "attn_scale": found.scale, "floor_scale": found.tokens}


class ExpertLayers:
    """Llama 4's experts in every n-th layer, as `moe_layers` may list them; dense layers have a width of their own."""

    def read(self, config: Config) -> Fields:
        layers, step = checked(config, "num_hidden_layers", "count"), checked(config, "interleave_moe_layer_step", "count", 1)
        given = config.get("moe_layers")
        if given is not None:
            step = given[0] + 1 if isinstance(given, list) and given and isinstance(given[0], int) else 0
            if step < 1 or given != list(range(step - 1, layers, step)):
                raise SpecError(
                    f"config.moe_layers is {given!r:.60} but experts must be in every layer or every n-th: try null, and "
                    "interleave_moe_layer_step: 2 for every second"
                )
        ffn = checked(config, "intermediate_size_mlp", "count", 16384)
        dense = step > 1
        return {"moe.interval": step, "ffn": ffn if dense else 0}

    def write(self, model: Model) -> dict[str, Any]:
        step = 1 if model.moe is None else model.moe.interval
        # A class of transformers needs a width even where no layer has it.
        return {
            "interleave_moe_layer_step": step,
            "moe_layers": [layer for layer, kind in enumerate(model.each_kind) if kind.has_experts],
            "intermediate_size_mlp": model.ffn or model.hidden,
        }


class ScoreScale:
    """Gemma's query_pre_attn_scalar: scores are divided by its root. That of a head's width is the usual scale."""

    key = "query_pre_attn_scalar"

    def read(self, config: Config) -> Fields:
        scalar = checked(config, self.key, "number", 256.0)
        head_dim = checked(config, "head_dim", "count", 256)
        return {} if scalar == head_dim else {"attention_scale": scalar**-0.5}

    def write(self, model: Model) -> dict[str, Any]:
        scale = model.attention_scale
        return {self.key: model.head_dim if scale is None else round(scale**-2)}


class ClampedSwiGLU:
    """gpt-oss's gate, whatever hidden_act says."""

    def read(self, config: Config) -> Fields:
        Only("swiglu_alpha", 1.702).read(config)
        return {"activation": "clamped_swiglu", "swiglu_limit": checked(config, "swiglu_limit", "number", 7.0)}

    def write(self, model: Model) -> dict[str, Any]:
        return {"hidden_act": "silu", "swiglu_limit": model.swiglu_limit}


class EmbeddingScale:
    """Gemma's: the root of the hidden size."""

    def read(self, config: Config) -> Fields:
        return {"embedding_scale": math.sqrt(checked(config, "hidden_size", "count"))}

    def write(self, model: Model) -> dict[str, Any]:
        return {}


class SparseLayers:
    """Qwen's experts: every layer, or every n-th, after a run of dense ones at the start; intermediate_size is read by
    dense layers alone.
    """

    def read(self, config: Config) -> Fields:
        step = checked(config, "decoder_sparse_step", "count", 1)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            given = f"{dense!r:.60}" if isinstance(dense, list) else shown(dense)
            raise SpecError(f"config.mlp_only_layers is {given} but dense layers must come first: try [0, 1] or []")
        ffn = checked(config, "intermediate_size", "count") if dense or step > 1 else 0
        return {"moe.dense_layers": len(dense), "moe.interval": step, "ffn": ffn}

    def write(self, model: Model) -> dict[str, Any]:
        dense, step = (0, 1) if model.moe is None else (model.moe.dense_layers, model.moe.interval)
        return {
            "decoder_sparse_step": step,
            "mlp_only_layers": list(range(dense)),
            "intermediate_size": model.ffn,
        }


@dataclass(frozen=True)
class DenseWidth:
    """DeepSeek's intermediate_size: read by leading dense layers alone."""

    dense_default: int

    def read(self, config: Config) -> Fields:
        dense = checked(config, "first_k_dense_replace", "count or zero", self.dense_default)
        dense = min(dense, checked(config, "num_hidden_layers", "count"))
        ffn = checked(config, "intermediate_size", "count")
        return {"moe.dense_layers": dense, "ffn": ffn if dense else 0}

    def write(self, model: Model) -> dict[str, Any]:
        moe = model.moe
        # A class of transformers needs a width even where no layer has it.
        return {"first_k_dense_replace": moe.dense_layers if moe else 0, "intermediate_size": model.ffn or model.hidden}


@dataclass(frozen=True)
class DeepSeekRouting:
    """How DeepSeek's models choose experts: V3 by sigmoid scores with a correction bias within groups, V2 by softmax."""

    v3: bool

    def read(self, config: Config) -> Fields:
        Only("moe_layer_freq", 1).read(config)
        v3 = self.v3
        Only("scoring_func", "sigmoid" if v3 else "softmax").read(config)
        method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
        known = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
        if method not in known:
            raise SpecError(
                f"config.topk_method is {shown(method)} but only {' or '.join(known)} can be planned, which are other "
                "models: give one with these"
            )
        fields: Fields = {
            "moe.renormalize": checked(config, "norm_topk_prob", "flag", v3),
            "moe.scaling": checked(config, "routed_scaling_factor", "number", 2.5 if v3 else 1.0),
        }
        if v3:
            fields |= {"moe.router": "sigmoid", "moe.router_bias": True}
        if method != "greedy":
            fields["moe.groups"] = checked(config, "n_group", "count", 8 if v3 else REQUIRED)
            fields["moe.top_groups"] = checked(config, "topk_group", "count", 4 if v3 else REQUIRED)
        return fields

    def write(self, model: Model) -> dict[str, Any]:
        moe = model.moe
        if moe is None:
            return {}
        return {
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid" if self.v3 else "softmax",
            "topk_method": "noaux_tc" if self.v3 else "group_limited_greedy" if moe.groups > 1 else "greedy",
            "norm_topk_prob": moe.renormalize,
            "routed_scaling_factor": moe.scaling,
            "n_group": moe.groups,
            "topk_group": moe.top_groups,
        }


@dataclass(frozen=True)
class HFFamily:
    """A model_type of transformers."""

    architecture: str
    """its class for training"""
    layer: str
    """the class of one of its layers"""
    parts: tuple[ConfigPart, ...]
    fixed: Fields = field(default_factory=dict)
    """what its classes hard-code"""

    def read(self, config: Config) -> Fields:
        """The fields of the Model, those of its parts as mappings."""
        found: Fields = dict(self.fixed)
        for part in self.parts:
            found |= part.read(config)
        nested: Fields = {}
        for name, value in found.items():
            outer, _, inner = name.partition(".")
            if inner:
                nested.setdefault(outer, {})[inner] = value
            else:
                nested[outer] = value
        return nested

    def write(self, model: Model) -> dict[str, Any]:
        """What its config.json would say of the model; whether it says all is for the caller to check, by reading it."""
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= part.write(model)
        return found


def mark_known(config: Config, parts: Iterable[ConfigPart]) -> None:
    """Marks keys as known that this config has no use for: those of a kind of layer that its model does not have."""
    for part in parts:
        if isinstance(part, Key | Only):
            config.get(part.key)


def shortest_cycle(values: Iterable[Any]) -> tuple[Any, ...]:
    """The shortest list that, repeated, begins with `values`."""
    whole = tuple(values)
    for length in range(1, len(whole)):
        if all(one == whole[index % length] for index, one in enumerate(whole)):
            return whole[:length]
    return whole


def checked(config: Config, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
    """The value of a key, of the right kind, or SpecError; null is missing."""
    value = default if config.get(key) is None else config[key]
    if value is REQUIRED:
        raise SpecError(f"config.{key} is missing: a config of model_type {config.get('model_type')} must give it")
    if kind in ACTIVATIONS:
        return _activation(key, value, ACTIVATIONS[kind])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "flag" and not isinstance(value, bool):
        raise SpecError(f"config.{key} is {shown(value)} but must be true or false: try {str(default is True).lower()}")
    if kind in ("number", "number or zero"):
        if not is_number or not (value > 0 or (value == 0 and kind == "number or zero")):
            hint = f": try {default:g}" if isinstance(default, int | float) else ""
            least = "greater than 0" if kind == "number" else "of at least 0"
            raise SpecError(f"config.{key} is {shown(value)} but must be a number {least}{hint}")
        return float(value)
    if kind in ("count", "count or zero"):
        smallest = 0 if kind == "count or zero" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise SpecError(f"config.{key} is {shown(value)} but must be a whole number of at least {smallest}: try 8")
    return value


def _activation(key: str, value: Any, known: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise SpecError(
            f"config.{key} is {shown(value)} but only {', '.join(sorted(known))} can be computed, and each computes something "
            "else: give a model with one of these"
        )
    return known[value]


def _value(model: Model, name: str) -> Any:
    """The field of a dotted name; None where the part that has it is missing."""
    found: Any = model
    for word in name.split("."):
        found = None if found is None else getattr(found, word)
    return found


def _factor_alone(config: Config, rope: Config) -> Fields:
    """dynamic reads max_position_embeddings too, which is the model's max_positions."""
    return _present(rope, "factor")


def _llama3(config: Config, rope: Config) -> Fields:
    return {**_present(rope, "factor", "low_freq_factor", "high_freq_factor"), **_original(config, rope)}


def _yarn(config: Config, rope: Config) -> Fields:
    original = _original(config, rope)
    fields = {**_present(rope, "factor", "attention_factor"), **original}
    if "factor" not in fields and original:  # null: the ratio of the two lengths, as transformers takes it
        fields["factor"] = checked(config, "max_position_embeddings", "count") / original["original_max_positions"]
    # transformers reads mscale only where both are given (0 is none) and attention_factor is not, and 0 as the default betas.
    if "attention_factor" not in fields and rope.get("mscale") and rope.get("mscale_all_dim"):
        fields |= _present(rope, "mscale", "mscale_all_dim")
    fields |= {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
    if "truncate" in rope:
        fields["truncate"] = False if rope["truncate"] is None else rope["truncate"]
    return fields


_SCALINGS: dict[str, Callable[[Config, Config], Fields]] = {
    "dynamic": _factor_alone,
    "linear": _factor_alone,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> fields of RopeScaling, of the config and its rope mapping"""


def _present(rope: Config, *keys: str) -> Fields:
    return {key: rope[key] for key in keys if rope.get(key) is not None}


def _original(config: Config, rope: Config) -> Fields:
    """transformers takes the config's own key before the mapping's, and max_position_embeddings where there is neither."""
    key = "original_max_position_embeddings"
    places = [(config, key), (rope, key), (config, "max_position_embeddings")]
    found = next((mapping[name] for mapping, name in places if mapping.get(name) is not None), None)
    return {} if found is None else {"original_max_positions": found}


def _scaling_of(model: Model) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    config: dict[str, Any] = {"rope_type": scaling.rope_type, "factor": scaling.factor}
    for name in ROPE_FIELDS[scaling.rope_type]:
        value = getattr(scaling, name)
        if value is not None:
            config["original_max_position_embeddings" if name == "original_max_positions" else name] = value
    return config
