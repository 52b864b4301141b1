"""Verifies torchtitan: its model and parallel code on gloo ranks, against our engine in one process.

torchtitan 0.3's Trainer needs a GPU to be constructed. Its parts run on a CPU: the model, `parallelize_llama`, `pipeline_llm`,
the loss, and of the Trainer what prepares a batch and runs forward and backward. Two things differ from a GPU: FlexAttention's
kernel, which has no backward on CPUs, is replaced by attention with the same mask; and FSDP reduces by a sum, which is what its
division by 1 asks for, since gloo has no scaled sum. `spmd_backend` is `full_dtensor`: the default, `spmd_types`, needs a
`fully_shard` that torch 2.13 does not have.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
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
from ultrascale.launch import local
from ultrascale.launch.rank_info import RankInfo
from ultrascale.measure.dump import Dump
from ultrascale.measure.dump_index import SECTIONS, Index
from ultrascale.measure.dump_names import NameMap
from ultrascale.measure.dump_tensors import DumpStep, Replica, Whole
from ultrascale.measure.verify import TIMEOUT_S, make_engine
from ultrascale.measure.verify_dumps import DumpComparison, compare_steps
from ultrascale.measure.verify_recording import PERTURBED_RUNS, StepPlan, StepRunner, record
from ultrascale.model import hf
from ultrascale.parallel.torch_private import step_microbatches
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.train.data import rows_of

STEP = 1
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


def check_torchtitan(job: Job, layout: Layout) -> None:
    """SpecError where torchtitan's Llama cannot be the plan's model."""
    model = job.model
    wrong = {
        "moe": model.moe is not None,
        "mla": model.mla is not None,
        "qk_norm": model.qk_norm,
        "sliding_window": model.sliding_window is not None,
        "qkv_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "attention_output_bias": model.attention_output_bias,
        "tied_embeddings": model.tied_embeddings,
        "positions": model.positions != "rotary",
        "norm": model.norm != "rmsnorm",
        "activation": model.activation != "swiglu",
        "rope_scaling": model.rope_scaling is not None and model.rope_scaling.rope_type != "llama3",
    }
    for field, unlike in wrong.items():
        if unlike:
            raise SpecError(
                f"model.{field} is {getattr(model, field)!s:.40} but --engine torchtitan runs its Llama only: "
                f"try llama-3-8b, or `verify` without --engine"
            )
    if job.precision != "fp32":
        raise SpecError(f"--precision is {job.precision} but --engine torchtitan is compared in fp32: leave it out")
    if model.kv_heads % layout.tp:
        raise SpecError(f"layout.tp is {layout.tp} but torchtitan needs it to divide kv_heads = {model.kv_heads}: try 2")


def seq_of(job: Job, layout: Layout) -> int:
    """FlexAttention's masks have blocks of 128 positions, and context parallelism cuts whole ones."""
    blocks = MASK_BLOCK * layout.cp
    return job.seq if layout.cp == 1 else -(-job.seq // blocks) * blocks


def verify_torchtitan(job: Job, layout: Layout, say: Callable[[str], None] = lambda text: None) -> DumpComparison:
    """One step: loss, outputs of modules, their gradients, weight gradients."""
    check_torchtitan(job, layout)
    job = job.changed(seq=seq_of(job, layout), batch_tokens=layout.batch_tokens(seq_of(job, layout)))
    say("importing torchtitan")
    try:
        for name in ("torchtitan.trainer", "torchtitan.models.llama3"):  # before ranks are forked, which share them
            import_module(name)
    except ImportError as error:
        raise SpecError(f"--engine torchtitan cannot be imported ({error}): try pip install 'torchtitan>=0.3,<0.4'") from None
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        place = Path(folder)
        say("one process of ours")
        local.run(_own_rank, 1, job, layout, place / "own.pt", timeout_s=TIMEOUT_S)
        say(f"{layout.gpus} ranks of torchtitan")
        try:
            local.run(_torchtitan_rank, layout.gpus, job, layout, place, timeout_s=TIMEOUT_S)
        except local.RankError as failure:
            raise RunError(f"torchtitan does not run this layout here: {failure.text.strip().splitlines()[-1]}") from None
        own = torch.load(place / "own.pt", weights_only=True)
        first = _TorchtitanStep(DumpStep.open(place / "torchtitan", STEP), job.model)
        second, *moved = (_OwnStep(tensors) for tensors in (own["recording"], *own["perturbed"]))
        return compare_steps([(first, second, moved)], NameMap.of(_MODULES), say)


def _own_rank(rank: int, nproc: int, store: str, job: Job, layout: Layout, file: Path) -> None:
    sequences = layout.dp * layout.mbs * layout.gas
    alone = job.changed(cluster=Cluster.load("1xh100"), batch_tokens=sequences * job.seq)
    training = Training(steps=1, warmup_steps=0, graphs="never")
    step = StepPlan(0, training, gradients=True, trace=True)

    def run(seed: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, Tensor]]:
        engine = make_engine(RankInfo(), alone, Layout(mbs=sequences), training)
        weights = {weight.shard.name: weight.exact().clone() for weight in engine.weights}
        found = record(StepRunner(engine, trace=True, seed=seed), [step])
        named = {f"weight/{name}": value for name, value in weights.items()}
        named |= {key.partition("/")[2]: value for key, value in found.items()}
        kept = {key: value for key, value in named.items() if key.split("/")[0] in SECTIONS}
        return kept, weights, engine.batches.train(0, range(sequences))

    recording, weights, (inputs, targets) = run(None)
    perturbed = [run(seed)[0] for seed in range(PERTURBED_RUNS)]
    saved = {"recording": recording, "perturbed": perturbed, "weights": weights, "inputs": inputs, "targets": targets}
    torch.save(saved, file)


@dataclass(frozen=True)
class _OwnStep:
    """Our recording as a dump of one rank."""

    tensors: Mapping[str, Tensor]
    folder: Path = Path("ultrascale")
    step: int = STEP
    world: int = 1
    program: str = "one process"
    indexes: tuple[Index, ...] = ()

    @property
    def keys(self) -> list[str]:
        return list(self.tensors)

    @property
    def axes(self) -> dict[str, int]:
        return {}

    @property
    def dtypes(self) -> set[str]:
        return {"float32"}

    def whole(self, key: str) -> Whole:
        return _whole(self.tensors[key])


def _whole(tensor: Tensor) -> Whole:
    return Whole(tensor, ((0, tuple(slice(0, length) for length in tensor.shape)),))


class _TorchtitanStep:
    """torchtitan's dump with queries, keys and values apart, and their rows in our order."""

    def __init__(self, step: DumpStep, model: Model) -> None:
        self.inner, self.model = step, model
        self.folder, self.step, self.world = Path("torchtitan"), step.step, step.world
        self.axes, self.dtypes, self.indexes = step.axes, step.dtypes, step.indexes

    @property
    def program(self) -> str:
        return self.inner.program

    @cached_property
    def _sources(self) -> dict[str, str]:
        """Our key of a converted tensor to torchtitan's."""
        found: dict[str, str] = {}
        for key in self.inner.keys:
            if key.endswith(_FUSED):
                section, _, name = key.partition("/")
                layer = name.split(".")[1]
                found |= {f"{section}/blocks.{layer}.attention.qkv.{one}.weight": key for one in "vkq"}
            else:
                found[key] = key
        return found

    @property
    def keys(self) -> list[str]:
        return list(self._sources)

    def whole(self, key: str) -> Whole:
        source = self._sources[key]
        found = self.inner.whole(source)
        if source == key:
            return found
        region = tuple(slice(0, length) for length in self._converted(key, found.tensor).shape)
        copies = []
        for copy in found.replicas:
            other = found.tensor.clone()
            other[copy.region] = copy.tensor
            copies.append(Replica(copy.rank, region, self._converted(key, other)))
        return replace(_whole(self._converted(key, found.tensor)), replicas=tuple(copies))

    def _converted(self, key: str, fused: Tensor) -> Tensor:
        """By torchtitan's own functions: of its checkpoints and of its Hugging Face adapter."""
        from torchtitan.models.common.attention import FusedQKVLinear

        model, one = self.model, key.split(".")[-2]
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


def _torchtitan_rank(rank: int, nproc: int, store: str, job: Job, layout: Layout, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(nproc))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.attention import FlexAttention

    parallel_dims.device_type = "cpu"
    FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)
    own = torch.load(folder / "own.pt", weights_only=True)
    trainer = _trainer(job, layout, nproc, own["weights"])
    dims = trainer.parallel_dims
    zigzag = ":zigzag" if dims.cp_enabled and trainer.config.parallelism.context_parallel_load_balancer else ""
    batch = dims.get_mesh("batch") if dims.dp_enabled else None
    part = batch.get_local_rank() if batch is not None else 0
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
        folder / "torchtitan",
        mesh=mesh,
        activations=" ".join(word for word in activations.split() if word.split(":")[0] in ("microbatch", *mesh)),
        loss="sum",
        rank=rank,
        world=nproc,
        program="torchtitan 0.3",
    )
    tokens = torch.tensor(own["inputs"].numel())
    batches = []
    for number in range(layout.gas):
        rows = rows_of(layout, part, number)
        positions = torch.arange(job.seq).expand(len(rows), -1).contiguous()
        batches.append(({"input": own["inputs"][rows], "positions": positions}, own["targets"][rows]))

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
    dist.barrier()
    dist.destroy_process_group()


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
