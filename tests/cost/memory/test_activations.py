"""Activations: the closed forms of Korthikanti 2022 to the byte, and a Llama layer tensor by tensor."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.memory import activations
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

SBH = 2048 * 1 * 12288  # GPT-3: s·b·h
SCORES = 5 * 96 * 2048 / 12288  # 5·a·s/h = 80

DENSE = LayerKind()


def one_layer(of: Job, layout: Layout, kind: LayerKind = DENSE) -> activations.LayerActivations:
    return activations.layer(of, LayoutColumns.of([layout]), kind)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "per_sbh"),
    [
        # Korthikanti 2022, table 2, row by row, times s·b·h
        (1, False, "none", 34 + 80),
        (8, False, "none", 10 + 24 / 8 + 80 / 8),
        (8, True, "none", 34 / 8 + 80 / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8),
        (1, False, "full", 2),
    ],
)
def test_korthikanti_table_2(tp: int, sequence_parallel: bool, recompute: str, per_sbh: float) -> None:
    of = make_job("gpt3-175b", "64xh100", 2048, attention="plain", dropout=True)
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)
    assert SCORES == 80
    assert one_layer(of, layout).total[0] == pytest.approx(SBH * per_sbh, rel=1e-12)


def test_gpt3_whole_model_is_the_papers_figure() -> None:
    """Equation 1 for GPT-3 at mbs 1: 114·s·b·h = 2.87 GB a layer, 275 GB for 96: why it needs cutting at all."""
    of = make_job("gpt3-175b", "64xh100", 2048, attention="plain", dropout=True)
    assert one_layer(of, Layout()).total[0] == 2_868_903_936
    assert 96 * one_layer(of, Layout()).total[0] / 1e9 == pytest.approx(275.4, abs=0.1)


def test_llama_layer_with_flash() -> None:
    """Llama-3-8B, 8192 tokens, bf16, no cut. Bytes per token:

    attention norm's input 2·4096, qkv's input 2·4096, q 2·4096, k and v 2·2·1024, attention output 2·4096, log-sum-exp 4·32,
    MLP norm's input 2·4096, MLP's input 2·4096, gate and up 2·2·14336, activation 2·14336.
    8192 + 8192 + 8192 + 4096 + 8192 + 128 + 8192 + 8192 + 57344 + 28672 = 139,392.
    """
    layer = one_layer(make_job("llama-3-8b", "64xh100", 8192), Layout())
    assert layer.total[0] == layer.whole[0] == 8192 * 139_392
    # Alive in its backward: gradients of gate and up (2·2·14336) and two residual-wide (2·2·4096).
    assert layer.gradients[0] == 8192 * (57_344 + 16_384)
    assert (layer.recomputed + layer.gradients)[0] == layer.gradients[0]


def test_llama_layer_selective() -> None:
    """Norm outputs (two of 8192) and the MLP's activation (28672) are computed again: 139,392 − 45,056 = 94,336 a token."""
    layer = one_layer(make_job("llama-3-8b", "64xh100", 8192), Layout(recompute="selective"))
    assert layer.total[0] == 8192 * 94_336
    assert (layer.recomputed + layer.gradients)[0] == 8192 * (45_056 + 73_728)


def test_llama_layer_full() -> None:
    """Only the layer's input stays: 8192 a token; the rest is back for the one layer in backward."""
    layer = one_layer(make_job("llama-3-8b", "64xh100", 8192), Layout(recompute="full"))
    assert layer.total[0] == 8192 * 8192
    assert (layer.recomputed + layer.gradients)[0] == 8192 * (139_392 - 8192 + 73_728)


def test_llama_layer_cut_by_tensor_parallelism() -> None:
    """tp=8: without sequence parallelism the four residual-wide tensors stay whole; with it all are cut by 8."""
    wide, cut = 4 * 8192, 139_392 - 4 * 8192
    of = make_job("llama-3-8b", "64xh100", 8192)
    assert one_layer(of, Layout(tp=8, sequence_parallel=False)).total[0] == 8192 * (wide + cut / 8)
    assert one_layer(of, Layout(tp=8)).total[0] == 8192 * 139_392 / 8
    # tp=16: 8 kv heads, so each rank keeps one k and one v head of 128: 2·2·128 = 512 bytes, not 4096/16.
    assert one_layer(of, Layout(tp=16)).total[0] == 8192 * ((139_392 - 4096) / 16 + 4096 / 8)


def test_context_parallelism_divides_tokens() -> None:
    assert one_layer(make_job("llama-3-8b", "64xh100", 8192), Layout(cp=4, mbs=2)).total[0] == 2 * 2048 * 139_392


def test_fp32_doubles_everything_but_the_log_sum_exp() -> None:
    layer = one_layer(make_job("llama-3-8b", "64xh100", 8192, precision="fp32"), Layout())
    assert layer.total[0] == 8192 * (2 * (139_392 - 128) + 128)


@pytest.mark.parametrize(("ep", "rows"), [(1, 2.0), (8, 2.2)])
def test_moe_layer_of_mixtral(ep: int, rows: float) -> None:
    """Mixtral-8x7B: 2 experts a token, a row of 4096 in and out and 3·14336 inside for each.

    With ep the busiest rank has 10 % over the mean; a rank with all experts has exactly its tokens. Attention
    8192 + 8192 + 8192 + 4096 + 8192 + 128, MLP norm and input 16384, router 4·8 = 32, rows 8192 + 8192, gate and up 57344,
    activation 28672.
    """
    of = make_job("mixtral-8x7b", "64xh100", 4096)
    assert of.cluster.efficiency.expert_imbalance == 1.10
    by_hand = 36_992 + 16_384 + 32 + rows * (16_384 + 57_344 + 28_672)
    assert one_layer(of, Layout(dp=8, ep=ep), LayerKind(mlp="moe")).total[0] == pytest.approx(4096 * by_hand)


def test_experts_keep_their_inputs_in_fp8_where_the_engine_does() -> None:
    """Of Mixtral's 2 rows a token, 4096 in and 14336 behind the gate are kept in one byte instead of two."""
    layers = [
        one_layer(
            make_job("mixtral-8x7b", "64xh100", 4096, precision="fp8", framework=Framework(transformer_engine=kept)),
            Layout(),
            LayerKind(mlp="moe"),
        )
        for kept in (False, True)
    ]
    for module, width in (("expert input", 4096), ("expert activation", 14_336)):
        assert layers[0].kept[module][0] == pytest.approx(4096 * 2 * width * 2)
        assert layers[1].kept[module][0] == pytest.approx(4096 * 2 * width)
    assert layers[0].kept["expert matmuls"][0] == layers[1].kept["expert matmuls"][0]


def test_mla_layer_of_deepseek_v3() -> None:
    """Per token: four residual-wide 2·7168; q and k 2·128·192 each, v 2·128·128; latents 1536 + 512 + 64 twice (before and
    after their norms); output 2·128·128; log-sum-exp 4·128. Cut by tp are all but the latents; the dense MLP 3·2·18432."""
    of = make_job("deepseek-v3", "64xh100", 4096)
    attention = 2 * 128 * (192 + 192 + 128) + 2 * 128 * 128 + 4 * 128
    latents = 2 * 2 * (1536 + 512 + 64)
    by_hand = 4 * 14_336 + attention + latents + 3 * 36_864
    assert one_layer(of, Layout()).total[0] == 4096 * by_hand
    assert one_layer(of, Layout(tp=8)).total[0] == 4096 * ((by_hand - latents) / 8 + latents)


def test_head_of_llama() -> None:
    """8192 tokens: norm's input and output 2·8192, two fp32 numbers of the softmax, logits 2·128256; then their gradient."""
    of = make_job("llama-3-8b", "64xh100", 8192)
    head = activations.head(of, LayoutColumns.of([Layout()]))
    assert head.saved[0] == 8192 * (16_384 + 8 + 256_512)
    assert head.peak[0] == 8192 * (16_384 + 8 + 2 * 256_512)
    assert activations.head(of, LayoutColumns.of([Layout(tp=8)])).peak[0] == 8192 * ((16_384 + 2 * 256_512) / 8 + 8)


def test_head_that_computes_its_gradients_in_forward() -> None:
    """8192 tokens, 4096 at a time.

    Kept: norm's input and the hidden states' gradient 2·8192, 8 bytes, and 525,336,576 weights in fp32. At the peak a chunk's
    logits, 2·4096·128,256 bytes, are as many as the weight's gradient in bf16: either stands beside a third 8192 a token.
    """
    of = make_job("llama-3-8b", "64xh100", 8192, framework=Framework(loss="at-once"))
    head = activations.head(of, LayoutColumns.of([Layout()]))
    assert head.saved[0] == 8192 * (16_384 + 8) + 4 * 525_336_576
    assert head.peak[0] == head.saved[0] + 8192 * 8192 + 2 * 525_336_576
    # Few tokens have few logits: then the weight's gradient decides.
    few = activations.head(
        make_job("llama-3-8b", "64xh100", 1024, framework=Framework(loss="at-once")), LayoutColumns.of([Layout()])
    )
    assert few.peak[0] - few.saved[0] == 1024 * 8192 + 2 * 525_336_576


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_chunked_head_over_a_cut_vocabulary(sequence_parallel: bool) -> None:
    """tp 8, 8 sequences of 8192: chunks of 8·4096 tokens, with as many logits on a rank as 4096 tokens have without tp.

    With sequence parallelism hidden states are an eighth; those of both chunks are gathered, and the first chunk's gradients
    are not scattered yet.
    """
    of = make_job("llama-3-8b", "64xh100", 8192, framework=Framework(loss="at-once"))
    head = activations.head(of, LayoutColumns.of([Layout(tp=8, mbs=8, sequence_parallel=sequence_parallel)]))
    tokens, residual = 65_536, 65_536 * 8192 / (8 if sequence_parallel else 1)
    assert head.saved[0] == 2 * residual + 8 * tokens + 4 * 525_336_576 / 8
    gathered = (tokens + 32_768) * 8192 if sequence_parallel else 0
    assert head.forward[0] == head.saved[0] + residual + 2 * 525_336_576 + gathered
    assert head.peak[0] == head.saved[0] + residual + 2 * 525_336_576 / 8  # in backward


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        ({"precision": "fp16"}, {"pp": 2, "gas": 2, "schedule": "zero-bubble"}),
        ({"precision": "fp16"}, {"cp": 2}),
        ({"precision": "fp16"}, {}),
        ({"precision": "fp16"}, {"tp": 8}),
    ],
    ids=str,
)
def test_layouts_whose_loss_is_not_chunked(fields: dict[str, str], layout: dict[str, object]) -> None:
    """In fp16 the loss is plain operators' where layers are cut or their backward is split; else it is a compiled graph, which
    keeps the logits and writes their gradient over them.
    """
    columns = LayoutColumns.of([Layout(**layout)])
    plain = Framework(loss="overwritten" if fields and not layout else "log-softmax")
    whole = activations.head(make_job("llama-3-8b", "64xh100", 8192, framework=plain, **fields), columns)
    at_once = activations.head(make_job("llama-3-8b", "64xh100", 8192, framework=Framework(loss="at-once"), **fields), columns)
    assert (at_once.saved[0], at_once.peak[0]) == (whole.saved[0], whole.peak[0])
