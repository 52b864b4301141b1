"""The contests of a fused block's kernels: norm with the residual's sum, rotation, gate.

The block keeps no output of norm and gate for backward and joins products, so that backward has to give such an output once
more, and q's, k's and v's gradients as one. All contestants do: what the block gains by it is measured by steps.


The contests of what a step does once: the loss of a linear head, and AdamW.

The contests of attention under a mask: a sliding window, and documents packed into sequences."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ultrascale.kernels import fused, split_master
from ultrascale.kernels.loss import linear_cross_entropy
from ultrascale.measure.bench_kernels import KernelCandidate, KernelComparison, KernelShape
from ultrascale.model import flex
from ultrascale.model.rotary import rotate, tables
from ultrascale.model.transformer import IGNORED, CausalAttention, CrossEntropy, within

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


LAYERS = 4  # whose weights AdamW steps: some gigabytes, as in a model
RATE, DECAY, BETAS, NEAR_ZERO, FACTOR = 1e-3, 0.1, (0.9, 0.95), 1e-8, 0.999


def loss(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    rows, width, vocab = shape.tokens, shape.model.hidden, shape.model.vocab
    hidden = numbers(device, dtype, rows, width)
    weight = numbers(device, dtype, vocab, width, seed=1) * width**-0.5
    targets = torch.randint(vocab, (rows,), device=device, generator=torch.Generator(device).manual_seed(2))
    inputs, grads = leaves(hidden, weight), (torch.tensor(1 / rows, device=device),)
    criterion = CrossEntropy()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = criterion(hidden @ weight.t(), targets)
        return out

    def liger() -> KernelCandidate:
        function = liger_function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")

        def run(hidden: Tensor, weight: Tensor) -> Tensor:
            found: Tensor = function.apply(hidden, weight, targets, None, None, IGNORED, 0.0, 0.0, "sum")[0]
            return found

        return KernelCandidate(both_ways(run, inputs, grads))

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets)

    found = {
        "eager": lambda: KernelCandidate(both_ways(plain, inputs, grads)),
        "compile": lambda: KernelCandidate(both_ways(torch.compile(plain, dynamic=False), inputs, grads)),
        "liger": liger,
        "ours": lambda: KernelCandidate(both_ways(ours, inputs, grads)),
    }
    return KernelComparison(
        f"{rows:,} × {width:,} × {vocab:,}",
        {way: make for way, make in found.items() if way not in ABSENT},
        flops=3 * 2.0 * rows * width * vocab,  # the logits, and the gradients of both factors
        missing=ABSENT,
    )


def adamw(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Scaling, the step and the copy that computes. Torch's optimizer finds gradients in fp32; the others read them as made."""
    model = shape.model
    wide = (model.q_dim + 2 * model.kv_dim, model.hidden), (model.hidden, model.q_dim)
    sizes = [*wide, (2 * model.ffn, model.hidden), (model.hidden, model.ffn), (model.hidden,), (model.hidden,)] * LAYERS
    before = [numbers(device, torch.float32, *size, seed=number) * 0.02 for number, size in enumerate(sizes)]
    made = [numbers(device, dtype, *size, seed=number + len(sizes)) for number, size in enumerate(sizes)]

    def eager() -> KernelCandidate:
        masters, gradients = [one.clone() for one in before], [one.float() for one in made]
        copies = [one.to(dtype) for one in before]
        inner = torch.optim.AdamW(masters, lr=RATE, betas=BETAS, eps=NEAR_ZERO, weight_decay=DECAY, fused=True)

        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            torch._foreach_mul_(gradients, FACTOR)
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            inner.step()
            torch._foreach_copy_(copies, masters)
            return ()

        return KernelCandidate(run, result=lambda: _updates(masters))

    def compiled() -> KernelCandidate:
        masters, copies = [one.clone() for one in before], [one.to(dtype) for one in before]
        means, squares = ([torch.zeros_like(one) for one in before] for _ in range(2))
        step = torch.compile(plain_steps, dynamic=False)

        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            step(masters, made, means, squares, copies)
            return ()

        return KernelCandidate(run, result=lambda: _updates(masters))

    def ours() -> KernelCandidate:
        from ultrascale.kernels import adamw_triton

        pairs = [split_master.split(one) for one in before]
        means, squares = ([torch.zeros_like(one) for one in before] for _ in range(2))
        now = adamw_triton.changing(FACTOR, RATE, BETAS, updates=1).to(device)

        def run() -> tuple[Tensor, ...]:
            for (copy, rest), gradient, mean, square in zip(pairs, made, means, squares, strict=True):
                adamw_triton.step(rest, gradient, mean, square, copy, now, decay=DECAY, betas=BETAS, eps=NEAR_ZERO)
            return ()

        return KernelCandidate(run, result=lambda: _updates([split_master.join(copy, rest) for copy, rest in pairs]))

    def _updates(after: list[Tensor]) -> tuple[Tensor, ...]:
        """What a step changed: beside the weights themselves a difference would not show."""
        return tuple(new - old for new, old in zip(after, before, strict=True))

    count = sum(one.numel() for one in before)
    return KernelComparison(
        f"{len(before)} weights, {count / 1e6:,.0f} million",
        {"eager": eager, "compile": compiled, "ours": ours},
        moved=26 * count,
        missing={"liger": "has none"},
    )


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


WINDOW, DOCUMENT = 1024, 500  # tokens: seen, and in a document on average
NONE = {"liger": "has none"}


def window(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Others make a dense mask in every layer, as the plain model does."""
    reach = min(WINDOW, max(1, shape.seq // 4))
    pairs = shape.seq * reach - reach * (reach - 1) // 2
    return _contest(shape, device, dtype, reach, None, pairs * shape.mbs, f"window {reach:,}")


def documents(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """All get their mask made: it is made once for all layers."""
    at_random = torch.Generator().manual_seed(0)
    ends = torch.rand(shape.mbs, shape.seq, generator=at_random) < 1 / DOCUMENT
    numbered = ends.cumsum(dim=1).to(device)
    lengths = [torch.bincount(row) for row in numbered]
    pairs = sum(int((row * (row + 1) // 2).sum()) for row in lengths)
    mean = shape.tokens / sum(len(row) for row in lengths)
    return _contest(shape, device, dtype, None, numbered, pairs, f"documents of {mean:,.0f}")


def _contest(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    reach: int | None,
    numbered: Tensor | None,
    pairs: int,
    what: str,
) -> KernelComparison:
    model, rows = shape.model, (shape.mbs, shape.seq)
    heads = model.heads, model.kv_heads, model.kv_heads
    inputs = leaves(*(numbers(device, dtype, *rows, count, model.head_dim, seed=seed) for seed, count in enumerate(heads)))
    grads = (numbers(device, dtype, *rows, model.heads, model.head_dim, seed=3),)
    core = CausalAttention(reach)
    bias = None if numbered is None else within(numbered, dtype)
    seen = flex.mask(shape.seq, reach, numbered, device)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = core(q, k, v, bias)
        return out

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex.attend(q, k, v, seen)

    return KernelComparison(
        f"{shape.mbs} × {shape.seq:,}, {model.heads} heads of {model.head_dim}, {what}",
        {
            "eager": lambda: KernelCandidate(both_ways(dense, inputs, grads)),
            "compile": lambda: KernelCandidate(both_ways(torch.compile(dense, dynamic=False), inputs, grads)),
            "ours": lambda: KernelCandidate(both_ways(ours, inputs, grads)),
        },
        # Two products of a pair forward and five backward, 2·d operations each.
        flops=7 * 2.0 * model.head_dim * model.heads * pairs,
        missing=NONE,
    )
