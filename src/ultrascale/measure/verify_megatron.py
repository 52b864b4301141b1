"""Verifies Megatron-Core: its GPTModel, parallel layers, schedules and DistributedDataParallel on gloo ranks.

Everything is Megatron-Core 0.16's but for what needs a GPU: the current device and the device "cuda" are the CPU; its RNG
tracker, which only dropout uses, does nothing; and the norm is torch's RMSNorm, whose weight is marked for sequence parallelism
as Transformer Engine's is: the norm of its local spec refuses sequence parallelism. Fused kernels are off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ultrascale.measure.dump import Dump
from ultrascale.measure.dump_tensors import DumpStep
from ultrascale.measure.verify_engine import STEP, Conversion, EngineInputs, EngineRunner
from ultrascale.measure.verify_megatron_model import EXPERT, FC1, QKV, build, sequence_parallel, virtual_stages
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

_SCHEDULES = ("1f1b", "interleaved")
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}  # fixed in Megatron
_DISPATCHERS = ("alltoall", "allgather")
_ROUTER = {"shared_experts": 0, "groups": 1, "dense_layers": 0, "interval": 1, "scale_inputs": False}


def _check(job: Job, layout: Layout) -> None:
    def refuse(field: str, why: str, instead: str) -> None:
        raise SpecError(f"layout.{field} is {getattr(layout, field)} but --engine megatron {why}: try {field}={instead}")

    if layout.cp > 1:
        refuse("cp", "has context parallelism in Transformer Engine only", "1")
    if layout.zero > 1:
        refuse("zero", "has DistributedDataParallel (zero=0) and the distributed optimizer (zero=1)", "1")
    if layout.zero_shards is not None:
        refuse("zero_shards", "shards over all data ranks", "null")
    if layout.recompute != "none":
        refuse("recompute", "records modules in forward only without recomputation", "none")
    if layout.pp > 1 and layout.schedule not in _SCHEDULES:
        refuse("schedule", f"runs {' and '.join(_SCHEDULES)}", "1f1b")
    if job.model.layers % (layout.pp * layout.virtual_stages):
        refuse("pp", f"needs stages of as many layers each, of {job.model.layers}", "1")
    if job.model.moe is not None and layout.tp > 1 and not layout.sequence_parallel:
        refuse("sequence_parallel", "trains experts beside tp with sequence parallelism only", "true")
    if layout.ep > 1 and layout.dispatcher not in _DISPATCHERS:
        refuse("dispatcher", f"runs {' and '.join(_DISPATCHERS)}", "alltoall")
    for name, known in _ROUTER.items() if job.model.moe is not None else ():
        if (given := getattr(job.model.moe, name)) != known:
            raise SpecError(
                f"model.moe.{name} is {given} but --engine megatron is compared with {known} only: try mixtral-8x7b"
            )
    moe = job.model.moe
    if moe is not None and moe.router == "sigmoid" and moe.top_k > 1 and not moe.renormalize:
        raise SpecError(
            "model.moe.renormalize is false but Megatron's sigmoid router divides the weights of chosen experts by their sum: "
            "try true"
        )
    if moe is not None and moe.router_bias and moe.router != "sigmoid":
        raise SpecError("model.moe.router_bias is true but Megatron has it beside the sigmoid router only: try router: sigmoid")
    scaling = job.model.rope_scaling
    for name, value in _SCALING.items() if scaling is not None else ():
        if getattr(scaling, name) != value:
            raise SpecError(
                f"model.rope_scaling.{name} is {getattr(scaling, name)} but Megatron has {value:g} only: "
                f"try {value:g}, or llama-3-8b"
            )


class _CpuForCuda(TorchFunctionMode):
    """The device "cuda" is the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if function is Tensor.cuda:
            return args[0]
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return function(*args, **named)


class _NoStream:
    """A stream on which everything is done."""

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron does with sizes of messages on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _all_gather(parts: list[Tensor], own: Tensor, group: Any) -> None:
    """With parts of any size, which gloo's has not."""
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(own)
        dist.broadcast(part, group=group, group_src=rank)


def _reduce_scatter(own: Tensor, parts: list[Tensor], group: Any) -> None:
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == group.rank():
            own.copy_(total)


def _run(job: Job, layout: Layout, batch: EngineInputs, folder: Path) -> None:
    from megatron.core import __version__, parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.Stream = _NoStream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = _NoStream  # type: ignore[assignment]
    dist.all_gather = _all_gather  # type: ignore[assignment]
    dist.reduce_scatter = _reduce_scatter  # type: ignore[assignment]
    token_dispatcher.maybe_move_tensor_to_cpu = _moved_to_cpu
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16.1 reads it although nothing defines it
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(layout),
        expert_model_parallel_size=layout.ep,
    )
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *names: nullcontext()
    with _CpuForCuda():
        parts = build(job, layout, batch.weights)
        mesh = {
            "pp": (parallel_state.get_pipeline_model_parallel_rank(), layout.pp),
            "dp": (parallel_state.get_data_parallel_rank(), layout.dp),
            "tp": (parallel_state.get_tensor_model_parallel_rank(), layout.tp),
            "ep": (parallel_state.get_expert_model_parallel_rank(), layout.ep),
        }
        mesh = {axis: place for axis, place in mesh.items() if place[1] > 1}
        dump = Dump(
            parts,
            folder,
            mesh=mesh,
            activations=_present("microbatch:1 dp:1", mesh),
            placements={name: _present(text, mesh) for name, text in _placements(layout).items()},
            program=f"Megatron-Core {__version__}",
        )
        microbatches = batch.microbatches(layout, parallel_state.get_data_parallel_rank())
        mask = torch.ones(1, 1, job.seq, job.seq, dtype=torch.bool).triu(1)

        def forward(data: Any, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
            inputs, targets = next(data)
            positions = torch.arange(job.seq).expand(len(inputs), -1)
            return model(inputs, positions, mask, labels=targets), loss

        def loss(tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = tokens.mean()
            dump.loss(mean / layout.gas)
            return mean, {}

        with dump.step(STEP):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(microbatches) for _ in parts],
                model=parts,
                num_microbatches=layout.gas,
                seq_length=job.seq,
                micro_batch_size=layout.mbs,
                forward_only=False,
            )
            if layout.zero:
                _gather_gradients(parts)


def _present(text: str, mesh: Mapping[str, Any]) -> str:
    return " ".join(word for word in text.split() if word.split(":")[0] in ("microbatch", *mesh))


def _placements(layout: Layout) -> dict[str, str]:
    """How Megatron cuts parameters, and outputs that are not cut as most are; those are [sequence, batch, hidden]."""
    columns = "microbatch:1 dp:1 tp:2"
    names = {
        "*word_embeddings.weight": "tp:0",
        "*linear_qkv.weight": "tp:0",
        "*linear_proj.weight": "tp:1",
        "*linear_fc1.weight": "tp:0",
        "*linear_fc2.weight": "tp:1",
        "*output_layer.weight": "tp:0",
        "*local_experts.*.linear_fc1": "tp:1",  # [tokens of the expert, features]
        "*linear_qkv": columns,
        "*core_attention": columns,
        "*linear_fc1": columns,
        "*output_layer": columns,
        # Of attention's heads and scores, and the rotary angles: no partner in our engine.
        "*q_layernorm": columns,
        "*k_layernorm": columns,
        "*core_attention.*": "microbatch:0 dp:0 tp:1",
        "*rotary_pos_emb": "",
    }
    if not sequence_parallel(layout):
        return {**names, "*word_embeddings": "microbatch:0 dp:0"}  # transposed afterwards
    # Not in `activations`: the loss of each tensor-parallel rank is that of all positions.
    return {**names, "*.weight": "", "*": "microbatch:1 dp:1 tp:0"}


def _gather_gradients(parts: list[Any]) -> None:
    """The distributed optimizer's ranks have reduced gradients in their own shard of each bucket only."""
    from megatron.core import parallel_state

    dense, experts = parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group()
    for part in parts:
        buffers = [(dense, one) for one in part.buffers] + [(experts, one) for one in part.expert_parallel_buffers]
        for group, buffer in buffers:
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _conversions(step: DumpStep, job: Job, layout: Layout) -> dict[str, Conversion]:
    """Outputs as [batch, sequence, hidden]; queries, keys and values apart; gate and up apart."""
    found: dict[str, Conversion] = dict(_expert_conversions(step, job, layout))
    for key in step.keys:
        section, _, name = key.partition("/")
        parameter = section in ("weight", "gradient")
        module = name.removesuffix(".weight") if parameter else name
        if module.endswith((QKV, FC1)):
            dim, layer = 0 if parameter else 2, module.split(".")[2]
            attention = module.endswith(QKV)
            prefix = f"{section}/blocks.{layer}.{'attention.qkv' if attention else 'mlp.inputs'}"
            for number, one in enumerate("qkv" if attention else ("gate", "up")):
                # Our recording has the outputs of one module by number.
                suffix = f".{one}.weight" if parameter else f".{number}"
                convert = partial(_group_of, job.model, number, dim) if attention else partial(_half_of, layout.tp, number, dim)
                found[prefix + suffix] = Conversion(key, convert, transposed=not parameter)
        elif section in ("forward", "backward") and (sequence_parallel(layout) or module != "embedding.word_embeddings"):
            found[key] = Conversion(key, transposed=True)
    return found


def _expert_conversions(step: DumpStep, job: Job, layout: Layout) -> Iterator[tuple[str, Conversion]]:
    """Experts are modules in Megatron, and one tensor of ours."""
    parts: dict[tuple[str, str, str], dict[int, str]] = {}
    for key in step.keys:
        section, _, name = key.partition("/")
        if section in ("weight", "gradient") and EXPERT.search(name) is not None:
            _, _, layer, module = name.removesuffix(".weight").split(".", 3)
            expert = EXPERT.fullmatch(module)
            assert expert is not None
            parts.setdefault((section, layer, expert[2]), {})[int(expert[1])] = key
    for (section, layer, module), keys in parts.items():
        sources = tuple(keys[number] for number in sorted(keys))
        prefix = f"{section}/blocks.{layer}.mlp.experts."
        if module == "linear_fc2":
            yield f"{prefix}down", Conversion(sources)
        else:
            for number, one in enumerate(("gate", "up")):
                yield prefix + one, Conversion(sources, partial(_half_of, layout.tp, number, 0))


def _group_of(model: Model, number: int, dim: int, fused: Tensor) -> Tensor:
    """Queries, keys or values; each group of heads has its queries, one key and one value."""
    heads = model.heads // model.kv_heads
    groups = torch.unflatten(fused, dim, (model.kv_heads, heads + 2, model.head_dim))
    start, stop = ((0, heads), (heads, heads + 1), (heads + 1, heads + 2))[number]
    return groups.narrow(dim + 1, start, stop - start).flatten(dim, dim + 2)


def _half_of(ranks: int, number: int, dim: int, fused: Tensor) -> Tensor:
    """Gate or up; each rank has half of its own rows for each."""
    return torch.unflatten(fused, dim, (ranks, 2, -1)).select(dim + 1, number).flatten(dim, dim + 1)


RUNNER = EngineRunner(
    name="megatron",
    requirement="megatron-core>=0.16,<0.17",
    imports=("megatron.core.models.gpt.gpt_model", "megatron.core.distributed", "megatron.core.pipeline_parallel"),
    check=_check,
    run=_run,
    conversions=_conversions,
    names={"embedding": "embed"},
    models="its Llama and Mixtral",
    beyond_llama=frozenset({"moe", "tied_embeddings"}),
)
