"""Which layers a pipeline stage gets: balanced as our engine does, or split as nanotron does, against what it printed."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.cost.stages import chunk_layers, nanotron_stage_split, rank_shares, representative_ranks, torchtitan_stage_split
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def job_of(name: str) -> Job:
    return Job(
        model=Model.load(name),
        cluster=Cluster.load("8xh100"),
        seq=1024,
        batch_tokens=2**20,
        framework=Framework.load("playbook"),
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "ranks", "printed"),
    [
        # Parameters of the first rank in nanotron's sweep, in billions: the embedding and its layers.
        (16, 2048, 8192, 2, 0.940),
        (16, 2048, 8192, 4, 0.604),
        (16, 2048, 8192, 8, 0.470),
        (28, 3072, 8192, 2, 2.21),
        (28, 3072, 8192, 4, 1.31),
        (28, 3072, 8192, 8, 0.856),
        (32, 4096, 14336, 2, 4.92),
        (32, 4096, 14336, 4, 2.73),
        (32, 4096, 14336, 8, 1.75),
    ],
)
def test_the_first_stage_holds_what_nanotron_printed(layers: int, hidden: int, ffn: int, ranks: int, printed: float) -> None:
    layer, embedding = 4 * hidden**2 + 3 * hidden * ffn, 131072 * hidden
    stages = nanotron_stage_split(layers, ranks, embedding / layer)
    assert (embedding + stages[0] * layer) / 1e9 == pytest.approx(printed, rel=4e-3)
    assert sum(stages) == layers
    assert min(stages) >= 1


def test_a_stage_closes_with_the_layer_that_reaches_its_share() -> None:
    """32 layers and a head of 2.2: shares of 8.55, so 9 layers, 18 at 17.1, 26 at 25.65, and the rest with the head."""
    assert nanotron_stage_split(32, 4, 2.2) == (9, 9, 8, 6)
    assert nanotron_stage_split(8, 4, 0.0) == (2, 2, 2, 2)


def test_a_heavy_head_leaves_a_layer_for_every_stage() -> None:
    assert nanotron_stage_split(8, 4, 20.0) == (5, 1, 1, 1)


def test_an_engine_that_fills_stages_is_slower_than_one_that_balances_them() -> None:
    """Llama-3-8B on two stages: 17 layers at most when balanced, 18 when dealt out (a head of 2.4 layers)."""

    def predicted(**fields: object) -> list[int]:
        cluster, model = Cluster.load("8xh100"), Model.load("llama-3-8b")
        job = Job(model=model, cluster=cluster, seq=4096, batch_tokens=64 * 4096, framework=Framework(**fields))
        found = estimate(job, Layout(dp=4, pp=2, zero=1, schedule="1f1b", mbs=1, gas=16))
        assert sum(stage.layers for stage in found.memory) == 32
        times.append(found.step_time_s)
        return [stage.layers for stage in found.memory]

    times: list[float] = []
    assert predicted() == [17, 15]
    assert predicted(stage_split="nanotron") == [18, 14]
    assert times[1] > times[0]


def test_ends_of_a_pipeline_have_fewer_layers() -> None:
    """Llama-3.1-405B over 16 ranks comes out as Meta cut it: one layer less on the first and on the last stage.

    Llama 3 paper, section 3.3.2. The head weighs 2·16384·128256 / (2·3.187e9) = 0.66 layers, so 7 + 0.66 is below 8.
    """
    assert chunk_layers(job_of("llama-3.1-405b"), 16, 1) == (7, *(8,) * 14, 7)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama-3-8b", 128256 * 4096 / (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)),  # 2.41 layers
        ("gpt2-xl", 50257 * 1600 / (12 * 1600**2)),  # 2.62
    ],
)
@pytest.mark.parametrize(("ranks", "loops"), [(2, 1), (4, 3), (8, 2), (12, 1)])
def test_the_layer_split_minimizes_the_slowest_chunk(name: str, head: float, ranks: int, loops: int) -> None:
    """The slowest chunk, the head counted in layers, is the smallest that any split of whole layers can have."""
    layers, chunks = Model.load(name).layers, ranks * loops
    counts = chunk_layers(job_of(name), ranks, loops)
    assert (sum(counts), len(counts), min(counts) >= 1) == (layers, chunks, True)
    best = min(max(-(-(layers - last) // (chunks - 1)), last + head) for last in range(1, layers - chunks + 2))
    assert max(*counts[:-1], counts[-1] + head) == pytest.approx(best)


def test_representative_ranks_include_peak_and_slowest() -> None:
    """DeepSeek-V3 over 32 ranks: the first rank with two MoE layers is rank 2, and it is included."""
    shares = rank_shares(job_of("deepseek-v3"), 32, 1, False)
    representatives = representative_ranks(shares)
    assert 2 in representatives
    assert shares[2][:2] == (0, 2)
    assert {shares[rank] for rank in representatives} == set(shares)
    assert len(representatives) < 12


def test_embedding_and_head_may_be_stages_of_their_own() -> None:
    """Qwen3-235B's 94 layers in 32 · 3 stages (mzqwen-004): the ends count as layers, one for each stage."""
    engine = Framework.load("megatron-core").model_copy(update={"stage_split": "layers-and-ends"})
    thin = Layout(tp=2, pp=32, dp=4, ep=8, virtual_stages=3, schedule="interleaved", gas=512)
    job = make_job("qwen3-235b-a22b", "256xh100", 4096, thin, engine)
    assert chunk_layers(job, 32, 3) == (0, *[1] * 94, 0)
    assert chunk_layers(job, 8, 1) == (11, *[12] * 6, 11)
    assert chunk_layers(job, 1, 1) == (94,)
    assert problem(job, thin) is None
    assert estimate(job, thin).memory[0].layers == 2
    assert "96 but there are only 94 layers" in (problem(job.changed(framework=Framework.load("megatron-core")), thin) or "")
    too_many = thin.changed(pp=64, dp=2, ep=4, gas=1024, virtual_stages=2)
    assert "64·2 = 128 but there are only 96 layers" in (problem(job, too_many) or "")


def test_torchtitan_counts_the_embedding_and_the_head_as_layers() -> None:
    """As its _generate_llm_fqn_per_model_part cuts them."""
    assert torchtitan_stage_split(32, 2) == (16, 16)
    assert torchtitan_stage_split(32, 4) == (8, 9, 8, 7)
    assert torchtitan_stage_split(8, 4) == (2, 3, 2, 1)
