"""Verifies another engine: its parallel code on gloo ranks, against our engine in one process on the same weights and batch.

An engine is one `EngineRunner`: what a rank runs, and how its names and tensors become ours. Compared are the loss, outputs of
modules, their gradients and weight gradients of one step in fp32, within measured bounds.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.launch import local
from ultrascale.launch.rank_info import RankInfo
from ultrascale.measure.dump_index import SECTIONS, Index
from ultrascale.measure.dump_names import NameMap
from ultrascale.measure.dump_tensors import DumpStep, Region, Replica, Whole
from ultrascale.measure.verify import TIMEOUT_S, make_engine
from ultrascale.measure.verify_dumps import DumpComparison, compare_steps
from ultrascale.measure.verify_recording import PERTURBED_RUNS, StepPlan, StepRunner, record
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.train.data import rows_of

STEP = 1
_OWN = "own.pt"


@dataclass(frozen=True)
class EngineInputs:
    """The weights, inputs and targets of our engine's step."""

    weights: Mapping[str, Tensor]
    inputs: Tensor
    targets: Tensor

    def microbatches(self, layout: Layout, data_rank: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for number in range(layout.gas):
            rows = rows_of(layout, data_rank, number)
            found.append((self.inputs[rows], self.targets[rows]))
        return found


@dataclass(frozen=True)
class Conversion:
    """One of our tensors, from one of the other engine's, or from several."""

    source: str | tuple[str, ...]
    """its key in the dump; several are stacked along a new first dimension"""
    convert: Callable[[Tensor], Tensor] | None = None
    transposed: bool = False
    """the first two dimensions change places"""


@dataclass(frozen=True)
class EngineRunner:
    """Another engine."""

    name: str
    requirement: str
    """what pip installs"""
    imports: tuple[str, ...]
    """before ranks are forked, which share them"""
    check: Callable[[Job, Layout], None]
    """SpecError where the engine cannot run a plan"""
    run: Callable[[Job, Layout, EngineInputs, Path], None]
    """one rank, in a gloo process group: writes its part of a dump"""
    conversions: Callable[[DumpStep, Job, Layout], Mapping[str, Conversion]]
    """by our key, what is converted; the rest is taken as it is"""
    names: Mapping[str, str] = field(default_factory=dict)
    """further names of modules"""
    seq: Callable[[Job, Layout], int] = lambda job, layout: job.seq
    models: str = "its Llama"
    beyond_llama: frozenset[str] = frozenset()
    """fields of a model that it runs although Llama has none such"""


def runner_of(engine: str) -> EngineRunner:
    runner: EngineRunner = import_module(f"ultrascale.measure.verify_{engine}").RUNNER
    return runner


def check_installed(runner: EngineRunner) -> None:
    """SpecError with what installs it."""
    logging.disable(logging.WARNING)  # of packages that it could use too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in runner.imports:
                import_module(name)
    except ImportError as error:
        raise SpecError(
            f"--engine {runner.name} cannot be imported ({error}): try pip install '{runner.requirement}'"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


def check_model(runner: EngineRunner, model: Model) -> None:
    """SpecError for what is no Llama, but for fields that the engine runs too."""
    if model.mla is not None:
        raise SpecError(
            f"model.mla is set but --engine {runner.name} runs {runner.models} only: try llama-3-8b or qwen3-30b-a3b, or "
            "`verify` without --engine"
        )
    wrong = {
        "moe": model.moe is not None,
        "qk_norm": model.qk_norm,
        "qk_l2_norm": model.qk_l2_norm,
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
    for name, unlike in wrong.items():
        if unlike and name not in runner.beyond_llama:
            raise SpecError(
                f"model.{name} is {getattr(model, name)!s:.40} but --engine {runner.name} runs {runner.models} only: "
                f"try llama-3-8b, or `verify` without --engine"
            )


def check_plan(runner: EngineRunner, job: Job, layout: Layout) -> None:
    """SpecError where the engine cannot run the plan."""
    check_model(runner, job.model)
    if job.precision != "fp32":
        raise SpecError(f"--precision is {job.precision} but --engine {runner.name} is compared in fp32: leave it out")
    if job.model.kv_heads % layout.tp:
        raise SpecError(f"layout.tp is {layout.tp} but {runner.name} needs it to divide kv_heads = {job.model.kv_heads}: try 2")
    runner.check(job, layout)


def verify_engine(
    runner: EngineRunner, job: Job, layout: Layout, say: Callable[[str], None] = lambda text: None
) -> DumpComparison:
    """One step of the other engine on the layout's ranks, compared with ours."""
    check_plan(runner, job, layout)
    seq = runner.seq(job, layout)
    job = job.changed(seq=seq, batch_tokens=layout.batch_tokens(seq))
    check_installed(runner)
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        place = Path(folder)
        say("one process of ours")
        local.run(_own_rank, 1, job, layout, place / _OWN, timeout_s=TIMEOUT_S)
        say(f"{layout.gpus} ranks of {runner.name}, {job.model.layers} layers")
        try:
            local.run(_engine_rank, layout.gpus, runner, job, layout, place, timeout_s=TIMEOUT_S)
        except local.RankError as failure:
            raise RunError(f"{runner.name} does not run this layout here: {failure.text.strip().splitlines()[-1]}") from None
        own = torch.load(place / _OWN, weights_only=True)
        dump = DumpStep.open(place / runner.name, STEP)
        first = _ConvertedStep(runner.name, dump, runner.conversions(dump, job, layout))
        second, *moved = (_OwnStep(tensors) for tensors in (own["recording"], *own["perturbed"]))
        return compare_steps([(first, second, moved)], NameMap.of(runner.names), say)


def _engine_rank(rank: int, nproc: int, store: str, runner: EngineRunner, job: Job, layout: Layout, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the other program's, once for each rank
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    own = torch.load(folder / _OWN, weights_only=True)
    runner.run(job, layout, EngineInputs(own["weights"], own["inputs"], own["targets"]), folder / runner.name)
    dist.barrier()
    dist.destroy_process_group()


def _own_rank(rank: int, nproc: int, store: str, job: Job, layout: Layout, file: Path) -> None:
    sequences = layout.dp * layout.mbs * layout.gas
    alone = job.changed(cluster=Cluster.load("1xh100"), batch_tokens=sequences * job.seq)
    training = Training(steps=1, warmup_steps=0, balance_loss=0.0, graphs="never")
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


class _ConvertedStep:
    """Another engine's dump with some of its tensors in our shapes and order."""

    def __init__(self, name: str, step: DumpStep, conversions: Mapping[str, Conversion]) -> None:
        used = {key for one in conversions.values() for key in _keys_of(one)}
        self.inner = step
        self.conversions = {**conversions, **{key: Conversion(key) for key in step.keys if key not in used}}
        self.folder, self.step, self.world, self.program = Path(name), step.step, step.world, step.program
        self.axes, self.dtypes, self.indexes = step.axes, step.dtypes, step.indexes

    @property
    def keys(self) -> list[str]:
        return list(self.conversions)

    def whole(self, key: str) -> Whole:
        conversion = self.conversions[key]
        parts = [self._converted(conversion, source) for source in _keys_of(conversion)]
        return parts[0] if isinstance(conversion.source, str) else _stacked(parts)

    def _converted(self, conversion: Conversion, source: str) -> Whole:
        found = self.inner.whole(source)
        if conversion.transposed:
            found = _transposed(found)
        if conversion.convert is None:
            return found
        whole = _whole(conversion.convert(found.tensor))
        copies = []
        for copy in found.replicas:
            other = found.tensor.clone()
            other[copy.region] = copy.tensor
            copies.append(Replica(copy.rank, whole.regions[0][1], conversion.convert(other)))
        return replace(whole, replicas=tuple(copies))


def _keys_of(conversion: Conversion) -> tuple[str, ...]:
    return (conversion.source,) if isinstance(conversion.source, str) else conversion.source


def _stacked(parts: Sequence[Whole]) -> Whole:
    """Whole tensors of one shape along a new first dimension."""

    def placed(number: int, region: Region) -> Region:
        return (slice(number, number + 1), *region)

    regions = [(rank, placed(number, region)) for number, part in enumerate(parts) for rank, region in part.regions]
    replicas = [
        Replica(one.rank, placed(number, one.region), one.tensor.unsqueeze(0))
        for number, part in enumerate(parts)
        for one in part.replicas
    ]
    return Whole(torch.stack([part.tensor for part in parts]), tuple(regions), tuple(replicas))


def _transposed(whole: Whole) -> Whole:
    def swapped(region: Region) -> Region:
        return (region[1], region[0], *region[2:])

    return replace(
        whole,
        tensor=whole.tensor.transpose(0, 1),
        regions=tuple((rank, swapped(region)) for rank, region in whole.regions),
        replicas=tuple(Replica(one.rank, swapped(one.region), one.tensor.transpose(0, 1)) for one in whole.replicas),
    )
