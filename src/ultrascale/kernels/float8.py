"""Applies fp8 to a plain model from outside: replaces its GEMMs by fp8 ones.

Grouped GEMMs of experts, routers and embeddings stay. The arithmetic is in kernels/float8_gemm.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ultrascale.kernels.float8_block import Float8Block
from ultrascale.kernels.float8_gemm import CustomGemmModule, Float8Gemms
from ultrascale.kernels.float8_head import Float8Head
from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.loss import ChunkedHead
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.transformer import MLP, Head, MultiLinear, Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import FP8_MULTIPLE, Fp8Keep, Fp8Scaling

FIRST = (8, 9)  # compute capability of Ada; Hopper and later have fp8 too
BLOCKS = 9  # the only major capability for which cuBLAS has GEMMs with a scale per block


class Float8Linear(nn.Linear):
    """A linear layer in fp8, with the weight and bias of the plain one under the same names."""

    def __init__(self, plain: nn.Linear, gemms: Float8Gemms) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: the plain module's parameters are taken over
        self.weight, self.bias, self.gemms = plain.weight, plain.bias, gemms

    def forward(self, input: Tensor) -> Tensor:
        return self.gemms.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, fp8 with a scale per {self.gemms.scaling}"


def apply(model: Transformer, scaling: Fp8Scaling, keep: Fp8Keep, device: torch.device) -> None:
    """Replaces GEMMs by fp8 ones if the kernel supports their sizes; names and parameters stay."""
    if device.type == "cuda":
        check(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device), scaling)
    gemms = Float8Gemms(scaling)
    ends = (0, model.model.layers - 1) if keep == "ends" else ()
    for index, block in zip(model.blocks, model.each_block(), strict=True):
        if int(index) in ends:
            continue
        if isinstance(block, FusedBlock):
            model.blocks[index] = Float8Block(block)
            continue
        _multi_linear(block.attention.qkv, gemms)
        block.attention.out = _linear(block.attention.out, gemms)
        mlp = block.mlp.shared if isinstance(block.mlp, MixtureOfExperts) else block.mlp
        if isinstance(mlp, MLP):
            _multi_linear(mlp.inputs, gemms)
            mlp.down = _linear(mlp.down, gemms)
    if keep == "none" and model.head is not None:
        model.head = _head(model.head, gemms)


def weights(model: nn.Module) -> list[list[nn.Parameter]]:
    """Weights used only by fp8 GEMMs, in groups that share a scale: a fused block joins several in one GEMM."""
    found: list[list[nn.Parameter]] = []
    for module in model.modules():
        if isinstance(module, Float8Block):
            found += [list(multi_linear.parameters()) for multi_linear in module.joined_linears()]
            assert isinstance(module.mlp, MLP)
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
    if capability < FIRST:
        raise SpecError(f"job.precision is fp8 but {name} does not compute in it (Ada and Hopper were the first): try bf16")
    if scaling == "block" and capability[0] != BLOCKS:
        raise SpecError(f"train.fp8_scaling is block but {name} has no such products (Hopper has): try tensor or row")


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


def _head(head: Head, gemms: Float8Gemms) -> Head:
    if not _fits(head.linear, gemms):
        return head
    if isinstance(head, ChunkedHead):
        return Float8Head(head)
    head.linear = _linear(head.linear, gemms)
    return head
