"""One GPU as rank 0 of a job, ours beside torchtitan: `python benchmarks/gpu/rank.py --tp 8 --dp 8 --beside torchtitan`.

In a job of several GPUs the other ranks do not exist (torch's `fake` process group): collectives return at once, so that
computing alone is timed, with real kernels on the sizes of one rank. With `--beside torchtitan` (0.2) its own model,
parallelisms, compiler, loss and optimizer take the same work as its trainer does; on one GPU with fp32 weights under autocast.
Models with experts are its Qwen3. `--beside transformers` runs a model of transformers under FSDP2 as Accelerate does, with
PEFT's adapters where `--adapters` asks for some. The engines take turns, each in a process of its own, ours in each
`--precision`. Prints ms and peak memory of each turn, and the ratios to the first engine.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast, get_args

import torch
from rich.console import Console
from rich.table import Table
from shapes import MODELS, titan_arguments
from step import MBS, SEQ, machine

from ultrascale import Cluster, Job, Layout, Model
from ultrascale.launch import local
from ultrascale.measure.foreign.data_stub import stub_data_pipeline
from ultrascale.measure.peer_values import values_of_peers
from ultrascale.measure.rehearse_world import RandomBatches, single_rank_world, unconnected_groups, without_values
from ultrascale.parallel.mesh import Mesh
from ultrascale.schedules import REGISTRY
from ultrascale.specs.hf_config import config_of
from ultrascale.specs.job import Precision
from ultrascale.specs.training import Fp8Keep, Graphs, Kernels, Training
from ultrascale.specs.units import GIB
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches

COLD, WARM_UP = 2, 4  # steps: compilation, states, the allocator's first blocks; a CUDA graph's capture in the fifth
# Beside those of step.py: shapes of Llama 3, of layers of 128 experts, and of linear attention with 512.
MODELS.update(
    (name, Model.load(preset))
    for name, preset in {
        "8b": "llama-3-8b",
        "70b": "llama-3-70b",
        "qwen3-30b-a3b": "qwen3-30b-a3b",
        "qwen3-next": "qwen3-next-80b-a3b",
    }.items()
)


@dataclass(frozen=True)
class Turn:
    engine: str
    step_ms: float
    tokens_per_s: float
    peak_gib: float
    reserved_gib: float
    gpu: str
    kernels: int = 0
    """of one more step, where it is profiled, and how long they ran"""
    kernels_ms: float = 0.0


def timed(engine: str, work: RankWork, step: Callable[[], object]) -> Turn:
    """The mean of some steps. Peaks include those of warm steps: a replayed graph allocates nothing."""
    for _ in range(COLD):
        step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(work.steps):
        step()
    torch.cuda.synchronize()
    each_s = (time.perf_counter() - start) / work.steps
    peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB
    counted, kernels_s = kernels_of(step) if work.profiled else (0, 0.0)
    name = torch.cuda.get_device_name()
    return Turn(engine, each_s * 1e3, work.tokens / each_s, peak, reserved, name, counted, kernels_s * 1e3)


def kernels_of(step: Callable[[], object]) -> tuple[int, float]:
    """How many kernels a step launches, and for how long they run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    return sum(event.count for event in events), sum(event.self_device_time_total for event in events) / 1e6


@dataclass(frozen=True)
class RankWork:
    """What rank 0 computes."""

    model: str
    layers: int
    seq: int
    steps: int
    layout: Layout
    tp_chunks: int = 1
    graphs: Graphs = "auto"
    precision: Precision = "bf16"
    fp8_keep: Fp8Keep = "ends"
    kernels: Kernels = "fused"
    compiled: bool = True
    """torchtitan"""
    profiled: bool = False
    adapters: int | None = None
    """rank of adapters that are trained alone"""

    @property
    def name(self) -> str:
        kernels = "" if self.kernels == "fused" else f" {self.kernels}"
        return f"ultrascale{kernels}" + (f" fp8, keep {self.fp8_keep}" if self.precision == "fp8" else "")

    @property
    def tokens(self) -> int:
        """Of this data-parallel rank in a step."""
        return self.layout.mbs * self.layout.gas * self.seq

    @property
    def shape(self) -> Model:
        return MODELS[self.model].model_copy(update={"layers": self.layers, "max_positions": None})


def ours(work: RankWork) -> Turn:
    layout, model = work.layout, work.shape
    job = Job(
        model=model,
        cluster=Cluster.load(f"{layout.gpus}xh200"),
        seq=work.seq,
        batch_tokens=layout.batch_tokens(work.seq),
        precision=work.precision,
        adapter_rank=work.adapters,
    )
    training = Training(steps=1000, tp_chunks=work.tp_chunks, graphs=work.graphs, fp8_keep=work.fp8_keep, kernels=work.kernels)
    with single_rank_world(0, layout.gpus), values_of_peers():
        mesh, _ = unconnected_groups(Mesh.build(layout, model.kv_heads, 0, f"cuda:{torch.cuda.current_device()}"))
        batches = cast(Batches, RandomBatches(work.seq, model.vocab))
        engine = build_engine(job, mesh, training, batches)
        without_values(engine)
        numbers = itertools.count()  # the next step's batch is read during this one
        return timed(work.name, work, lambda: engine.step(next(numbers)))


class TitanTrainer(NamedTuple):
    """torchtitan's own model, loss and optimizers."""

    model: Any
    loss: Callable[..., Any]
    optimizers: Any
    arguments: Any


def titan_config(work: RankWork) -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size = work.seq, work.layout.mbs
    config.compile.enable = work.compiled
    config.activation_checkpoint.mode = work.layout.recompute
    config.optimizer.implementation = "fused"
    config.parallelism.tensor_parallel_degree = work.layout.tp
    config.parallelism.context_parallel_degree = work.layout.cp
    return config


def titan_trainer(shape: Model, config: Any, dims: Any) -> TitanTrainer:
    """Parallelized, compiled and initialized as its trainer does it."""
    family = importlib.import_module(f"torchtitan.models.{'llama3' if shape.moe is None else 'qwen3'}")
    spec = family.get_train_spec()
    arguments = titan_arguments(shape, config.training.seq_len, type(next(iter(spec.model_args.values()))))
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    loss = spec.build_loss_fn(config, parallel_dims=dims)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    return TitanTrainer(model, loss, spec.build_optimizers_fn([model], config.optimizer, dims), arguments)


def torchtitan(work: RankWork) -> Turn:
    stub_data_pipeline()
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed

    layout, config = work.layout, titan_config(work)
    with single_rank_world(0, layout.gpus), values_of_peers():
        dims = ParallelDims(
            dp_shard=layout.dp, dp_replicate=1, cp=layout.cp, tp=layout.tp, pp=1, ep=1, etp=1, world_size=layout.gpus
        )
        dims.build_mesh()
        model, loss_of, optimizers, arguments = titan_trainer(work.shape, config, dims)
        batches = RandomBatches(work.seq, arguments.vocab_size)
        train_context = distributed.get_train_context(not config.parallelism.disable_loss_parallel and layout.tp > 1)
        alone = layout.gpus == 1
        autocast = distributed.maybe_enable_amp(dims, config.training.mixed_precision_param, "cuda") if alone else nullcontext()

        def step() -> None:
            optimizers.zero_grad()
            for _ in range(layout.gas):
                inputs, targets = (one.cuda() for one in batches.train(0, list(range(layout.mbs))))
                extra: dict[str, Any] = {}
                if layout.cp > 1:
                    inputs, targets, extra = context_slices(inputs, targets, dims)
                with train_context():
                    with autocast:
                        predicted = model(inputs, **extra)
                        loss = loss_of(predicted, targets) / targets.numel()
                    del predicted
                    loss.backward()
            distributed.clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
            optimizers.step()

        return timed("torchtitan", work, step)


def context_slices(inputs: torch.Tensor, targets: torch.Tensor, dims: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """This rank's part of the sequence, as torchtitan's trainer cuts it."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    return prepare_context_parallel_input(inputs, targets, {}, dims.get_mesh("cp"), inputs.device)  # type: ignore[no-any-return]


def transformers(work: RankWork) -> Turn:
    """A model of transformers as Accelerate trains it, with torch's fused AdamW: fp32 weights and bf16 compute; or bf16 weights
    that are frozen, and adapters of PEFT in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    library: Any = importlib.import_module("transformers")
    layout, kept = work.layout, config_of(work.shape, "fp32")
    config = library.AutoConfig.for_model(kept.pop("model_type"), **kept)
    with single_rank_world(0, layout.gpus), values_of_peers():
        weights = torch.bfloat16 if work.adapters else torch.float32
        with torch.device("cuda"):
            model = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=weights)
        if work.adapters:
            peft: Any = importlib.import_module("peft")
            kind = peft.LoraConfig(r=work.adapters, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, kind)
        if layout.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sharded = layout.dp > 1
        if sharded:
            bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.model.layers:
                fully_shard(block, mp_policy=bf16)
            fully_shard(model, mp_policy=bf16)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        batches = RandomBatches(work.seq, work.shape.vocab)

        def step() -> None:
            optimizer.zero_grad()
            for _ in range(layout.gas):
                tokens = batches.train(0, list(range(layout.mbs)))[0].cuda()
                with torch.autocast("cuda", torch.bfloat16, enabled=not sharded):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()

        return timed("transformers", work, step)


OTHERS = {"torchtitan": torchtitan, "transformers": transformers}


def in_own_process(engine: str, work: RankWork) -> Turn:
    def rank(_: int, __: int, ___: str) -> Turn:
        return OTHERS.get(engine, ours)(work)

    (turn,) = local.run(rank, 1, timeout_s=600)
    return turn  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, where its states do not fit one GPU")
    for axis in ("tp", "dp", "cp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--mbs", type=int, help="sequences in a micro-batch; default that of step.py, or 2")
    parser.add_argument("--gas", type=int, default=1)
    parser.add_argument("--seq", type=int, help="default 8192; 4096 for the models of step.py")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline; zb-v, dualpipe-v and the like with two stages")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--recompute-layers", type=int, help="ours: of each stage, its first layers that recompute")
    parser.add_argument("--tp-chunks", type=int, default=1, help="ours: train.tp_chunks")
    parser.add_argument("--graphs", choices=get_args(Graphs), default="auto", help="ours: train.graphs")
    parser.add_argument(
        "--kernels", choices=get_args(Kernels), nargs="+", default=["fused"], help="ours, in bf16: train.kernels"
    )
    parser.add_argument("--precision", choices=("bf16", "fp8"), nargs="+", default=["bf16"], help="ours: each takes its turn")
    parser.add_argument(
        "--fp8-keep", choices=get_args(Fp8Keep), nargs="+", default=["ends"], help="ours: what fp8 leaves in bf16"
    )
    parser.add_argument("--adapters", type=int, help="train adapters of this rank alone, PEFT's beside with transformers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--beside", choices=tuple(OTHERS))
    options = parser.parse_args()
    if options.beside and importlib.util.find_spec(options.beside) is None:
        wanted = {"torchtitan": "torchtitan==0.2.2"}.get(options.beside, options.beside)
        sys.exit(f"{options.beside} is not installed: try `pip install {wanted}`, or leave --beside out")
    if options.beside and options.pp > 1:
        sys.exit(f"{options.beside}'s pipeline needs its other ranks: leave --pp or --beside out")
    if options.beside == "transformers" and options.tp * options.cp > 1:
        sys.exit("transformers is run without tp and cp: leave --beside, or --tp and --cp, out")
    if options.beside == "torchtitan" and options.adapters:
        sys.exit("torchtitan 0.2 has no adapters: try --beside transformers")
    layout = Layout(
        tp=options.tp, dp=options.dp, cp=options.cp, pp=options.pp, zero=options.zero if options.dp * options.cp > 1 else 0,
        mbs=options.mbs or MBS.get(options.model, 2), gas=options.gas, schedule=options.schedule,
        virtual_stages=REGISTRY[options.schedule].least_stages, recompute=options.recompute,
        recompute_layers=options.recompute_layers,
    )  # fmt: skip
    layers = options.layers or MODELS[options.model].layers
    seq = options.seq or (SEQ if options.model in MBS else 8192)
    work = RankWork(
        options.model, layers, seq, options.steps, layout, options.tp_chunks, options.graphs, adapters=options.adapters
    )
    works = [replace(work, kernels=kernels) for kernels in options.kernels] if "bf16" in options.precision else []
    if "fp8" in options.precision:
        works += [replace(work, precision="fp8", fp8_keep=keep) for keep in options.fp8_keep]
    contestants = [*([(options.beside, work)] if options.beside else []), *((one.name, one) for one in works)]
    engines = [name for name, _ in contestants]
    turns = [in_own_process(engine, one) for _ in range(options.turns) for engine, one in contestants]
    beside = f" · {options.beside} {importlib.metadata.version(options.beside)}" if options.beside else ""
    what = f"rank 0 of {layout}, {options.model} with {layers} layers, sequences of {seq}"
    table = Table(title=f"{what}{beside} · {machine(turns[0].gpu)}")
    for heading in ("engine", "step ms", "tokens/s", "peak GiB", "reserved GiB"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for turn in turns:
        memory = (f"{gib:.2f}" for gib in (turn.peak_gib, turn.reserved_gib))
        table.add_row(turn.engine, f"{turn.step_ms:.1f}", f"{turn.tokens_per_s:,.0f}", *memory)
    Console(width=128).print(table)
    first, *others = engines
    step, peak = (
        {engine: statistics.mean(getattr(turn, field) for turn in turns if turn.engine == engine) for engine in engines}
        for field in ("step_ms", "peak_gib")
    )
    for engine in others:
        print(
            f"{engine}: {step[first] / step[engine]:.3f} × the speed of {first}, {peak[engine] / peak[first]:.3f} × its memory"
        )


if __name__ == "__main__":
    main()
