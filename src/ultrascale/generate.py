"""`generate`: text of a trained model, from a run, a checkpoint of any layout or a Hugging Face folder, on one device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.data import corpora, sets
from ultrascale.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from ultrascale.model.attention import causal_attention, softcapped_attention
from ultrascale.model.hf_folder import CONFIG, HFFolder
from ultrascale.model.hf_folder import TOKENIZER as TOKENIZER_JSON
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_mapping
from ultrascale.specs.hub import model_folder, tokenizer_file
from ultrascale.train import checkpoint
from ultrascale.train.checkpoint import Checkpoint

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 takes the likeliest, top_k 0 draws from all."""

    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise SpecError(f"--temperature is {self.temperature:g} but must be from 0 (the likeliest token) to 100: try 0.8")
        if self.top_k < 0:
            raise SpecError(f"--top-k is {self.top_k} but must be 0 (all tokens) or more: try 50")


class KVCacheAttention(nn.Module):
    """Attention of new tokens to themselves and to all tokens before; replaces CausalAttention while text is generated."""

    def __init__(self, core: CausalAttention) -> None:
        super().__init__()
        self.sliding_window, self.scale, self.softcap = core.sliding_window, core.scale, core.softcap
        self.chunked = core.chunked
        self.reset()

    def reset(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [b, new, heads, d], k and v [b, new, kv_heads, d] -> [b, new, heads, d]."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat((self.keys, k), dim=1), torch.cat((self.values, v), dim=1)
        self.keys, self.values = k, v
        new, length = q.shape[1], k.shape[1]
        visible = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
        if self.sliding_window is not None and self.chunked:
            chunks = torch.arange(length, device=q.device) // self.sliding_window
            visible &= chunks[-new:].unsqueeze(1) == chunks
        elif self.sliding_window is not None:
            visible = visible.triu(length - new + 1 - self.sliding_window)
        if self.softcap is not None:
            return softcapped_attention(q, k, v, self.scale or q.shape[-1] ** -0.5, self.softcap, visible)
        if sinks is not None:
            hidden = torch.zeros(new, length, dtype=q.dtype, device=q.device).masked_fill_(~visible, -math.inf)
            return causal_attention(q, k, v, self.scale or q.shape[-1] ** -0.5, hidden, sinks)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=True).transpose(1, 2)


@dataclass(frozen=True)
class TextModel:
    """A model on one device with the tokenizer of its data."""

    module: Transformer
    tokenizer: Tokenizer
    ends: frozenset[int]
    """tokens after which a text is complete"""
    encode: Callable[[str], list[int]]
    """the tokens of a prompt"""
    caches: list[KVCacheAttention] = field(default_factory=list)
    """of every block; empty where a block has linear attention, or positions depend on the length of the text"""

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def longest(self) -> int | None:
        """The most tokens of a text; None: any number."""
        return self.module.model.max_positions if self.module.model.positions == "learned" else None

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, tokens of the longest, vocab] in fp32: of the token that follows each; arbitrary after the end of a text."""
        self._reset()
        longest = max(map(len, texts))
        found = self._forward([[*text, *[0] * (longest - len(text))] for text in texts], 0).float()
        self._reset()
        return found

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int, sampling: Sampling, ends: Collection[int] = ()) -> Iterator[int]:
        """Up to `count` tokens, one by one, after the prompt; a token of `ends` ends the text and is not part of it."""
        generator = torch.Generator().manual_seed(sampling.seed)
        tokens = list(prompt)
        self._reset()
        begin = 0
        for _ in range(count):
            logits = self._forward([tokens[begin:]], begin)[0, -1]
            begin = len(tokens) if self.caches else 0
            token = draw(logits.float().cpu(), sampling, generator)
            if token in ends:
                return
            tokens.append(token)
            yield token

    def _forward(self, texts: Sequence[Sequence[int]], begin: int) -> Tensor:
        """`texts` have one length, and come after `begin` tokens that the caches hold."""
        positions = torch.arange(begin, begin + len(texts[0]), device=self.device)
        found: Tensor = self.module(torch.tensor(texts, device=self.device), positions)
        return found

    def _reset(self) -> None:
        for cache in self.caches:
            cache.reset()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token by the logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
    return int(torch.multinomial((logits / sampling.temperature).softmax(0), 1, generator=generator))


def load(path: str | Path, tokenizer: str | Path | None = None, device: str | None = None) -> TextModel:
    """The newest checkpoint of a run, a checkpoint, a Hugging Face folder, or `hf://ORG/NAME`.

    `tokenizer`: instead of that of its data.
    """
    place = _device(device)
    folder, name = model_folder(path)
    if not os.path.isdir(folder):
        raise SpecError(f"{path} is no folder: name a run, such as runs/first, a checkpoint, or a Hugging Face folder")
    source = HFFolder.open(folder, name) if (folder / CONFIG).is_file() else checkpoint.resolve(folder)
    words, ends, encode = _tokenizer(source, None if tokenizer is None else tokenizer_file(tokenizer))
    model = source.model if isinstance(source, HFFolder) else source.job.model
    if words.vocab > model.vocab:
        raise SpecError(
            f"the tokenizer {words.name} has {words.vocab:,} tokens but the model of {path} has {model.vocab:,}: name the "
            "tokenizer that it was trained with, such as --tokenizer tokenizer.json"
        )
    with torch.device("meta"):
        module = Transformer(model)
    module.to(torch.bfloat16 if place.type == "cuda" else torch.float32).to_empty(device=place)
    for router in module.routers().values():
        if router.bias is not None:
            router.bias = router.bias.float()  # added to scores in fp32
    weight = source.tensor if isinstance(source, HFFolder) else checkpoint.merged(source)[1]
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(weight(name))
    caches = []
    dynamic = model.rope_scaling is not None and model.rope_scaling.rope_type == "dynamic"
    if model.recurrence is None and not dynamic:
        for attention in (block.attention for block in module.each_block() if block.attention is not None):
            assert isinstance(attention.core, CausalAttention)
            caches.append(KVCacheAttention(attention.core))
            attention.core = caches[-1]  # type: ignore[assignment]
    return TextModel(module.eval(), words, ends, encode, caches)


def text(model: TextModel, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
    """The text after a prompt, in pieces that end at a character; an empty prompt is the start of a document."""
    given = model.encode(prompt) or sorted(model.ends)[:1]
    if not given:
        raise SpecError('--prompt is empty and the model has no token to begin with: try --prompt "Once"')
    if count < 1:
        raise SpecError(f"--tokens is {count} but must be at least 1: try 64")
    if model.longest is not None and len(given) + count > model.longest:
        rest = model.longest - len(given)
        advice = f"try --tokens {rest}" if rest > 0 else f"try a prompt of fewer than {model.longest} tokens"
        raise SpecError(
            f"--tokens is {count} and the prompt has {len(given)} but the model has {model.longest} positions: {advice}"
        )
    tokens: list[int] = []
    shown = ""
    for token in model.generate(given, count, sampling, model.ends):
        tokens.append(token)
        whole = model.tokenizer.decode(tokens)
        if not whole.endswith("\N{REPLACEMENT CHARACTER}") and whole.startswith(shown):
            yield whole[len(shown) :]
            shown = whole
    yield model.tokenizer.decode(tokens)[len(shown) :]


def _device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cuda" and not has_gpu):
        raise SpecError(
            f"--device is {name!r:.40} but this machine has {'cpu and cuda' if has_gpu else 'cpu'}: try --device cpu"
        )
    return device


Words = tuple[Tokenizer, frozenset[int], Callable[[str], list[int]]]


def _tokenizer(source: HFFolder | Checkpoint, given: Path | None) -> Words:
    """The tokenizer, the tokens that end a text, and how a prompt is encoded."""
    if isinstance(source, HFFolder):
        ends = _ends_of(source.path)
        file = given or source.path / TOKENIZER_JSON
        if not file.is_file():
            raise SpecError(
                f"{source.path} has no {TOKENIZER_JSON}: name one with --tokenizer, such as --tokenizer tokenizer.json"
            )
        words = FileTokenizer(file, next(iter(ends), 0))
        return words, frozenset(ends), words.prompt
    if given is not None:
        words = FileTokenizer(given, None)
        return words, frozenset({words.eod}), lambda text: words.encode([text])[0].tolist()
    trained = _trained_with(source)
    return trained, frozenset({trained.eod}), lambda text: trained.encode([text])[0].tolist()


def _trained_with(source: Checkpoint) -> Tokenizer:
    """The tokenizer of the run's data: of the first set of a mixture that has one."""
    example = "such as --tokenizer tokenizer.json"
    if not source.step:
        raise SpecError(f"{source.folder} holds converted weights, without the tokenizer of any data: name it, {example}")
    for part in corpora.parts("train.data", source.training.data):
        if part.name == corpora.STDLIB:
            return ByteTokenizer()
        facts = sets.open_set(part.name).facts if part.name != corpora.SYNTHETIC else None
        if facts is not None:
            return (
                ByteTokenizer()
                if facts.tokenizer_sha256 is None
                else FileTokenizer(Path(part.name) / TOKENIZER_JSON, facts.eod)
            )
    raise SpecError(f"the run's data ({source.training.data:.80}) names no tokenizer: name the one of its tokens, {example}")


def _ends_of(folder: Path) -> list[int]:
    """`eos_token_id`, one or several, of the generation config or the config."""
    for name in (GENERATION_CONFIG, CONFIG):
        if (folder / name).is_file():
            found: Any = read_mapping(folder / name, name).get("eos_token_id")
            if found is not None:
                return [int(one) for one in (found if isinstance(found, list) else [found])]
    return []
