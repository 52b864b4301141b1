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
from ultrascale.model import hf
from ultrascale.parallel.torch_private import step_microbatches
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

MASK_BLOCK = 128
BACKEND = "full_dtensor"
_FUSED = "attention.qkv_linear.wqkv.weight"
# What our recording calls by number; gradients and weights have names of their own.
_MODULES = {
    "tok_embeddings": "embed",
    "layers.{}.feed_forward.w1": "blocks.{}.mlp.inputs.0",
    "layers.{}.feed_forward.w3": "blocks.{}.mlp.inputs.1",
    "layers.{}.attention.qkv_linear.2": "blocks.{}.attention.qkv.2",
}


def _check(job: Job, layout: Layout) -> None:
    """Over two axes DTensor searches the cheapest redistribution for each operator: 150 s did not suffice for a step."""
    if layout.cp > 1 and layout.tp > 1:
        raise SpecError(
            f"layout.tp is {layout.tp} beside cp {layout.cp} but DTensor takes minutes to place operators over both: "
            f"try tp=1, or cp=1"
        )


def seq_of(job: Job, layout: Layout) -> int:
    """FlexAttention's masks have blocks of 128 positions, and context parallelism cuts whole ones."""
    blocks = MASK_BLOCK * layout.cp
    return job.seq if layout.cp == 1 else -(-job.seq // blocks) * blocks


def _conversions(step: DumpStep, job: Job, layout: Layout) -> dict[str, Conversion]:
    """Queries, keys and values apart, and their rows in our order."""
    found: dict[str, Conversion] = {}
    for key in step.keys:
        if key.endswith(_FUSED):
            section, _, name = key.partition("/")
            layer = name.split(".")[1]
            for one in "vkq":
                ours = f"{section}/blocks.{layer}.attention.qkv.{one}.weight"
                found[ours] = Conversion(key, partial(_rows_of_one, job.model, one))
    return found


def _rows_of_one(model: Model, one: str, fused: Tensor) -> Tensor:
    """By torchtitan's own functions: of its checkpoints and of its Hugging Face adapter."""
    from torchtitan.models.common.attention import FusedQKVLinear

    group = model.heads // model.kv_heads
    tensors = {"wqkv.weight": fused}
    layer = SimpleNamespace(head_dim=model.head_dim, heads_per_kv=group, r_dim=group + 2)
    FusedQKVLinear._split_qkv_on_save(layer, tensors, "", None)
    named = {f"layers.0.attention.qkv_linear.w{one}.weight": tensors[f"w{one}.weight"]}
    (found,) = _adapter(model).to_hf(named).values()
    return torch.as_tensor(found)


def _adapter(model: Model) -> Any:
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    return Llama3StateDictAdapter(model_config(model, seq=2), None)


def model_config(model: Model, seq: int) -> Any:
    """torchtitan's Llama of this shape."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    scaling = model.rope_scaling
    scaled = {} if scaling is None else {
        "scaling": "llama",
        "scaling_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }  # fmt: skip
    rope = ComplexRoPE.Config(dim=model.head_dim, max_seq_len=seq, theta=model.rope_theta, **scaled)
    hidden: dict[str, Any] = {"normalized_shape": model.hidden, "eps": model.norm_eps}
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(**hidden),
            ffn_norm=RMSNorm.Config(**hidden),
            attention=make_gqa_config(
                dim=model.hidden,
                n_heads=model.heads,
                n_kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                wqkv_param_init={},
                wo_param_init={},
                inner_attention=FlexAttention.Config(),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(dim=model.hidden, hidden_dim=model.ffn, w1_param_init={}, w2w3_param_init={}),
        )
        for _ in range(model.layers)
    ]
    return Llama3Model.Config(
        dim=model.hidden,
        vocab_size=model.vocab,
        tok_embeddings=Embedding.Config(num_embeddings=model.vocab, embedding_dim=model.hidden),
        norm=RMSNorm.Config(**hidden),
        lm_head=Linear.Config(in_features=model.hidden, out_features=model.vocab),
        layers=layers,
    )


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
    trainer = _trainer(job, layout, world, batch.weights)
    dims = trainer.parallel_dims
    zigzag = ":zigzag" if dims.cp_enabled and trainer.config.parallelism.context_parallel_load_balancer else ""
    data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    mesh = {
        name: (dims.get_mesh(name).get_local_rank(), size)
        for name, size in (
            ("pp", dims.pp),
            ("dp_replicate", dims.dp_replicate),
            ("dp_shard", dims.dp_shard),
            ("cp", dims.cp),
            ("tp", dims.tp),
        )
        if size > 1
    }
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
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.trainer import Trainer

    settings = CURRENT.settings(job, layout)
    named = {name: None if value == NOTHING else value for name, value in settings["parallelism"].items()}
    parallelism = ParallelismConfig(**named, spmd_backend=BACKEND)
    training = TrainingConfig(**{**settings["training"], "disable_cuda_graphs": True})
    recompute = {"full": FullAC, "selective": SelectiveAC}.get(layout.recompute)
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    utils.set_spmd_backend(BACKEND)
    shape = model_config(job.model, job.seq)
    shape.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = shape.build()
    stored = {one.name: one.joined([weights[name] for name in one.ours]) for one in hf.stored(job.model)}
    model.load_state_dict(_adapter(job.model).from_hf(stored))
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
            parallelize_fn=parallelize_llama,
            loss_fn=trainer.loss_fn,
            **common,
        )
        trainer.pp_schedule = SimpleNamespace(step=partial(step_microbatches, schedule))
    else:
        trainer.model_parts = [parallelize_llama(model, **common)]
    for part in trainer.model_parts:
        part.train()
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


RUNNER = EngineRunner(
    name="torchtitan",
    requirement="torchtitan>=0.3,<0.4",
    imports=("torchtitan.trainer", "torchtitan.models.llama3"),
    check=_check,
    run=_run,
    conversions=_conversions,
    names=_MODULES,
    seq=seq_of,
)
