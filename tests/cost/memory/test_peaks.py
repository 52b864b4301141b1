"""Memory owner by owner against sums done by hand (bytes; G = 10⁹), for the layouts of the playbook and of two papers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from builders import make_job
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.memory import activations
from ultrascale.cost.memory.estimate import fragmentation
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import Estimate, StageMemory
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

GIB = 2**30
N8, N70, N405 = 8_030_261_248, 70_553_706_496, 405_853_388_800
ENDS8 = 2 * 128_256 * 4096 + 65 * 4096  # of N8, what is no matrix of a layer


def predict(name: str, cluster: str, seq: int, layout: Layout, **fields: Any) -> Estimate:
    return estimate(make_job(name, cluster, seq, layout, **fields), layout)


def same(stage: StageMemory, **by_hand: float) -> None:
    """Every owner within 2 % of the hand calculation; the runtime is 1 GiB and 4 % of what comes and goes."""
    by_hand["runtime"] = 1.0 * GIB + 0.04 * (by_hand["activations"] + by_hand["buffers"])
    for owner, bytes_ in by_hand.items():
        assert getattr(stage.memory, owner) == pytest.approx(bytes_, rel=0.02), owner
    assert stage.memory.total == pytest.approx(sum(by_hand.values()), rel=0.02)


@pytest.mark.parametrize(
    ("zero", "per_parameter"),
    [
        # bf16 copy, fp32 master, fp32 gradients, AdamW: 2 + 4 + 4 + 8 = 18 bytes; each stage divides more of them by dp = 8
        (0, (2, 4, 4, 8)),
        (1, (2, 4 / 8, 4, 8 / 8)),
        (2, (2, 4 / 8, 4 / 8, 8 / 8)),
        (3, (2 / 8, 4 / 8, 4 / 8, 8 / 8)),
    ],
)
def test_the_playbooks_bytes_per_parameter(zero: int, per_parameter: tuple[float, ...]) -> None:
    memory = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=zero)).memory[0].memory
    for owner, each in zip(("parameters", "master", "gradients", "optimizer"), per_parameter, strict=True):
        assert getattr(memory, owner) == pytest.approx(N8 * each, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "per_parameter"),
    [
        ({"gradients": "bf16"}, (2, 4, 2, 8)),
        ({"optimizer": "adamw-8bit"}, (2, 4, 4, 2)),
        ({"optimizer": "adamw-bf16"}, (2, 4, 4, 4)),
        ({"optimizer": "muon"}, (2, 4, 4, 4 + 4 * ENDS8 / N8)),  # AdamW steps embedding, head and norms
        ({"optimizer": "sgd"}, (2, 4, 4, 0)),
        ({"precision": "fp32"}, (4, 0, 4, 8)),  # no second copy: 16 bytes, as in the playbook
        ({"precision": "fp32", "gradients": "bf16"}, (4, 0, 4, 8)),
        ({"precision": "fp8"}, (2, 4, 4, 8)),  # fp8 is a format of operands: what is stored stays
    ],
)
def test_other_formats(fields: dict[str, Any], per_parameter: tuple[float, ...]) -> None:
    memory = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8), **fields).memory[0].memory
    for owner, each in zip(("parameters", "master", "gradients", "optimizer"), per_parameter, strict=True):
        assert getattr(memory, owner) == pytest.approx(N8 * each, rel=1e-12)


def test_llama_8b_zero_3_on_8_gpus() -> None:
    """mbs 1, 8192 tokens, selective recomputation.

    Activations: 32 layers × 94,336 B/token (test_activations) + head at the loss (16,384 + 8 + 4·128,256) B/token.
    8192 · (3,018,752 + 529,416) = 29.07 G. The layer in backward (118,784 B/token) is smaller than the head.
    Buffers: two gathered layers of 218,112,000 and embedding + head + norm 1,050,677,248 in bf16 = 2.974 G;
    one layer's fresh bf16 gradients 0.436 G; its fp32 gradients on their way 0.872 G.
    """
    predicted = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=3, gas=8, recompute="selective"))
    same(
        predicted.memory[0],
        parameters=2 * N8 / 8,
        master=4 * N8 / 8,
        gradients=4 * N8 / 8,
        optimizer=8 * N8 / 8,
        activations=29.066e9,
        buffers=2 * (2 * 218_112_000 + 1_050_677_248) + 2 * 218_112_000 + 4 * 218_112_000,
    )
    assert predicted.memory[0].moment == "loss of a micro-batch"
    assert predicted.first_step_peak_gib == pytest.approx(predicted.peak_gib - 8 * N8 / 8 / GIB)


def test_llama_8b_zero_1_on_8_gpus() -> None:
    """Full recomputation: 32 layer inputs of 8192 B/token + the head's 529,416: 8192 · 791,560 = 6.48 G. No gathered layers."""
    predicted = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=1, gas=8, recompute="full"))
    same(
        predicted.memory[0],
        parameters=16.06e9,
        master=4.015e9,
        gradients=32.12e9,
        optimizer=8.03e9,
        activations=6.485e9,
        buffers=2 * 218_112_000,
    )


def test_keep_gathered_holds_all_parameters() -> None:
    kept = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=3, keep_gathered=True)).memory[0].memory
    twice = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=3)).memory[0].memory
    assert kept.parameters == 2 * N8
    assert twice.buffers - kept.buffers == 2 * (2 * 218_112_000 + 1_050_677_248)
    assert kept.master == twice.master


def test_hsdp_shards_over_its_own_group() -> None:
    """64 data ranks, sharded over 8: every replica group holds what 8 GPUs hold."""
    memory = predict("llama-3-8b", "64xh100", 8192, Layout(dp=64, zero=3, zero_shards=8)).memory[0].memory
    assert memory.parameters == pytest.approx(2 * N8 / 8)
    assert memory.optimizer == pytest.approx(8 * N8 / 8)


def test_offload_moves_states_to_the_host() -> None:
    layout = Layout(dp=8, zero=3, offload="optimizer")
    memory = predict("llama-3-8b", "8xh100", 8192, layout).memory[0].memory
    assert (memory.master, memory.optimizer) == (0, 0)
    assert memory.parameters == pytest.approx(2 * N8 / 8)
    away = predict("llama-3-8b", "8xh100", 8192, layout.changed(offload="parameters")).memory[0].memory
    assert (away.parameters, away.master, away.optimizer) == (0, 0, 0)
    assert away.gradients == pytest.approx(4 * N8 / 8)


def test_llama_70b_tp8_pp4() -> None:
    """1F1B, 16 micro-batches of one 8192-token sequence, selective recomputation, 32 GPUs.

    A layer has 855,638,016 matrix elements (cut by 8) and 16,384 of norms: 106,971,136 on a rank. Embedding or head: 128256 ·
    8192 / 8 = 131,334,144. The head weighs 1.23 layers: 20, 21, 20, 19. Stage 0: 2,270,756,864; stage 3: 2,163,793,920.
    Selective per token and layer, over tp 8: (attention norm, MLP norm, q, output 4·16,384 + k, v 4,096 + log-sum-exp 256 +
    gate and up 114,688) / 8 = 23,072 B: one layer, one micro-batch 189.0 M. Stage r holds 4 − r micro-batches.
    The layer in backward: dropped (2·16,384 + 57,344)/8, gradients (114,688 + 2·16,384)/8 = 29,696 B/token = 243.3 M.
    Stage 3 at its loss: 19 · 189.0 M + 8192 · ((2·16,384 + 4·128,256)/8 + 8) = 3.591 + 0.559 G.
    Buffers: a gathered sequence 8192·16,384 = 134.2 M, two received activations of an eighth of that = 33.6 M, fresh bf16
    gradients of a layer 213.9 M.
    """
    predicted = predict("llama-3-70b", "32xh100", 8192, Layout(tp=8, pp=4, gas=16, recompute="selective"))
    first, last = predicted.memory[0], predicted.memory[3]
    assert [stage.layers for stage in predicted.memory] == [20, 21, 20, 19]
    assert [stage.in_flight for stage in predicted.memory] == [4, 3, 2, 1]
    buffers = 134.2e6 + 33.6e6 + 213.9e6
    stage_0, stage_3 = 2_270_756_864, 2_163_793_920
    same(
        first,
        parameters=2 * stage_0,
        master=4 * stage_0,
        gradients=4 * stage_0,
        optimizer=8 * stage_0,
        activations=4 * 20 * 189.0e6 + 243.3e6,
        buffers=buffers,
    )
    same(
        last,
        parameters=2 * stage_3,
        master=4 * stage_3,
        gradients=4 * stage_3,
        optimizer=8 * stage_3,
        activations=3.591e9 + 0.559e9,
        buffers=buffers,
    )
    assert predicted.peak_stage == 0
    assert "4 micro-batches in flight" in predicted.peak_moment
    assert last.moment.startswith("loss")


def test_llama_405b_as_meta_trained_it() -> None:
    """Llama 3 paper, table 4, second row: TP 8, CP 1, PP 16, DP 128 at 8,192 tokens, 16M tokens a batch: 16 micro-batches.

    A layer has 3,187,671,040 matrix elements: 398,491,648 on a rank with its norms. Stage 0: 7 layers and 128256·16384/8 =
    262,668,288 of embedding: 3,052,109,824. Stage 1: 8 layers, 3,187,933,184. ZeRO-1 over 128.
    Per token and layer, nothing recomputed, over tp 8: 4·32,768 + q, output 2·32,768 + k, v 4,096 + log-sum-exp 512 + MLP
    3·106,496 = 520,704 → 65,088 B: 533.2 M. Stage 1 holds 15 micro-batches × 8 layers, and gradients of gate, up and two
    residuals (212,992 + 65,536)/8 · 8192 = 285.2 M.
    Buffers: gathered sequence 268.4 M, two received 67.1 M, fresh gradients 797.0 M.
    The paper says the first stage's extra memory made them take a layer off it; here stage 1 is the peak for that reason.
    """
    predicted = predict("llama-3.1-405b", "16384xh100", 8192, Layout(dp=128, tp=8, pp=16, zero=1, gas=16))
    assert predicted.memory[0].layers == predicted.memory[15].layers == 7
    assert [stage.in_flight for stage in predicted.memory] == list(range(16, 0, -1))
    assert predicted.peak_stage == 1
    buffers = 268.4e6 + 67.1e6 + 797.0e6
    for stage, (elements, kept_layers) in enumerate(((3_052_109_824, 16 * 7), (3_187_933_184, 15 * 8))):
        same(
            predicted.memory[stage],
            parameters=2 * elements,
            master=4 * elements / 128,
            gradients=4 * elements,
            optimizer=8 * elements / 128,
            activations=kept_layers * 533.2e6 + 285.2e6,
            buffers=buffers,
        )


def test_gpt3_as_korthikanti_trained_it() -> None:
    """Korthikanti 2022, table 3: 175B on 64 A100, TP 8, PP 8, interleaved 3, mbs 1; sequence parallel and selective.

    Chunks held by stage 0: 2·8 + 2·7 + 1 = 31 of 4 layers, 10⅓ micro-batches (their L(1 + (p−1)/(p·m)) with m = 3: 1.29·96/12).
    34·s·b·h/8 = 106.95 M a layer and micro-batch; in backward the scores, 80·s·b·h/8 = 251.7 M, are back, and gradients of
    the MLP's matmul (2·49,152) and two residuals, (98,304 + 49,152)/8 · 2048 = 37.7 M.
    Parameters of stage 0: 12 layers of 1,811,939,328/8 and 84,480 of vectors (norms and output biases 6h whole, the other
    biases 7h/8), embedding 617,558,016/8, positions 25,165,824.
    """
    predicted = predict(
        "gpt3-175b",
        "64xa100-80gb",
        2048,
        Layout(tp=8, pp=8, schedule="interleaved", virtual_stages=3, gas=64, recompute="selective"),
        attention="plain",
        dropout=True,
    )
    first = predicted.memory[0]
    assert first.in_flight == pytest.approx(31 / 3)
    assert first.in_flight == pytest.approx(8 * (1 + 7 / (8 * 3)))
    parameters_on_rank = 12 * (1_811_939_328 / 8 + 84_480) + 617_558_016 / 8 + 25_165_824
    same(
        first,
        parameters=2 * parameters_on_rank,
        master=4 * parameters_on_rank,
        gradients=4 * parameters_on_rank,
        optimizer=8 * parameters_on_rank,
        activations=31 * 4 * 106.95e6 + 251.7e6 + 37.7e6,
        buffers=2048 * 24_576 * (1 + 2 / 8) + 2 * (1_811_939_328 / 8 + 84_480),
    )


def test_afab_keeps_all_micro_batches_and_losses() -> None:
    """16 micro-batches on 4 ranks: all held; the last stage also keeps 15 finished losses (norm, statistics, bf16 logits)."""
    layout = Layout(tp=8, pp=4, gas=16, schedule="afab", recompute="selective")
    predicted = predict("llama-3-70b", "32xh100", 8192, layout)
    assert [stage.in_flight for stage in predicted.memory] == [16] * 4
    loss = 8192 * ((2 * 16_384 + 256_512) / 8 + 8)
    at_loss = 8192 * ((2 * 16_384 + 2 * 256_512) / 8 + 8)
    assert predicted.memory[3].memory.activations == pytest.approx(16 * 19 * 189.0e6 + 15 * loss + at_loss, rel=0.001)


def test_deferred_weight_gradients_keep_their_inputs() -> None:
    """Zero-bubble on 4 ranks, selective: every rank holds 4 micro-batches, and r + 1 of them wait with their whole layers.

    B/token and layer over tp 8: whole (4·16,384 + q, output 32,768 + k, v 4,096 + log-sum-exp 256 + MLP 3·57,344) / 8 = 34,336;
    kept 23,072. The layer in backward adds gradients only, (3·57,344 + 4·16,384) / 8 = 29,696 B/token, since a split backward
    frees nothing on its way: what it dropped is counted with the waiting.
    """
    layout = Layout(tp=8, pp=4, gas=16, schedule="zero-bubble", recompute="selective")
    predicted = predict("llama-3-70b", "32xh100", 8192, layout)
    assert [stage.in_flight for stage in predicted.memory] == [4] * 4
    stage_1 = predicted.memory[1]
    by_hand = 21 * 8192 * (4 * 23_072 + 2 * (34_336 - 23_072)) + 8192 * 29_696
    assert stage_1.memory.activations == pytest.approx(by_hand, rel=0.001)


@pytest.mark.parametrize(
    ("variant", "bytes_per_token"),
    [
        # Llama-3-8B: k and v of a token 2·2·1024 = 4096 B, q 8192 B; 8 ranks
        ("zigzag", 2 * 4096),
        ("allgather", 8 * 4096),
        ("ulysses", 8192 + 4096),
    ],
)
def test_buffers_of_context_parallelism(variant: str, bytes_per_token: int) -> None:
    memory = predict("llama-3-8b", "8xh100", 65536, Layout(cp=8, context_parallel=variant)).memory[0].memory
    assert memory.buffers == pytest.approx(8192 * bytes_per_token + 2 * 218_112_000)


def test_expert_states_shard_over_dp_divided_by_ep() -> None:
    """Mixtral-8x7B, dp 8, ep 4, ZeRO-1: the trunk's states over 8, the experts' over 8 / 4 = 2."""
    expert = 32 * 2 * 3 * 4096 * 14336
    trunk = 46_702_792_704 - 4 * expert
    memory = predict("mixtral-8x7b", "8xh200", 4096, Layout(dp=8, ep=4, zero=1)).memory[0].memory
    assert memory.optimizer == pytest.approx(8 * (trunk / 8 + expert / 2))
    assert memory.parameters == pytest.approx(2 * (trunk + expert))


def test_the_worked_example_of_the_documentation() -> None:
    """docs/memory.md prints every owner of this layout in GiB."""
    text = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    printed = dict(re.findall(r"^\| (\w+) \|[^|\n]*\| (\d+\.\d\d) \|$", text, flags=re.MULTILINE))
    predicted = predict("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=3, gas=8, recompute="selective"))
    owners_gib = {owner: bytes_ / GIB for owner, bytes_ in predicted.memory[0].memory.model_dump().items()}
    assert {name: float(gib) for name, gib in printed.items()} == {
        name: pytest.approx(gib, abs=0.006) for name, gib in {**owners_gib, "peak": predicted.peak_gib}.items()
    }


# Tensors at the peak of a step of the engine on one H200, with sequences of 4096 (benchmarks/gpu).
ONE_B = {"layers": 16, "hidden": 2048, "heads": 32, "head_dim": 64}
THREE_B = {"layers": 28, "hidden": 3072, "heads": 24, "head_dim": 128}


@pytest.mark.parametrize(
    ("shape", "mbs", "recompute", "measured_gib", "measured_ms"),
    [
        (ONE_B, 8, "none", 44.51, 483.4),
        (ONE_B, 8, "selective", 29.51, 536.3),
        (ONE_B, 8, "full", 22.88, 584.5),
        (THREE_B, 4, "none", 69.45, 621.6),
        (THREE_B, 4, "selective", 55.45, 680.3),
        (THREE_B, 4, "full", 48.24, 742.7),
    ],
    ids=["1b", "1b selective", "1b full", "3b", "3b selective", "3b full"],
)
def test_steps_measured_on_one_gpu(
    shape: dict[str, int], mbs: int, recompute: str, measured_gib: float, measured_ms: float
) -> None:
    model = Model(name="untied", ffn=8192, kv_heads=8, vocab=128_256, **shape)
    cluster, engine = Cluster.load("1xh200"), Framework.load("ultrascale")
    job = Job(model=model, cluster=cluster, seq=4096, batch_tokens=mbs * 4096, framework=engine)
    found = estimate(job, Layout(mbs=mbs, recompute=recompute))
    memory = found.memory[0].memory
    assert (memory.total - memory.runtime) / GIB == pytest.approx(measured_gib, rel=0.02)
    assert found.step_time_s * 1e3 == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "fields", "stays"),
    [
        ({}, {}, True),
        ({"gas": 2}, {}, False),
        ({"offload": "optimizer"}, {}, False),
        ({}, {"optimizer": "sgd"}, False),
    ],
    ids=str,
)
def test_unaccumulated_gradients_are_not_live_at_the_peak(layout: dict[str, Any], fields: dict[str, Any], stays: bool) -> None:
    """16 GB of gradients in bf16, 150 GB of activations: none at the loss, and then they find room where backward has been."""
    engine = Framework(fused_blocks=True)
    memory = predict("llama-3-8b", "1xh200", 8192, Layout(mbs=4, **layout), framework=engine, **fields).memory[0].memory
    assert memory.gradients == (0 if stays else 4 * N8)


def test_gradients_exceed_activations_of_a_small_batch() -> None:
    """All gradients, 2 bytes each, are there when no activations are.

    A layer keeps of a token: two residuals of 8192 bytes, q 8192, k and v 4096, output 8192, log-sum-exp 128, and two
    times 28,672 of the MLP: 94,336 bytes.
    """
    engine = Framework(fused_blocks=True)
    memory = predict("llama-3-8b", "1xh200", 64, Layout(), framework=engine).memory[0].memory
    # The head's gradients are counted where the layer works: they are there before it does.
    assert memory.gradients == pytest.approx(2 * N8 - 2 * 128_256 * 4096 - 64 * 32 * 94_336, rel=0.001)


def test_fragmentation_from_the_second_micro_batch_on() -> None:
    """A share of activations in flight, which grows with the inputs that tp gathers and frees beside them."""
    framework = Framework.load("nanotron").model_copy(update={"fragmentation": 0.25})
    layouts = [Layout(dp=8), Layout(dp=8, gas=2), Layout(tp=8, gas=2), Layout(tp=8, gas=2, recompute="full")]
    rows = LayoutColumns.of(layouts)
    job = make_job("llama-3-8b", "8xh100", 8192, layouts[1], framework=framework)
    once, plain, cut, full = fragmentation(job, rows)
    assert (once, plain, full) == (0.0, 0.25, 0.25)
    kept = activations.layer(job, rows, LayerKind()).total[2]
    residual = 2 * 8192 * 4096 / 8
    assert cut == pytest.approx(0.25 * (1 + 2 * 7 * residual / kept))
    whole = make_job("llama-3-8b", "8xh100", 8192, layouts[1], framework=framework.model_copy(update={"fragmentation": 0.0}))
    more = estimate(job, layouts[1]).memory[0].memory.runtime - estimate(whole, layouts[1]).memory[0].memory.runtime
    layers = activations.layer(job, LayoutColumns.of([layouts[1]]), LayerKind()).total[0] * job.model.layers
    assert more == pytest.approx(0.25 * layers, rel=0.01)


def test_roots_of_second_moments_are_the_peak_of_a_step_with_few_activations() -> None:
    """Llama-3.2-1B, tp 2, ZeRO-1 over 2 ranks, in Megatron without Transformer Engine: weights and their gradients whole, and
    a half of masters, of moments and of 4 bytes more for each weight.
    """
    layout = Layout(dp=2, tp=2, zero=1, recompute="full")
    job = make_job("llama-3.2-1b", "4xh100", 256, layout, framework=Framework.load("megatron-local"))
    stage = estimate(job, layout).memory[0]
    norms = 33 * 2048
    weights = (job.model.parameters - norms) / 2 + norms
    assert stage.moment == "optimizer step"
    assert stage.memory.total - stage.memory.runtime == pytest.approx(weights * (2 + 4 + (4 + 8 + 4) / 2))
