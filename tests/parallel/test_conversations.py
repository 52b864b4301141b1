"""Losses on answers alone: every layout has one process's losses and gradients, and one process has those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from builders import write_conversations
from model.builders import to_hf
from parallel.harness import SEQ, check, engine_of, in_ranks, job_of, one_process, relative, training_of
from ultrascale.data.corpora import corpus
from ultrascale.kernels import selection
from ultrascale.kernels.selection import Kernels
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import checkpoint
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.request import from_words

slow = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "gas": 2, "mbs": 2},
    "zero 3, full recompute": {"dp": 2, "zero": 3, "recompute": "full", "gas": 2, "mbs": 2},
    "tp": {"tp": 2, "gas": 2, "mbs": 2},
    "tp with sequences": {"tp": 2, "sequence_parallel": True, "gas": 2, "mbs": 2},
    "cp": {"cp": 2, "gas": 4},
    "pp": {"pp": 2, "gas": 4},
    "pp split": {"pp": 2, "schedule": "zero-bubble", "gas": 4},
    "gas": {"gas": 4},
    "zero 1 tp": {"dp": 2, "zero": 1, "tp": 2, "gas": 2},
    "pp dp": {"dp": 2, "pp": 2, "schedule": "zb-v", "virtual_stages": 2, "gas": 4},
    "cp tp": {"cp": 2, "tp": 2, "context_parallel": "ulysses", "gas": 4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of few answers, so that micro-batches have different numbers of losses, and some none."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("chats") / "set"
    lengths = random.integers(2, 24, size=300)
    masks = [random.random(length) < random.choice([0.02, 0.2, 0.9]) for length in lengths]
    return write_conversations(folder, [random.integers(0, 60, size=length) for length in lengths], masks, vocab=60)


def training_on(data: Path, **fields: Any) -> Training:
    return training_of(data=str(data), **{"document_mask": True, **fields})


@pytest.mark.quick_cases("dp", "zero 3, full recompute", "tp with sequences", "cp", "pp dp")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_process(name: str, data: Path) -> None:
    fields = LAYOUTS[name]
    check("llama", training_on(data, document_mask="cp" not in fields), evaluate=True, **fields)


@pytest.mark.quick_cases("tp with sequences")
@pytest.mark.parametrize("name", ["dp", "tp", "tp with sequences", "pp"])
def test_fused_blocks_and_chunked_losses_equal_one_process(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Kernels(fused=True, loss=True)
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: fused if layout.gpus > 1 else Kernels())
    check("llama", training_on(data), evaluate=True, **LAYOUTS[name])


@pytest.mark.parametrize("fields", [{"dp": 2, "zero": 2, "gas": 2}, pytest.param({"pp": 2, "gas": 4}, marks=slow)], ids=str)
def test_adapters_learn_answers_in_every_layout(fields: dict[str, Any], data: Path) -> None:
    check("qwen2", training_on(data), adapter_rank=4, **fields)


@pytest.mark.parametrize(
    "fields", [{"dp": 2, "gas": 2, "mbs": 2}, pytest.param({"pp": 2, "tp": 2, "gas": 4}, marks=slow)], ids=str
)
def test_the_z_loss_is_a_mean_over_answers(fields: dict[str, Any], data: Path) -> None:
    check("llama", training_on(data, z_loss=0.2), evaluate=True, **fields)


def test_experts_balance_over_all_tokens(data: Path) -> None:
    check("experts", training_on(data, balance_loss=0.1), dp=2, gas=2)


def losses_of(batches: Batches, step: int) -> int:
    return int((batches.train(step, slice(None))[1] >= 0).sum())


def test_the_mean_is_over_answers_and_micro_batches_differ(data: Path) -> None:
    training = training_on(data)
    batches = Batches(corpus(training, 64), SEQ, 4, training.seed)
    per_row = [(batches.train(0, [row])[1] >= 0).sum() for row in range(4)]
    assert len(set(map(int, per_row))) > 1
    assert batches.losses(0) == losses_of(batches, 0) == sum(map(int, per_row)) < 4 * SEQ
    assert one_process(job_of("llama"), 4, training).losses != one_process(job_of("llama"), 4, training_of()).losses


def test_evaluation_is_a_mean_over_all_its_answers(data: Path) -> None:
    engine = engine_of(job_of("llama"), Layout(mbs=4), training_on(data))
    total, count = 0.0, 0
    for number in range(3):
        batch = engine.read(number, held_out=True)
        total += float(engine.pipeline.evaluate(batch))
        count += int((batch.microbatches[0][1] >= 0).sum())
    assert abs(engine.evaluate(3) - total / count) < 1e-6


def test_losses_and_gradients_equal_transformers(data: Path) -> None:
    """Of a step's conversations one by one, with labels of −100 where nothing counts."""
    engine = engine_of(job_of("llama"), Layout(mbs=4), training_on(data))
    model = engine.job.model
    config = transformers.LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )
    reference = transformers.LlamaForCausalLM(config)
    reference.load_state_dict(to_hf({weight.shard.name: weight.master for weight in engine.weights}, model))
    batch = engine.read(0)
    loss = engine.backward(batch)
    wanted, count = torch.zeros(()), 0
    for tokens, targets, documents in zip(*batch.microbatches[0], strict=True):
        for document in range(int(documents.max()) + 1):
            mine = documents == document
            labels = torch.cat((torch.tensor([-100]), targets[mine]))
            losses = int((labels >= 0).sum())
            if losses:  # the last target is the label of a token behind the last input
                found = reference(input_ids=torch.cat((tokens[mine], labels[-1:].clamp(min=0)))[None], labels=labels[None])
                wanted = wanted + found.loss * losses
                count += losses
    assert count == batch.losses
    (wanted / count).backward()
    torch.testing.assert_close(loss.squeeze(), (wanted / count).detach(), rtol=1e-5, atol=0)
    gradients = to_hf({weight.shard.name: weight.gradient for weight in engine.weights}, model)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        assert float((gradients[name] - parameter.grad).abs().max()) < 1e-4 * largest, name


def run(engine: Engine, folder: Path, first: int, last: int) -> list[float]:
    if first:
        restore(engine, checkpoint.latest(folder))
    losses = [engine.step(number).loss for number in range(first, last)]
    CheckpointManager(engine, folder, Checkpointing(background=False)).save(last, wait=True)
    return losses


def test_a_run_resumes_under_another_layout(data: Path, tmp_path: Path) -> None:
    training, job = training_on(data, steps=4), job_of("llama")
    begun = in_ranks(run, job, Layout(dp=2, mbs=2), training, tmp_path, 0, 2)[0]
    found = in_ranks(run, job, Layout(tp=2, mbs=4), training, tmp_path, 2, 4)[0]
    assert relative(begun + found, one_process(job, 4, training).losses) < 1e-5


def test_conversations_are_masked_by_default(data: Path) -> None:
    def request(*words: str) -> Training:
        return from_words([f"train.data={data}", "job.seq=32", *words], {}, 1, gpu=False, model="tiny").training

    assert request().document_mask is True
    assert request("train.document_mask=false").document_mask is False
    assert request("train.data=stdlib").document_mask is None
    assert request(f"train.data={data}:0.5,stdlib:0.5").document_mask is True
    assert json.loads((data / "data.json").read_text())["answers"] > 0
