"""What a rank of each pipeline stage sends: small collectives, first, middle and last stages, our engine and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from builders import make_job
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.traffic import of_stage
from ultrascale.specs.estimate import Traffic
from ultrascale.specs.framework import Framework
from ultrascale.specs.layout import Layout

N8, ENDS8 = 8_030_261_248, 2 * 128256 * 4096 + 4096
EAGER = Framework.load("ultrascale-eager")


def sent(model: str, seq: int, layout: Layout, stage: int = 0, **fields: Any) -> list[Traffic]:
    job = make_job(model, f"{layout.gpus}xh100", seq, layout, **fields)
    return list(of_stage(job, layout, ClusterRates(job), stage))


def bytes_of(found: list[Traffic], technique: str, collective: str) -> float:
    return sum(one.bytes for one in found if (one.technique, one.collective) == (technique, collective))


def calls_of(found: list[Traffic], technique: str, collective: str) -> float:
    return sum(one.calls for one in found if (one.technique, one.collective) == (technique, collective))


def test_small_sums_of_tensor_parallelism() -> None:
    """Llama-3-70B, tp 16 of 8 kv heads, 4 micro-batches of 8192 tokens; an all-reduce over n sends 2·(n − 1)/n of its buffer.

    The loss: a maximum and two sums of 4 bytes a token and micro-batch. fp32 gradients of 161 norms of 8192. Two ranks hold
    each kv head: of 80 layers 2·8192·128 elements are reduced between them.
    """
    found = sent("llama-3-70b", 8192, Layout(tp=16, gas=4))
    loss = 4 * 3 * 4 * 8192 * 2 * 15 / 16
    norms = 161 * 8192 * 4 * 2 * 15 / 16
    kv = 80 * 2 * 8192 * 128 * 4
    assert bytes_of(found, "tensor", "all_reduce") == pytest.approx(loss + norms + kv)
    assert {one.group for one in found} == {16, 2}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_chunked_loss_gathers_two_numbers_per_token_and_rank(sequence_parallel: bool) -> None:
    """Llama-3-8B, tp 2, 3 micro-batches of 16,384 tokens: chunks of 2·4096, each gathered and scattered once."""
    layout = Layout(tp=2, pp=2, gas=3, mbs=2, sequence_parallel=sequence_parallel)
    with_head, plain = (
        sent("llama-3-8b", 8192, layout, 1, framework=Framework.load("ultrascale").model_copy(update={"loss": loss}))
        for loss in ("at-once", "log-softmax")
    )
    tokens, hidden = 3 * 16_384, 2 * 4096  # in bytes of bf16
    extra = {one: bytes_of(with_head, "tensor", one) - bytes_of(plain, "tensor", one) for one in ("all_gather", "all_reduce")}
    gathered = tokens * (2 * 2 * 4 - (hidden if sequence_parallel else 0)) / 2  # half of it from the other rank
    assert extra == {"all_gather": gathered, "all_reduce": -tokens * 3 * 4}
    calls = [calls_of(one, "tensor", "all_gather") for one in (with_head, plain)]
    assert calls[0] - calls[1] == 3 * 2  # two chunks' numbers; and hidden states in two parts instead of twice


def test_without_sequence_parallelism_only_head_norms_and_routers_are_reduced() -> None:
    """Qwen3-30B-A3B, tp 4: norms of queries and keys (2·128) and the router (128·2048) of 48 layers, 4 bytes each."""
    found = sent("qwen3-30b-a3b", 4096, Layout(tp=4, sequence_parallel=False))
    residual = 2 * 4096 * 2048
    large = 48 * 2 * 2 + 2
    small = 3 * 4 * 4096 + 48 * (2 * 128 + 128 * 2048) * 4
    assert bytes_of(found, "tensor", "all_reduce") == pytest.approx((large * residual + small) * 2 * 3 / 4)


def test_experts_inputs_are_not_gathered_again() -> None:
    """Mixtral, tp 8: 32 layers gather 4 times a micro-batch and attention's saved input once more; and the two ends."""
    found = sent("mixtral-8x7b", 4096, Layout(tp=8, gas=2))
    assert calls_of(found, "tensor", "all_gather") == 2 * (32 * 5 + 1 + 2)
    assert calls_of(found, "tensor", "reduce_scatter") == 2 * (32 * 4 + 1 + 1)


@pytest.mark.parametrize(("recompute", "gathers", "scatters"), [("none", 0, 0), ("selective", 0, 0), ("full", 2, 1)])
def test_collectives_repeated_by_checkpointing(recompute: str, gathers: int, scatters: int) -> None:
    """torch.utils.checkpoint enters both regions once more and leaves the first: it stops before the second is left. Saved
    matmuls are saved after their collective.
    """
    layout = Layout(tp=8, recompute=recompute)
    found = sent("llama-3-8b", 8192, layout, framework=EAGER)
    assert calls_of(found, "tensor", "all_gather") == 32 * (6 + gathers) + 3
    assert calls_of(found, "tensor", "reduce_scatter") == 32 * (4 + scatters) + 2


def test_other_engines_repeat_all_forward_collectives_or_none() -> None:
    for recompute, gathers, scatters in (("selective", 0, 0), ("full", 2, 2)):
        found = sent("llama-3-8b", 8192, Layout(tp=8, recompute=recompute))
        assert calls_of(found, "tensor", "all_gather") == 32 * (6 + gathers) + 3
        assert calls_of(found, "tensor", "reduce_scatter") == 32 * (4 + scatters) + 2


def test_fsdp_keeps_the_ends_gathered() -> None:
    """ZeRO-3 over 8, 4 micro-batches: layers before forward and backward, embedding and head once a micro-batch."""
    layout = Layout(dp=8, zero=3, gas=4)
    assert bytes_of(sent("llama-3-8b", 8192, layout), "zero", "all_gather") == pytest.approx(7 / 8 * 2 * 8 * N8)
    found = bytes_of(sent("llama-3-8b", 8192, layout, framework=EAGER), "zero", "all_gather")
    assert found == pytest.approx(7 / 8 * 2 * (8 * (N8 - ENDS8) + 4 * ENDS8))


def stages(layout: Layout) -> Iterator[list[Traffic]]:
    for stage in range(layout.pp):
        yield sent("llama-3.2-1b", 8192, layout, stage)


def test_pipeline_ends_send_in_one_direction() -> None:
    """Llama-3.2-1B over 4 ranks, 8 micro-batches of 2·8192·2048 bytes; the tied matrix, 4·128256·2048, is summed at the end."""
    found = list(stages(Layout(pp=4, gas=8)))
    hop = 2 * 8192 * 2048
    assert [bytes_of(one, "pipeline", "send_recv") / hop for one in found] == [8, 16, 16, 8]
    assert [bytes_of(one, "pipeline", "all_reduce") for one in found] == [4 * 128256 * 2048, 0, 0, 4 * 128256 * 2048]


def test_v_shaped_placement_turns_without_a_send() -> None:
    """8 chunks on 4 ranks: the last rank hands over from its first to its second, and the first rank has both ends."""
    found = list(stages(Layout(pp=4, gas=8, schedule="zb-v", virtual_stages=2)))
    assert [calls_of(one, "pipeline", "send_recv") for one in found] == [16, 32, 32, 16]
    assert not any(bytes_of(one, "pipeline", "all_reduce") for one in found)


def test_each_stage_reduces_its_own_parameters() -> None:
    """Llama-3-8B over 2 ranks: 17 layers and the embedding, 15 layers, head and norm; all-reduced over two data ranks."""
    layout = Layout(dp=2, pp=2, gas=4)
    first, last = (bytes_of(sent("llama-3-8b", 8192, layout, stage), "data", "all_reduce") for stage in (0, 1))
    assert first == 4 * (17 * 218_112_000 + 128256 * 4096)
    assert last == 4 * (15 * 218_112_000 + 128256 * 4096 + 4096)


def test_tp_sharded_experts_receive_tokens_of_every_tp_rank() -> None:
    """Mixtral, ep 2 beside tp 2, 32 layers: our ranks route all tokens each, and tell each other counts of 8 experts.

    Megatron's route their slices. Each of the rows has a weight in bf16 on its way to the experts, and both gradients come
    back. The other tp rank's part of an expert gathers the rows that arrived, twice (forward, and gradients of the outputs),
    with their weights once; as often they are scattered. Counts go to all 4 ranks, and those for the loss to 2.
    """
    layout = Layout(tp=2, dp=2, ep=2)
    rows = 32 * 4096 * 2 * 1.1
    width, half = 2 * 4096, 1 / 2
    found = sent("mixtral-8x7b", 4096, layout)
    assert bytes_of(found, "expert", "all_to_all") == pytest.approx(4 * rows * width * half + 32 * 8 * 8 * half)
    sliced = sent("mixtral-8x7b", 4096, layout, framework=Framework.load("megatron-core"))
    assert bytes_of(sliced, "expert", "all_to_all") == pytest.approx((4 * width + 2 * 2) * rows / 2 * half)
    over_tp, counts = (2 * width + 2) * rows * half, 32 * 8 * 8 * 3
    assert bytes_of(sliced, "expert", "all_gather") == pytest.approx(over_tp + counts)
    assert bytes_of(sliced, "expert", "reduce_scatter") == pytest.approx(over_tp)
    assert bytes_of(sliced, "expert", "all_reduce") == 32 * 8 * 8
    # Attention alone enters and leaves the tp region: 33 times forward with the head, and the same of gradients.
    regions = [bytes_of(one, "tensor", "reduce_scatter") / (4096 * width * half) for one in (found, sliced)]
    assert regions == [2 * (2 * 32 + 1), 2 * (32 + 1)]


@pytest.mark.parametrize(("stage", "together"), [(0, 0), (1, 1)])
def test_a_split_backward_reduces_undeferred_gradients_together(stage: int, together: int) -> None:
    """Llama-3-8B, pp 2, dp 2, zero-bubble, 4 micro-batches: two of the last stage are back before the first weights' turn, so
    that its norms and head are scattered once less than its matrices. Fp32, half of them leave.
    """
    layout = Layout(pp=2, dp=2, gas=4, zero=2, schedule="zero-bubble")
    layers, ends = ((17, 128256 * 4096), (15, 128256 * 4096 + 4096))[stage]
    matrices = layers * (218_112_000 - 2 * 4096)
    at_once = layers * 2 * 4096 + ends
    found = sent("llama-3-8b", 8192, layout, stage, framework=EAGER)
    assert bytes_of(found, "zero", "reduce_scatter") == 4 * (4 * matrices + (4 - together) * at_once) / 2
    assert all(one.calls > 0 for one in found)
