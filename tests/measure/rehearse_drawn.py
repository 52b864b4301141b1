"""Jobs and layouts drawn at random, the same for the same seed: sizes that do not divide nicely, all techniques together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ultrascale.measure.rehearse import check, engine_of
from ultrascale.specs.blocks import MoE
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

MOST = 64  # GPUs


def drawn(seed: int) -> Iterator[tuple[Job, Layout]]:
    """Without end; only such as the engine runs."""
    dice = random.Random(seed)
    while True:
        model, seq = _model(dice), dice.choice((512, 768, 1024, 1536))
        layout = _layout(dice, model)
        if layout.gpus > MOST:
            continue
        job = Job(
            model=model,
            cluster=Cluster.load(f"{layout.gpus}x1 h100"),
            seq=seq,
            batch_tokens=layout.batch_tokens(seq),
            precision=dice.choice(("bf16", "bf16", "bf16", "fp32")),
            gradients=dice.choice(("fp32", "fp32", "fp32", "bf16")),
            optimizer=dice.choice(("adamw", "adamw", "adamw", "sgd-momentum", "sgd")),
            framework=engine_of("eager"),
        )
        try:
            check(job, layout, "meta")
        except SpecError:
            continue
        yield job, layout


def _model(dice: random.Random) -> Model:
    head_dim, heads = dice.choice((32, 48, 64)), dice.choice((4, 6, 8, 12))
    width = dice.choice((688, 768, 1000, 1024, 1360, 1536, 2048))
    experts = _experts(dice) if dice.random() < 0.4 else None
    dense = experts is None or experts.dense_layers
    return Model(
        name="drawn",
        layers=dice.randint(2, 8),
        hidden=dice.choice((heads * head_dim, 256, 320, 512, 600)),
        heads=heads,
        kv_heads=dice.choice([count for count in range(1, heads + 1) if heads % count == 0]),
        head_dim=head_dim,
        ffn=width if dense else 0,
        vocab=dice.choice((1000, 4096, 5003, 8190, 32000)),
        activation=dice.choice(("swiglu", "swiglu", "swiglu", "geglu", "gelu")),
        norm=dice.choice(("rmsnorm", "rmsnorm", "rmsnorm", "layernorm")),
        tied_embeddings=dice.random() < 0.3,
        qkv_bias=dice.random() < 0.2,
        qk_norm=dice.random() < 0.2,
        moe=experts,
    )


def _experts(dice: random.Random) -> MoE:
    width, shared = dice.choice((128, 200, 256, 512)), dice.random() < 0.5
    return MoE(
        experts=dice.choice((4, 6, 8, 16)),
        top_k=dice.choice((1, 2, 4)),
        expert_ffn=width,
        shared_experts=int(shared),
        shared_expert_ffn=dice.choice((width, 2 * width, 320)) if shared else 0,
        dense_layers=dice.choice((0, 0, 1)),
        shared_gate=shared and dice.random() < 0.3,
        router=dice.choice(("softmax", "sigmoid")),
    )


def _layout(dice: random.Random, model: Model) -> Layout:
    pp = dice.choice((1, 1, 2, 2, 3, 4))
    schedule = dice.choice(("afab", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")) if pp > 1 else "1f1b"
    virtual = {"interleaved": dice.choice((2, 3)), "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1)
    dp, cp, zero = dice.choice((1, 1, 2, 3, 4, 8)), dice.choice((1, 1, 1, 2, 3, 4)), dice.choice((0, 0, 1, 2, 3, 3))
    shards = [count for count in range(1, dp * cp) if dp * cp % count == 0]
    fields: dict[str, Any] = {
        "dp": dp,
        "cp": cp,
        "pp": pp,
        "tp": dice.choice((1, 1, 1, 2, 4, 6)),
        "ep": dice.choice((1, 2, 4)) if model.moe is not None else 1,
        "zero": zero,
        "zero_shards": dice.choice(shards) if zero and shards and dice.random() < 0.3 else None,
        "keep_gathered": zero == 3 and dice.random() < 0.2,
        "sequence_parallel": dice.random() < 0.75,
        "context_parallel": dice.choice(("allgather", "ring", "zigzag", "ulysses")),
        "data_parallel": dice.choice(("bucketed", "bucketed", "naive", "hooks")),
        "schedule": schedule,
        "virtual_stages": virtual,
        "mbs": dice.choice((1, 1, 2, 3)),
        "gas": dice.choice((1, 2, 3, 4, 6, 8, 12)),
        "recompute": dice.choice(("none", "none", "selective", "full")),
        "offload": dice.choice(("none", "none", "none", "none", "optimizer", "parameters" if dp * cp > 1 else "optimizer")),
    }
    return Layout(**fields)
