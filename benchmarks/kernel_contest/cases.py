"""The kernels that `bench kernels` compares: those of a fused block, of the loss and the optimizer, and masked attention.

The fused block saves no output of norm and gate for backward and joins GEMMs, so that its backward recomputes such an output
and returns the gradients of q, k and v as one tensor. All candidates do the same here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_contest.contest import KernelCandidate, KernelComparison, KernelShape
from ultrascale.kernels import fused, split_master
from ultrascale.kernels.loss import linear_cross_entropy
from ultrascale.model import flex
from ultrascale.model.rotary import rotate, tables
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import IGNORE_INDEX, CrossEntropy, document_bias
from ultrascale.parallel.torch_private import foreach_copy_, foreach_mul_

EPS = 1e-5
LIGER = importlib.util.find_spec("liger_kernel") is not None
ABSENT = {} if LIGER else {"liger": "not installed"}
NONE = {"liger": "has none"}
LAYERS = 4  # whose weights AdamW steps: some gigabytes, as in a model
RATE, DECAY, BETAS, NEAR_ZERO, FACTOR = 1e-3, 0.1, (0.9, 0.95), 1e-8, 0.999
WINDOW, DOCUMENT = 1024, 500  # tokens: in a sliding window, and in a document on average

Run = Callable[[], tuple[Tensor, ...]]
Make = Callable[[], KernelCandidate]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def norm(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """RMSNorm with the sum of the residual."""
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

    def plain(wrap: Wrap) -> Run:
        there, back = wrap(forward), wrap(backward)

        @torch.no_grad()
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

    # Forward reads two and writes two; backward reads three, writes the gradient and the norm's output once more.
    moved = 9 * rows * width * x.element_size()
    return KernelComparison(
        f"{rows:,} × {width:,}", candidates(plain, lambda: KernelCandidate(ours), liger), moved, missing=ABSENT
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

    def plain(wrap: Wrap) -> Run:
        there, back = wrap(forward), wrap(backward)
        return torch.no_grad()(lambda: (*there(joint), back(to_q, to_k, to_v)))

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
            fused.rotate_(own.view(rows, -1, dim), heads, kv_heads, (cos, sin))
            q, k, v = (part.view(rows, -1, dim) for part in (to_q, to_k, to_v))
            return *torch.split(own, cut, dim=2)[:2], fused.rotate_back(q, k, v, (cos, sin)).view_as(own)

        return KernelCandidate(run, restoring((own,), (joint,)))

    size = f"{rows:,} × ({heads} + 2 × {kv_heads}) × {dim}"
    moved = 2 * rows * dim * joint.element_size() * (heads + kv_heads + sum(cut))
    return KernelComparison(size, candidates(plain, ours, liger), moved, missing=ABSENT)


def gate(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    rows, width = shape.tokens, shape.model.ffn
    both, grad = numbers(device, dtype, rows, 2 * width), numbers(device, dtype, rows, width, seed=1)

    def forward(both: Tensor) -> Tensor:
        opened, up = both.chunk(2, dim=-1)
        return F.silu(opened) * up

    def backward(both: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        out, pull = torch.func.vjp(forward, both)  # type: ignore[misc]
        return pull(grad)[0], out

    def plain(wrap: Wrap) -> Run:
        there, back = wrap(forward), wrap(backward)
        return torch.no_grad()(lambda: (there(both), *back(both, grad)))

    def liger() -> KernelCandidate:
        """In its own layout: gate and up are separate tensors, and so are their gradients."""
        function = liger_function("swiglu", "LigerSiLUMulFunction")
        kept = [half.contiguous() for half in both.chunk(2, dim=-1)]
        own = leaves(*(half.clone() for half in kept))  # its backward overwrites them

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

    # Forward reads two and writes one; backward reads three, writes both gradients and the gate's output once more.
    moved = 9 * rows * width * both.element_size()
    return KernelComparison(
        f"{rows:,} × {width:,}", candidates(plain, lambda: KernelCandidate(ours), liger), moved, missing=ABSENT
    )


def loss(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Cross entropy of a linear head."""
    rows, width, vocab = shape.tokens, shape.model.hidden, shape.model.vocab
    hidden = numbers(device, dtype, rows, width)
    weight = numbers(device, dtype, vocab, width, seed=1) * width**-0.5
    targets = torch.randint(vocab, (rows,), device=device, generator=torch.Generator(device).manual_seed(2))
    run = partial(forward_and_backward, inputs=leaves(hidden, weight), grads=(torch.tensor(1 / rows, device=device),))
    criterion = CrossEntropy()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = criterion(hidden @ weight.t(), targets)
        return out

    def liger() -> KernelCandidate:
        function = liger_function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
        return KernelCandidate(run(lambda h, w: function.apply(h, w, targets, None, None, IGNORE_INDEX, 0.0, 0.0, "sum")[0]))

    return KernelComparison(
        f"{rows:,} × {width:,} × {vocab:,}",
        candidates(
            lambda wrap: run(wrap(plain)),
            lambda: KernelCandidate(run(lambda hidden, weight: linear_cross_entropy(hidden, weight, targets))),
            liger,
        ),
        flops=3 * 2.0 * rows * width * vocab,  # the logits, and the gradients of both factors
        missing=ABSENT,
    )


def adamw(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Scaling, the step and the cast to the compute format. Torch's optimizer gets gradients in fp32; others cast them."""
    model = shape.model
    wide = (model.q_dim + 2 * model.kv_dim, model.hidden), (model.hidden, model.q_dim)
    sizes = [*wide, (2 * model.ffn, model.hidden), (model.hidden, model.ffn), (model.hidden,), (model.hidden,)] * LAYERS
    before = [numbers(device, torch.float32, *size, seed=number) * 0.02 for number, size in enumerate(sizes)]
    grads = [numbers(device, dtype, *size, seed=number + len(sizes)) for number, size in enumerate(sizes)]

    def eager() -> KernelCandidate:
        masters, gradients = [one.clone() for one in before], [one.float() for one in grads]
        copies = [one.to(dtype) for one in before]
        inner = torch.optim.AdamW(masters, lr=RATE, betas=BETAS, eps=NEAR_ZERO, weight_decay=DECAY, fused=True)

        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            foreach_mul_(gradients, FACTOR)
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            inner.step()
            foreach_copy_(copies, masters)
            return ()

        return KernelCandidate(run, result=lambda: _updates(masters))

    def compiled() -> KernelCandidate:
        masters, copies = [one.clone() for one in before], [one.to(dtype) for one in before]
        means, squares = ([torch.zeros_like(one) for one in before] for _ in range(2))
        step = torch.compile(plain_steps, dynamic=False)

        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            step(masters, grads, means, squares, copies)
            return ()

        return KernelCandidate(run, result=lambda: _updates(masters))

    def ours() -> KernelCandidate:
        from ultrascale.kernels import adamw_triton

        pairs = [split_master.split(one) for one in before]
        means, squares = ([torch.zeros_like(one) for one in before] for _ in range(2))
        now = torch.cat((torch.tensor([FACTOR]), adamw_triton.step_inputs(RATE, BETAS, updates=1))).to(device)

        columns = zip(pairs, grads, means, squares, strict=True)
        weights = [
            adamw_triton.AdamWTensors(rest, gradient, mean, square, copy, DECAY)
            for (copy, rest), gradient, mean, square in columns
        ]
        kernel = adamw_triton.MultiTensorAdamW(torch.device(device))

        def run() -> tuple[Tensor, ...]:
            kernel.step(weights, now, BETAS, NEAR_ZERO)
            return ()

        return KernelCandidate(run, result=lambda: _updates([split_master.join(copy, rest) for copy, rest in pairs]))

    def _updates(after: list[Tensor]) -> tuple[Tensor, ...]:
        """What a step changed: relative to the weights themselves a difference would not show."""
        return tuple(new - old for new, old in zip(after, before, strict=True))

    count = sum(one.numel() for one in before)
    size = f"{len(before)} weights, {count / 1e6:,.0f} million"
    return KernelComparison(size, {"eager": eager, "compile": compiled, "ours": ours}, moved=26 * count, missing=NONE)


def plain_steps(
    masters: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor], copies: list[Tensor]
) -> None:
    """The first step of AdamW by its formula."""
    beta1, beta2 = BETAS
    for master, gradient, mean, square, copy in zip(masters, gradients, means, squares, copies, strict=True):
        scaled = gradient.float() * FACTOR
        mean.copy_(beta1 * mean + (1 - beta1) * scaled)
        square.copy_(beta2 * square + (1 - beta2) * scaled * scaled)
        update = mean / (1 - beta1) / ((square / (1 - beta2)).sqrt() + NEAR_ZERO)
        master.copy_(master * (1 - RATE * DECAY) - RATE * update)
        copy.copy_(master)


def window(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Sliding-window attention. Others make a dense mask in every layer, as the plain model does."""
    reach = min(WINDOW, max(1, shape.seq // 4))
    pairs = shape.seq * reach - reach * (reach - 1) // 2
    return _attention(shape, device, dtype, reach, None, pairs * shape.mbs, f"window {reach:,}")


def documents(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Attention inside documents packed into sequences. All get a ready mask: it is made once for all layers."""
    at_random = torch.Generator().manual_seed(0)
    ends = torch.rand(shape.mbs, shape.seq, generator=at_random) < 1 / DOCUMENT
    numbered = ends.cumsum(dim=1).to(device)
    lengths = [torch.bincount(row) for row in numbered]
    pairs = sum(int((row * (row + 1) // 2).sum()) for row in lengths)
    mean = shape.tokens / sum(len(row) for row in lengths)
    return _attention(shape, device, dtype, None, numbered, pairs, f"documents of {mean:,.0f}")


def _attention(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    reach: int | None,
    numbered: Tensor | None,
    pairs: int,
    what: str,
) -> KernelComparison:
    """`pairs`: of a query and a key, over the batch."""
    model, rows = shape.model, (shape.mbs, shape.seq)
    heads = model.heads, model.kv_heads, model.kv_heads
    inputs = leaves(*(numbers(device, dtype, *rows, count, model.head_dim, seed=seed) for seed, count in enumerate(heads)))
    run = partial(
        forward_and_backward, inputs=inputs, grads=(numbers(device, dtype, *rows, model.heads, model.head_dim, seed=3),)
    )
    core = CausalAttention(reach)
    bias = None if numbered is None else document_bias(numbered, dtype)
    mask = flex.mask(shape.seq, reach, numbered, device)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = core(q, k, v, bias)
        return out

    return KernelComparison(
        f"{shape.mbs} × {shape.seq:,}, {model.heads} heads of {model.head_dim}, {what}",
        candidates(lambda wrap: run(wrap(dense)), lambda: KernelCandidate(run(lambda q, k, v: flex.attend(q, k, v, mask)))),
        # Two GEMMs of a pair forward and five backward, 2·d operations each.
        flops=7 * 2.0 * model.head_dim * model.heads * pairs,
        missing=NONE,
    )


def candidates(plain: Callable[[Wrap], Run], ours: Make, liger: Make | None = None) -> dict[str, Make]:
    """The candidates that exist; `plain` builds a run of torch's operators, each function wrapped, or not, by torch.compile."""
    found: dict[str, Make] = {
        "eager": lambda: KernelCandidate(plain(lambda function: function)),
        "compile": lambda: KernelCandidate(plain(partial(torch.compile, dynamic=False))),
    }
    if LIGER and liger is not None:
        found["liger"] = liger
    return {**found, "ours": ours}


def forward_and_backward(forward: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Run:
    """Forward, and backward from `grads` to all inputs."""

    def run() -> tuple[Tensor, ...]:
        output = forward(*inputs)
        return output.detach(), *torch.autograd.grad(output, inputs, grads)

    return run


def liger_function(module: str, name: str) -> Any:
    """One of its autograd functions. It is an optional package without types."""
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def restoring(overwritten: Sequence[Tensor], kept: Sequence[Tensor]) -> Callable[[], None]:
    @torch.no_grad()
    def reset() -> None:
        foreach_copy_([one.detach() for one in overwritten], list(kept))

    return reset


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def numbers(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(seed))


CASES: dict[str, Callable[[KernelShape, torch.device, torch.dtype], KernelComparison]] = {
    "norm": norm,
    "rotary": rotary,
    "gate": gate,
    "loss": loss,
    "adamw": adamw,
    "window": window,
    "documents": documents,
}
