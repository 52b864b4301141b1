"""Applies fp8 to a plain model from outside: replaces its GEMMs by fp8 ones, and the chunked head by one in fp8.

Grouped GEMMs of experts, routers and embeddings stay. The arithmetic is in kernels/float8_gemm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.kernels import float8_block, loss
from ultrascale.kernels.float8_block import Float8Block, amax_bound
from ultrascale.kernels.float8_gemm import E5M2, CustomGemmModule, Float8Gemms, GemmOperand, multiply
from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.loss import ChunkedHead, LinearCrossEntropy
from ultrascale.model.latent_attention import LatentAttention
from ultrascale.model.linear_attention import GatedDeltaNet
from ultrascale.model.mamba import Mamba2Mixer
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.self_attention import MultiLinear
from ultrascale.model.transformer import IGNORE_INDEX, MLP, Head, Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import FP8_MULTIPLE, FP8_TOKENS, Fp8Keep, Fp8Scaling

MIN_CAPABILITY = (8, 9)  # compute capability of Ada; Hopper and later have fp8 too
BLOCKWISE_MAJOR = 9  # the only major capability for which cuBLAS has GEMMs with a scale per block


class Float8Linear(nn.Linear):
    """A linear layer in fp8, with the weight and bias of the plain one under the same names."""

    def __init__(self, plain: nn.Linear, gemms: Float8Gemms) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: the plain module's parameters are taken over
        self.weight, self.bias, self.gemms = plain.weight, plain.bias, gemms

    def forward(self, input: Tensor) -> Tensor:
        return self.gemms.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, fp8 with a scale per {self.gemms.scaling}"


def apply(
    model: Transformer,
    scaling: Fp8Scaling,
    keep: Fp8Keep,
    device: torch.device,
    fused_block: Callable[[FusedBlock], FusedBlock] = Float8Block,
    chunked_head: Callable[[ChunkedHead], ChunkedHead] | None = None,
) -> None:
    """Replaces GEMMs by fp8 ones if the kernel supports their sizes; names and parameters stay.

    `fused_block` and `chunked_head`: the fp8 forms of the model's, where tensor parallelism cuts them.
    """
    if device.type == "cuda":
        check(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device), scaling)
    gemms = Float8Gemms(scaling)
    ends = (0, model.model.all_layers - 1) if keep == "ends" else ()
    for index, block in zip(model.blocks, model.each_block(), strict=True):
        if int(index) in ends:
            continue
        if isinstance(block, FusedBlock):
            model.blocks[index] = fused_block(block)
            continue
        attention = block.attention
        if isinstance(attention, LatentAttention):
            multi_linears = [attention.q_up, attention.kv_up]
        elif isinstance(attention, GatedDeltaNet | Mamba2Mixer):
            multi_linears = [attention.inputs]
        else:
            multi_linears = [] if attention is None else [attention.qkv]
        for multi_linear in multi_linears:
            _multi_linear(multi_linear, gemms)
        if attention is not None:
            attention.out = _linear(attention.out, gemms)
        mlp = block.mlp.shared if isinstance(block.mlp, MixtureOfExperts) else block.mlp
        if isinstance(mlp, MLP):
            _multi_linear(mlp.inputs, gemms)
            mlp.down = _linear(mlp.down, gemms)
    if keep == "none" and model.head is not None:
        model.head = _head(model.head, gemms, chunked_head or Float8Head)


def weights(model: nn.Module) -> list[list[nn.Parameter]]:
    """Weights used only by fp8 GEMMs, in groups that share a scale: a fused block joins several in one GEMM."""
    found: list[list[nn.Parameter]] = []
    for module in model.modules():
        if isinstance(module, Float8Block):
            found += [list(multi_linear.parameters()) for multi_linear in module.joined_linears()]
            assert isinstance(module.mlp, MLP)
            assert module.attention is not None
            found += [[linear.get_parameter("weight")] for linear in (module.attention.out, module.mlp.down)]
        elif isinstance(module, Float8Head):
            found.append([module.linear.get_parameter("weight")])
        elif isinstance(module, Float8Linear) or (
            isinstance(module, CustomGemmModule) and isinstance(module.gemms, Float8Gemms)
        ):
            linears = module.children() if isinstance(module, MultiLinear) else (module,)
            found += [[linear.get_parameter("weight")] for linear in linears]
    looked_up = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]  # including a tied head's
    return [group for group in found if not any(group[0] is table for table in looked_up)]


def check(capability: tuple[int, int], name: str, scaling: Fp8Scaling) -> None:
    """Raises SpecError if a GPU of that capability does not support the scaling."""
    if capability < MIN_CAPABILITY:
        raise SpecError(f"job.precision is fp8 but {name} does not compute in it (Ada and Hopper were the first): try bf16")
    if scaling == "block" and capability[0] != BLOCKWISE_MAJOR:
        raise SpecError(f"train.fp8_scaling is block but {name} has no such matmuls (Hopper has): try tensor or row")


def _fits(linear: nn.Module, gemms: Float8Gemms) -> bool:
    weight = linear.get_parameter("weight")
    return all(size % FP8_MULTIPLE[gemms.scaling] == 0 for size in weight.shape)


def _linear(linear: nn.Linear, gemms: Float8Gemms) -> nn.Linear:
    if not _fits(linear, gemms):
        return linear
    if isinstance(linear, CustomGemmModule):
        linear.gemms = gemms
        return linear
    return Float8Linear(linear, gemms)


def _multi_linear(multi_linear: MultiLinear, gemms: Float8Gemms) -> None:
    """Linears with one input; those with custom GEMMs are computed together, so all of them are changed or none."""
    if isinstance(multi_linear, CustomGemmModule):
        if all(_fits(linear, gemms) for linear in multi_linear.children()):
            multi_linear.gemms = gemms
        return
    for name, linear in multi_linear.named_children():
        assert isinstance(linear, nn.Linear)
        setattr(multi_linear, name, _linear(linear, gemms))


def _head(head: Head, gemms: Float8Gemms, chunked_head: Callable[[ChunkedHead], ChunkedHead]) -> Head:
    if not _fits(head.linear, gemms):
        return head
    if isinstance(head, ChunkedHead):
        return chunked_head(head)
    head.linear = _linear(head.linear, gemms)
    return head


CHUNKS_PER_GEMM = 4  # chunks in one GEMM for the weight gradient: 2 GiB of fp8 for a vocabulary of 128 thousand
FACTOR = 2.0**15  # the power of two that scales 1 to just below e5m2's maximum


class _LinearCrossEntropy(LinearCrossEntropy):
    """As in kernels/loss.py, with all three GEMMs in fp8, for hidden [n, h] and weight [v, h] of sizes that these support.

    The gradient of logits is between -1 and 1, so that its scale is known beforehand. fp8 GEMMs cannot accumulate into an
    existing output: the weight gradient is computed from several chunks at once, whose logit gradients are stored in fp8
    until then.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: tuple[int, float], with_grad: bool
    ) -> Tensor:
        if len(hidden) % FP8_TOKENS["tensor"]:
            return LinearCrossEntropy.forward(ctx, hidden, weight, targets, settings, with_grad)
        chunk, z_loss = settings
        losses = loss.empty_losses(len(hidden), hidden, z_loss)
        narrow, table = float8_block.cast_rows(hidden), float8_block.cast_rows(weight)
        parts = *narrow, targets, losses
        if not with_grad:
            for data, scale, wanted, lost in _split(parts, chunk):
                logits = multiply(GemmOperand(data, scale), table, hidden.dtype, fast=True)
                loss.loss_and_gradient(logits, wanted, lost, z_loss)
            return loss.summed(losses)
        transposed, of_hidden = float8_block.cast_transposed(weight, amax_bound(table)), amax_bound(narrow)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        back = torch.full((), 1 / FACTOR, device=weight.device)
        for rows, *group in _split((hidden, *parts, grad_hidden), CHUNKS_PER_GEMM * chunk):
            gradients = torch.empty(len(weight), len(rows), dtype=E5M2, device=weight.device)
            for columns, (data, scale, wanted, lost, out) in zip(
                torch.split(gradients, chunk, 1), _split(group, chunk), strict=True
            ):
                logits = multiply(GemmOperand(data, scale), table, hidden.dtype, fast=True)
                gradient = scaled_gradient(logits, wanted, lost, columns, z_loss)
                del logits  # before the next chunk's are allocated
                out.copy_(multiply(GemmOperand(gradient, back), transposed, hidden.dtype))
            part = multiply(GemmOperand(gradients, back), float8_block.cast_transposed(rows, of_hidden), losses.dtype)
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return loss.summed(losses)


class Float8Head(ChunkedHead):
    """A chunked head in fp8."""

    function: type[LinearCrossEntropy] | None = _LinearCrossEntropy


def scaled_gradient(logits: Tensor, targets: Tensor, losses: Tensor, transposed: Tensor, z_loss: float = 0.0) -> Tensor:
    """The gradient of the summed losses times FACTOR, in fp8, also written to `transposed`; writes each token's losses."""
    if logits.is_cuda:
        from ultrascale.kernels import loss_triton

        return loss_triton.loss_and_scaled_gradient(logits, targets, losses, FACTOR, transposed, z_loss)
    narrow = (loss.loss_and_gradient(logits, targets, losses, z_loss) * FACTOR).to(transposed.dtype)
    transposed.copy_(narrow.t())
    return narrow


def shard_scaled_gradient(
    logits: Tensor, targets: Tensor, first: int, statistics: Tensor, losses: Tensor, transposed: Tensor, z_loss: float = 0.0
) -> Tensor:
    """The same of the columns of a vocabulary from `first` on; statistics [shards, 2, n]: those of all columns."""
    if logits.is_cuda:
        from ultrascale.kernels import loss_triton

        log_sum = loss.shard_loss(statistics, targets, losses, z_loss)
        return loss_triton.scaled_gradient(
            logits, targets - first, log_sum, targets != IGNORE_INDEX, FACTOR, transposed, z_loss
        )
    narrow = (loss.shard_gradient(logits, targets, first, statistics, losses, z_loss) * FACTOR).to(transposed.dtype)
    transposed.copy_(narrow.t())
    return narrow


def _split(parts: Iterable[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(part, size) for part in parts), strict=True)
