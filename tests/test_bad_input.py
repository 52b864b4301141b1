"""Every malformed model, cluster, layout, plan file and flag gets one sentence, exit code 2, and leaves no trace.

The sentence names the field (or file, or flag), what was given, and something that works; `says` has the parts to look for.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


class _Missing:
    """A field taken out; a name of its own, because test names must be the same in every process."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Any = _Missing()
NAN, INF = float("nan"), float("inf")
MODEL = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 1024, "vocab": 1000}
HF = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
CLUSTER = {"gpu": "h100", "nodes": 1, "gpus_per_node": 8}
NINES = "9" * 5000

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def flags(model: str = "llama-3.2-1b", cluster: str = "8xh100", batch: str = "64k", seq: str = "4096") -> list[str]:
    # `=` keeps values such as -1 values; a model that begins with - would be an option anywhere.
    return ["plan", model, f"--cluster={cluster}", f"--batch-tokens={batch}", f"--seq={seq}"]


def refused(result: tuple[int, str, str], *says: str) -> None:
    """One line on standard error, nothing on standard output, exit code 2."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for part in says:
        assert part in err
    assert len(err) < 1200


def changed(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in {**base, **fields}.items() if value is not MISSING}


FLAGS: list[tuple[list[str], list[str]]] = [
    # names of models
    (flags(model="lama-3-8b"), ["model 'lama-3-8b'", "did you mean 'llama-3-8b'"]),
    (flags(model="meta-llama/Llama-3-8B"), ["did you mean 'llama-3-8b'"]),
    (flags(model=""), ["model ''", "list presets with `ultrascale presets`"]),
    (flags(model="/none/config.json"), ["model file /none/config.json does not exist", "llama-3-8b"]),
    (flags(model="."), ["model folder . has no config.json"]),
    (flags(model="gpt2", seq="2048"), ["job.seq is 2048", "gpt2 has 1024 learned positions: try 1024"]),
    # clusters
    (flags(cluster="0xh100"), ["cluster is '0xh100'", "try 8xh100"]),
    (flags(cluster="12xh100"), ["nodes of 8", "try 8xh100, 16xh100"]),
    (flags(cluster="h100"), ["cluster is 'h100'", "such as 64xh100"]),
    (flags(cluster="x"), ["cluster is 'x'", "such as 64xh100"]),
    (flags(cluster=""), ["cluster is ''", "such as 64xh100"]),
    (flags(cluster="8x8"), ["cluster is '8x8'", "'8x8 h100'"]),
    (flags(cluster="-8xh100"), ["cluster is '-8xh100'", "such as 64xh100"]),
    (flags(cluster="8x8 hal9000"), ["gpu 'hal9000' is not a known kind", "did you mean"]),
    (flags(cluster="8xh10"), ["gpu 'h10' is not a known kind: did you mean 'h100'"]),
    (flags(cluster="8x0 h100"), ["cluster.gpus_per_node is 0", "try 8"]),
    (flags(cluster="0x8 h100"), ["cluster.nodes is 0", "try 8"]),
    (flags(cluster="9000000x8 h100"), ["cluster.nodes is 9000000 but must be at most 1048576: try 8"]),
    (flags(cluster="8x2048 h100"), ["cluster.gpus_per_node is 2048 but must be at most 1024: try 8"]),
    (flags(cluster="1e3xh100"), ["cluster is '1e3xh100'"]),
    (flags(cluster=NINES + "xh100"), ["cluster is '999", "such as 64xh100"]),
    (flags(cluster="a" * 5000), ["cluster is 'aaa", "such as 64xh100"]),
    (flags(cluster="8xh100 more"), ["cluster is '8xh100 more'"]),
    (flags(cluster="none.yaml"), ["cluster file none.yaml does not exist"]),
    (flags(cluster="."), ["cluster file . is a folder"]),
    # batch, sequence, totals
    *(
        (flags(batch=text), [f"--batch-tokens is '{text}'", "try 4M or 4194304"])
        for text in ["0", "-1", "4Q", "nan", "inf", ""]
    ),
    *(
        (flags(batch=text), [f"--batch-tokens is '{text}'", "4M"])
        for text in ["abc", "4MM", "1,2", "1_", "1e400", "1T", "1e-3"]
    ),
    (flags(batch="1.5"), ["--batch-tokens is '1.5', which is not a whole number: try 2"]),
    (flags(batch=NINES), ["--batch-tokens is '999", "4M"]),
    (flags(batch="9e18"), ["job.batch_tokens is 9000000000000000000 but must be at most 1099511627776: try 4194304"]),
    *((flags(seq=text), [f"--seq is '{text}'", "8192 or 8k"]) for text in ["0", "-1", "4Q", "nan", "", "8kk"]),
    (flags(seq="8192.5"), ["--seq is '8192.5', which is not a whole number: try 8192"]),
    (flags(seq="2G"), ["job.seq is 2147483648 but must be at most 1073741824: try 8192"]),
    *(([*flags(), f"--total-tokens={text}"], [f"--total-tokens is '{text}'", "15T or 300B"]) for text in ["0", "x", "1e30"]),
    ([*flags(), "--total-tokens=1.5"], ["--total-tokens is '1.5'", "try 2"]),
    # choices
    *(([*flags(), f"--top={text}"], [f"top is {text}", "such as 10"]) for text in ["0", "-1", "99999999999"]),
    *(([*flags(), f"--objective={text}"], [f"objective is '{text}'", "throughput, cost, memory"]) for text in ["foo", ""]),
    ([*flags(), "--precision=fp4"], ["job.precision is 'fp4'", "did you mean 'fp8'"]),
    ([*flags(cluster="8xa100"), "--precision=fp8"], ["job.precision is fp8", "a100-80", "try fp32 or fp16 or bf16"]),
    (flags(cluster="8xv100"), ["job.precision is bf16", "v100", "try fp32 or fp16"]),
    ([*flags(), "--gradients=fp16"], ["job.gradients is 'fp16'", "did you mean 'bf16'"]),
    ([*flags(), "--optimizer=adam"], ["job.optimizer is 'adam'", "did you mean 'adamw'"]),
    ([*flags(), "--attention=flsh"], ["job.attention is 'flsh'", "did you mean 'flash'?"]),
]
FIX: list[tuple[str, list[str]]] = [
    ("foo=1", ["layout has no field 'foo'", "known: context_parallel"]),
    ("tpp=8", ["layout has no field 'tpp'", "did you mean 'tp'"]),
    ("TP=8", ["layout has no field 'TP'", "did you mean 'tp'"]),
    ("=8", ["layout has no field ''"]),
    ("tp", ["--fix 'tp'", "such as --fix tp=8"]),
    ("tp=", ["--fix 'tp='", "such as --fix tp=8"]),
    ("", ["--fix is empty", "such as --fix tp=8"]),
    (",", ["--fix is empty", "such as --fix tp=8"]),
    ("tp=abc", ["layout.tp is 'abc'", "such as tp=2"]),
    ("tp=1.5", ["layout.tp is '1.5'", "such as tp=2"]),
    ("tp=nan", ["layout.tp is 'nan'", "such as tp=2"]),
    ("tp=true", ["layout.tp is 'true'", "such as tp=2"]),
    ("tp=8=8", ["layout.tp is '8=8'", "such as tp=2"]),
    ("tp=0", ["layout.tp is 0", "try 1"]),
    ("tp=-1", ["layout.tp is -1", "try 1"]),
    (f"tp={NINES}", ["layout.tp is '999", "such as tp=2"]),
    ("tp=7", ["layout.tp is 7", "heads = 32", "try 4 or 8"]),
    ("tp=16", ["layout.tp is 16 but must divide 8 GPUs: try 8"]),
    ("dp=3", ["layout.dp is 3 but must divide 8 GPUs: try 2 or 4"]),
    ("pp=33", ["layout.pp is 33"]),
    ("cp=3", ["layout.cp is 3 but must divide 8 GPUs: try 2 or 4"]),
    ("ep=2", ["layout.ep is 2", "no experts: try 1"]),
    ("dp=8,tp=8", ["--fix dp=8 --fix tp=8", "try"]),
    ("zero=4", ["layout.zero is 4", "try 0"]),
    ("schedule=foo", ["layout.schedule is 'foo'", "1f1b"]),
    ("schedule=1f1", ["layout.schedule is '1f1'", "did you mean '1f1b'"]),
    ("recompute=half", ["layout.recompute is 'half'", "none, selective, full"]),
    ("offload=disk", ["layout.offload is 'disk'", "none, optimizer, parameters"]),
    ("sequence_parallel=maybe", ["layout.sequence_parallel is 'maybe'", "true or false"]),
    ("virtual_stages=2000", ["layout.virtual_stages is 2000", "at most 1024"]),
    ("pp=2,virtual_stages=17", ["2·17 = 34", "only 16 layers", "try pp="]),
    ("zero_shards=0", ["layout.zero_shards is 0", "try 8"]),
    ("keep_gathered=true,zero=1", ["layout.keep_gathered", "zero is 1", "try keep_gathered=false or zero=3"]),
    ("offload=parameters,zero=1", ["layout.offload = parameters", "zero is 1", "try zero=3"]),
    ("data_parallel=ddp,zero=3", ["layout.data_parallel = ddp", "try data_parallel=bucketed"]),
    ("tp=8,tp=4", ["--fix tp=8 and --fix tp=4 contradict each other: drop one"]),
]
FORBID: list[tuple[list[str], list[str]]] = [
    (["--forbid=foo"], ["layout has no field 'foo'"]),
    (["--forbid=schedul"], ["did you mean 'schedule'?"]),
    (["--forbid=zero=9"], ["layout.zero is 9", "at most 3"]),
    (["--forbid=tp="], ["--forbid 'tp='", "such as --forbid tp=8"]),
    (["--forbid="], ["--forbid is empty"]),
    (["--forbid=context_parallel"], ["--forbid context_parallel needs a value", "such as --forbid context_parallel=allgather"]),
    (["--forbid=zero=0,zero=1,zero=2,zero=3"], ["--forbid zero=0", "try fewer --fix or --forbid"]),
    (["--forbid=dp,tp,pp,cp"], ["1·1·1·1 = 1", "8 GPUs: try dp=8"]),
    (["--fix=tp=8", "--forbid=tp"], ["--fix tp=8 and --forbid tp contradict each other: drop one"]),
    (["--fix=tp=8", "--forbid=tp=8"], ["--fix tp=8 and --forbid tp=8 contradict each other: drop one"]),
    (["--fix=sequence_parallel=true", "--forbid=sequence_parallel"], ["--fix sequence_parallel=true and --forbid"]),
]
CASES = [
    *FLAGS,
    *(([*flags(), f"--fix={text}"], says) for text, says in FIX),
    *(([*flags(), *more], says) for more, says in FORBID),
]


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(("arguments", "says"), CASES, ids=[" ".join(arguments)[5:60] for arguments, _ in CASES])
def test_invalid_flags(run: Run, tmp_path: Path, arguments: list[str], says: list[str]) -> None:
    (tmp_path / "plan.yaml").write_text("old")
    refused(run(*arguments, "-o", "plan.yaml"), *says)
    assert (tmp_path / "plan.yaml").read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.yaml"]


MODELS: list[tuple[dict[str, Any], list[str]]] = [
    ({"layers": "4"}, ["model.layers is '4'", "try 32"]),
    ({"layers": True}, ["model.layers is true", "try 32"]),
    ({"layers": 1.5}, ["model.layers is 1.5", "try 32"]),
    ({"layers": -1}, ["model.layers is -1", "try 32"]),
    ({"layers": 0}, ["model.layers is 0", "try 32"]),
    ({"layers": NAN}, ["model.layers is nan", "try 32"]),
    ({"layers": INF}, ["model.layers is inf", "try 32"]),
    ({"layers": 10**30}, ["model.layers is 1000", "at most 65536: try 32"]),
    ({"layers": [4]}, ["model.layers is a list", "try 32"]),
    ({"layers": {"a": 1}}, ["model.layers is a mapping", "try 32"]),
    ({"layers": None}, ["model.layers is null", "try 32"]),
    ({"layer": 4}, ["model.layer is not a field of model: did you mean 'layers'"]),
    ({"hidden": MISSING}, ["model.hidden is missing: give it, e.g. 4096"]),
    ({"heads": 7}, ["model.head_dim is missing", "heads = 7", "e.g. 73"]),
    ({"kv_heads": 3}, ["model.kv_heads is 3", "try 2 or 4"]),
    ({"ffn": 0}, ["model.ffn is 0", "try 2048"]),
    ({"activation": "swish"}, ["model.activation is 'swish'", "did you mean 'swiglu'?"]),
    ({"positions": "learned"}, ["model.max_positions is missing", "try 2048"]),
    ({"positions": "learned", "max_positions": 1024}, ["job.seq is 4096", "1024 learned positions: try 1024"]),
    ({"moe": 3}, ["model.moe is 3", "try {experts: 8"]),
    ({"moe": {"experts": 2, "top_k": 4, "expert_ffn": 8}}, ["model.moe.top_k is 4", "try 2"]),
    ({"tied_embeddings": "yes"}, ["model.tied_embeddings is 'yes'", "try false"]),
    ({"name": ""}, ["model.name is ''", "try 'my-model'"]),
]


@pytest.mark.parametrize(("fields", "says"), MODELS, ids=[str(fields)[:40] for fields, _ in MODELS])
def test_invalid_model_files(run: Run, tmp_path: Path, fields: dict[str, Any], says: list[str]) -> None:
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(changed(MODEL, **fields)))
    refused(run(*flags(model="m.yaml")), *says)


CONFIGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "bert"}, ["config.model_type is 'bert'", "known: arcee"]),
    ({"model_type": "lama"}, ["config.model_type is 'lama'", "describe it in a model file"]),
    ({"model_type": MISSING}, ["config.model_type is missing"]),
    ({"model_type": 3}, ["config.model_type is 3"]),
    ({"hidden_size": MISSING}, ["config.hidden_size is missing"]),
    ({"hidden_size": "512"}, ["config.hidden_size is '512'", "whole number"]),
    ({"num_hidden_layers": -4}, ["config.num_hidden_layers is -4", "at least 1"]),
    ({"vocab_size": NAN}, ["config.vocab_size is nan", "whole number"]),
    ({"hidden_act": "tanh"}, ["config.hidden_act is 'tanh'"]),
    ({"tie_word_embeddings": 1}, ["config.tie_word_embeddings is 1", "true or false"]),
]


@pytest.mark.parametrize(("fields", "says"), CONFIGS, ids=[str(fields)[:40] for fields, _ in CONFIGS])
def test_invalid_hugging_face_configs(run: Run, tmp_path: Path, fields: dict[str, Any], says: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(HF, **fields)))
    refused(run(*flags(model="config.json")), *says)


CLUSTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"gpu": MISSING}, ["cluster.gpu is missing", "such as gpu: h100"]),
    ({"gpu": "h10"}, ["gpu 'h10' is not a known kind: did you mean 'h100'"]),
    ({"gpu": 3}, ["cluster.gpu is 3", "such as h100"]),
    ({"gpu": None}, ["cluster.gpu is null", "such as h100"]),
    ({"gpu": {}}, ["cluster.gpu.kind is missing", "such as h100"]),
    ({"gpu": {"kind": ["h100"]}}, ["cluster.gpu.kind is a list", "such as h100"]),
    ({"gpu": {"kind": "h100", "memory": 94}}, ["cluster.gpu.memory is not a field", "did you mean 'memory_gib'"]),
    ({"gpu": {"kind": "h100", "memory_gib": "94"}}, ["cluster.gpu.memory_gib is '94'", "try 79.1"]),
    ({"gpu": {"kind": "h100", "memory_gib": -1}}, ["cluster.gpu.memory_gib is -1", "try 79.1"]),
    ({"gpu": {"kind": "h100", "peak_tflops": 3}}, ["cluster.gpu.peak_tflops is 3", "try {bf16: 989.4}"]),
    ({"kind": "h100"}, ["cluster.kind is not a field of cluster"]),
    ({"nodes": 0}, ["cluster.nodes is 0", "try 8"]),
    ({"nodes": 1.5}, ["cluster.nodes is 1.5", "try 8"]),
    ({"nodes": "2"}, ["cluster.nodes is '2'", "try 8"]),
    ({"nodes": True}, ["cluster.nodes is true", "try 8"]),
    ({"nodes": 10**30}, ["cluster.nodes is 1000", "try 8"]),
    ({"gpus_per_node": None}, ["cluster.gpus_per_node is null", "try 8"]),
    ({"gpus": 8}, ["cluster.gpus and cluster.nodes were both given"]),
    ({"nodes": MISSING, "gpus": 12}, ["cluster.gpus is 12", "try 8 or 16"]),
    ({"nodes": MISSING, "gpus": "8"}, ["cluster.gpus is '8'", "try 64"]),
    ({"nodes": MISSING, "gpus": 8, "gpus_per_node": "x"}, ["cluster.gpus_per_node is 'x'", "try 8"]),
    ({"link_domain": 3}, ["cluster.link_domain is 3", "gpus_per_node = 8: try 8"]),
    ({"link_domain": "8"}, ["cluster.link_domain is '8'", "try 8"]),
    ({"network_gb_s": 0}, ["cluster.network_gb_s is 0", "try 50"]),
    ({"network_gb_s": "25"}, ["cluster.network_gb_s is '25'", "try 50"]),
    ({"network_gb_s": NAN}, ["cluster.network_gb_s is nan", "try 50"]),
    ({"network_gb_s": INF}, ["cluster.network_gb_s is inf", "try 50"]),
    ({"network_gb_s": 1e-300}, ["cluster.network_gb_s is 1e-300", "try 50"]),
    ({"network_gbs": 25}, ["cluster.network_gbs is not a field of cluster: did you mean 'network_gb_s'?"]),
    ({"link_bandwidth_gb_s": True}, ["cluster.link_bandwidth_gb_s is true", "try 450"]),
    ({"price_per_gpu_hour_usd": -1}, ["cluster.price_per_gpu_hour_usd is -1", "try 2.5"]),
    ({"price_per_gpu_hour_usd": 1e308}, ["cluster.price_per_gpu_hour_usd is 1e+308", "try 2.5"]),
    ({"efficiency": 3}, ["cluster.efficiency is 3", "try {matmul: 0.95}"]),
    ({"efficiency": {"matmul": 0}}, ["cluster.efficiency.matmul is 0", "try 0.95"]),
    ({"efficiency": {"matmul": "0.9"}}, ["cluster.efficiency.matmul is '0.9'", "try 0.95"]),
    ({"efficiency": {"matmull": 0.9}}, ["cluster.efficiency.matmull is not a field", "did you mean 'matmul'"]),
    ({"efficiency": {"context_gib": INF}}, ["cluster.efficiency.context_gib is inf", "try 1.0"]),
    ({"efficiency": {"expert_imbalance": 0.5}}, ["cluster.efficiency.expert_imbalance is 0.5", "try 1.1"]),
]


@pytest.mark.parametrize(("fields", "says"), CLUSTERS, ids=[str(fields)[:40] for fields, _ in CLUSTERS])
def test_invalid_cluster_files(run: Run, tmp_path: Path, fields: dict[str, Any], says: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(changed(CLUSTER, **fields)))
    refused(run(*flags(cluster="c.yaml")), *says)


ALIAS_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
TEXTS = {
    "empty": ("", "is empty"),
    "list": ("- 1", "is a list"),
    "broken": ("layers: [4", "is not YAML"),
    "tab": ("layers:\n\t4", "at line 2"),
    "twice": ("gpu: h100\ngpu: h200", "the field 'gpu' is given twice at line 2"),
    "binary": (b"\x80\x81\xff\x00", "is not text"),
    "deep": ("[" * 3000, "nested too deeply"),
    "python": ("!!python/object/apply:os.system [exit]", "is not YAML"),
    "alias bomb": (ALIAS_BOMB, ""),
}


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("kind", ["model", "cluster", "plan"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_mapping(run: Run, tmp_path: Path, kind: str, name: str) -> None:
    content, says = TEXTS[name]
    (tmp_path / "f.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    commands = {"model": flags(model="f.yaml"), "cluster": flags(cluster="f.yaml"), "plan": ["explain", "f.yaml"]}
    refused(run(*commands[kind]), says)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The mapping of a plan of two stages, read anew for each test."""
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    command = [sys.executable, "-m", "ultrascale", *flags(), "--fix=pp=2", "-o", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    data: dict[str, Any] = yaml.safe_load(file.read_text())
    return data


PLANS: list[tuple[str, Any, list[str]]] = [
    ("layout.tp", 3, ["layout.dp·tp·pp·cp", "8 GPUs: try"]),
    ("layout.mbs", 64, ["layout.dp·mbs·gas", "16 sequences", "try"]),
    ("layout.tp", "2", ["plan.layout.tp is '2'", "try 1"]),
    ("layout.tpp", 2, ["plan.layout.tpp is not a field of plan.layout: did you mean 'tp'"]),
    ("layout.schedule", "foo", ["plan.layout.schedule is 'foo'", "1f1b"]),
    ("layout.pp", 4, ["plan.estimate.memory lists 2 stages but layout.pp is 4: try pp: 2"]),
    ("layout", MISSING, ["plan.layout is missing", "ultrascale plan"]),
    ("layout", [], ["plan.layout is a list"]),
    ("estimate", MISSING, ["plan.estimate is missing", "ultrascale plan"]),
    ("estimate", {}, ["plan.estimate.step_time_s is missing", "more"]),
    ("estimate.step_time_s", 0, ["plan.estimate.step_time_s is 0", "greater than 0"]),
    ("estimate.step_time_s", "fast", ["plan.estimate.step_time_s is 'fast'"]),
    ("estimate.peak_stage", 9, ["plan.estimate.peak_stage is 9", "try 1"]),
    ("estimate.peak_gib", INF, ["plan.estimate.peak_gib is inf", "finite"]),
    ("estimate.time", MISSING, ["plan.estimate.time is missing"]),
    ("estimate.fits", "yes", ["plan.estimate.fits is 'yes'", "try true"]),
    ("job", MISSING, ["plan.job is missing", "ultrascale plan"]),
    ("job.model", "lama", ["model 'lama'", "did you mean"]),
    ("job.model", 3, ["plan.job.model is 3"]),
    ("job.cluster", "0xh100", ["cluster is '0xh100'", "try 8xh100"]),
    ("job.cluster", "16xh100", ["8 but the cluster has 16 GPUs: try dp="]),
    ("job.seq", "4k", ["plan.job.seq is '4k'", "try 8192"]),
    ("job.seq", 2048, ["layout.dp·mbs·gas", "32 sequences", "try"]),
    ("job.precision", "int4", ["plan.job.precision is 'int4'", "try 'bf16'"]),
    ("extra", 1, ["plan.extra is not a field of plan: known: estimate"]),
    ("reasons", "x", ["plan.reasons is 'x'", "a list"]),
]


@pytest.mark.quick_cases(every=8)
@pytest.mark.parametrize("question", [[], ["--json"], ["--what-if=zero=2"], ["--largest=mbs"], ["--cheatsheet"]], ids=str)
@pytest.mark.parametrize(("path", "value", "says"), PLANS, ids=[f"{path}={value!s:.10}" for path, value, _ in PLANS])
def test_an_edited_plan_file(
    run: Run, good: dict[str, Any], tmp_path: Path, path: str, value: Any, says: list[str], question: list[str]
) -> None:
    data = copy.deepcopy(good)
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[name]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    refused(run("explain", "p.yaml", *question), *says)


QUESTIONS: list[tuple[str, list[str]]] = [
    ("--what-if=", ["--what-if is empty", "such as --what-if zero=3"]),
    ("--what-if=zero", ["--what-if 'zero'", "such as --what-if zero=3"]),
    ("--what-if=zero=", ["--what-if 'zero='", "such as --what-if zero=3"]),
    ("--what-if=zero=9", ["layout.zero is 9", "at most 3"]),
    ("--what-if=zro=3", ["--what-if has no field 'zro': did you mean 'zero'?"]),
    ("--what-if=tp=8,tp=4", ["gives tp twice"]),
    ("--what-if=gpus=0", ["gpus is '0'", "try gpus=128"]),
    ("--what-if=gpus=12", ["gpus is 12", "nodes of 8: try 8 or 16"]),
    ("--what-if=gpus=²", ["gpus is '²'", "try gpus=128"]),
    (f"--what-if=gpus={NINES}", ["gpus is '999", "try gpus=128"]),
    ("--what-if=seq=0", ["seq is '0'", "8192 or 8k"]),
    ("--what-if=batch_tokens=4Q", ["batch_tokens is '4Q'", "4M"]),
    ("--what-if=precision=fp4", ["job.precision is 'fp4'", "did you mean 'fp8'"]),
    ("--what-if=dropout=maybe", ["job.dropout is 'maybe'", "try false"]),
    ("--what-if=offload=disk", ["layout.offload is 'disk'", "none, optimizer, parameters"]),
    ("--largest=foo", ["--largest is 'foo'", "mbs, seq, model"]),
    ("--largest=", ["--largest is ''", "mbs, seq, model"]),
]


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize(("question", "says"), QUESTIONS, ids=[question[2:30] for question, _ in QUESTIONS])
def test_invalid_what_if_and_largest_options(
    run: Run, good: dict[str, Any], tmp_path: Path, question: str, says: list[str]
) -> None:
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(good, sort_keys=False))
    refused(run("explain", "p.yaml", question), *says)


def test_conflicting_options_and_missing_files(run: Run, tmp_path: Path) -> None:
    refused(run("explain", "p.yaml", "--cheatsheet", "--largest=mbs"), "ask one at a time")
    refused(run("explain", "p.yaml"), "plan file p.yaml does not exist")
    refused(run("explain", "."), "plan file . is a folder")
    refused(run("presets", "h10"), "'h10' is neither a model nor a GPU kind: did you mean 'h100'")
    refused(run("presets", "lama-3-8b", "--json"), "did you mean 'llama-3-8b'")


@pytest.mark.parametrize("output", [".", "file/plan.yaml", "a" * 300, "/proc/none/plan.yaml", "/dev/null"])
def test_unwritable_outputs(run: Run, tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("x")
    refused(run(*flags(), "--top=1", "-o", output), "such as ")
    assert os.listdir(tmp_path) == ["file"]
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pln"], "Did you mean 'plan'"),
        (["plan", "gpt2", "--clustr", "8xh100"], "--cluster"),
        (["plan", "gpt2"], "--cluster is missing"),
        (["plan", "gpt2", "-c", "8xh100", "-b", "1M", "-s", "1k", "--top", "many"], "Invalid value for '--top'"),
        (["explain"], "Missing argument"),
        (["presets", "a", "b"], "unexpected extra argument"),
    ],
)
def test_unknown_commands(run: Run, arguments: list[str], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (flags(cluster="12xh100"), "error: cluster is '12xh100'"),
        (flags(model="lama-3-8b"), "error: model 'lama-3-8b'"),
        ([*flags(), "--fix=tp=7"], "error: layout.tp is 7"),
    ],
)
def test_the_program_itself_ends_with_code_2(arguments: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ultrascale", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(says)
