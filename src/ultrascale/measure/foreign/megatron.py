"""Run megatron-core's GPTModel, DistributedDataParallel, distributed optimizer and schedules with the arguments of Megatron-LM.

megatron-core alone has no pretrain_gpt.py: a few arguments are turned into its configurations here, as Megatron-LM does.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ultrascale.export.megatron import ENGINE
from ultrascale.measure.foreign.gpu import replace_everywhere
from ultrascale.measure.foreign.request import BALANCED, CannotRehearseError, ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher
from ultrascale.measure.rehearse_world import split_evenly
from ultrascale.parallel.torch_private import FakeTensor, unset_fake_temporarily

LOCAL = (
    "megatron-core's own layers with flash attention take the place of Transformer Engine's: norms, rotary embeddings and "
    "accumulation of weight gradients are not fused with their neighbours"
)
NO_CONTEXT = (
    "--context-parallel-size is {size}, which megatron-core has in Transformer Engine alone, and that needs a GPU: try 1"
)
NO_DISPATCHER = "--moe-token-dispatcher-type is {kind}, whose kernels need a GPU: try alltoall"
_NOT_FUSED = {"tp_comm_overlap", "attention_backend", "cross_entropy_fusion_impl"}
"""fields that need Transformer Engine"""
_REFUSED = {
    "moe_expert_capacity_factor": None,
    "pipeline_model_parallel_layout": None,
}
"""with the value that works, or None where there is none"""


def run(request: ForeignRequest, watcher: Watcher, note: Callable[[str], None]) -> None:
    """Its program: a shell script that starts pretrain_gpt.py."""
    note(LOCAL)
    given = _settings(request.program)
    given["perform_initialization"] = request.on_gpu
    if request.on_gpu and "num_experts" in given:
        given["moe_router_force_load_balancing"] = True
        note(BALANCED)
    if not request.on_gpu:
        torch.compile = _with_numbered_device(torch.compile, torch.cuda.current_device)
        _without_gpu(given)
    _core("tensor_parallel.random").model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    parallel = _core("parallel_state")
    torch.distributed.init_process_group()
    pp = int(given["pipeline_model_parallel_size"])
    virtual = _virtual_stages(given)
    tp = int(given["tensor_model_parallel_size"])
    parallel.initialize_model_parallel(
        tp,
        pp,
        virtual,
        expert_model_parallel_size=int(given.get("expert_model_parallel_size", 1)),
        expert_tensor_parallel_size=int(given.get("expert_tensor_parallel_size", tp)),
    )
    shape, reduction = _model_config(given), _of_class(_core("distributed").DistributedDataParallelConfig, given)
    reduction.grad_reduce_in_fp32 = "accumulate_allreduce_grads_in_fp32" in given
    model = _chunks(shape, reduction, given)
    optimizers = _core("optimizer")
    optimizer = optimizers.get_megatron_optimizer(
        _of_class(optimizers.OptimizerConfig, given, params_dtype=shape.params_dtype), model
    )
    seq, rows = int(given["seq_length"]), int(given["micro_batch_size"])
    count = int(given["global_batch_size"]) // rows // parallel.get_data_parallel_world_size()
    step = _core("pipeline_parallel").get_forward_backward_func()
    watcher.steps_by_hand = True  # experts have an optimizer of their own

    def forward(_: Any, stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        tokens = torch.zeros(rows, seq, dtype=torch.int64, device=torch.cuda.current_device())
        return stage(tokens, tokens, None, labels=tokens), lambda losses: (losses.mean(), {})

    while True:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        step(
            forward_step_func=forward,
            data_iterator=[iter(()) for _ in model],
            model=model,
            num_microbatches=count,
            seq_length=seq,
            micro_batch_size=rows,
            forward_only=False,
        )
        optimizer.step()
        watcher.end_step()


def _with_numbered_device(compile_with: Callable[..., Any], number: Callable[[], int]) -> Callable[..., Any]:
    """torch.compile, which asks for the properties of the device of that number while it captures."""

    def compile_here(function: Any) -> Any:
        compiled = compile_with(function)

        @functools.wraps(function)
        def outer(*args: Any, **kwargs: Any) -> Any:
            device, torch.cuda.current_device = torch.cuda.current_device, number
            try:
                return compiled(*args, **kwargs)
            finally:
                torch.cuda.current_device = device

        return outer

    return compile_here


def _chunks(shape: Any, reduction: Any, given: Mapping[str, Any]) -> list[Any]:
    """The rank's stages, each in its DistributedDataParallel, and the schedule's calls of them, as in Megatron-LM."""
    distributed = _core("distributed")
    chunks = [
        distributed.DistributedDataParallel(shape, reduction, _model(shape, given, stage), disable_bucketing=bool(stage))
        for stage in range(_virtual_stages(given) or 0) or [None]
    ]
    shape.finalize_model_grads_func = distributed.finalize_model_grads
    if len(chunks) == 1:
        if reduction.overlap_grad_reduce:
            shape.no_sync_func = chunks[0].no_sync
        return chunks
    if reduction.overlap_grad_reduce:
        shape.no_sync_func = [chunk.no_sync for chunk in chunks]
        shape.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if reduction.overlap_param_gather:
        shape.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return chunks


def _virtual_stages(given: Mapping[str, Any]) -> int | None:
    """Of a rank; None without interleaving, as Megatron-LM counts them."""
    found = int(given.get("num_virtual_stages_per_pipeline_rank", 1))
    if "num_layers_per_virtual_pipeline_stage" in given:
        layers = int(given["num_layers"]) // int(given["pipeline_model_parallel_size"])
        found = layers // int(given["num_layers_per_virtual_pipeline_stage"])
    return found if found > 1 else None


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _settings(config: str) -> dict[str, Any]:
    """Arguments of Megatron-LM by the names of its fields."""
    found = ENGINE.parse(Path(config).read_text(encoding="utf-8"), Path(config).name)
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in found.items() if name.startswith("--")}
    if int(given.get("context_parallel_size", 1)) > 1:
        raise CannotRehearseError(NO_CONTEXT.format(size=given["context_parallel_size"]))
    for name, works in _REFUSED.items():
        if given.get(name, works) != works:
            text = f"--{name.replace('_', '-')} is {given[name]}, which the rehearsal of megatron-core does not run: "
            raise CannotRehearseError(text + ("leave it out" if works is None else f"try {works}"))
    if given.get("moe_token_dispatcher_type", "alltoall") not in ("alltoall", "allgather"):
        raise CannotRehearseError(NO_DISPATCHER.format(kind=given["moe_token_dispatcher_type"]))
    return given


def _of_class(kind: Any, given: Mapping[str, Any], **more: Any) -> Any:
    """The configuration with every argument that is one of its fields, in the type of its default or of its text."""
    names = {one.name for one in fields(kind)} - _NOT_FUSED
    return kind(**{**{name: _value(text) for name, text in given.items() if name in names}, **more})


def _value(text: Any) -> Any:
    for kind in (int, float) if isinstance(text, str) else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _model_config(given: Mapping[str, Any]) -> Any:
    dtype = torch.bfloat16 if "bf16" in given else torch.float32
    more: dict[str, Any] = {"recompute_modules": given["recompute_modules"].split()} if "recompute_modules" in given else {}
    if "num_experts" in given:
        more |= {"num_moe_experts": int(given["num_experts"]), "moe_layer_freq": _expert_layers(given)}
    return _of_class(
        _core("transformer.transformer_config").TransformerConfig,
        given,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        virtual_pipeline_model_parallel_size=_virtual_stages(given),
        overlap_p2p_comm=_virtual_stages(given) is not None,  # as Megatron-LM sets them
        batch_p2p_comm=_virtual_stages(given) is None,
        deallocate_pipeline_outputs=True,
        layernorm_epsilon=float(given["norm_epsilon"]),
        add_bias_linear="disable_bias_linear" not in given,
        gated_linear_unit="swiglu" in given,
        activation_func=functional.silu if "swiglu" in given else functional.gelu,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
        **more,
    )


def _expert_layers(given: Mapping[str, Any]) -> int | list[int]:
    """1 for each layer with experts: `([0]*1+[1]*3)`, or a number, of which one layer has them."""
    text = str(given.get("moe_layer_freq", 1))
    parts = re.findall(r"\[([01])\]\*(\d+)", text)
    return [int(kind) for kind, count in parts for _ in range(int(count))] if parts else int(text)


def _model(config: Any, given: Mapping[str, Any], stage: int | None) -> nn.Module:
    """Of one of the rank's virtual stages, or of its only one."""
    parallel = _core("parallel_state")
    model_class, specs = _core("models.gpt").GPTModel, _core("models.gpt.gpt_layer_specs")
    replace_everywhere([(_core("transformer.torch_norm").WrappedTorchNorm, Norm)])
    if config.num_moe_experts is None:
        spec = specs.get_gpt_layer_local_spec(normalization=given["normalization"])
        layers = [spec]
    else:
        _grouped_experts()
        spec = specs.get_gpt_decoder_block_spec(config, False, given["normalization"], vp_stage=stage)
        spec.layer_norm, layers = Norm, spec.layer_specs
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = FlashAttention
    model: nn.Module = model_class(
        config,
        spec,
        vocab_size=int(given["vocab_size"]) + 1,
        max_sequence_length=int(given["seq_length"]),
        pre_process=parallel.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        vp_stage=stage,
        share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in given,
        position_embedding_type=given["position_embedding_type"],
        rotary_base=_value(given.get("rotary_base", 10000)),
    )
    model.cuda()  # norms and routers are made elsewhere
    return _core("transformer.module").Float16Module(config, model) if config.bf16 else model


def _grouped_experts() -> None:
    """Experts run in torch's grouped GEMMs, without Transformer Engine or the package grouped_gemm."""
    grouped = _core("transformer.moe.grouped_gemm_util")

    def gmm(rows: Tensor, weights: Tensor, counts: Tensor, trans_b: bool = False) -> Tensor:
        weights = weights.transpose(1, 2) if trans_b else weights
        if isinstance(rows, FakeTensor):
            ends = torch.zeros(len(counts), dtype=torch.int32)
        else:
            ends = counts.cumsum(0).to(rows.device, torch.int32)
        return functional.grouped_mm(rows, weights, offs=ends)

    _core("transformer.moe.moe_utils").te_general_gemm = None  # 0.16 reads it without Transformer Engine too
    grouped.grouped_gemm, grouped.ops = torch, SimpleNamespace(gmm=gmm)


def _experts_without_values(experts: int, top_k: int) -> None:
    """Tokens are spread evenly over experts."""
    dispatchers = _core("transformer.moe.token_dispatcher")

    def masked_select(values: Tensor, mask: Tensor) -> Tensor:
        """Of a map from tokens to experts."""
        rows = mask.numel() * top_k // experts
        return _Selected.apply(values, mask, rows)  # type: ignore[no-untyped-call,no-any-return]

    sort_chunks = _core("transformer.moe.moe_utils").sort_chunks_by_idxs

    def as_they_are(rows: Tensor, sizes: Any, order: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sort_chunks(rows, sizes, np.arange(len(order)), *args, **kwargs)

    def counts(self: Any, point: str, per_expert: Tensor | None = None) -> Tensor | None:
        """Rows of each rank and expert, where the dispatcher reads them."""
        if point != self.cuda_dtoh_point:
            return per_expert
        rows, ranks, local = int(self.num_out_tokens), self.ep_size * self.tp_size, self.num_local_experts
        whole = np.array(split_evenly(rows * self.tp_size, ranks * local)).reshape(ranks, local)
        if ranks > 1:
            self.input_splits = self.output_splits = np.array(split_evenly(rows, self.ep_size))
            self.output_splits_tp = np.full(self.tp_size, rows)
        if local > 1:
            self.num_global_tokens_per_local_expert = whole
        with unset_fake_temporarily():
            return torch.tensor(whole.sum(0))

    replace_everywhere([(sort_chunks, as_they_are)])
    Tensor.masked_select = masked_select  # type: ignore[assignment,method-assign]
    dispatchers.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts


class _Selected(torch.autograd.Function):
    """masked_select, where the number of chosen elements is known."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(mask)
        return values.new_empty(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.zeros_like(mask, dtype=grads[0].dtype), None, None


class Norm:
    """torch's, with the mark by which gradients are reduced over tp ranks under sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        found = (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps=eps)
        for parameter in found.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return found


class FlashAttention(nn.Module):
    """In the place of a core_attention: tokens, sequences, heads, channels."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def _without_gpu(given: Mapping[str, Any]) -> None:
    """Weights say that they are on a GPU, buffers of a backward are on the CPU, and nothing is random."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    plain = FakeTensor.type

    def kind(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    FakeTensor.type = kind  # type: ignore[method-assign,assignment]
    clipping = _core("optimizer.clip_grads")  # its own norm without fused kernels reads values
    clipping.l2_norm_impl = lambda chunk, flag, lists, each: (nn.utils.get_total_norm(lists[0]), None)
    random = _core("tensor_parallel.random")
    random._set_cuda_rng_state = lambda *_, **__: None
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    if "num_experts" in given:
        _experts_without_values(int(given["num_experts"]), int(given.get("moe_router_topk", 2)))
