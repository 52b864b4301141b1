"""Peak memory of our engine, byte by byte, for a model small enough to add up by hand.

4 layers, hidden 512, 8 heads of 64, 2 kv heads, MLP 1536, vocabulary 4096, 1024 tokens of bf16. One residual-wide tensor is
R = 2·1024·512, one as wide as the MLP W = 3·R, keys and values R / 2. A layer keeps 6 R (two norms' inputs and outputs, q,
attention's output), keys and values, 4·8·1024 of log-sum-exp and 3 W. A micro-batch keeps one table of angles, 2·2·1024·64.
"""

from __future__ import annotations

from typing import Any

import pytest

from ultrascale.cost.estimate import estimate
from ultrascale.specs.blocks import MoE
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import Memory
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

R = 2 * 1024 * 512
W = 3 * R
LAYER = 6 * R + R // 2 + 4 * 8 * 1024 + 3 * W
EXPERT_LAYER = 5 * R + R // 2 + 4 * 8 * 1024 + 4 * 1024 * 512 + 4 * 1024 * 8 + 2 * 2 * R + 3 * 2 * R  # of EXPERTS, below
ANGLES = 2 * 2 * 1024 * 64
WEIGHTS = 2 * 512 * 512 + 2 * 128 * 512 + 3 * 512 * 1536 + 2 * 512
ENDS = 2 * 4096 * 512 + 512
HEAD = 4096 * 512 + 512
LOGITS = 1024 * 4096
SHAPE: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 4096}
SMALL = Model(name="small", kv_heads=2, ffn=1536, **SHAPE)
EXPERTS = Model(name="experts", kv_heads=2, ffn=0, moe=MoE(experts=8, top_k=2, expert_ffn=512), **SHAPE)


def predict(
    layout: Layout, stage: int = 0, model: Model = SMALL, imbalance: float = 1.0, engine: str = "ultrascale-eager"
) -> Memory:
    cluster = Cluster.from_mapping({"gpu": "h100", "gpus": layout.gpus, "efficiency": {"expert_imbalance": imbalance}})
    framework = Framework.load(engine)
    job = Job(model=model, cluster=cluster, seq=1024, batch_tokens=layout.batch_tokens(1024), framework=framework)
    return estimate(job, layout).memory[stage].memory


def test_at_the_loss_of_one_rank() -> None:
    """Log-softmax, its gradient and the logits' in fp32; final norm's input and output, two numbers a token. No buffers."""
    memory = predict(Layout())
    assert memory.activations == 4 * LAYER + ANGLES + 2 * R + 8 * 1024 + 12 * LOGITS
    assert memory.buffers == 0


def test_vocab_parallel_loss_peaks_in_forward() -> None:
    """Of half the logits each: bf16, their fp32 copy, their softmax. Keys and values are cut in two as all else is."""
    memory = predict(Layout(tp=2))
    assert memory.activations == 4 * LAYER / 2 + ANGLES + R + 8 * 1024 + 10 * LOGITS / 2


def test_the_gate_in_backward_on_a_first_stage() -> None:
    """Two micro-batches of two layers and their sent outputs; the received gradient, four W (gradients of activation, gate
    and up, and the gate's recomputed activation) in place of the activation.
    """
    memory = predict(Layout(pp=2, gas=4))
    assert memory.activations == 2 * (2 * LAYER + ANGLES + R) + R + 3 * W
    assert memory.buffers == 0


def test_last_stage_loss_with_a_gradient_in_transit() -> None:
    memory = predict(Layout(pp=2, gas=4), stage=1)
    assert memory.activations == 2 * LAYER + ANGLES + 2 * R + 8 * 1024 + 12 * LOGITS
    assert memory.buffers == R


def test_full_recomputation_restores_one_layer() -> None:
    memory = predict(Layout(pp=2, gas=4, recompute="full"))
    assert memory.activations == 2 * (2 * R + ANGLES + R) + (LAYER - R) + R + 3 * W


def test_zero_2_at_the_gate() -> None:
    """The fp32 input of the embedding gradients' reduce-scatter, and the last matmul's fresh bf16 gradients."""
    memory = predict(Layout(pp=2, dp=2, gas=4, zero=2))
    assert memory.buffers == 4 * 4096 * 512 + 2 * 512 * 1536


def test_zero_3_gathers_two_layers_in_backward() -> None:
    memory = predict(Layout(pp=2, dp=2, gas=4, zero=3))
    assert memory.buffers == 4 * 4096 * 512 + 2 * 512 * 1536 + 2 * (2 * WEIGHTS)


def test_one_micro_batch_has_no_gradients_at_its_loss() -> None:
    """ZeRO-3: head and norm are gathered, and the layer that backward begins with; gradients do not exist yet."""
    memory = predict(Layout(dp=2, zero=3))
    assert memory.gradients == 0
    assert memory.buffers == 2 * (HEAD + WEIGHTS)
    again = predict(Layout(dp=2, zero=3, gas=2))
    assert again.gradients == pytest.approx(4 * (4 * WEIGHTS + ENDS) / 2)
    assert again.buffers == 2 * (HEAD + WEIGHTS) + 4 * 4096 * 512  # and what was scattered last: the embedding's


def test_gradients_larger_than_activations() -> None:
    """Full recomputation, one micro-batch over 2: after two layers theirs and the head's are live, and activations of two.

    At the gate of the third: one recomputed layer, gradients of the last matmul, two layers gathered, one layer's gradients in
    the reduce-scatter.
    """
    memory = predict(Layout(dp=2, zero=3, recompute="full"))
    assert memory.gradients == pytest.approx((2 * 4 * WEIGHTS + 4 * HEAD) / 2)
    assert memory.activations == pytest.approx(4 * R / 2 + ANGLES + (LAYER - R) + R + 3 * W)
    assert memory.buffers == pytest.approx(2 * 512 * 1536 + 2 * 2 * WEIGHTS + 4 * WEIGHTS)


def test_a_split_backward_keeps_the_activation_and_gathered_gradients() -> None:
    """Zero-bubble: four W more, as the activation is kept. With tp 2 a layer with deferred weight gradients keeps two
    gradients of the whole sequence, the layer in backward one; residual-wide tensors are R / 2.
    """
    memory = predict(Layout(pp=2, gas=4, schedule="zero-bubble"))
    assert memory.activations == 2 * (2 * LAYER + ANGLES + R) + R + 4 * W
    cut = predict(Layout(pp=2, tp=2, gas=4, schedule="zero-bubble"))
    waiting = 2 * (2 * LAYER / 2 + ANGLES + R / 2)
    assert cut.activations == waiting + 2 * (R - R / 2) + R / 2 + R / 2 + R + 4 * W / 2  # and the gradient that came


@pytest.mark.parametrize("tp", [1, 2])
def test_a_fused_block_keeps_slices_for_deferred_weight_gradients(tp: int) -> None:
    """Zero-bubble, fused, the gate of the second layer in backward. The first keeps its gate's output and two output gradients
    beyond what it had saved, whose places norm outputs and other gradients took; the second has its output gradient and four W,
    and with tp 2 that gradient gathered.
    """
    memory = predict(Layout(pp=2, tp=tp, gas=4, schedule="zero-bubble"), engine="ultrascale")
    saved = 4 * R + R // 2 + 4 * 8 * 1024 + 2 * W
    in_flight = 2 * (2 * saved / tp + ANGLES + R / tp)
    assert memory.activations == in_flight + (2 * R + W) / tp + (R + 4 * W) / tp + (R if tp > 1 else 0)


def test_expert_gradients_are_stacked_while_their_parts_are_live() -> None:
    """2048 routed rows: inputs and outputs of 2 R, three of an expert's width (2 R each), the router's fp32 copy of its input
    and scores. The last matmul: gradients of its output, in the output's place, and of its input; twice the bf16 gradients of
    8 matrices.
    """
    memory = predict(Layout(pp=2, gas=4), model=EXPERTS)
    assert memory.activations == 2 * (2 * EXPERT_LAYER + ANGLES + R) + R + 2 * R
    assert memory.buffers == 2 * 2 * 8 * 512 * 512


def test_expert_load_scales_inputs_and_not_outputs() -> None:
    """At the loss: of a layer's saved tensors, experts' inputs, matmuls and activation grow with the load, outputs do not."""
    mean, busy = (predict(Layout(dp=2, ep=2), model=EXPERTS, imbalance=load) for load in (1.0, 1.5))
    assert mean.activations == 4 * EXPERT_LAYER + ANGLES + 2 * R + 8 * 1024 + 12 * LOGITS
    assert busy.activations - mean.activations == 4 * 0.5 * (2 * R + 3 * 2 * R)


def test_combine_is_the_forward_peak_of_tp_sharded_experts() -> None:
    """tp 2 shards experts, but not their rows. Live are: received rows, weighted rows, their sum, the gathered input of the
    layer and its shard; the output to send is not allocated yet.
    """
    uncut = 4 * 1024 * 512 + 4 * 1024 * 8 + 2 * 2 * R
    layer = (EXPERT_LAYER - uncut) / 2 + uncut
    memory = predict(Layout(pp=2, tp=2, gas=4), model=EXPERTS)
    assert memory.activations == 2 * (2 * layer + ANGLES + R / 2) + 2 * 2 * R + R + R + R / 2 - R / 2
    assert memory.buffers == 0


def test_deferred_expert_weight_gradients_free_the_layer_input() -> None:
    """Zero-bubble, the loss of the second micro-batch: of the first, with deferred weight gradients, each layer has freed
    its input and the router's copy of it; what the stage received stays.
    """
    memory = predict(Layout(pp=2, gas=4, schedule="zero-bubble"), stage=1, model=EXPERTS)
    waiting = 2 * EXPERT_LAYER + ANGLES - 2 * (R + 4 * 1024 * 512) + R
    assert memory.activations == waiting + 2 * EXPERT_LAYER + ANGLES + 2 * R + 8 * 1024 + 12 * LOGITS


def test_first_backward_buffers_hold_only_its_own_reduce_scatter() -> None:
    """AFAB peaks in its first backward, at the second layer's gate: the first layer's gradient shards, the input of their
    reduce-scatter and the last matmul's fresh gradients. No other gradients exist; one layer's activations are freed, and the
    received gradient is another tensor than the residual's.
    """
    memory = predict(Layout(pp=2, dp=2, gas=4, zero=2, schedule="afab"))
    assert memory.gradients == 0
    assert memory.buffers == 4 * WEIGHTS / 2 + 4 * WEIGHTS + 2 * 512 * 1536
    assert memory.activations == 4 * (2 * LAYER + ANGLES + R) - LAYER + 2 * R + 3 * W


def test_input_norm_of_a_split_backward() -> None:
    """One layer a stage, tp 4: residual-wide tensors are R / 4, keys and values are cut in two. Gradients of both last matmuls
    are whole (one in the place of the other norm's input); beside the layer's input the residual's, the norm's and the received
    gradient, and five tensors in fp32.
    """
    memory = predict(Layout(pp=4, tp=4, gas=4, schedule="zero-bubble"))
    layer = (6 * R + 4 * 8 * 1024 + 3 * W) / 4 + R / 4
    assert memory.activations == 4 * (layer + ANGLES + R / 4) + 2 * R - R / 4 + 3 * R / 4 + 5 * 2 * R / 4


def test_final_norm_exceeds_logits_of_a_small_vocabulary() -> None:
    """Its input, its output's gradient, five tensors in fp32; 64 logits a token are less."""
    memory = predict(Layout(), model=SMALL.model_copy(update={"vocab": 64}))
    assert memory.activations == 4 * LAYER + ANGLES + 2 * R + 5 * 2 * R


def test_expert_forward_without_gather_buffers() -> None:
    """ZeRO-1 with one micro-batch. Received and weighted rows, their sum, the normed input; no loss yet. Weights were gathered
    into their own memory.
    """
    narrow = SHAPE | {"vocab": 64, "norm": "layernorm"}  # whose backward is one kernel, and which has biases
    model = Model(name="narrow", kv_heads=2, ffn=0, moe=MoE(experts=8, top_k=2, expert_ffn=64), **narrow)
    memory = predict(Layout(dp=2, zero=1), model=model)
    assert memory.activations == 4 * (EXPERT_LAYER - 3 * 2 * R * 7 / 8) + ANGLES + 2 * 2 * R + 2 * R
    assert memory.buffers == 0


def test_every_chunk_keeps_its_last_reduce_scatter_buffer() -> None:
    """Interleaved: a layer of each chunk, or the embedding, and the gradient sent last. Where reduce-scatters follow deferred
    weight gradients, the last layer of every chunk.
    """
    looped = predict(Layout(pp=2, dp=2, gas=4, zero=2, schedule="interleaved", virtual_stages=2), stage=1)
    assert looped.buffers == 2 * 4 * WEIGHTS + R
    v_shaped = predict(Layout(pp=2, dp=2, gas=4, zero=2, schedule="zb-v", virtual_stages=2))
    assert v_shaped.buffers == 2 * 4 * WEIGHTS + R


def test_gathered_weights_are_freed_in_the_last_backward() -> None:
    """ZeRO-2 with one micro-batch peaks at its loss: backward frees a layer's gathered weights as it adds gradients."""
    memory = predict(Layout(dp=2, zero=2, recompute="full"))
    assert (memory.gradients, memory.buffers) == (0, 0)
    assert memory.activations == 4 * R + ANGLES + 2 * R + 8 * 1024 + 12 * LOGITS


def test_selective_recomputation_repeats_the_token_permutation() -> None:
    """Selective: no outputs of norms and gates, no experts' inputs; q, k, v, attention, both residuals and matmuls stay."""
    layer = 4 * R + R // 2 + 4 * 8 * 1024 + 4 * 1024 * 8 + 2 * R + 2 * 2 * R
    memory = predict(Layout(recompute="selective"), model=EXPERTS)
    assert memory.activations == 4 * layer + ANGLES + 2 * R + 8 * 1024 + 12 * LOGITS


def test_selective_recomputation_keeps_the_reduce_scattered_output() -> None:
    """tp 2, selective: of attention's last matmul a slice, as of everything else."""
    kept = 3 * R + R // 2 + 4 * 8 * 1024 + 2 * W
    memory = predict(Layout(tp=2, recompute="selective"))
    assert memory.activations == 4 * (kept / 2 + R / 2) + ANGLES + R + 8 * 1024 + 10 * LOGITS / 2


def test_ulysses_keeps_its_output_in_both_shardings() -> None:
    ulysses, ring = (predict(Layout(cp=2, context_parallel=kind)) for kind in ("ulysses", "zigzag"))
    assert ulysses.activations - ring.activations == 4 * R / 2
