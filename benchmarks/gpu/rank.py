"""One GPU as rank 0 of a larger job: `python benchmarks/gpu/rank.py --tp 8 --dp 8 --recompute selective --beside torchtitan`.

The other ranks do not exist (torch's `fake` process group): collectives return at once, so that computing alone is timed, with
real kernels on the sizes of one rank. With `--beside torchtitan` (0.2) its own model, parallelisms, compiler, loss and
optimizer take the same work. The engines take turns, each in a process of its own. Prints ms and peak memory of each turn, and
the ratios.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import statistics
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import torch
from beside import Turn, timed, titan_config, titan_trainer
from rich.console import Console
from rich.table import Table
from step import machine

from ultrascale import Cluster, Job, Layout, Model
from ultrascale.launch import local
from ultrascale.measure.rehearse_world import single_rank_world, unconnected_groups, without_values
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.training import Training
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches

WARM_UP = 4  # steps: compilation, the optimizer's states, the allocator's first blocks
# Shapes of Llama 3, and of a dense layer of 70B.
MODELS = {
    "8b": Model(name="8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256),
    "70b": Model(name="70b", layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256),
}


@dataclass(frozen=True)
class RankWork:
    """What rank 0 computes."""

    model: str
    layers: int
    seq: int
    steps: int
    layout: Layout

    @property
    def tokens(self) -> int:
        """Of this data-parallel rank in a step."""
        return self.layout.mbs * self.layout.gas * self.seq

    @property
    def shape(self) -> Model:
        return MODELS[self.model].model_copy(update={"layers": self.layers, "rope_theta": 500000.0})


class RandomBatches:
    def __init__(self, seq: int, vocab: int) -> None:
        self.seq, self.vocab, self.generator = seq, vocab, torch.Generator().manual_seed(0)

    def train(self, _: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, self.vocab, (len(rows), self.seq + 1), generator=self.generator)
        return tokens[:, :-1], tokens[:, 1:]


def ours(work: RankWork) -> Turn:
    layout, model = work.layout, work.shape
    job = Job(
        model=model,
        cluster=Cluster.load(f"{layout.gpus}xh200"),
        seq=work.seq,
        batch_tokens=layout.batch_tokens(work.seq),
    )
    with single_rank_world(0, layout.gpus):
        mesh, _ = unconnected_groups(Mesh.build(layout, model.kv_heads, 0, f"cuda:{torch.cuda.current_device()}"))
        batches = cast(Batches, RandomBatches(work.seq, model.vocab))
        engine = build_engine(job, mesh, Training.model_validate({"steps": 1000}), batches)
        without_values(engine)
        numbers = itertools.count()  # the next step's batch is read during this one
        return timed("ultrascale", work.tokens, work.steps, WARM_UP, lambda: engine.step(next(numbers)))


class StubType(type):
    """A class whose attributes are such classes too."""

    def __getattr__(cls, name: str) -> StubType:
        return stub(name)


def stub(name: str) -> StubType:
    if name.startswith("__"):
        raise AttributeError(name)
    return StubType(name, (), {})


class DataPipelineStub:
    """Stands in for packages of torchtitan's data pipeline, which is not used here, where they are not installed."""

    names = ("datasets", "tensorboard", "tokenizers")

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__version__, module.__getattr__ = "99.0", stub  # type: ignore[attr-defined, method-assign]
        return module

    def exec_module(self, _: ModuleType) -> None:
        return


def torchtitan(work: RankWork) -> Turn:
    sys.meta_path.append(DataPipelineStub())  # last: where a package is installed, it is used
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed

    layout, config = work.layout, titan_config(work.seq, work.layout.mbs, work.layout.recompute)
    config.parallelism.tensor_parallel_degree = layout.tp
    config.parallelism.context_parallel_degree = layout.cp
    with single_rank_world(0, layout.gpus):
        dims = ParallelDims(
            dp_shard=layout.dp, dp_replicate=1, cp=layout.cp, tp=layout.tp, pp=1, ep=1, etp=1, world_size=layout.gpus
        )
        dims.build_mesh()
        model, loss_of, optimizers, arguments = titan_trainer(work.shape, config, dims)
        batches = RandomBatches(work.seq, arguments.vocab_size)
        train_context = distributed.get_train_context(not config.parallelism.disable_loss_parallel and layout.tp > 1)

        def step() -> None:
            optimizers.zero_grad()
            for _ in range(layout.gas):
                inputs, targets = (one.cuda() for one in batches.train(0, list(range(layout.mbs))))
                extra: dict[str, Any] = {}
                if layout.cp > 1:
                    inputs, targets, extra = context_slices(inputs, targets, dims)
                with train_context():
                    predicted = model(inputs, **extra)
                    loss = loss_of(predicted, targets) / targets.numel()
                    del predicted
                    loss.backward()
            distributed.clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
            optimizers.step()

        return timed("torchtitan", work.tokens, work.steps, WARM_UP, step)


def context_slices(inputs: torch.Tensor, targets: torch.Tensor, dims: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """This rank's part of the sequence, as torchtitan's trainer cuts it."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    return prepare_context_parallel_input(inputs, targets, {}, dims.get_mesh("cp"), inputs.device)  # type: ignore[no-any-return]


def in_own_process(engine: str, work: RankWork) -> Turn:
    def rank(_: int, __: int, ___: str) -> Turn:
        return {"ultrascale": ours, "torchtitan": torchtitan}[engine](work)

    (turn,) = local.run(rank, 1, timeout_s=600)
    return turn  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, where its states do not fit one GPU")
    for axis in ("tp", "dp", "cp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--mbs", type=int, default=2)
    parser.add_argument("--gas", type=int, default=1)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--beside", choices=("torchtitan",))
    options = parser.parse_args()
    if options.beside and importlib.util.find_spec("torchtitan") is None:
        sys.exit("torchtitan is not installed: try `pip install torchtitan==0.2.2`, or leave --beside out")
    layout = Layout(
        tp=options.tp, dp=options.dp, cp=options.cp, zero=options.zero if options.dp * options.cp > 1 else 0, mbs=options.mbs,
        gas=options.gas, recompute=options.recompute,
    )  # fmt: skip
    layers = options.layers or MODELS[options.model].layers
    work = RankWork(options.model, layers, options.seq, options.steps, layout)
    engines = [*([options.beside] if options.beside else []), "ultrascale"]
    turns = [in_own_process(engine, work) for _ in range(options.turns) for engine in engines]
    beside = f" · torchtitan {importlib.metadata.version('torchtitan')}" if options.beside else ""
    what = f"rank 0 of {layout}, {options.model} with {layers} layers, sequences of {options.seq}"
    table = Table(title=f"{what}{beside} · {machine(turns[0].gpu)}")
    for heading in ("engine", "step ms", "tokens/s", "peak GiB"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for turn in turns:
        table.add_row(turn.engine, f"{turn.step_ms:.1f}", f"{turn.tokens_per_s:,.0f}", f"{turn.peak_gib:.2f}")
    Console(width=128).print(table)
    if options.beside:
        step, memory = (
            {engine: statistics.mean(getattr(turn, field) for turn in turns if turn.engine == engine) for engine in engines}
            for field in ("step_ms", "peak_gib")
        )
        print(f"speed: {step['torchtitan'] / step['ultrascale']:.3f} × torchtitan's")
        print(f"peak memory: {memory['ultrascale'] / memory['torchtitan']:.3f} × torchtitan's")


if __name__ == "__main__":
    main()
