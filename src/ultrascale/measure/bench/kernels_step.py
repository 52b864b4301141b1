"""The contests of what a step does once: the loss of a linear head, and AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from ultrascale.kernels import split_master
from ultrascale.kernels.loss import linear_cross_entropy
from ultrascale.measure.bench.kernels import KernelCandidate, KernelComparison, KernelShape
from ultrascale.measure.bench.kernels_block import ABSENT, both_ways, leaves, liger_function, numbers
from ultrascale.model.transformer import IGNORED, CrossEntropy

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
