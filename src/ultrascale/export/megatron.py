"""Megatron-LM: a script that starts pretrain_gpt.py (its megatron/training/arguments.py, core 0.15 and 0.16).

Any such script is read; none is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ultrascale.export import header, megatron_model, shell
from ultrascale.export import table as row
from ultrascale.export.common import EngineFormat, File, quoted
from ultrascale.export.megatron_model import has_experts, has_latents
from ultrascale.export.table import MAY_CHANGE, PlanFields, Setting, SettingsReader, UnmodelledSettings, World
from ultrascale.schedules import REGISTRY
from ultrascale.specs.blocks import RopeScaling
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import mapping_of
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

TITLE = "Megatron-LM"
_SCHEDULES = tuple(spec for spec in REGISTRY.values() if spec.runs_in("megatron"))  # by the stages of a rank
_CONTEXT = {"p2p": "zigzag", "allgather": "allgather", "a2a": "ulysses", "all_gather": "allgather"}  # p2p: balanced ring
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_STATES = {"fp32": "adamw", "bf16": "adamw-bf16", "fp8": "adamw-8bit", "fp16": "adamw-bf16"}
_BACKENDS = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "plain", "local": "plain"}
_CHEAP_MODULES = ["layernorm", "moe_act"]  # what experts make that is cheap to repeat
_PRECISIONS: row.Cases = {
    "bf16": {"--bf16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "fp16": {"--fp16": True},
}
_NODES, _GPUS = "nodes", "gpus_per_node"  # of the launcher
ARGUMENTS = "MODEL_ARGS"  # the arguments in a model_config.yaml of its functional tests
_SBATCH = re.compile(r"^#SBATCH\s+--?([\w-]+)[= ]\s*(\S+)", re.MULTILINE)


def _virtual(p: PlanFields) -> int:
    return p.layout.virtual_stages if REGISTRY[p.layout.schedule] in _SCHEDULES else 1


def _uneven(p: PlanFields) -> str | None:
    """Layers that no even cut fits, the longer stages first: `Et*3|t*3|t*2L`."""
    stages = p.layout.pp * _virtual(p)
    short, longer = divmod(p.model.layers, stages)
    if p.layout.pp == 1 or not longer:
        return None
    return "E" + "|".join(f"t*{short + (1 if stage < longer else 0)}" for stage in range(stages)) + "L"


def _read_virtual(s: SettingsReader) -> Any:
    pp = s["layout.pp"]
    if "--pipeline-model-parallel-layout" in s:
        stages = _stages(str(s.value("--pipeline-model-parallel-layout")))
        if stages % pp:
            raise s.error(f"--pipeline-model-parallel-layout has {stages} stages for {pp} ranks: try {pp}")
        return stages // pp
    if "--num-layers-per-virtual-pipeline-stage" in s:
        layers, each = s.whole("--num-layers"), s.whole("--num-layers-per-virtual-pipeline-stage")
        return max(1, layers // pp // each)
    return s.whole("--num-virtual-stages-per-pipeline-rank", 1)


def _read_schedule(s: SettingsReader) -> str:
    named = next(spec.name for spec in _SCHEDULES if spec.takes(s["layout.virtual_stages"]))
    return s.filled_schedule(named) if s["layout.pp"] > 1 else named


def _stages(layout: str) -> int:
    """Stages of `E|(t|)*3,tt|L`: its bars, with those in repeated brackets."""
    bars = 1
    for part, times in re.findall(r"\(([^()]*)\)(?:\*(\d{1,5}))?", layout):
        bars += part.count("|") * int(times or 1)
    rest = re.sub(r"\([^()]*\)(?:\*\d{1,5})?", "", layout)
    for times in re.findall(r"\|\*(\d{1,5})", rest):
        bars += int(times) - 1
    return bars + rest.count("|")


def _recompute_modules(p: PlanFields) -> list[str]:
    """What selective recomputation repeats in this model; of a dense one attention, as fused attention leaves nothing else."""
    if p.model.mla is not None:
        return ["mla_up_proj"]
    return ["core_attn"] if p.model.moe is None else _CHEAP_MODULES


def _write_recompute(p: PlanFields) -> dict[str, Any]:
    if p.layout.recompute == "selective":
        return {"--recompute-granularity": "selective", "--recompute-modules": _recompute_modules(p)}
    if p.layout.recompute == "none":
        return {}
    layers = p.layout.recompute_layers  # of each stage, the first ones
    method = {"--recompute-method": "block" if layers else "uniform", "--recompute-num-layers": layers or 1}
    return {"--recompute-granularity": "full", **method}


def _read_recompute_modules(s: SettingsReader) -> str | None:
    """Selective recomputation of other modules than `_recompute_modules` would write."""
    if s["layout.recompute"] != "selective":
        return None
    given = s.value("--recompute-modules", "core_attn")
    names = {str(name) for name in (given if isinstance(given, list) else str(given).split())}
    others = names - {"core_attn", "mla_up_proj", *_CHEAP_MODULES}
    if others:
        s.notes.append(f"{MAY_CHANGE}--recompute-modules {' '.join(sorted(others))}")
    if not names & {"mla_up_proj", *_CHEAP_MODULES}:
        return "attention" if has_latents(s) or has_experts(s) else None
    return "cheap" if has_latents(s) and names & set(_CHEAP_MODULES) else None


def _recompute(s: SettingsReader) -> str:
    grain = s.word("--recompute-granularity", {"full": "full", "selective": "selective", "none": "none"}, "none")
    if s.flag("--checkpoint-activations") or "--activations-checkpoint-method" in s:  # until 3.0
        return "full"
    return "selective" if grain == "none" and s.flag("--recompute-activations") else str(grain)


def _recompute_layers(s: SettingsReader) -> int | None:
    if s["layout.recompute"] != "full" or s.value("--recompute-method") != "block":
        return None
    stages = s["layout.pp"] * s["layout.virtual_stages"]
    layers = s.whole("--recompute-num-layers", 1)
    return layers if layers < -(-s.whole("--num-layers") // stages) else None


def _needed_gpus(s: SettingsReader) -> int:
    """The least GPUs of this layout: those of one replica, and those over which experts are spread."""
    sizes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    tp, pp, cp = (s.whole(key, 1) for key in sizes)
    experts = s.whole("--expert-model-parallel-size", 1) * s.whole("--expert-tensor-parallel-size", tp)
    return math.lcm(tp * pp * cp, pp * experts if s.whole("--num-experts", 0, least=0) else 1)


def _data_ranks(s: SettingsReader) -> int:
    started = (s.value(_NODES) or 1) * (s.value(_GPUS) or 0)
    if started and s.world.gpus is not None and started < _needed_gpus(s) <= s.world.gpus:
        s.notes.append(f"the script starts {started} processes, too few for its layout: {s.world.gpus} GPUs are counted")
    return s.data_parallel(s["layout.tp"] * s["layout.pp"] * s["layout.cp"])


def _expert_cut(s: SettingsReader) -> int | None:
    """None where it is the usual one."""
    tp, etp = s["layout.tp"], s.whole("--expert-tensor-parallel-size", s["layout.tp"])
    usual = tp if s["layout.dp"] * s["layout.cp"] % s["layout.ep"] == 0 else 1
    return None if etp == usual or not s.whole("--num-experts", 0, least=0) else etp


def _overlaps(p: PlanFields) -> bool:
    """Unless the plan is for a Megatron-LM without it."""
    return p.job.framework.engine != "megatron" or p.job.framework.overlap > 0


def _sharding(p: PlanFields) -> dict[str, Any]:
    stage = p.layout.zero
    if not stage:
        return {}
    found: dict[str, Any] = {"--use-distributed-optimizer": True, "--overlap-param-gather": _overlaps(p)}
    if stage > 1:
        found |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": list(_SHARDING)[stage]}
        found |= {"--no-gradient-accumulation-fusion": True, "--ckpt-format": "fsdp_dtensor"}
    return found


def _zero(s: SettingsReader) -> int:
    strategy = s.word("--data-parallel-sharding-strategy", _SHARDING, "no_shard")
    stage = 1 if s.flag("--use-distributed-optimizer") else 0
    if s.flag("--use-megatron-fsdp"):
        return int(strategy)
    return 3 if s.flag("--use-torch-fsdp2") else stage


def _zero_shards(s: SettingsReader) -> int | None:
    ranks, copies = s["layout.dp"] * s["layout.cp"], s.whole("--num-distributed-optimizer-instances", 1)
    if copies > 1 and ranks % copies:
        raise s.error(f"--num-distributed-optimizer-instances is {copies} for {ranks} data ranks: try {ranks}")
    return ranks // copies if s["layout.zero"] and copies > 1 else None


_CUT = (
    row.whole("--tensor-model-parallel-size", "layout.tp", 1),
    row.whole("--pipeline-model-parallel-size", "layout.pp", 1),
    row.whole("--context-parallel-size", "layout.cp", 1),
    Setting(path="layout.dp", read=_data_ranks),
    row.flag("--sequence-parallel", "layout.sequence_parallel", when=row.above_one("layout.tp")),
    row.word("--cp-comm-type", "layout.context_parallel", _CONTEXT, "p2p", when=row.above_one("layout.cp")),
    row.whole("--expert-model-parallel-size", "layout.ep", 1, written=has_experts),
    Setting("--expert-tensor-parallel-size", "layout.etp", lambda p: p.layout.expert_cut, _expert_cut, written=has_experts),
    Setting("--pipeline-model-parallel-layout", write=_uneven),
    Setting(
        "--num-virtual-stages-per-pipeline-rank",
        "layout.virtual_stages",
        _virtual,
        _read_virtual,
        written=lambda p: _virtual(p) > 1 and _uneven(p) is None,
    ),
    Setting(path="layout.schedule", read=_read_schedule),
    Setting(path="layout.recompute", write=_write_recompute, read=_recompute),
    Setting(path="layout.recompute_layers", read=_recompute_layers),
    Setting(path="framework.selective", read=_read_recompute_modules),
    Setting(
        "--overlap-grad-reduce",
        "layout.data_parallel",
        lambda p: (p.layout.data_parallel in ("bucketed", "hooks") or p.layout.zero > 0) and _overlaps(p),
        lambda s: "bucketed" if s.flag("--overlap-grad-reduce") or s["layout.zero"] else "naive",
    ),
    Setting(path="layout.zero", write=_sharding, read=_zero),
    Setting(
        "--num-distributed-optimizer-instances",
        "layout.zero_shards",
        lambda p: p.layout.data_ranks // p.layout.shards,
        _zero_shards,
        written=lambda p: p.layout.zero > 0 and p.layout.shards < p.layout.data_ranks,
    ),
)


def _read_overlap(s: SettingsReader) -> float | None:
    """Of gradient reductions and of ZeRO's gathers: all, half or none hides behind computation."""
    reduces = s.flag("--overlap-grad-reduce")
    gathers = s.flag("--overlap-param-gather") or not s["layout.zero"]
    alone = s["layout.dp"] * s["layout.cp"] == 1
    return None if alone or (reduces and gathers) else 0.5 if reduces or (gathers and s["layout.zero"]) else 0.0


def _overlaps_tp(p: PlanFields) -> bool:
    """Transformer Engine's user buffers: they need sequence parallelism and the links of one node."""
    layout, framework = p.layout, p.job.framework
    there = layout.tp > 1 and layout.sequence_parallel and layout.tp <= p.job.cluster.fast_domain
    return there and (framework.engine != "megatron" or framework.tensor_overlap > 0)


def _loss(p: PlanFields) -> dict[str, Any] | None:
    if p.job.framework.engine == "megatron" and p.job.framework.loss != "overwritten":
        return None
    return {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"}


def _read_loss(s: SettingsReader) -> str:
    fused = s.flag("--cross-entropy-loss-fusion") and s.value("--cross-entropy-fusion-impl", "native") == "te"
    return "overwritten" if fused else "in-place"


def _framework(field: str, value: Any) -> Callable[[PlanFields], bool]:
    """Whether a plan for Megatron-LM has this value of a field of its framework."""
    return lambda p: p.job.framework.engine == "megatron" and getattr(p.job.framework, field) == value


def _read_fp8_gather(s: SettingsReader) -> bool | None:
    if not s.flag("--fp8-param-gather"):
        return None
    if s["layout.zero"] in (1, 2):
        s.notes.append("--fp8-param-gather is counted with ZeRO-3 alone")
    return True


def _overlaps_shared_experts(p: PlanFields) -> bool:
    framework, moe = p.job.framework, p.model.moe
    there = moe is not None and bool(moe.shared_experts) and p.layout.ep > 1 and p.layout.dispatcher == "alltoall"
    return there and (framework.engine != "megatron" or framework.shared_expert_overlap)


# What the estimate assumes of Megatron-LM, and the options that switch it on.
_FRAMEWORK = (
    Setting(path="framework.overlap", read=_read_overlap),
    Setting(
        "--tp-comm-overlap",
        "framework.tp_comm_overlap",
        _overlaps_tp,
        lambda s: s.flag("--tp-comm-overlap") if s["layout.tp"] > 1 else None,
    ),
    Setting(path="framework.loss", write=_loss, read=_read_loss),
    Setting("--fp8-param-gather", "framework.fp8_gather", _framework("fp8_gather", True), _read_fp8_gather),
    Setting(
        "--no-gradient-accumulation-fusion",
        "framework.accumulation",
        _framework("accumulation", "separate"),
        # Megatron-FSDP asks for it, and accumulates in its own way.
        lambda s: "separate" if s.flag("--no-gradient-accumulation-fusion") and not s.flag("--use-megatron-fsdp") else None,
    ),
    Setting(
        "--account-for-loss-in-pipeline-split",
        "framework.stage_split",
        _framework("stage_split", "layers-and-head"),
        lambda s: "layers-and-head" if s.flag("--account-for-loss-in-pipeline-split") else None,
    ),
    Setting(
        "--overlap-moe-expert-parallel-comm",
        "framework.expert_overlap",
        _framework("expert_overlap", "microbatches"),
        lambda s: "microbatches" if s.flag("--overlap-moe-expert-parallel-comm") else None,
    ),
    Setting(
        "--moe-shared-expert-overlap",
        "framework.shared_expert_overlap",
        _overlaps_shared_experts,
        lambda s: s.flag("--moe-shared-expert-overlap") if s["layout.ep"] > 1 else None,
        when=has_experts,
    ),
    Setting(path="framework.routing", read=lambda s: "capacity" if "--moe-expert-capacity-factor" in s else None),
    Setting(
        path="framework.transformer_engine",
        read=lambda s: s.word("--transformer-impl", {"transformer_engine": None, "local": False}, "transformer_engine"),
    ),
)


def _precision(s: SettingsReader) -> str:
    bf16, fp16 = s.flag("--bf16"), s.flag("--fp16")
    if bf16 and fp16:
        raise SpecError(f"{s.where} asks for --bf16 and --fp16 at once: keep one")
    eight = "--fp8-format" in s or s.flag("--fp8-hybrid") or s.flag("--fp8-e4m3")
    return "fp8" if eight else "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _optimizer(p: PlanFields) -> dict[str, Any]:
    name, training = p.job.optimizer, p.training
    if name.startswith("sgd"):
        return {"--optimizer": "sgd", "--sgd-momentum": training.beta1 if name == "sgd-momentum" else 0.0}
    if name == "muon":
        matched = training.muon_scale == "match_rms_adamw"
        scale = {
            "--muon-scale-mode": "spectral" if matched else "shape_scaling",
            "--muon-extra-scale-factor": 0.2 if matched else 1.0,
        }
        momentum = {"--muon-momentum": training.muon_momentum, "--muon-use-nesterov": True}
        # Whole matrices, as here: by default each tp rank orthogonalises its own part.
        return {"--optimizer": "muon", **momentum, **scale, "--muon-tp-mode": "duplicated", "--ckpt-format": "torch"}
    found: dict[str, Any] = {"--optimizer": "adam", "--adam-beta1": training.beta1, "--adam-beta2": training.beta2}
    states = next(dtype for dtype, optimizer in _STATES.items() if optimizer == name)
    if p.layout.offload != "none" or states != "fp32":
        found |= {"--use-precision-aware-optimizer": True, "--exp-avg-dtype": states, "--exp-avg-sq-dtype": states}
    return found


def _read_optimizer(s: SettingsReader) -> str:
    adam, momentum = s.word("--exp-avg-dtype", _STATES, "fp32"), s.number("--sgd-momentum", 0.9)
    names = {"adam": adam, "muon": "muon", "dist_muon": "muon", "sgd": "sgd-momentum" if momentum else "sgd"}
    return str(s.word("--optimizer", names, "adam"))


def _dropout(p: PlanFields) -> dict[str, Any]:
    rate = 0.1 if p.job.dropout else 0.0
    return {"--attention-dropout": rate, "--hidden-dropout": rate}


def _read_dropout(s: SettingsReader) -> bool:
    return s.number("--attention-dropout", 0.1) + s.number("--hidden-dropout", 0.1) > 0


_NUMBERS = (
    row.word("--attention-backend", "job.attention", _BACKENDS, "auto"),
    row.cases("job.precision", _PRECISIONS, read=_precision),
    row.flag("--grad-reduce-in-bf16", "job.gradients", "bf16", "fp32"),
    Setting("--accumulate-allreduce-grads-in-fp32", write=lambda p: p.job.gradients != "bf16"),
    Setting(path="job.optimizer", write=_optimizer, read=_read_optimizer),
    row.flag("--optimizer-cpu-offload", "layout.offload", "optimizer", "none", write=lambda p: p.layout.offload != "none"),
    Setting(path="job.dropout", write=_dropout, read=_read_dropout),
)


def _steps(s: SettingsReader) -> int | None:
    if "--train-samples" in s:
        batch = s.whole("--global-batch-size", s["layout.dp"] * s["layout.mbs"])
        return max(1, s.whole("--train-samples") // batch)
    return s.whole("--train-iters") if "--train-iters" in s else None


def _accumulation(s: SettingsReader) -> int:
    dp, mbs = s["layout.dp"], s["layout.mbs"]
    if "--rampup-batch-size" in s:
        s.notes.append("--rampup-batch-size: the batch is counted at its full size")
    return s.accumulation(s.whole("--global-batch-size", dp * mbs), dp, mbs, "--global-batch-size")


def _rates(p: PlanFields) -> dict[str, Any]:
    return {
        "--lr": p.training.lr,
        "--min-lr": p.lowest_rate,
        "--lr-warmup-iters": p.training.warmup,
        "--lr-decay-style": "cosine",
        "--weight-decay": p.training.weight_decay,
        "--clip-grad": p.training.clip,
        "--mock-data": True,
        "--save": "checkpoints",
        "--load": "checkpoints",
        "--save-interval": 1000,
        "--log-interval": 1,
        "--eval-iters": 0,
    }


_RUN = (
    row.whole("--seq-length", "job.seq"),
    row.whole("--micro-batch-size", "layout.mbs"),
    Setting("--global-batch-size", "layout.gas", lambda p: p.sequences, _accumulation),
    Setting("--train-iters", "job.steps", lambda p: p.training.steps, _steps),
    Setting(write=_rates),
)


def files(job: Job, layout: Layout, settings: dict[str, Any], comments: list[str]) -> tuple[File, ...]:
    notes = ["Data is mocked and the tokenizer a stand-in: put --data-path and your --tokenizer-type in their places."]
    if job.model.activation == "relu":
        notes.append("Megatron's ReLU is squared.")
    cut = layout.tp > 1 or layout.cp > 1
    connections = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if cut and "--use-megatron-fsdp" not in settings else ""
    words = [_option(name, value) for name, value in settings.items() if value is not False]
    text = f"""#!/usr/bin/env bash
{header.commented(TITLE, comments, *notes)}set -euo pipefail
{connections}torchrun \\
  --nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.gpus_per_node} \\
  --node-rank "${{NODE_RANK:-0}}" --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON_LM:-.}}"/pretrain_gpt.py \\
  """
    return (File("run.sh", text + " \\\n  ".join(words) + "\n"),)


def _option(name: str, value: Any) -> str:
    given = [] if value is True else value if isinstance(value, list) else [value]
    return " ".join([name, *(quoted(str(one)) for one in given)])


def parse(text: str, where: str) -> dict[str, Any]:
    """The arguments after pretrain_gpt.py, and under names of their own what the launcher says before it."""
    if where.endswith((".yaml", ".yml")):
        return _parse_yaml(text, where)
    renamed = UnmodelledSettings.of("megatron").renamed
    starts = []
    for words in shell.commands(text, where):
        at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
        if at is not None:
            options = shell.options(words[at:])
            if "--micro-batch-size" in {renamed.get(name, name) for name in options}:
                starts.append((shell.options(words[:at]), options))
    if not starts:
        raise SpecError(
            f"{where} starts no training of Megatron-LM: expected pretrain_gpt.py with --micro-batch-size and so on"
        )
    (before, options), batch = starts[-1], dict(_SBATCH.findall(text))
    nodes = before.get("--nnodes") or batch.get("nodes") or batch.get("N")
    each = before.get("--nproc-per-node") or batch.get("gpus-per-node") or batch.get("gres") or batch.get("ntasks-per-node")
    return {**options, _NODES: _count(nodes), _GPUS: _count(each)}


def _parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A model_config.yaml of Megatron-LM's functional tests."""
    given = mapping_of(text, where, "YAML").get(ARGUMENTS)
    if not isinstance(given, Mapping):
        raise SpecError(f"{where}: {ARGUMENTS} must be a mapping of arguments, such as --num-layers: 32")
    options = {f"--{str(name).removeprefix('--').replace('_', '-')}": value for name, value in given.items()}
    return {**options, _NODES: None, _GPUS: None}


def _count(value: Any) -> int | None:
    digits = re.fullmatch(r"(?:gpu:(?:\w+:)?)?(\d{1,6})", value) if isinstance(value, str) else None
    return int(digits[1]) if digits and int(digits[1]) else None


def _world(script: Any, where: str) -> tuple[int, int] | None:
    """As many nodes as the script starts, or as its layout needs if those are more."""
    nodes, each = script[_NODES] or 1, script[_GPUS]
    if not each:
        return None
    needed = _needed_gpus(SettingsReader((), script, where, World(), UnmodelledSettings.of("megatron")))
    return (needed // each, each) if needed > nodes * each and needed % each == 0 else (nodes, each)


_SCALING = (
    "Megatron-LM has Llama 3's scaling of a context of 8192, linear interpolation by whole factors, and with latent attention "
    "YaRN of a context of 4096"
)
_BIASES = "Megatron-LM has biases everywhere, in qkv alone, or nowhere"

ENGINE = EngineFormat(
    name="megatron",
    title=TITLE,
    framework="megatron-core",
    config="run.sh",
    table=(*megatron_model.TABLE, *_CUT, *_FRAMEWORK, *_NUMBERS, *_RUN),
    lost={
        "layout.schedule": "Megatron-LM has 1f1b, and interleaved with virtual stages",
        "layout.virtual_stages": "only Megatron-LM's interleaved schedule has them",
        "layout.context_parallel": "Megatron-LM has the balanced ring, all-gather and all-to-all",
        "layout.data_parallel": "Megatron-LM reduces in buckets, behind backward or after it",
        "layout.keep_gathered": "Megatron-FSDP gathers again for backward",
        "layout.offload": "Megatron-LM offloads optimizer states, not parameters",
        "job.gradients": "a setting of bf16 training",
        "model.vocab": "Megatron-LM pads it to a multiple of tp",
        "model.max_positions": "Megatron-LM's positions reach at least as far as a sequence",
        "model.activation": "Megatron-LM has swiglu, squared relu, and gelu: tanh's with biases, else the exact one",
        **dict.fromkeys((f"model.rope_scaling.{name}" for name in RopeScaling.model_fields), _SCALING),
        **dict.fromkeys(("model.qkv_bias", "model.attention_output_bias", "model.mlp_bias"), _BIASES),
        "model.moe.shared_experts": "Megatron-LM counts their width alone",
    },
    files=files,
    parse=parse,
    start="bash {folder}/run.sh",
    environment="MEGATRON_LM=/path/to/Megatron-LM ",
    needs="Megatron-LM must be there, in the working directory or where MEGATRON_LM says.",
    ignored=(
        *(_NODES, _GPUS),
        *("--expert-tensor-parallel-size", "--recompute-method", "--recompute-num-layers", "--ckpt-format", "--eval-iters"),
        *("--fp8-recipe", "--exp-avg-sq-dtype", "--sequence-parallel", "--cp-comm-type"),
        *("--accumulate-allreduce-grads-in-fp32", "--use-precision-aware-optimizer"),
        *("--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-router-bias-update-rate"),
    ),
    world=_world,
)
