"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are projected up from one small latent per token."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ultrascale.model.adapters import Adapters
from ultrascale.model.operators import RMSNorm
from ultrascale.model.rotary import Rope, rotate
from ultrascale.model.self_attention import CausalAttention, Mask, MultiLinear
from ultrascale.specs.blocks import MLA
from ultrascale.specs.model import Model

LATENT_NORM_EPS = 1e-6  # of the published code, whatever the model's other norms have


class LatentAttention(nn.Module):
    """x [b, s, hidden] -> [b, s, hidden]. The rotated part of a key is one for all heads and not part of the latent."""

    def __init__(self, model: Model, mla: MLA) -> None:
        super().__init__()
        self.mla = mla
        latents = {"kv": mla.kv_lora_rank + mla.qk_rope_head_dim}
        if mla.q_lora_rank is not None:
            latents["q"] = mla.q_lora_rank
        self.down = MultiLinear(model.hidden, latents, model.qkv_bias)
        self.q_latent_norm = None if mla.q_lora_rank is None else RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
        self.q_up = MultiLinear(mla.q_lora_rank or model.hidden, {"q": model.q_dim}, bias=False)
        self.kv_latent_norm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_up = MultiLinear(mla.kv_lora_rank, {"kv": model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)}, bias=False)
        self.shared_key: nn.Module = nn.Identity()
        """replaced by tensor parallelism, which gathers the slices of the rotated keys"""
        self.core = CausalAttention(scale=model.score_scale)
        self.out = nn.Linear(model.heads * mla.v_head_dim, model.hidden, bias=model.attention_output_bias)
        self.adapters: nn.ModuleDict | None = None
        """by the name of what they stand beside"""

    def forward(self, x: Tensor, rope: Rope | None, bias: Mask | None = None) -> Tensor:
        mla = self.mla
        latents = dict(zip((name for name, _ in self.down.named_children()), self._project("down", x), strict=True))
        (q,) = self._project("q_up", x if self.q_latent_norm is None else self.q_latent_norm(latents["q"]))
        latent, shared_key = torch.split(latents["kv"], [mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        (kv,) = self._project("kv_up", self.kv_latent_norm(latent))
        shared_key = self.shared_key(shared_key).unsqueeze(-2)  # of all heads
        q_nope, q_rope = _heads(q, mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        k_nope, v = _heads(kv, mla.qk_nope_head_dim, mla.v_head_dim)
        if rope is not None:
            q_rope, shared_key = rotate(q_rope, rope), rotate(shared_key, rope)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, shared_key.expand(*k_nope.shape[:-1], -1)), -1)
        heads = self.core(q, k, v) if bias is None else self.core(q, k, v, bias)
        heads, beside = heads.flatten(-2), self._adapters("out")
        out: Tensor = self.out(heads) if beside is None else beside.output_with(heads, self.out)
        return out

    def _project(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        products: tuple[Tensor, ...] = self.get_submodule(name)(x)
        beside = self._adapters(name)
        return products if beside is None else beside.add_to_inputs(x, products)

    def _adapters(self, name: str) -> Adapters | None:
        return None if self.adapters is None or name not in self.adapters else cast(Adapters, self.adapters[name])


def _heads(x: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """[b, s, heads · sum of widths] -> a [b, s, heads, width] for each width."""
    return torch.split(torch.unflatten(x, -1, (-1, sum(widths))), list(widths), -1)
