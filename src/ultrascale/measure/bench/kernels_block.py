"""The contests of a fused block's kernels: norm with the residual's sum, rotation, gate.

The block keeps no output of norm and gate for backward and joins products, so that backward has to give such an output once
more, and q's, k's and v's gradients as one. All contestants do: what the block gains by it is measured by steps.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ultrascale.kernels import fused
from ultrascale.measure.bench.kernels import KernelCandidate, KernelComparison, KernelShape
from ultrascale.model.rotary import rotate, tables

EPS = 1e-5
LIGER = importlib.util.find_spec("liger_kernel") is not None
ABSENT = {} if LIGER else {"liger": "not installed"}

Run = Callable[[], tuple[Tensor, ...]]


def norm(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    rows, width = shape.tokens, shape.model.hidden
    x, added, past, grad = (numbers(device, dtype, rows, width, seed=seed) for seed in range(4))
    gain = numbers(device, dtype, width, seed=4)

    def normed(total: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(total, (width,), gain, EPS)

    def forward(x: Tensor, added: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, normed(total, gain)

    def backward(total: Tensor, gain: Tensor, grad: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, pull = torch.func.vjp(normed, total, gain)  # type: ignore[misc]  # three only with has_aux
        to_total, to_gain = pull(grad)
        return to_total + past, to_gain, out

    def plain(there: Callable[..., Any], back: Callable[..., Any]) -> Run:
        def run() -> tuple[Tensor, ...]:
            total, out = there(x, added, gain)
            return total, out, *back(total, gain, grad, past)

        return run

    def liger() -> KernelCandidate:
        summed = liger_function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
        alone = liger_function("rms_norm", "LigerRMSNormFunction")
        inputs = leaves(x, added, gain)

        def run() -> tuple[Tensor, ...]:
            out, total = summed.apply(*inputs, EPS, 0.0, "llama", False)
            to_x, _, to_gain = torch.autograd.grad((out, total), inputs, (grad, past))
            with torch.no_grad():
                again = alone.apply(total, gain, EPS)
            return total, out, to_x, to_gain, again

        return KernelCandidate(run)

    def ours() -> tuple[Tensor, ...]:
        total, out, scales = fused.norm(x, added, gain, EPS)
        return total, out, *fused.norm_backward(grad, total, scales, gain, past)

    return KernelComparison(
        f"{rows:,} × {width:,}",
        entered(plain, forward, backward, liger, lambda: KernelCandidate(ours)),
        # Forward reads two and writes two; backward reads three, writes the gradient and the norm's output once more.
        moved=9 * rows * width * x.element_size(),
        missing=ABSENT,
    )


def rotary(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    model, rows = shape.model, shape.tokens
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    cut = [heads, kv_heads, kv_heads]
    joint, grads = (numbers(device, dtype, shape.mbs, shape.seq, sum(cut), dim, seed=seed) for seed in range(2))
    to_q, to_k, to_v = (part.contiguous() for part in torch.split(grads, cut, dim=2))
    cos, sin = tables(model, torch.arange(shape.seq, device=device))

    def forward(joint: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = torch.split(joint, cut, dim=2)
        return rotate(q, (cos, sin)), rotate(k, (cos, sin))

    def backward(to_q: Tensor, to_k: Tensor, to_v: Tensor) -> Tensor:
        return torch.cat((rotate(to_q, (cos, -sin)), rotate(to_k, (cos, -sin)), to_v), dim=2)

    def plain(there: Callable[..., Any], back: Callable[..., Any]) -> Run:
        def run() -> tuple[Tensor, ...]:
            return *there(joint), back(to_q, to_k, to_v)

        return run

    def liger() -> KernelCandidate:
        function = liger_function("rope", "LigerRopeFunction")
        kept = [part.contiguous() for part in torch.split(joint, cut, dim=2)[:2]]
        own, own_grads = leaves(*(part.clone() for part in kept)), [to_q.clone(), to_k.clone()]
        rope = [table.to(dtype).unsqueeze(0) for table in (cos, sin)]

        def run() -> tuple[Tensor, ...]:
            q, k = (part.transpose(1, 2) for part in function.apply(*(one.transpose(1, 2) for one in own), *rope))
            return q.detach(), k.detach(), torch.cat((*torch.autograd.grad((q, k), own, own_grads), to_v), dim=2)

        return KernelCandidate(run, restoring((*own, *own_grads), (*kept, to_q, to_k)))

    def ours() -> KernelCandidate:
        own = joint.clone()

        def run() -> tuple[Tensor, ...]:
            fused.turn_(own.view(rows, -1, dim), heads, kv_heads, (cos, sin))
            q, k, v = (part.view(rows, -1, dim) for part in (to_q, to_k, to_v))
            return *torch.split(own, cut, dim=2)[:2], fused.rotate_back(q, k, v, (cos, sin)).view_as(own)

        return KernelCandidate(run, restoring((own,), (joint,)))

    each = 2 * rows * dim * joint.element_size()
    return KernelComparison(
        f"{rows:,} × ({heads} + 2 × {kv_heads}) × {dim}",
        entered(plain, forward, backward, liger, ours),
        moved=each * (heads + kv_heads) + each * sum(cut),
        missing=ABSENT,
    )


def gate(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    rows, width = shape.tokens, shape.model.ffn
    both, grad = numbers(device, dtype, rows, 2 * width), numbers(device, dtype, rows, width, seed=1)

    def forward(both: Tensor) -> Tensor:
        opened, up = both.chunk(2, dim=-1)
        return F.silu(opened) * up

    def backward(both: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        out, pull = torch.func.vjp(forward, both)  # type: ignore[misc]
        return pull(grad)[0], out

    def plain(there: Callable[..., Any], back: Callable[..., Any]) -> Run:
        def run() -> tuple[Tensor, ...]:
            return there(both), *back(both, grad)

        return run

    def liger() -> KernelCandidate:
        """In its own layout: gate and up apart, and so their gradients."""
        function = liger_function("swiglu", "LigerSiLUMulFunction")
        kept = [half.contiguous() for half in both.chunk(2, dim=-1)]
        own = leaves(*(half.clone() for half in kept))  # its backward writes over them

        def run() -> tuple[Tensor, ...]:
            out = function.apply(*own)
            with torch.no_grad():
                again = function.apply(*own)
            return out.detach(), *torch.autograd.grad(out, own, grad), again

        def result() -> tuple[Tensor, ...]:
            restoring(own, kept)()
            out, to_gate, to_up, again = run()
            return out, torch.cat((to_gate, to_up), dim=-1), again

        return KernelCandidate(run, restoring(own, kept), result)

    def ours() -> tuple[Tensor, ...]:
        return fused.gate(both), *fused.gate_backward(grad, both)

    return KernelComparison(
        f"{rows:,} × {width:,}",
        entered(plain, forward, backward, liger, lambda: KernelCandidate(ours)),
        # Forward reads two and writes one; backward reads three, writes both gradients and the gate's output once more.
        moved=9 * rows * width * both.element_size(),
        missing=ABSENT,
    )


def entered(
    plain: Callable[[Callable[..., Any], Callable[..., Any]], Run],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    liger: Callable[[], KernelCandidate],
    ours: Callable[[], KernelCandidate],
) -> dict[str, Callable[[], KernelCandidate]]:
    """The contestants that there are; `plain` runs forward and backward as they are, or compiled."""
    compiled = [torch.compile(function, dynamic=False) for function in (forward, backward)]
    found = {
        "eager": lambda: KernelCandidate(torch.no_grad()(plain(forward, backward))),
        "compile": lambda: KernelCandidate(torch.no_grad()(plain(compiled[0], compiled[1]))),
        "liger": liger,
        "ours": ours,
    }
    return {way: make for way, make in found.items() if way not in ABSENT}


def both_ways(forward: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Run:
    """Forward, and backward from `grads` to all inputs that have a gradient."""
    wanted = [one for one in inputs if one.requires_grad]

    def run() -> tuple[Tensor, ...]:
        outputs = forward(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *(output.detach() for output in outputs), *torch.autograd.grad(outputs, wanted, grads)

    return run


def liger_function(module: str, name: str) -> Any:
    """One of its autograd functions: it is no requirement of ours and has no types."""
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def restoring(overwritten: Sequence[Tensor], kept: Sequence[Tensor]) -> Callable[[], None]:
    @torch.no_grad()
    def reset() -> None:
        torch._foreach_copy_([one.detach() for one in overwritten], list(kept))

    return reset


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def numbers(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(seed))
