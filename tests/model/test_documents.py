"""Documents in one sequence: each is computed as if it were alone, by attention and by layers with a state."""

from __future__ import annotations

import pytest
import torch

from parallel.harness import family
from ultrascale.model.transformer import Transformer, full_weight

LENGTHS = 70, 1, 2, 3, 20  # more than a chunk, less than the convolution sees


@pytest.mark.parametrize("name", ["llama", "qwen3-next-family", "nemotron-h-family", "mamba"])
def test_a_document_is_computed_as_if_alone(name: str) -> None:
    shape = family(name).model_copy(update={"positions": "none", "max_positions": None})
    model = Transformer(shape).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(full_weight(key, parameter.shape, 3, shape, "cpu"))
            if key.endswith("bias") and parameter.dim() == 1:
                parameter.add_(0.3)
    tokens = torch.randint(0, shape.vocab, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).expand(2, -1)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    packed = model(tokens, torch.arange(sum(LENGTHS)), documents=documents)
    alone = [model(part, torch.arange(part.shape[1])) for part in tokens.split(LENGTHS, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    losses = [out.logsumexp(-1).square().sum() for out in (packed, torch.cat(alone, 1))]
    gradients = [torch.autograd.grad(loss, weights) for loss in losses]
    for mine, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, wanted)
