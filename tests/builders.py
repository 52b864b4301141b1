"""Builders of specs that many tests need, and of processes that die."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.cost.estimate import estimate
from ultrascale.data.sets import ANSWERS, FACTS, TOKENS, TokenizedInputs, TokenSetMetadata
from ultrascale.data.token_files import END, Header, smallest_type
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

SMALL = Path(__file__).with_name("small.yaml")
"""A model file for runs of which the model is not the subject."""


def make_job(
    model: str | Model = "llama-3-8b",
    cluster: str | Cluster = "8xh100",
    seq: int = 8192,
    batch: int | Layout = 64,
    framework: str | Framework = "playbook",
    **fields: Any,
) -> Job:
    """A job on presets. `batch`: sequences in a step, or the layout that computes them.

    `framework`: the idealised engine, of which laws are worked out by hand, unless another is named.
    """
    fields["framework"] = Framework.load(framework) if isinstance(framework, str) else framework
    return Job(
        model=Model.load(model) if isinstance(model, str) else model,
        cluster=Cluster.load(cluster) if isinstance(cluster, str) else cluster,
        seq=seq,
        batch_tokens=batch.batch_tokens(seq) if isinstance(batch, Layout) else seq * batch,
        **fields,
    )


def with_constants(gpus: int, **constants: float) -> Cluster:
    return Cluster.from_mapping({"gpu": "h100", "gpus": gpus, "efficiency": constants})


def make_plan(layout: Layout, model: str | Model = "llama-3-8b", cluster: str = "64xh100", seq: int = 8192) -> Plan:
    """A plan of the layout with its estimate, on the idealised engine."""
    job = make_job(model, cluster, seq, layout)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


def exit_in_call(calls: int, *functions: str) -> None:
    """Makes this process die before the given one of its calls of these functions of `os`, counted together."""
    left = calls

    def exit_at_limit(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return call(*arguments, **options)

        return wrapped

    for name in functions:
        setattr(os, name, exit_at_limit(getattr(os, name)))


def write_tokens(path: Path, tokens: npt.ArrayLike, ends: npt.ArrayLike, vocab: int) -> None:
    """A token file of our format. `ends`: the number of tokens up to and including each document's last."""
    token_array, end_array = np.asarray(tokens).astype(smallest_type(vocab)), np.asarray(ends).astype(END)
    header = Header(smallest_type(vocab), len(token_array), len(end_array), vocab)
    path.write_bytes(header.pack() + token_array.tobytes() + bytes(header.padding) + end_array.tobytes())


def write_conversations(folder: Path, documents: Sequence[npt.ArrayLike], masks: Sequence[npt.ArrayLike], vocab: int) -> Path:
    """A set of `ultrascale data chat`: conversations of tokens, and for each token whether it is of an answer."""
    folder.mkdir()
    ends = np.cumsum([np.asarray(one).size for one in documents])
    counted = [np.concatenate(([0], np.asarray(mask, dtype=np.uint8)[1:])) for mask in masks]  # nothing predicts the first
    answers = np.concatenate(counted).astype(np.uint8)
    write_tokens(folder / TOKENS, np.concatenate([np.asarray(one) for one in documents]), ends, vocab)
    (folder / ANSWERS).write_bytes(answers.tobytes())
    inputs = TokenizedInputs(path="chats.jsonl", files=1, bytes=1, field="messages")
    facts = TokenSetMetadata(
        tokenizer="tokenizer.json",
        vocab=vocab,
        eod=0,
        tokens=int(ends[-1]),
        documents=len(ends),
        dtype="uint16",
        answers=int(answers.sum()),
        inputs=inputs,
    )
    (folder / FACTS).write_text(json.dumps(facts.model_dump()))
    return folder
