"""Parameters: the playbook's approximation, every preset's exact count, and what tp, pp and ep leave on a rank."""

from __future__ import annotations

import numpy as np
import pytest

from ultrascale.cost import stages
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.flops import parameters_approximate
from ultrascale.cost.memory import states
from ultrascale.specs import weights
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def job_of(model: Model) -> Job:
    return Job(model=model, cluster=Cluster.load("8xh100"), seq=1024, batch_tokens=2**20)


def ranks_of(model: Model, layout: Layout) -> states.RankParameters:
    """One row per pipeline rank."""
    columns = LayoutColumns.of([layout] * layout.pp)
    return states.on_rank(model, columns, stages.share_of(job_of(model), columns, np.arange(layout.pp)))


@pytest.mark.parametrize(
    ("name", "approximate", "exact"),
    [
        # 50257·1600 + 48·(12·1600² + 13·1600) + 2·1600 = 80,411,200 + 48·30,740,800 + 3,200; exact adds 1024·1600 positions
        ("gpt2-xl", 1_555_972_800, 1_557_611_200),
        # 50257·12288 + 96·(12·12288² + 13·12288) + 2·12288 = 617,558,016 + 96·1,812,099,072 + 24,576; + 2048·12288 positions
        ("gpt3-175b", 174_579_093_504, 174_604_259_328),
    ],
)
def test_the_playbooks_approximation_leaves_out_positions_only(name: str, approximate: int, exact: int) -> None:
    model = Model.load(name)
    assert parameters_approximate(model.hidden, model.layers, model.vocab) == approximate
    assert model.parameters == exact
    assert exact - approximate == model.max_positions * model.hidden


def test_the_approximation_is_no_good_for_a_gated_mlp_with_few_kv_heads() -> None:
    """Llama-3-8B: 128256·4096 + 32·(12·4096² + 13·4096) + 8192 = 6.97e9, the truth 8,030,261,248: 13 % more."""
    assert parameters_approximate(4096, 32, 128256) == 6_969_499_648
    assert Model.load("llama-3-8b").parameters == 8_030_261_248


@pytest.mark.parametrize("name", sorted(Model.presets()))
def test_one_rank_holds_the_whole_model(name: str) -> None:
    model = Model.load(name)
    assert ranks_of(model, Layout()).total[0] == model.parameters


def test_dense_tensor_parallel_repeats_norms_only() -> None:
    """Llama-3-8B at tp=8: 65 norms of 4096 on every rank, all else cut (8 kv heads: one each)."""
    model = Model.load("llama-3-8b")
    norms = 65 * 4096
    assert ranks_of(model, Layout(tp=8)).total[0] == (8_030_261_248 - norms) / 8 + norms


def test_kv_heads_are_repeated_beyond_their_number() -> None:
    """Llama-3-8B at tp=16: 8 kv heads for 16 ranks, so the 2·4096·1024 elements of k and v are cut by 8, not 16."""
    model = Model.load("llama-3-8b")
    norms, kv = 65 * 4096, 32 * 2 * 4096 * 1024
    assert ranks_of(model, Layout(tp=16)).total[0] == (8_030_261_248 - norms - kv) / 16 + kv / 8 + norms


def test_a_tied_head_is_held_twice_by_a_pipeline() -> None:
    """Llama-3.2-1B: the last stage has its own copy of 128256·2048 elements; the final norm sits with it."""
    model = Model.load("llama-3.2-1b")
    held = ranks_of(model, Layout(pp=4))
    assert held.total.sum() == model.parameters + 128256 * 2048
    # V-shaped: the first rank has embedding and head, but in two chunks, each with a matrix of its own.
    v_shaped = ranks_of(model, Layout(pp=4, schedule="zb-v", virtual_stages=2))
    assert v_shaped.total.sum() == model.parameters + 128256 * 2048
    assert ranks_of(model, Layout()).total.sum() == model.parameters


def test_experts_are_spread_by_ep_and_the_router_is_not() -> None:
    """Mixtral-8x7B, ep=4: 2 of 8 experts of 3·4096·14336 on each of 32 layers; the rest is whole."""
    model = Model.load("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    held = ranks_of(model, Layout(dp=4, ep=4))
    assert held.experts[0] == 32 * 2 * expert
    assert held.trunk[0] == model.parameters - 32 * 8 * expert
    assert held.trunk[0] + 4 * held.experts[0] == model.parameters


def test_mla_cuts_the_up_projections_and_repeats_the_down_projections() -> None:
    """DeepSeek-V3 at tp=8, ep=32, pp=1, tensor by tensor.

    Per layer whole on every rank: kv down 7168·(512+64) + norm 512, q down 7168·1536 + norm 1536, two norms of 7168.
    Per layer cut by 8: q up 1536·128·192, kv up 512·128·(128+128), output 128·128·7168.
    """
    model = Model.load("deepseek-v3")
    whole = 7168 * 576 + 512 + 7168 * 1536 + 1536 + 2 * 7168
    cut = 1536 * 24576 + 512 * 32768 + 16384 * 7168
    dense_mlp, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 256 * 7168 + 256
    trunk = 61 * (whole + cut / 8) + 3 * dense_mlp / 8 + 58 * (router + expert / 8)
    ends = 2 * 129280 * 7168 / 8 + 7168
    held = ranks_of(model, Layout(dp=32, tp=8, ep=32))
    assert held.trunk[0] == trunk + ends
    assert held.experts[0] == 58 * 8 * expert / 8
    assert held.ends[0] == ends
    assert held.layer[0] == whole + cut / 8 + router + expert / 8 + 8 * expert / 8


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3-70b", Layout(tp=8, pp=4)),
        ("llama-3.1-405b", Layout(tp=8, pp=16)),
        ("deepseek-v2-lite", Layout(dp=8, tp=2, pp=4, ep=8)),
        ("deepseek-v3", Layout(dp=8, pp=16, ep=8, schedule="interleaved", virtual_stages=3)),
        ("gpt2-xl", Layout(pp=6, schedule="dualpipe-v", virtual_stages=2)),
    ],
)
def test_every_tensor_is_somewhere(name: str, layout: Layout) -> None:
    """Summed over tp, pp and ep ranks: the model, plus tp − 1 further copies of what tp does not cut, plus a tied copy."""
    model = Model.load(name)
    held = ranks_of(model, layout)
    everywhere = layout.tp * (held.trunk.sum() + layout.ep * held.experts.sum())
    whole = sum(weight.elements for weight in weights.attention(model) if weight.cut == "none")
    repeated = model.layers * (whole + 2 * weights.norm(model).elements) + weights.norm(model).elements
    repeated += model.moe_layers * (weights.elements(weights.router(model)) + weights.router_bias(model))
    tied_copy = model.vocab * model.hidden * model.tied_embeddings
    assert everywhere == pytest.approx(model.parameters + (layout.tp - 1) * repeated + tied_copy, rel=1e-12)


def test_the_layers_of_a_pipeline_leave_room_for_the_head() -> None:
    """Llama-3.1-405B over 16 ranks comes out as Meta cut it: one layer less on the first and on the last stage.

    Llama 3 paper, section 3.3.2. The head weighs 2·16384·128256 / (2·3.187e9) = 0.66 layers, so 7 + 0.66 is below 8.
    """
    assert stages.chunk_layers(job_of(Model.load("llama-3.1-405b")), 16, 1) == (7, *(8,) * 14, 7)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama-3-8b", 128256 * 4096 / (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)),  # 2.41 layers
        ("gpt2-xl", 50257 * 1600 / (12 * 1600**2)),  # 2.62
    ],
)
@pytest.mark.parametrize(("ranks", "loops"), [(2, 1), (4, 3), (8, 2), (12, 1)])
def test_no_split_is_more_even(name: str, head: float, ranks: int, loops: int) -> None:
    """The slowest chunk, the head counted in layers, is the smallest that any split of whole layers can have."""
    layers, chunks = Model.load(name).layers, ranks * loops
    counts = stages.chunk_layers(job_of(Model.load(name)), ranks, loops)
    assert (sum(counts), len(counts), min(counts) >= 1) == (layers, chunks, True)
    best = min(max(-(-(layers - last) // (chunks - 1)), last + head) for last in range(1, layers - chunks + 2))
    assert max(*counts[:-1], counts[-1] + head) == pytest.approx(best)


def test_the_peak_and_the_slowest_are_among_the_representatives() -> None:
    """DeepSeek-V3 over 32 ranks: the first rank with two MoE layers is rank 2, and it is asked."""
    shares = stages.rank_shares(job_of(Model.load("deepseek-v3")), 32, 1, False)
    chosen = stages.representative_ranks(shares)
    assert 2 in chosen
    assert shares[2][:2] == (0, 2)
    assert {shares[rank] for rank in chosen} == set(shares)
    assert len(chosen) < 12
