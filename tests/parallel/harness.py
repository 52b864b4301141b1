"""Runs an Engine in as many processes as a layout wants and holds every rank's losses, norms and gradients to one process's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it late: once here, and not once in every fork
import torch.distributed as dist

from ultrascale.data.corpora import corpus
from ultrascale.launch import local
from ultrascale.measure import verify_programs
from ultrascale.model.transformer import copy_of_embedding
from ultrascale.parallel.mesh import Mesh, Shard
from ultrascale.schedules import Action
from ultrascale.specs.batch_ramp import BatchRamp
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.train import supported
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import Weight

torch.set_num_threads(1)

SEQ = 32
CLOSE = 1e-5
NOISE = 1e-4  # of the largest gradient: below it (a key's bias, which softmax ignores) only rounding is left to compare

_SMALL: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied_embeddings": True},
    "gpt2": verify_programs.FAMILIES["gpt2"],
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "window": {"sliding_window": 8},
    "sinks": {"attention_sinks": True},
    "one-kv-head": {"kv_heads": 1},
    "odd-vocabulary": {"vocab": 61, "tied_embeddings": True},
    "narrow": {"hidden": 6, "heads": 3, "kv_heads": 1, "head_dim": 2, "ffn": 5},
    "experts": {"ffn": 0, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 16}},
    "two-experts": {"ffn": 0, "moe": {"experts": 2, "top_k": 1, "expert_ffn": 16, "renormalize": False}},
    "qwen2-moe": {
        "qkv_bias": True,
        "tied_embeddings": True,
        "moe": {
            "experts": 4,
            "top_k": 3,
            "expert_ffn": 12,
            "dense_layers": 1,
            "shared_experts": 1,
            "shared_expert_ffn": 20,
            "shared_gate": True,
            "renormalize": False,
        },
    },
    "deepseek": {
        "moe": {
            "experts": 8,
            "top_k": 2,
            "expert_ffn": 8,
            "dense_layers": 1,
            "shared_experts": 2,
            "router": "sigmoid",
            "router_bias": True,
        },
    },
    "latent": {
        "kv_heads": 4,
        "qkv_bias": True,
        "mla": {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
    **{
        f"{name}-family": verify_programs.FAMILIES[name]
        for name in ("gemma", "gpt-oss", "llama4", "qwen3-next", "nemotron-h", "olmo", "cohere", "deepseek")
    },
    "mamba": {"mamba": {"heads": 4, "head_dim": 8, "groups": 4, "state_dim": 4}, "attention_pattern": ("mamba", "full")},
    "hybrid-experts": {
        **verify_programs.FAMILIES["nemotron-h"],
        "ffn": 0,
        "moe": {
            "experts": 4,
            "top_k": 2,
            "expert_ffn": 16,
            "shared_experts": 1,
            "shared_expert_ffn": 24,
            "router": "sigmoid",
            "router_bias": True,
        },
    },
    "neox": {
        "norm": "layernorm",
        "parallel_residual": "two_norms",
        "activation": "relu2",
        "kv_heads": 4,
        "residual_scale": 0.5,
        **dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), True),
    },
    "predicting": {"mtp_depth": 2},
    "predicting, tied": {"mtp_depth": 1, "tied_embeddings": True},
    "predicting, deepseek": {**verify_programs.FAMILIES["deepseek"], "mtp_depth": 1},
    "eight-experts": {"layers": 8, "hidden": 16, "heads": 2, "ffn": 0, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 8}},
    "eight": {"layers": 8, "hidden": 16, "heads": 2, "ffn": 24},
    "eight-tied": {"layers": 8, "hidden": 16, "heads": 2, "ffn": 24, "tied_embeddings": True},
}


def family(name: str) -> Model:
    return Model(name=name, **{**_SMALL, **_FAMILIES[name]})


def job_of(model: str | Model, **fields: Any) -> Job:
    shape = family(model) if isinstance(model, str) else model
    given = {"seq": SEQ, "batch_tokens": SEQ, "precision": "fp32", **fields}
    return Job(model=shape, cluster=Cluster.load("1xh100"), **given)


def training_of(**fields: Any) -> Training:
    """Biases are zero and norms one at first: a high rate shows from the second step whether they are used rightly.

    A large eps keeps Adam from turning the rounding of gradients near zero into whole steps.
    """
    return Training(**{"steps": 3, "seed": 1, "lr": 1e-2, "warmup_steps": 0, "eps": 1e-4, "data": "synthetic", **fields})


@dataclass(frozen=True)
class GradientShard:
    """One rank's part of one gradient of the first step."""

    shard: Shard
    chunk: tuple[int, int] | None
    """which of how many pieces FSDP2 cut the shard into"""
    gradient: torch.Tensor

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        part = self.shard.model_parallel_part(whole)
        if self.chunk is None:
            return part
        number, count = self.chunk
        if self.shard.slices > 1:  # one slice of one expert's matrix each
            expert, place = divmod(number, self.shard.slices)
            rows = part.shape[1] // self.shard.slices
            assert count == len(part) * self.shard.slices
            return part[expert : expert + 1, place * rows : (place + 1) * rows]
        pieces = part.chunk(count)
        return pieces[number] if number < len(pieces) else part[:0]


@dataclass(frozen=True)
class RankResult:
    """What one rank saw of a few steps."""

    losses: list[float]
    """of each step, with its other losses if there are such"""
    norms: list[float]
    pieces: list[GradientShard]
    ran: list[Action]


def in_ranks(work: Callable[..., Any], job: Job, layout: Layout, training: Training, *arguments: Any) -> list[Any]:
    """`work(engine, *arguments)` on every rank of the layout."""
    return local.run(_rank, layout.gpus, work, job, layout, training, arguments, timeout_s=90)


def _rank(
    rank: int, nproc: int, store: str, work: Callable[..., Any], job: Job, layout: Layout, training: Training, arguments: Any
) -> Any:
    torch.set_num_threads(1)
    if nproc > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    result = work(engine_of(job, layout, training, rank), *arguments)
    if nproc > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


def engine_of(job: Job, layout: Layout, training: Training, rank: int = 0, device: str = "cpu") -> Engine:
    mesh = Mesh.build(layout, job.model.kv_heads, rank, device)
    sequences = layout.dp * layout.mbs * layout.gas
    batches = Batches(corpus(training, job.model.vocab), job.seq, sequences, training.seed, training.batch_ramp)
    return build_engine(job, mesh, training, batches)


def train(engine: Engine, evaluate: bool = False) -> RankResult:
    """All steps of the training; the gradients of the first, before anything scales or clips them. Of adapters those of the
    second: at first one of their matrices is zero, and the other's gradient.

    With `evaluate`, held-out text is evaluated before every step but the first: the steps must not change by it.
    """
    losses, norms, pieces = [], [], list[GradientShard]()
    for number in range(engine.training.steps):
        if evaluate and number:
            engine.evaluate(1)
        loss = engine.backward(engine.read(number))
        if number == bool(engine.frozen):
            pieces = [_gradient_shard(weight) for weight in engine.weights]
        result = engine.update(number, loss)
        losses += [one for one in (result.loss, result.z_loss, result.mtp_loss) if one is not None]
        norms.append(result.grad_norm)
    return RankResult(losses, norms, pieces, engine.pipeline.ran)


def _gradient_shard(weight: Weight) -> GradientShard:
    pieces = weight.shard.pieces
    chunk = None if pieces is None else (pieces.rank, pieces.size)
    return GradientShard(replace(weight.shard, partial=None, pieces=None, copies=None), chunk, weight.gradient.clone())


@cache
def one_process(job: Job, batch: int, training: Training) -> RankResult:
    """The whole batch, in one forward unless a ramp has smaller ones, on one rank, with nothing cut."""
    mbs = BatchRamp.of(training.batch_ramp, job.seq, batch).divisor
    return train(engine_of(job, Layout(mbs=mbs, gas=batch // mbs), training))


def whole_gradients(job: Job, result: RankResult) -> Mapping[str, torch.Tensor]:
    found = {piece.shard.name: piece.gradient for piece in result.pieces}
    copy = copy_of_embedding(job.model)  # of a stage with the head
    if copy is not None and job.adapter_rank is None:
        found[copy] = found["embed.tokens.weight"]
    return found


def check(
    model: str | Model, training: Training | None = None, close: float = CLOSE, evaluate: bool = False, **fields: Any
) -> list[RankResult]:
    """Trains under the layout of `fields`, which may have some of the job, and asserts that every rank agrees with one
    process. Without a pipeline two layers and three micro-batches will do: the first, one between, and the last.
    """
    of_job = {name: fields.pop(name) for name in list(fields) if name in Job.model_fields}
    training, layout = training or training_of(), Layout(**{"gas": 4 if fields.get("pp", 1) > 1 else 3, **fields})
    shape = family(model) if isinstance(model, str) else model
    if isinstance(model, str) and layout.pp == 1 and layout.recompute_layers is None:
        shape = shape.model_copy(update={"layers": 2})
    job = job_of(shape, **of_job)
    assert supported.layout_problem(_as_cut(job, layout), layout, training) is None
    ranks: list[RankResult] = in_ranks(train, job, layout, training, evaluate)
    assert_same(ranks, one_process(job, layout.dp * layout.mbs * layout.gas, Training(**plain(training))), job, close)
    return ranks


def _as_cut(job: Job, layout: Layout) -> Job:
    cluster = Cluster.load(f"{layout.gpus}xh100")
    return job.changed(cluster=cluster, batch_tokens=layout.batch_tokens(job.seq))


_BETWEEN_RANKS = ("bucket_mb", "compress", "reduce_every_microbatch", "expert_overlap", "tp_chunks")


def plain(training: Training) -> dict[str, Any]:
    """The training of one process: without settings of communication between ranks."""
    given = training.model_dump()
    return {name: value for name, value in given.items() if name not in _BETWEEN_RANKS}


def assert_same(ranks: list[RankResult], reference: RankResult, job: Job, close: float = CLOSE) -> None:
    for rank, result in enumerate(ranks):
        assert relative(result.losses, reference.losses) < close, (rank, result.losses, reference.losses)
        assert relative(result.norms, reference.norms) < 10 * close, (rank, result.norms, reference.norms)
    errors = gradient_errors(ranks, reference, job)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < close, {name: error for name, error in errors.items() if error >= close}


def relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def gradient_errors(ranks: list[RankResult], reference: RankResult, job: Job) -> dict[str, float]:
    """Per parameter, the largest difference over the largest element; asserts that the ranks' pieces make up the whole."""
    wholes = whole_gradients(job, reference)
    floor = NOISE * max(float(whole.abs().max()) for whole in wholes.values())
    missing = {name: torch.ones(whole.shape, dtype=torch.bool) for name, whole in wholes.items()}
    errors = dict.fromkeys(wholes, 0.0)
    for piece in (piece for result in ranks for piece in result.pieces):
        name, wanted = piece.shard.name, piece.of(wholes[piece.shard.name])
        assert piece.gradient.shape == wanted.shape, (name, piece.gradient.shape, wanted.shape)
        piece.of(missing[name]).fill_(False)
        if wanted.numel():
            largest = max(float(wholes[name].abs().max()), floor)
            errors[name] = max(errors[name], float((piece.gradient - wanted).abs().max()) / largest)
    missing.pop(copy_of_embedding(job.model) or "", None)
    assert not [name for name, left in missing.items() if left.any()]
    return errors
