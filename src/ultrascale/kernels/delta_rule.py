"""The gated delta rule on a GPU: kernels of delta_rule_triton.py in autograd; model/linear_attention.py has the plain rule.

Both save their inputs alone. Backward computes the chunks' values and states again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.model.linear_attention import GatedDeltaRule


def apply(model: nn.Module) -> None:
    for core in (module for module in model.modules() if isinstance(module, GatedDeltaRule)):
        core.kernel = DeltaRuleKernels.apply


class DeltaRuleKernels(torch.autograd.Function):
    """q, k, v in one dtype; log_decay and step in fp32."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        from ultrascale.kernels import delta_rule_triton as kernels

        q, k, v, log_decay, step = inputs = tuple(one.contiguous() for one in inputs)
        ctx.save_for_backward(*inputs)
        written, stated, _ = kernels.prepare(k, v, log_decay, step, backward=False)
        return kernels.scan(q, k, v, log_decay, written, stated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        from ultrascale.kernels import delta_rule_triton as kernels

        inputs, grad = ctx.saved_tensors, grad.contiguous()
        q, k, v, log_decay, step = inputs
        written, stated, inverse = kernels.prepare(k, v, log_decay, step, backward=True)
        states = kernels.scan_states(k, v, log_decay, written, stated)
        grad_states, grad_values = kernels.scan_back(grad, q, k, log_decay, stated)
        del stated
        grad_q, grad_k, *others = kernels.gradients(inputs, grad, written, inverse, states, grad_states, grad_values)
        del written, inverse, states, grad_states, grad_values
        repeats = v.shape[2] // k.shape[2]
        if repeats > 1:
            grad_q, grad_k = (one.view(*k.shape[:3], repeats, -1).sum(3) for one in (grad_q, grad_k))
        return grad_q, grad_k, *others
