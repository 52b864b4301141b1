"""Attention within documents under every kind of parallelism against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import write_tokens
from parallel.harness import SEQ, check, engine_of, job_of, one_process, training_of
from ultrascale.data.corpora import corpus
from ultrascale.kernels import selection
from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.selection import Kernels
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import supported
from ultrascale.train.data import Batches

slow = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "gas": 2, "mbs": 2},
    "tp with sequences": {"tp": 2, "sequence_parallel": True, "gas": 2, "mbs": 2},
    "pp": {"pp": 2, "gas": 4},
    "zero 3, full recompute": {"dp": 2, "zero": 3, "recompute": "full", "gas": 2, "mbs": 2},
    "pp split, selective recompute": {"pp": 2, "schedule": "zero-bubble", "recompute": "selective", "gas": 4},
}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Documents of one to thirty tokens, of a vocabulary that the small models have."""
    random = np.random.default_rng(0)
    ends = np.cumsum(random.integers(1, 30, size=400))
    path = Path(tmp_path_factory.mktemp("documents")) / "a.bin"
    write_tokens(path, random.integers(0, 60, size=int(ends[-1])), ends, vocab=60)
    return training_of(data=str(path), document_mask=True)


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_process(name: str, training: Training) -> None:
    check("llama", training, **LAYOUTS[name])


@pytest.mark.quick_cases("qwen3-next-family, tp with sequences", "mamba, zero 3, full recompute")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["qwen3-next-family", "mamba"])
def test_states_begin_anew_with_each_document_in_every_layout(model: str, name: str, training: Training) -> None:
    check(model, training, evaluate=True, **LAYOUTS[name])


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2, "gas": 2, "mbs": 2},
        {"tp": 2, "gas": 2, "mbs": 2, "recompute": "selective"},
        {"dp": 2, "zero": 3, "recompute": "full", "gas": 2, "mbs": 2},
        {"pp": 2, "tp": 2, "schedule": "zero-bubble", "gas": 4},
        pytest.param({"dp": 2, "recompute": "selective", "gas": 2}, marks=slow),
        pytest.param({"tp": 2, "gas": 2, "mbs": 2}, marks=slow),
        pytest.param({"tp": 2, "recompute": "full", "gas": 2, "mbs": 2}, marks=slow),
        pytest.param({"pp": 2, "schedule": "zero-bubble", "gas": 4}, marks=slow),
        pytest.param({"pp": 2, "schedule": "zero-bubble", "recompute": "full", "gas": 4}, marks=slow),
        pytest.param({"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "recompute": "selective", "gas": 4}, marks=slow),
    ],
    ids=str,
)
def test_fused_blocks_stay_within_documents(
    fields: dict[str, Any], training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    check("llama", training, evaluate=True, **fields)


def test_chunks_of_tensor_parallelism_stay_within_documents(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    check("llama", training.changed(tp_chunks=2), evaluate=True, tp=2, gas=2, mbs=2)


def test_the_fused_block_is_what_ran(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    monkeypatch.setattr(FusedBlock, "out_mlp", lambda self, x, *_: 2 * x)
    with pytest.raises(AssertionError):
        check("llama", training, dp=2, gas=1)


def test_a_window_and_documents_together_under_pipelines(training: Training) -> None:
    check("window", training, pp=2, gas=4)


def test_the_mask_changes_the_loss_and_is_per_micro_batch(training: Training) -> None:
    job = job_of("llama")
    masked = one_process(job, 4, training)
    assert masked.losses != one_process(job, 4, training.changed(document_mask=False)).losses


def test_evaluation_has_its_documents_too(training: Training) -> None:
    engine = engine_of(job_of("llama"), Layout(mbs=4), training)
    batch = engine.read(0, held_out=True)
    text = Batches(corpus(training, 64), SEQ, 4, training.seed)
    assert batch.microbatches[0][2].tolist() == text.documents(0, slice(None), held_out=True).tolist()
    other = engine_of(job_of("llama"), Layout(mbs=4), training.changed(document_mask=False))
    assert engine.evaluate(1) != other.evaluate(1)


def test_sequence_sharding_is_refused(training: Training) -> None:
    job = job_of("llama").changed(batch_tokens=4 * SEQ)
    sentence = supported.layout_problem(_of_two(job), Layout(cp=2, gas=4), training)
    assert sentence is not None
    assert sentence.startswith("layout.cp is 2 but train.document_mask keeps attention within documents only where")
    assert supported.layout_problem(_of_two(job), Layout(cp=2, gas=4), training.changed(document_mask=False)) is None
    with pytest.raises(SpecError, match=r"try cp=1 or train.document_mask=false. Layouts of 2 processes that work: "):
        supported.check(_of_two(job), Layout(cp=2, gas=4), training)


def _of_two(job: Any) -> Any:
    from ultrascale.specs.cluster import Cluster

    return job.changed(cluster=Cluster.load("2xh100"))
