"""Any script that starts Megatron-LM's pretrain_gpt.py, read as a layout; it is never run."""

from __future__ import annotations

import re
from typing import Any

from ultrascale.export import megatron_model, shell
from ultrascale.export.common import Found, World, accumulation
from ultrascale.export.fields import Fields
from ultrascale.export.keys import Keys
from ultrascale.export.megatron_model import CONTEXT, SHARDING, STATES, Script
from ultrascale.specs.errors import SpecError

_SBATCH = re.compile(r"^#SBATCH\s+--?([\w-]+)[= ]\s*(\S+)", re.MULTILINE)


def parse(text: str, where: str) -> Script:
    commands = shell.commands(text, where)
    scripts = ((words, [at for at, word in enumerate(words) if word.endswith(".py")]) for words in commands)
    starts = [(words, places[0]) for words, places in scripts if places]
    named = [(words, at) for words, at in starts if "--micro-batch-size" in shell.options(words[at:])]
    if not named:
        raise SpecError(
            f"{where} starts no training of Megatron-LM: expected pretrain_gpt.py with --micro-batch-size and so on"
        )
    words, at = named[-1]
    before, batch = shell.options(words[:at]), dict(_SBATCH.findall(text))
    nodes = before.get("--nnodes") or batch.get("nodes") or batch.get("N")
    each = before.get("--nproc-per-node") or batch.get("gpus-per-node") or batch.get("ntasks-per-node") or batch.get("gres")
    return Script(dict(shell.options(words[at:])), _count(nodes), _count(each))


def _count(value: Any) -> int | None:
    digits = re.fullmatch(r"(?:gpu:(?:\w+:)?)?(\d{1,6})", value) if isinstance(value, str) else None
    return int(digits[1]) if digits and int(digits[1]) else None


def world(script: Script, where: str) -> tuple[int, int] | None:
    if script.gpus_per_node is None:
        return None
    return script.nodes or 1, script.gpus_per_node


def read(script: Script, where: str, known: World) -> Found:
    keys, found = Keys(script.arguments, where), Found()
    tp, pp = keys.whole("--tensor-model-parallel-size", 1), keys.whole("--pipeline-model-parallel-size", 1)
    cp, seq = keys.whole("--context-parallel-size", 1), keys.whole("--seq-length")
    gpus = known.gpus
    if gpus is None and script.gpus_per_node:
        gpus = script.gpus_per_node * (script.nodes or 1)
    dp, mbs = World(gpus).data_parallel(tp * pp * cp, where), keys.whole("--micro-batch-size")
    virtual = _virtual(keys, pp)
    found.fields = {
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.cp": cp,
        "layout.ep": keys.whole("--expert-model-parallel-size", 1),
        "layout.sequence_parallel": keys.flag("--sequence-parallel") if tp > 1 else True,
        "layout.schedule": "interleaved" if virtual > 1 else "1f1b",
        "layout.virtual_stages": virtual,
        "layout.mbs": mbs,
        "layout.gas": accumulation(keys.whole("--global-batch-size", dp * mbs), dp, mbs, "--global-batch-size", where),
        "layout.recompute": _recompute(keys, found),
        "layout.offload": "optimizer" if keys.flag("--optimizer-cpu-offload") else "none",
        "job.seq": seq,
        "job.steps": _steps(keys, dp * mbs),
        **_read_data_parallel(keys, dp * cp),
        **_read_numbers(keys, where),
    }
    if cp > 1:
        ways = {theirs: ours for ours, theirs in CONTEXT.items()} | {"all_gather": "allgather"}
        found.fields["layout.context_parallel"] = keys.word("--cp-comm-type", ways, "p2p")
    found.fields |= megatron_model.read(keys, seq, tp, known.vocab, found.notes)
    keys.passed(
        "--expert-tensor-parallel-size", "--recompute-method", "--recompute-num-layers", "--ckpt-format", "--eval-iters"
    )
    keys.also_known("--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters", "--weight-decay", "--clip-grad", "--data-path")
    keys.also_known("--tokenizer-model", "--save", "--load", "--save-interval", "--log-interval", "--eval-interval", "--split")
    found.notes += keys.unread()
    return found


def _steps(keys: Keys, sequences: int) -> int | None:
    if "--train-samples" in keys:
        batch = keys.whole("--global-batch-size", sequences)
        return max(1, keys.whole("--train-samples") // batch)
    return keys.whole("--train-iters") if "--train-iters" in keys else None


def _virtual(keys: Keys, pp: int) -> int:
    if "--pipeline-model-parallel-layout" in keys:
        stages = _stages(str(keys.value("--pipeline-model-parallel-layout")), keys.where)
        if stages % pp:
            raise SpecError(f"{keys.where}: --pipeline-model-parallel-layout has {stages} stages for {pp} ranks: try {pp}")
        return stages // pp
    if "--num-layers-per-virtual-pipeline-stage" in keys:
        layers, each = keys.whole("--num-layers"), keys.whole("--num-layers-per-virtual-pipeline-stage")
        return max(1, layers // pp // each)
    return keys.whole("--num-virtual-stages-per-pipeline-rank", 1)


def _stages(layout: str, where: str) -> int:
    """Stages of `E|(t|)*3,tt|L`: its bars, with those in repeated brackets."""
    bars = 1
    for part, times in re.findall(r"\(([^()]*)\)(?:\*(\d{1,5}))?", layout):
        bars += part.count("|") * int(times or 1)
    rest = re.sub(r"\([^()]*\)(?:\*\d{1,5})?", "", layout)
    for times in re.findall(r"\|\*(\d{1,5})", rest):
        bars += int(times) - 1
    return bars + rest.count("|")


def _recompute(keys: Keys, found: Found) -> str:
    grain = keys.word("--recompute-granularity", {"full": "full", "selective": "selective", "none": "none"}, "none")
    if grain == "full" and keys.value("--recompute-method") == "block":
        found.notes.append("--recompute-method block recomputes some layers of a stage; it is read as all of them")
    return "selective" if grain == "none" and keys.flag("--recompute-activations") else str(grain)


def _read_data_parallel(keys: Keys, ranks: int) -> Fields:
    keys.passed("--overlap-param-gather", "--no-gradient-accumulation-fusion")
    strategy = keys.word("--data-parallel-sharding-strategy", SHARDING, "no_shard")
    zero = 1 if keys.flag("--use-distributed-optimizer") else 0
    if keys.flag("--use-megatron-fsdp"):
        zero = strategy
    elif keys.flag("--use-torch-fsdp2"):
        zero = 3
    copies = keys.whole("--num-distributed-optimizer-instances", 1)
    if copies > 1 and ranks % copies:
        raise SpecError(f"{keys.where}: --num-distributed-optimizer-instances is {copies} for {ranks} data ranks: try {ranks}")
    overlaps = keys.flag("--overlap-grad-reduce")
    return {
        "layout.zero": zero,
        "layout.zero_shards": ranks // copies if zero and copies > 1 else None,
        "layout.data_parallel": "bucketed" if overlaps or zero else "naive",
    }


def _read_numbers(keys: Keys, where: str) -> Fields:
    bf16, fp16 = keys.flag("--bf16"), keys.flag("--fp16")
    if bf16 and fp16:
        raise SpecError(f"{where} asks for --bf16 and --fp16 at once: keep one")
    eight = "--fp8-format" in keys
    keys.passed("--fp8-recipe", "--accumulate-allreduce-grads-in-fp32", "--use-precision-aware-optimizer", "--exp-avg-sq-dtype")
    names = {theirs: ours for ours, theirs in STATES.items()} | {"fp16": "adamw-bf16"}
    adam = keys.word("--exp-avg-dtype", names, "fp32")
    momentum = keys.number("--sgd-momentum", 0.9)
    optimizers = {"adam": adam, "muon": "muon", "dist_muon": "muon", "sgd": "sgd-momentum" if momentum else "sgd"}
    dropout = keys.number("--attention-dropout", 0.1) + keys.number("--hidden-dropout", 0.1)
    backends = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "plain", "local": "plain"}
    return {
        "job.precision": "fp8" if eight else "bf16" if bf16 else "fp16" if fp16 else "fp32",
        "job.gradients": "bf16" if keys.flag("--grad-reduce-in-bf16") else "fp32",
        "job.optimizer": keys.word("--optimizer", optimizers, "adam"),
        "job.dropout": dropout > 0,
        "job.attention": keys.word("--attention-backend", backends, "auto"),
    }
