"""The kernels of the gated delta rule against the plain one; here by Triton's interpreter (test_interpreted.py)."""

from __future__ import annotations

import os

import pytest
import torch

from ultrascale import Cluster, Job, Layout, Model
from ultrascale.cost.memory.states import DELTA_RULE_WIDTHS
from ultrascale.kernels import autotune
from ultrascale.kernels.delta_rule import DeltaRuleKernels
from ultrascale.model.linear_attention import gated_delta_rule
from ultrascale.specs.blocks import LinearAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: a GPU's fp32 takes minutes to compile")
@pytest.mark.parametrize(("length", "heads", "widths"), [(64, (1, 1), (16, 16)), (100, (1, 2), (16, 32))])
@pytest.mark.parametrize("alike", [False, True])
def test_output_and_gradients_are_those_of_the_plain_rule(
    length: int, heads: tuple[int, int], widths: tuple[int, int], alike: bool
) -> None:
    """`alike`: keys of the same direction, steps of one and no decay, where powers of a chunk's system reach 10¹⁷."""
    generator = torch.Generator().manual_seed(length)

    def draw(count: int, *width: int) -> torch.Tensor:
        return torch.randn(2, length, count, *width, generator=generator)

    inputs = [draw(heads[0], widths[0]), draw(heads[0], widths[0]), draw(heads[1], widths[1])]
    inputs += [-draw(heads[1]).abs(), draw(heads[1]).sigmoid()]
    if alike:
        inputs[1] = 1 + 0.01 * inputs[1]
        inputs[3], inputs[4] = 0.001 * inputs[3], 1 - 0.01 * inputs[4]
    grad = draw(heads[1], widths[1])
    exact = [one.double().requires_grad_() for one in inputs]
    out = gated_delta_rule(*exact)
    wanted = [out, *torch.autograd.grad(out, exact, grad.double())]
    mine = [one.clone().requires_grad_() for one in inputs]
    out = DeltaRuleKernels.apply(*mine)
    for found, expected in zip([out, *torch.autograd.grad(out, mine, grad)], wanted, strict=True):
        assert (found - expected).norm() < (1e-4 if alike else 1e-5) * expected.norm()


if torch.cuda.is_available() and not INTERPRETED:

    @pytest.mark.parametrize("keys", DELTA_RULE_WIDTHS)
    @pytest.mark.parametrize("values", DELTA_RULE_WIDTHS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_the_formats_and_widths_of_a_job(keys: int, values: int, dtype: torch.dtype) -> None:
        linear = LinearAttention(key_heads=2, value_heads=4, key_head_dim=keys, value_head_dim=values)
        model = Model(name="linear", layers=2, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=512,
                      linear_attention=linear, attention_pattern=("linear", "full"))  # fmt: skip
        job = Job(model=model, cluster=Cluster.load("1xh200"), seq=256, batch_tokens=256)
        check = autotune.check_delta_rule(job, Layout(), dtype, torch.device("cuda"))
        assert check is not None
        assert check.is_right, str(check)
        assert check.error > 0
