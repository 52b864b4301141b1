"""Verifies torchtitan: its model and parallel code on gloo ranks, against our engine in one process.

torchtitan 0.3's Trainer needs a GPU to be constructed. Its parts run on a CPU: the model, `parallelize_llama`, `pipeline_llm`,
the loss, and of the Trainer what prepares a batch and runs forward and backward. What differs from a GPU is in docs/verify.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ultrascale.export.torchtitan import CURRENT
from ultrascale.export.torchtitan_text import NOTHING
from ultrascale.measure.dump import Dump
from ultrascale.measure.dump_tensors import DumpStep
from ultrascale.measure.verify_engine import STEP, Conversion, EngineInputs, EngineRunner
from ultrascale.measure.verify_torchtitan_model import (
    adapter,
    check_model,
    config_of,
    is_qwen3,
    named_alike,
    parallelize_function,
)
from ultrascale.model import hf
from ultrascale.parallel.torch_private import step_microbatches
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

MASK_BLOCK = 128
BACKEND = "partial_dtensor"  # over cp and tp, full_dtensor searches placements for minutes
_FUSED = "attention.qkv_linear.wqkv.weight"
_ROUTER = "moe.router"
_QUERIES_AND_KEYS = {"attention.qkv_linear": "attention.qkv.0", "attention.qkv_linear.1": "attention.qkv.1"}
# What our recording calls by number; gradients and weights have names of their own.
_MODULES = {
    "tok_embeddings": "embed",
    "layers.{}.feed_forward.w1": "blocks.{}.mlp.inputs.0",
    "layers.{}.feed_forward.w3": "blocks.{}.mlp.inputs.1",
    "layers.{}.attention.qkv_linear.2": "blocks.{}.attention.qkv.2",
    "layers.{}.moe": "blocks.{}.mlp",
    "layers.{}.moe.router.gate.weight": "blocks.{}.mlp.router.weight",
    "layers.{}.moe.routed_experts.inner_experts.w1_EFD": "blocks.{}.mlp.experts.gate",
    "layers.{}.moe.routed_experts.inner_experts.w2_EDF": "blocks.{}.mlp.experts.down",
    "layers.{}.moe.routed_experts.inner_experts.w3_EFD": "blocks.{}.mlp.experts.up",
}


def _check(job: Job, layout: Layout) -> None:
    check_model(job.model)
    if job.model.tied_embeddings and layout.pp > 1:
        raise SpecError(
            f"layout.pp is {layout.pp} but torchtitan runs no pipeline of a model with tied_embeddings: try pp=1, or "
            "tied_embeddings=false"
        )
    _check_experts(layout)


def _check_experts(layout: Layout) -> None:
    if layout.ep > 1 and layout.dispatcher != "alltoall":
        raise SpecError(
            f"layout.dispatcher is {layout.dispatcher} but --engine torchtitan runs the dispatcher that gloo has: try alltoall"
        )
    if layout.ep > 1 and layout.tp > 1 and not layout.sequence_parallel:
        raise SpecError(
            f"layout.ep is {layout.ep} beside tp {layout.tp} without sequence parallelism but torchtitan's DTensor backends do "
            f"not run that: try sequence_parallel=true"
        )
    sharded = 1 if layout.zero == 0 else layout.shards
    if sharded * layout.tp % layout.ep:
        raise SpecError(
            f"layout.ep is {layout.ep} but torchtitan takes ranks for experts from the {sharded * layout.tp} that shard "
            f"weights: try zero=3 without zero_shards, or ep=1"
        )


def seq_of(job: Job, layout: Layout) -> int:
    """FlexAttention's masks have blocks of 128 positions, and context parallelism cuts whole ones."""
    blocks = MASK_BLOCK * layout.cp
    return job.seq if layout.cp == 1 else -(-job.seq // blocks) * blocks


def _conversions(step: DumpStep, job: Job, layout: Layout) -> dict[str, Conversion]:
    """Queries, keys and values apart, and their rows in our order; a token's experts in our order."""
    found: dict[str, Conversion] = {}
    outputs = _QUERIES_AND_KEYS if is_qwen3(job.model) else {}  # Llama's have rows in another order
    for key in step.keys:
        if key.endswith(_FUSED):
            section, _, name = key.partition("/")
            layer = name.split(".")[1]
            for one in "vkq":
                ours = f"{section}/blocks.{layer}.attention.qkv.{one}.weight"
                found[ours] = Conversion(key, partial(_rows_of_one, job.model, one))
        elif key.startswith("forward/") and key.endswith(_ROUTER):
            ours = f"forward/blocks.{key.split('.')[1]}.mlp.router.weights"
            found[ours] = Conversion(key, _sorted)
        else:
            for theirs, ours in outputs.items():
                if key.startswith(("forward/", "backward/")) and key.endswith(theirs):
                    section, _, name = key.partition("/")
                    found[f"{section}/blocks.{name.split('.')[1]}.{ours}"] = Conversion(key)
    return found


def _sorted(weights: Tensor) -> Tensor:
    """A token's experts are in no order in torchtitan; ours begin with the best."""
    return weights.sort(-1, descending=True).values


def _rows_of_one(model: Model, one: str, fused: Tensor) -> Tensor:
    """By torchtitan's own functions: of its checkpoints and of its Hugging Face adapter."""
    from torchtitan.models.common.attention import FusedQKVLinear

    group = model.heads // model.kv_heads
    tensors = {"wqkv.weight": fused}
    layer = SimpleNamespace(head_dim=model.head_dim, heads_per_kv=group, r_dim=group + 2)
    FusedQKVLinear._split_qkv_on_save(layer, tensors, "", None)
    named = {f"layers.0.attention.qkv_linear.w{one}.weight": tensors[f"w{one}.weight"]}
    (found,) = adapter(model).to_hf(named).values()
    return torch.as_tensor(found)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """FlexAttention's kernel: attention with the same mask."""
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(options["block_mask"].mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    scale, grouped = options["scale"], options["enable_gqa"]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped), None


def _run(job: Job, layout: Layout, batch: EngineInputs, folder: Path) -> None:
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.attention import FlexAttention

    torch.compiler.set_stance("force_eager")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    parallel_dims.device_type = "cpu"
    FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)
    torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign, assignment, return-value]  # experts cast
    trainer = _trainer(job, layout, world, batch.weights)
    dims = trainer.parallel_dims
    zigzag = ":zigzag" if dims.cp_enabled and trainer.config.parallelism.context_parallel_load_balancer else ""
    sizes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard, "cp": dims.cp, "tp": dims.tp}
    place = dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True))
    data_rank = int(place["dp_replicate"] * dims.dp_shard + place["dp_shard"])
    mesh = {name: (int(place[name]), size) for name, size in sizes.items() if size > 1}
    if dims.ep_enabled:
        mesh["ep"] = (dims.get_mesh("ep").get_local_rank(), dims.ep)
    activations = "microbatch:0 dp_replicate:0 dp_shard:0 cp:1" + zigzag
    dump = Dump(
        trainer.model_parts,
        folder,
        mesh=mesh,
        activations=" ".join(word for word in activations.split() if word.split(":")[0] in ("microbatch", *mesh)),
        loss="sum",
        program="torchtitan 0.3",
    )
    tokens = torch.tensor(batch.inputs.numel())
    batches = []
    for inputs, targets in batch.microbatches(layout, data_rank):
        positions = torch.arange(job.seq).expand(len(inputs), -1).contiguous()
        batches.append(({"input": inputs, "positions": positions}, targets))

    # A pipeline takes all micro-batches at once, copies of them, since torchtitan cuts the positions in place.
    steps: list[tuple[Any, Any]] = list(batches)
    if dims.pp_enabled:
        steps = [([inputs for inputs, _ in batches], [labels for _, labels in batches])]

    def forward_backward() -> None:
        for inputs, labels in steps:
            loss = trainer.forward_backward_step(input_dict=deepcopy(inputs), labels=labels, global_valid_tokens=tokens)
            if not dims.pp_enabled or trainer.pp_has_last_stage:
                dump.loss(loss)

    if dims.pp_enabled:  # torch's pipelines run one forward more in their first step
        forward_backward()
        for model in trainer.model_parts:
            model.zero_grad()
    with dump.step(STEP):
        forward_backward()


def _trainer(job: Job, layout: Layout, world: int, weights: Mapping[str, Tensor]) -> Any:
    """torchtitan's Trainer with a parallelised model and our weights; its constructor needs a GPU, and is not called."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.trainer import Trainer

    settings = CURRENT.settings(job, layout)
    named = {name: None if value == NOTHING else value for name, value in settings["parallelism"].items()}
    named.pop("expert_parallel_comm_backend", None)  # of the model
    parallelism = ParallelismConfig(**named, spmd_backend=BACKEND)
    training = TrainingConfig(**{**settings["training"], "disable_cuda_graphs": True})
    recompute = {"full": FullAC, "selective": SelectiveAC}.get(layout.recompute)
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    utils.set_spmd_backend(BACKEND)
    shape, parallelize = config_of(job.model, job.seq), parallelize_function(job.model)
    shape.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = shape.build()
    stored = {one.name: one.joined([weights[name] for name in one.ours]) for one in hf.stored(named_alike(job.model))}
    biases = {name: one for name, one in model.state_dict().items() if name.endswith("expert_bias_E")}  # zero in a first step
    model.load_state_dict(adapter(job.model).from_hf(stored) | biases)
    trainer = Trainer.__new__(Trainer)
    trainer.config = SimpleNamespace(parallelism=parallelism, training=training)
    trainer.parallel_dims, trainer.model_config, trainer.device = dims, shape, torch.device("cpu")
    trainer.loss_fn = CrossEntropyLoss.Config(global_vocab_size=job.model.vocab).build(compile_config=CompileConfig())
    trainer.train_context = utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    trainer.fwd_bwd_fn, trainer.ntokens_seen = trainer._forward_backward_body, 0
    common: dict[str, Any] = {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": CompileConfig(),
        "ac_config": None if recompute is None else recompute.Config(),
        "dump_folder": "",
    }
    if dims.pp_enabled:
        schedule, trainer.model_parts, trainer.pp_has_first_stage, trainer.pp_has_last_stage = pipeline_llm(
            model,
            device=trainer.device,
            model_config=shape,
            parallelize_fn=parallelize,
            loss_fn=trainer.loss_fn,
            **common,
        )
        trainer.pp_schedule = SimpleNamespace(step=partial(step_microbatches, schedule))
    else:
        trainer.model_parts = [parallelize(model, **common)]
        if job.model.tied_embeddings:  # sharding over tp has made two of one; its init_states does this in a Trainer
            model.tok_embeddings.weight = model.lm_head.weight
    for part in trainer.model_parts:
        part.train()
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


RUNNER = EngineRunner(
    name="torchtitan",
    requirement="torchtitan>=0.3,<0.4",
    imports=("torchtitan.trainer", "torchtitan.models.llama3", "torchtitan.models.qwen3"),
    check=_check,
    run=_run,
    conversions=_conversions,
    names=_MODULES,
    models="its Llama and Qwen3",
    beyond_llama=frozenset({"moe", "qk_norm", "tied_embeddings"}),
    seq=seq_of,
)
