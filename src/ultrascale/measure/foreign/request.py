"""What to rehearse of a program that is not ours, and what was found: read and written as JSON between two processes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ultrascale.measure.rehearse import Collective, check_device
from ultrascale.specs.errors import SpecError, nearest

if TYPE_CHECKING:
    from ultrascale.specs.plan import Plan

GPUS_PER_NODE = 8
FIRST_STEPS = 2
"""the step that is counted: the first one creates optimizer states and buffers"""
GPU_STEPS = 10
"""on a GPU: the step that is counted, after those that are measured"""
FIRST_GPU_STEPS = 3
"""at least one is measured between the first and the one that is counted"""
COMPILED = (
    "torch.compile: code is captured and partitioned as on a GPU; its kernels are not generated, their buffers are counted"
)
BALANCED = "experts are chosen equally often"
NOT_COMPILED = "torch.compile is off: operators run one by one and keep what compiled code would fuse or recompute"


@dataclass(frozen=True)
class ForeignEngine:
    """An engine whose own code can be rehearsed; foreign/<name>.py runs it."""

    name: str
    tested: tuple[str, ...]
    """versions that were rehearsed in tests"""
    framework: str
    """preset of the estimate that is shown beside it"""
    package: str
    eager: str | None = None
    """the preset without torch.compile, or of what can be rehearsed, if it is another"""
    fsdp2: bool = False
    """its weights are shards in fp32 under ZeRO; others hold weights to compute with and masters"""
    library: bool = True
    """its configuration has no model and no batch: they are a program's, here foreign/program.py"""
    other_names: tuple[str, ...] = ()
    """that users type for it"""

    def preset(self, version: str, eager: bool) -> str:
        """Of an estimate for this version, with torch.compile or without."""
        name = self.eager if (eager or self.library) and self.eager else self.framework
        old = self.name == "torchtitan" and version.startswith("0.2.")
        return name.replace(self.name, "torchtitan-0.2") if old else name

    def installed(self) -> str:
        """Its version; SpecError if there is none."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            raise SpecError(
                f"--engine is {self.name}, which is not installed: try pip install '{self.package}=={self.tested[-1]}'"
            ) from None


ENGINES = {
    one.name: one
    for one in (
        ForeignEngine(
            "torchtitan",
            ("0.2.2", "0.3.0"),
            "torchtitan",
            "torchtitan",
            "torchtitan-eager",
            fsdp2=True,
            library=False,
        ),
        ForeignEngine("accelerate", ("1.15.0",), "accelerate", "accelerate", fsdp2=True, other_names=("transformers", "fsdp")),
        ForeignEngine("deepspeed", ("0.19.8",), "deepspeed", "deepspeed"),
        ForeignEngine("megatron", ("0.16.1",), "megatron-core", "megatron-core", "megatron-local"),
    )
}


def arguments_of(plan: Plan) -> tuple[str, ...]:
    """What the program of a library needs to know beside the exported configuration."""
    job, layout = plan.job, plan.layout
    if job.optimizer != "adamw":
        raise SpecError(f"job.optimizer is {job.optimizer}, which is rehearsed in our engine alone: try adamw")
    given = {"seq": job.seq, "mbs": layout.mbs, "gas": layout.gas, "gradients": job.gradients, "recompute": layout.recompute}
    return tuple(f"--{name}={value}" for name, value in given.items())


def engine_named(name: str) -> ForeignEngine:
    """By its own name or another."""
    known = {each: one for one in ENGINES.values() for each in (one.name, *one.other_names)}
    if name not in known:
        raise SpecError(f"--engine is '{name:.40}', which is none that can be rehearsed: {nearest(name[:40], known)}")
    return known[name]


@dataclass(frozen=True)
class ForeignRequest:
    program: str
    """a script's file, or an engine's configuration"""
    world: int
    rank: int = 0
    engine: str | None = None
    """None: a script"""
    arguments: tuple[str, ...] = ()
    steps: int = FIRST_STEPS
    gpus_per_node: int = GPUS_PER_NODE
    device: str = "meta"
    """meta: tensors without memory; cuda: one real GPU"""
    count: bool = True
    """on a GPU: run the last step, which counts operators and may need more memory than those that are measured"""
    only_shapes: bool = False
    """end when the pipeline's first stage, which this rank has, knows the shapes of what it sends"""
    notes: tuple[str, ...] = field(default=())

    def checked(self) -> ForeignRequest:
        """SpecError for what cannot run; with a note about a version that was not tested."""
        if not 0 <= self.rank < self.world:
            raise SpecError(f"--rank is {self.rank} but --world has ranks 0 to {self.world - 1}: try 0")
        check_device(self.device)
        if self.steps < FIRST_STEPS:
            raise SpecError(f"--steps is {self.steps} but the first step only creates optimizer states: try {FIRST_STEPS}")
        if self.on_gpu and self.steps < FIRST_GPU_STEPS:
            raise SpecError(
                f"--steps is {self.steps} but on a GPU the last step is not measured, nor is the first: try {GPU_STEPS}"
            )
        if self.engine is None:
            _readable("--script", self.program, ".py")
            return self
        engine = engine_named(self.engine)
        version = engine.installed()
        _check_configuration(engine, version, self.program)
        found = replace(self, engine=engine.name)
        if version in engine.tested:
            return found
        note = f"{engine.name} {version} was not tested; {' and '.join(engine.tested)} {'were' if engine.tested[1:] else 'was'}"
        return replace(found, notes=(*self.notes, note))

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def environment(self) -> dict[str, str]:
        """As torchrun sets it for this rank; on a real GPU the rank is alone on its node, since there is one GPU."""
        local = 1 if self.on_gpu else min(self.gpus_per_node, self.world)
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.rank % local,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": self.rank // local,
            "MASTER_PORT": 29500,
        }
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "localhost"}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> ForeignRequest:
        return cls(**{**data, "arguments": tuple(data["arguments"]), "notes": tuple(data["notes"])})


def _check_configuration(engine: ForeignEngine, version: str, config: str) -> None:
    """Libraries read files. torchtitan 0.2 reads TOML, 0.3 runs a Python function."""
    if engine.library:
        _readable("--config", config, "")
        return
    file = config.partition(":")[0]
    toml, old = file.endswith(".toml"), version.startswith("0.2.")
    if old and not toml:
        raise SpecError(f"--config is '{config:.80}' but {engine.name} {version} reads TOML: try a file such as config.toml")
    if toml and not old:
        raise SpecError(
            f"--config is '{config:.80}', which {engine.name} 0.2 reads, and {version} is installed: name a function, such as "
            "config.py:plan or llama3:llama3_debugmodel, or `pip install torchtitan==0.2.2`"
        )
    if toml or file.endswith(".py"):
        _readable("--config", file, "")
    elif ":" not in config:
        raise SpecError(f"--config is '{config:.80}': name a file or a function, such as config.py:plan")


def _readable(option: str, file: str, ending: str) -> None:
    if not os.path.isfile(file):
        raise SpecError(f"{option} is '{file:.80}', which is not a file: name one, such as train{ending or '.py'}")


@dataclass(frozen=True)
class ForeignRehearsal:
    """Memory, FLOPs and collectives of one rank in one step."""

    rank: int
    world: int
    step: int
    peak: int
    """bytes of all tensors at the peak; on a GPU the allocator's"""
    moment: str
    """of the peak; empty on a GPU"""
    memory: dict[str, int]
    """by owner at the peak; empty on a GPU"""
    most: dict[str, int]
    """maximum of each owner, at the peak or not"""
    flops: dict[str, int]
    """by operator; attention counts its causal half where it is causal, without recomputation in its backward kernel"""
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...]
    torch: str
    engine: str | None
    """with its version"""
    seconds: float = 0.0
    """that the rehearsal took"""
    gpu: str | None = None
    """its name, if it is a real one"""
    step_s: float | None = None
    """on a GPU: the mean of the measured steps, in which collectives take no time"""

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> ForeignRehearsal:
        data["collectives"] = tuple(Collective(**one) for one in data["collectives"])
        return cls(**{**data, "notes": tuple(data["notes"])})


class CannotRehearseError(Exception):
    """A sentence: why a program cannot run here."""
