"""Programs for `verify --runs`: launches of one run that are killed, resumed, rolled back and relaid out. No torch.

Each launch trains some steps under a layout, evaluates and saves on the way, and ends by itself, by SIGTERM, or by kill -9 at a
given point. Programs are drawn at random from what the engine accepts; of many, those are taken that use the most pairs of
features not used before.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from ultrascale.measure.verify_layouts import compositions, small_job
from ultrascale.specs.batch_ramp import text
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_mapping, write_text
from ultrascale.specs.folders import CHECKPOINTS, step_folder
from ultrascale.specs.job import Job
from ultrascale.specs.layout import DEGREES, Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.specs.validate import build
from ultrascale.train.supported import job_problem, layout_problem

STEPS, SEQ, SEQUENCES = 6, 32, 8
RAMPS = tuple(text([(SEQ * sequences, 2 * SEQ * SEQUENCES)]) for sequences in (SEQUENCES // 4, SEQUENCES // 2))
LENGTHS = tuple(text([(SEQ // parts, 2 * SEQ * SEQUENCES)]) for parts in (4, 2))
LR = 2e-3  # at 1e-2, updates are as large as weights, and one rounding grows to half a gradient norm within five steps
TIMEOUT_S = 60.0
CANDIDATES_PER_PROGRAM = 64  # programs drawn for each one that is taken
_DONE: dict[str, Any] = {"end": "done", "at": 0, "rank": None, "phase": "update"}
PHASES = ("reading", "forward and backward", "update", "saving", "evaluating")

_DENSE: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "head_dim": 16, "tied_embeddings": True},
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "max_positions": 64,
        "kv_heads": 4,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_embeddings": True,
    },
    "mistral": {"sliding_window": 12},
    "mixtral": {"ffn": 0, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 16}},
    "gemma": {
        "norm_placement": "both",
        "qk_norm": True,
        "activation": "geglu",
        "embedding_scale": 5.7,
        "attention_scale": 0.3,
        "attention_softcap": 2.0,
        "logits_softcap": 3.0,
        "sliding_window": 12,
        "attention_pattern": ("local", "full"),
        "local_rope_theta": 100.0,
        "tied_embeddings": True,
    },
    "gpt-oss": {
        "activation": "clamped_swiglu",
        "swiglu_limit": 1.0,
        "attention_sinks": True,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "sliding_window": 12,
        "attention_pattern": ("local", "full"),
        "moe": {"experts": 4, "top_k": 2, "expert_ffn": 16, "logits_bias": True},
    },
    "qwen3-next": {
        "qk_norm": True,
        "attention_gate": True,
        "linear_attention": {"key_heads": 4, "value_heads": 8, "key_head_dim": 6, "value_head_dim": 4},
        "attention_pattern": ("linear", "full"),
    },
    "nemotron-h": {
        "positions": "none",
        "activation": "relu2",
        "mamba": {"heads": 8, "head_dim": 4, "groups": 4, "state_dim": 6, "min_step": 0.001},
        "attention_pattern": ("mamba", "none", "full", "none"),
        "one_sublayer": True,
    },
    "llama4": {
        "qk_l2_norm": True,
        "sliding_window": 8,
        "chunked_window": True,
        "attention_pattern": ("local", "full"),
        "rope_pattern": (True, False),
        "attention_temperature": {"scale": 0.5, "tokens": 4},
        "moe": {
            "experts": 4,
            "top_k": 1,
            "expert_ffn": 16,
            "interval": 2,
            "shared_experts": 1,
            "router": "sigmoid",
            "renormalize": False,
            "scale_inputs": True,
        },
    },
    "olmo": {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    "cohere": {
        "norm": "layernorm",
        "norm_bias": False,
        "parallel_residual": "one_norm",
        "rope_pattern": (True, False),
        "rotary_dim": 4,
        "logits_scale": 0.5,
    },
    "deepseek": {
        "kv_heads": 4,
        "mla": {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_positions": 8,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        "moe": {
            "experts": 8,
            "top_k": 2,
            "expert_ffn": 16,
            "dense_layers": 1,
            "shared_experts": 1,
            "router": "sigmoid",
            "router_bias": True,
        },
    },
}
MODELS = tuple(FAMILIES)


@cache
def small_model(name: str) -> Model:
    """A model of this family that steps in milliseconds."""
    if name not in FAMILIES:
        raise SpecError(f"program.model is '{name:.40}' but must be one of {', '.join(MODELS)}")
    return Model(name=name, **{**_DENSE, **FAMILIES[name]})


class Launch(BaseModel):
    """One start of the run: its layout, what it does, how it ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Layout
    steps: int = STEPS
    lr: float = LR
    eval_every: int = 0
    save_every: int = 2
    background: bool = True
    roll_back: int | None = None
    """resume from the last checkpoint up to this step; None: from the newest"""
    end: Literal["done", "stop", "kill"] = "done"
    at: int = 0
    """the step during which it is stopped or killed"""
    phase: str = "update"
    rank: int | None = None
    """the rank to kill; None: all ranks and their launcher"""

    def to_the_end(self) -> Launch:
        return self.model_copy(update={**_DONE, "steps": STEPS})

    def words(self, fields: Sequence[str]) -> list[str]:
        """The overrides of `ultrascale train`; `fields`: of the layout."""
        values = self.layout.model_dump()
        layout = [f"layout.{name}={_text(values[name])}" for name in fields]
        return [
            *layout,
            f"train.lr={self.lr:g}",
            f"train.eval_every={self.eval_every}",
            f"checkpoint.every={self.save_every}",
            f"checkpoint.background={_text(self.background)}",
        ]

    def ending(self) -> str:
        if self.end == "done":
            return ""
        who = (
            "SIGTERM" if self.end == "stop" else "kill -9 of " + ("every process" if self.rank is None else f"rank {self.rank}")
        )
        return f"{who} in step {self.at}, {self.phase}"


class Program(BaseModel):
    """The launches of a run, and the settings that they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "llama"
    precision: str = "fp32"
    optimizer: str = "adamw"
    ema: bool = False
    training: dict[str, Any] = {}
    launches: tuple[Launch, ...]

    @property
    def base_training(self) -> Training:
        """Settings that launches share. A large eps keeps Adam from turning rounding into whole steps."""
        fixed = {"steps": STEPS, "warmup_steps": 0, "eps": 1e-4, "seed": 1, "eval_batches": 1, "timeout_s": TIMEOUT_S}
        return Training().changed(**{"data": "synthetic", **fixed, **self.training})

    def job(self, world: int) -> Job:
        return small_job(small_model(self.model), world, SEQ, SEQUENCES, self.precision).changed(
            optimizer=self.optimizer, ema=self.ema
        )

    def problem(self) -> str | None:
        """Why the engine does not run it."""
        training = self.base_training
        for launch in self.launches:
            job = self.job(launch.layout.gpus)
            if (found := job_problem(job) or layout_problem(job, launch.layout, training)) is not None:
                return found
        return None

    def words(self, number: int) -> list[str]:
        """The overrides of launch `number`: what differs from the defaults, in this launch or one before it."""
        plain = Layout().model_dump()
        layouts = [launch.layout.model_dump() for launch in self.launches[: number + 1]]
        fields = [name for name in plain if any(layout[name] != plain[name] for layout in layouts)]
        launch = self.launches[number]
        common = []
        if number == 0:
            given = self.base_training.model_dump(mode="json")
            default = Training().model_dump(mode="json")
            common = [
                f"train.{name}={_text(value)}" for name, value in given.items() if value != default[name] and name != "steps"
            ]
            common += [f"job.seq={SEQ}", f"job.batch_tokens={SEQ * SEQUENCES}", "checkpoint.keep=0"]
            common += [f"job.precision={self.precision}", f"job.optimizer={self.optimizer}", f"job.ema={_text(self.ema)}"]
        return [f"train.steps={launch.steps}", *common, *launch.words(fields)]

    def commands(self, run: Path, model: Path) -> list[str]:
        """The same as shell commands, with kills as comments."""
        lines = []
        for number, launch in enumerate(self.launches):
            source = f"--model {model} --out {run}" if number == 0 else f"--resume {run}"
            if launch.roll_back is not None and number:
                source += f"/{CHECKPOINTS}/{step_folder(launch.roll_back)}"
            ending = launch.ending()
            lines.append(
                f"ultrascale train {source} --nproc {launch.layout.gpus} {' '.join(self.words(number))}"
                + (f"  # {ending}" if ending else "")
            )
        return lines

    def features(self) -> Iterator[frozenset[str]]:
        """The features that each launch combines."""
        always = {self.model, self.precision, self.optimizer} | {name for name, value in self.training.items() if value}
        always -= {"llama", "fp32", "adamw", "data"}
        always |= {"ema"} if self.ema else set()
        for number, launch in enumerate(self.launches):
            before = self.launches[number - 1] if number else None
            yield frozenset(always | {name for name, used in _features(launch, before).items() if used})

    def pairs(self) -> set[tuple[str, str]]:
        return {pair for features in self.features() for pair in combinations(sorted(features), 2)}

    def save(self, folder: Path) -> tuple[Path, Path]:
        """program.yaml and model.yaml in this folder."""
        folder.mkdir(parents=True, exist_ok=True)
        files = folder / "program.yaml", folder / "model.yaml"
        model = small_model(self.model).model_dump(mode="json", exclude_defaults=True)
        for file, data in zip(files, (self.model_dump(mode="json", exclude_defaults=True), model), strict=True):
            write_text(file, yaml.safe_dump(data, sort_keys=False))
        return files

    @classmethod
    def load(cls, file: Path) -> Program:
        program = build(Program, read_mapping(file, "program"), "program")
        small_model(program.model)
        if not program.launches:
            raise SpecError("program.launches is empty: give at least one launch, such as {layout: {dp: 2}}")
        if (problem := program.problem()) is not None:
            raise SpecError(problem)
        return program


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)


def _features(launch: Launch, before: Launch | None) -> dict[str, object]:
    """Features of a layout and of a launch, each with whether it is used. `before`: the launch that it resumes."""
    layout = launch.layout
    plain_data = not layout.zero and layout.data_ranks > 1
    found: dict[str, object] = {axis: getattr(layout, axis) > 1 for axis in DEGREES}
    found |= {
        f"zero{layout.zero}": layout.zero and layout.data_ranks > 1,
        "hsdp": layout.zero and layout.shards < layout.data_ranks,
        layout.data_parallel: plain_data and layout.data_parallel != "bucketed",
        layout.schedule: layout.pp > 1,
        layout.context_parallel: layout.cp > 1,
        "no sp": layout.tp > 1 and not layout.sequence_parallel,
        f"{layout.recompute} recompute": layout.recompute != "none",
        f"{layout.offload} offload": layout.offload != "none",
        "evaluate": launch.eval_every,
        "async save" if launch.background else "save": launch.save_every,
        "stop": launch.end == "stop",
        "kill all": launch.end == "kill" and launch.rank is None,
        "kill rank": launch.end == "kill" and launch.rank is not None,
    }
    if before is not None:
        found |= {
            "resume": True,
            "relayout": launch.layout != before.layout,
            "roll back": launch.roll_back is not None,
            "new lr": launch.lr != before.lr,
            "more steps": launch.steps > before.steps,
        }
    return found


class ProgramGenerator:
    """Draws programs; of many it takes the one with the most new pairs of features."""

    def __init__(self, seed: int, processes: int = 4) -> None:
        self.random, self.processes = random.Random(seed), processes
        self.covered: Counter[tuple[str, str]] = Counter()
        self.possible: set[tuple[str, str]] = set()
        """pairs of all programs that were drawn"""
        self._uncovered: dict[tuple[str, str], Program] = {}
        """a program for each pair that was drawn but not taken, so that rare pairs need not be drawn again"""

    def next(self) -> Program:
        for program in (self._draw() for _ in range(CANDIDATES_PER_PROGRAM)):
            pairs = program.pairs()
            self.possible |= pairs
            self._uncovered |= dict.fromkeys(sorted(pairs - self.covered.keys()), program)
        candidates = list({id(one): one for one in self._uncovered.values()}.values()) or [program]
        best = max(candidates, key=lambda program: len(program.pairs() - self.covered.keys()))
        self.covered.update(best.pairs())
        self._uncovered = {pair: program for pair, program in self._uncovered.items() if pair not in self.covered}
        return best

    def _draw(self) -> Program:
        while True:
            program = self._any()
            if program.problem() is None:
                return program

    def _any(self) -> Program:
        pick = self.random.choice
        model = pick(MODELS)
        precision = pick(("fp32", "fp32", "fp32", "bf16", "fp16", "fp8"))
        optimizer = pick(("adamw", "adamw", "muon", "sgd-momentum", "sgd"))
        training = self._training(model)
        launches: list[Launch] = []
        for number in range(pick((1, 2, 2, 3, 3))):
            before = launches[-1] if launches else None
            same = before is not None and self.random.random() < 0.25
            layout = before.layout if same and before is not None else self._layout(model)
            launches.append(self._launch(layout, before, number))
        # The last launch always trains to the end.
        launches[-1] = launches[-1].to_the_end()
        ema = self.random.random() < 0.2
        return Program(
            model=model, precision=precision, optimizer=optimizer, ema=ema, training=training, launches=tuple(launches)
        )

    def _training(self, model: str) -> dict[str, Any]:
        chance, found = self.random.random, dict[str, Any]()
        if chance() < 0.2:
            found |= {"document_mask": True, "data": "stdlib"}
        if small_model(model).moe is not None:
            if chance() < 0.4:
                found["balance_loss"] = 0.01
            if chance() < 0.3:
                found["capacity_factor"] = 1.25
            if chance() < 0.3:
                found["expert_overlap"] = self.random.choice(("gradients", "rows"))
        if chance() < 0.2:
            found["reduce_every_microbatch"] = True
        if chance() < 0.2:
            found["z_loss"] = 1e-3
        if chance() < 0.2:
            found["clip_value"] = 5e-3
        if chance() < 0.2:
            found["batch_ramp"] = self.random.choice(RAMPS)
        if chance() < 0.2:
            found["seq_stages"] = self.random.choice(LENGTHS)
        return found

    def _launch(self, layout: Layout, before: Launch | None, number: int) -> Launch:
        pick, chance = self.random.choice, self.random.random
        fields: dict[str, Any] = {
            "layout": layout,
            "eval_every": pick((0, 1, 2, 2, 3)),
            "save_every": pick((1, 2, 2, 3)),
            "background": chance() < 0.7,
            "steps": pick((STEPS, STEPS, STEPS - 2)) if number == 0 else STEPS,
        }
        if before is not None and chance() < 0.35:
            fields["roll_back"] = pick((1, 2, 3, 4))
        if before is not None:
            fields["lr"] = pick((before.lr, before.lr, before.lr / 2))
        fields["end"] = pick(("done", "stop", "kill", "kill", "kill")) if fields["steps"] == STEPS else "done"
        if fields["end"] != "done":
            at = fields["at"] = self.random.randint(2 if number == 0 else 3, STEPS - 1)
            happens = list(PHASES[:3])
            happens += ["saving"] if at % fields["save_every"] == 0 else []
            happens += ["evaluating"] if fields["eval_every"] and at % fields["eval_every"] == 0 else []
            fields["phase"] = pick(happens) if fields["end"] == "kill" else "update"
            fields["rank"] = self.random.randrange(layout.gpus) if fields["end"] == "kill" and chance() < 0.5 else None
        return Launch(**fields)

    def _layout(self, model: str) -> Layout:
        layouts = _layouts(model, self.random.choice([size for size in (1, 2, 2, 3, 4, 4, 4, 8) if size <= self.processes]))
        layout = self.random.choice(layouts)
        if layout.zero and layout.shards > 1 and self.random.random() < 0.15:
            return layout.model_copy(update={"offload": self.random.choice(("optimizer", "parameters"))})
        return layout


@cache
def _layouts(model: str, world: int) -> list[Layout]:
    job = Program(model=model, launches=()).job(world)
    return [layout for layout in compositions(job, world) if SEQUENCES % layout.dp == 0] or [Layout()]


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest simplifications first."""
    launches = program.launches
    for number in range(len(launches)):
        if len(launches) > 1:
            *earlier, last = launches[:number] + launches[number + 1 :]
            yield program.model_copy(update={"launches": (*earlier, last.to_the_end())})
    plain: dict[str, Any] = {"model": "llama", "precision": "fp32", "optimizer": "adamw", "ema": False}
    for name, value in plain.items():
        if getattr(program, name) != value:
            yield program.model_copy(update={name: value})
    for name in program.training:
        yield program.model_copy(update={"training": {key: value for key, value in program.training.items() if key != name}})
    for number, launch in enumerate(launches):
        for fields in _simpler_launch(launch):
            changed = launch.model_copy(update=fields)
            yield program.model_copy(update={"launches": (*launches[:number], changed, *launches[number + 1 :])})


def _simpler_launch(launch: Launch) -> Iterator[dict[str, Any]]:
    layout = launch.layout
    for axis in ("pp", "cp", "tp", "dp"):
        if getattr(layout, axis) > 1:
            yield {"layout": _without(layout, axis), "rank": None}
    if launch.end != "done":
        yield _DONE
    for name, value in {"roll_back": None, "eval_every": 0, "lr": LR, "steps": STEPS, "background": False}.items():
        if getattr(launch, name) != value:
            yield {name: value}
    plain = Layout()
    names = ("ep", "zero", "recompute_layers", "recompute", "offload", "zero_shards", "keep_gathered", "data_parallel")
    for name in (*names, "context_parallel"):
        if getattr(layout, name) != getattr(plain, name):
            other = {"recompute_layers": None} if name == "recompute" else {}
            yield {"layout": layout.model_copy(update={name: getattr(plain, name), **other})}


def _without(layout: Layout, axis: str) -> Layout:
    fields: dict[str, Any] = {axis: 1, "zero_shards": None}
    if axis == "pp":
        fields |= {"schedule": "1f1b", "virtual_stages": 1}
    if axis in ("dp", "cp"):
        fields["ep"] = 1
    if axis == "dp":
        fields["gas"] = layout.gas * layout.dp
    return layout.model_copy(update=fields)
