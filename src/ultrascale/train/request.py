"""Training requests: a plan, model or checkpoint with overrides such as `layout.tp=4`, completed and checked. No torch.

The batch belongs to the job and the number of processes to the machine. So dp follows from the processes, and accumulation
from the batch, unless both are given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ultrascale.cost.recompute import AUTO, fastest_recompute
from ultrascale.data import corpora
from ultrascale.data.digest import Report, data_digest
from ultrascale.kernels.selection import left_in_bf16
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY
from ultrascale.specs.batch_ramp import BatchRamp, stages_left
from ultrascale.specs.checkpointing import Checkpointing, checkpoint_value
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout, field_value
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training, training_value
from ultrascale.specs.units import tokens
from ultrascale.specs.validate import build, shown
from ultrascale.train import checkpoint, history, supported
from ultrascale.train.checkpoint import Checkpoint
from ultrascale.train.history import LastLaunch
from ultrascale.train.supported import LENGTHS, RAMP

JOB_FIELDS = ("seq", "batch_tokens", "precision", "gradients", "optimizer", "ema", "adapter_rank", "adapter_targets")
TRY_SEQ, TRY_SEQUENCES = 128, 16  # for a run without a plan: seconds on a laptop, divisible by most small layouts
CHANGEABLE = ("data", "seed")  # values of --allow-changed
HASH_THREADS = 4


@dataclass(frozen=True)
class Overrides:
    """`section.field=value` words, by section."""

    layout: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    auto_recompute: bool = False
    """layout.recompute=auto: as little as fits"""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Overrides:
        found: dict[str, dict[str, Any]] = {section: {} for section in _PARSERS}
        auto = False
        for word in words:
            name, equals, text = word.partition("=")
            section, dot, key = name.strip().partition(".")
            if not equals or not dot:
                raise SpecError(
                    f"{shown(word)} is no override: write section.field=value, such as layout.tp=2 or train.lr=1e-3"
                )
            if section not in found:
                raise SpecError(f"{shown(word)} names no section of a run: {nearest(section, found)}, such as layout.tp=2")
            if (section, key, text.strip()) == ("layout", "recompute", AUTO):
                auto = True
            else:
                found[section][key] = _PARSERS[section](key, text)
        if auto and {"recompute", "recompute_layers"} & found["layout"].keys():
            raise SpecError("layout.recompute is auto, which also finds the layers: leave out the other layout.recompute words")
        return cls(**found, auto_recompute=auto)


def _job_value(key: str, text: str) -> Any:
    if key not in JOB_FIELDS:
        raise SpecError(f"job.{shown(key)[1:-1]} cannot be changed here: {nearest(key, JOB_FIELDS)}")
    if key in ("seq", "batch_tokens"):
        return tokens(text, f"job.{key}", "4096 or 4k")
    word = text.strip().lower()
    if key == "ema":
        return {"true": True, "false": False}.get(word, word)
    if key == "adapter_rank":
        return None if word in ("none", "null") else int(word) if word.isdecimal() else word
    return word


_PARSERS = {"layout": field_value, "train": training_value, "job": _job_value, "checkpoint": checkpoint_value}


@dataclass(frozen=True)
class Request:
    """A checked run that can start."""

    job: Job
    layout: Layout
    training: Training
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    resume: Path | None = None
    """the checkpoint to resume from"""
    weights: Path | None = None
    """the checkpoint whose weights initialize this run"""
    notes: tuple[str, ...] = ()
    """notes for the user about derived settings"""
    changed: tuple[str, ...] = ()
    """which of data and seed differ from the resumed run, with --allow-changed"""

    def continues_in(self, out: Path) -> bool:
        """Whether this continues the run in that folder, instead of starting a new folder from another run."""
        return self.resume is not None and checkpoint.run_of(self.resume).resolve() == out.resolve()

    def on_cluster(self, cluster: Cluster) -> Request:
        """The same run on the actual machine; on a CPU nothing is compiled."""
        return replace(self, job=self.job.changed(cluster=cluster, framework=Framework.own(cluster.gpu.name)))


def from_words(
    words: Sequence[str],
    options: Mapping[str, Any],
    world: int | None,
    gpu: bool,
    model: str | None = None,
    resume: Path | None = None,
    weights: Path | None = None,
    allow_changed: str | None = None,
    first: bool = True,
    report: Report | None = None,
    devices: int = 1,
) -> Request:
    """Builds and checks a request from the command line; starts nothing.

    `options`: overrides with their own flag, such as train.steps. `world`: processes; None: as many as the plan or the resumed
    run has, but one for a plan of more than the `devices` of this machine, and for a model. `allow_changed`: for a resumed run,
    `data`, `seed` or both. `first`: whether this is rank 0, which alone reads the data to compare it; `report`: called with its
    progress.
    """
    allowed = allowed_changes(allow_changed, resume)
    file = words[0] if words and "=" not in words[0] else None
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    changes = Overrides.parse([*given, *(words if file is None else words[1:])])
    if resume is not None:
        if model is not None or weights is not None:
            raise SpecError("--resume brings its own model and weights: leave --model and --weights out")
        plan = Plan.load(file) if file is not None else None
        kept = checkpoint.resolve(resume)
        # Given as a run, not as a checkpoint: a launch that was killed before its first checkpoint is repeated as it was.
        last = history.last_launch(resume) if plan is None and kept.folder != resume else None
        repeated = last if last is not None and last.resumed_from == kept.folder.name else None
        request = from_checkpoint(kept, changes, world, gpu, plan, repeated, allowed, first, report)
    else:
        source = checkpoint.resolve(weights) if weights is not None else None
        request = _new_run(file, model, changes, world, devices, gpu, source)
    if gpu or request.job.precision != "fp8":
        return request
    return replace(request, notes=(*request.notes, "no GPU here: fp8 is emulated, with its rounding and without its speed"))


def _new_run(
    file: str | None,
    model: str | None,
    changes: Overrides,
    world: int | None,
    devices: int,
    gpu: bool,
    source: Checkpoint | None,
) -> Request:
    sources = sum((file is not None, model is not None))
    if sources > 1 or (sources == 0 and source is None):
        raise SpecError("train takes a plan or --model, one of them: try `ultrascale train --model tiny`, or `train plan.yaml`")
    if file is not None:
        if file.lower() in Model.preset_names() and not os.path.exists(file):
            raise SpecError(f"{file} is a model, not a plan file: try `ultrascale train --model {file}`")
        plan = Plan.load(file)
        needed = _processes(plan.layout, changes.layout)
        request = from_plan(plan, changes, world or (needed if needed <= devices else 1), gpu=gpu)
    else:
        shape = source.job.model if model is None and source is not None else Model.load(str(model))
        request = from_model(shape, changes, world or 1, precision="bf16" if gpu else "fp32")
    if source is not None:
        _refuse_other_model(request.job.model, source.job.model, source.folder)
        if source.job.adapter_rank is not None:
            _refuse_other_adapters(request, source)
        request = replace(request, weights=source.folder)
    elif request.job.adapter_rank is not None:
        note = "the adapters stand beside random weights, which is good for measurements: give --weights for a model's own"
        request = replace(request, notes=(*request.notes, note))
    return request


def from_checkpoint(
    source: Checkpoint,
    changes: Overrides,
    world: int | None = None,
    gpu: bool = True,
    plan: Plan | None = None,
    last: LastLaunch | None = None,
    allowed: Set[str] = frozenset(),
    first: bool = True,
    report: Report | None = None,
) -> Request:
    """A request that resumes from a checkpoint, in the same layout, in another, or in that of a plan.

    `last`: an earlier launch that resumed from this checkpoint and saved none, whose settings are inherited. `allowed`,
    `first`, `report`: as in `from_words`.
    """
    job, layout = (plan.job, plan.layout) if plan is not None else (source.job, source.layout)
    training, settings = source.training, source.checkpointing
    _refuse_other_model(job.model, source.job.model, source.folder)
    notes: list[str] = []
    if plan is not None:
        job = _precision_without_gpu(job, changes, gpu, notes)
    if last is not None:
        notes.extend(_inherited_settings_notes(source, last))
        job, training, settings = job.changed(**last.job), last.training, last.checkpoint
    given = _request(job, layout, changes, world or _processes(layout, changes.layout), training, notes, source.step)
    _refuse_unresumable(given, source)
    notes.extend(_learning_rate_notes(given.training, source))
    given = replace(given, notes=tuple(notes))
    changed = _changed(given, source, allowed | set(last.changed if last is not None else ()), first, report)
    return replace(given, checkpoint=settings.changed(**changes.checkpoint), resume=source.folder, changed=changed)


def _learning_rate_notes(training: Training, source: Checkpoint) -> Iterator[str]:
    """A note when another number of steps changes the learning rates that follow."""
    from ultrascale.train.optimizer import learning_rate

    before = source.training
    rate, planned = learning_rate(training, source.step), learning_rate(before, source.step)
    if training.steps != before.steps and rate != planned and training.lr == before.lr:
        yield (
            f"{training.steps:,} steps instead of {before.steps:,} change the learning rates to come: step {source.step + 1} "
            f"has {rate:.3g}, not {planned:.3g}"
        )


def _inherited_settings_notes(source: Checkpoint, last: LastLaunch) -> Iterator[str]:
    """A note about the settings in which the last launch differs from the checkpoint."""
    before = {"train": source.training.model_dump(), "checkpoint": source.checkpointing.model_dump()}
    before["job"] = {name: getattr(source.job, name) for name in last.job}
    after = {"train": last.training.model_dump(), "checkpoint": last.checkpoint.model_dump(), "job": last.job}
    changed = [
        f"{section}.{name}={value}"
        for section, fields in after.items()
        for name, value in fields.items()
        if value != before[section][name]
    ]
    if changed:
        yield f"as the last launch from this checkpoint was given, which saved none: {' '.join(changed)}"


def from_plan(plan: Plan, overrides: Overrides, world: int, training: Training | None = None, gpu: bool = True) -> Request:
    """A request from a plan with overrides; dp is adjusted to the number of processes unless it is given."""
    notes: list[str] = []
    job = _precision_without_gpu(plan.job, overrides, gpu, notes)
    return _request(job, plan.layout, overrides, world, training or Training(), notes)


def _precision_without_gpu(job: Job, overrides: Overrides, gpu: bool, notes: list[str]) -> Job:
    if gpu or job.precision == "fp32" or "precision" in overrides.job:
        return job
    notes.append(
        f"no GPU here: this computes in fp32, not in {job.precision} as planned (job.precision={job.precision} insists)"
    )
    return job.changed(precision="fp32")


def from_model(model: Model, overrides: Overrides, world: int, precision: str = "fp32") -> Request:
    """A request without a plan: a short sequence and a small batch, the same for every layout."""
    seq = overrides.job.get("seq", TRY_SEQ)
    job = build(
        Job,
        {
            "model": model,
            "cluster": Cluster.load(f"{world}xh100"),  # a placeholder until the machine is known
            "seq": seq,
            "batch_tokens": seq * TRY_SEQUENCES,
            "precision": precision,
        },
        "job",
    )
    if overrides.auto_recompute:
        raise SpecError("layout.recompute is auto but without a plan no GPU sets a limit: try recompute=selective, or a plan")
    fixed = overrides.layout
    if "batch_tokens" not in overrides.job and "gas" in fixed:
        # With both given, they set the batch. With gas alone, the batch stays if some micro-batch size gives it.
        dp = _data_parallel(Layout().changed(**fixed), fixed, world)
        mbs = fixed.get("mbs", 1)
        if "mbs" in fixed or TRY_SEQUENCES % (dp * fixed["gas"]):
            job = job.changed(batch_tokens=dp * mbs * fixed["gas"] * seq)
    return _request(job, Layout(), overrides, world, Training(), [])


def _request(
    job: Job, base: Layout, overrides: Overrides, world: int, training: Training, notes: list[str], done: int = 0
) -> Request:
    """`done`: steps of the run that is resumed."""
    training = training.changed(**overrides.train)
    places = {"train.data": training.data, "train.eval_data": training.eval_data}
    whole = {name.removeprefix("train."): corpora.absolute(name, text) for name, text in places.items() if text is not None}
    training = training.changed(**whole)
    job = job.changed(**overrides.job)
    if training.document_mask is None and corpora.has_conversations(training, job.model.vocab):
        training = training.changed(document_mask=True)
    if job.cluster.gpus != world:
        job = job.changed(cluster=_resized(job.cluster, world))
    fixed = overrides.layout
    layout = base.changed(**fixed)
    follows: dict[str, Any] = {"dp": _data_parallel(layout, fixed, world)}
    if layout.pp == 1 and "schedule" not in fixed:
        follows |= {"schedule": DEFAULT_SCHEDULE, "virtual_stages": 1}
    elif "virtual_stages" not in fixed and "schedule" in fixed:
        follows["virtual_stages"] = REGISTRY[layout.schedule].least_stages
    layout = layout.changed(**follows)
    ramp = BatchRamp.of(training.batch_ramp, job.seq, job.sequences, training.seq_stages)
    layout = layout.changed(**_batch(ramp, layout, fixed, base == Layout()))
    if overrides.auto_recompute and layout.gpus == world:
        layout = fastest_recompute(job, layout)
    changed = {name: value for name, value in layout.model_dump().items() if value != getattr(base, name) and name not in fixed}
    if changed and base != Layout():
        notes.append("to fit: " + ", ".join(f"layout.{name}={value}" for name, value in changed.items()))
    if layout.gpus != world:
        raise SpecError(_world_sentence(job, layout, training, world))
    trained = ramp.tokens_before(done)
    left = {name: stages_left(getattr(training, name), trained) for name in ("batch_ramp", "seq_stages")}
    supported.check(job, layout, training.changed(**left))
    if left["seq_stages"] is not None:
        notes.append(f"a plan and its estimate are of the last sequences, of job.seq = {job.seq} tokens")
    if (plain := left_in_bf16(job, layout, training)) is not None:
        notes.append(plain)
    corpora.check(training, job.model.vocab, job.seq)
    return Request(job, layout, training, Checkpointing().changed(**overrides.checkpoint), notes=tuple(notes))


def _processes(layout: Layout, fixed: Mapping[str, Any]) -> int:
    """The same number of processes as before if the new layout divides it, else as many as the new layout needs."""
    new = layout.changed(**fixed)
    rest = new.tp * new.pp * new.cp
    if "dp" in fixed:
        return new.gpus
    return layout.gpus if layout.gpus % rest == 0 else rest


def _refuse_other_model(given: Model, kept: Model, folder: Path) -> None:
    for name in Model.model_fields:
        if name not in ("name", "source") and getattr(given, name) != getattr(kept, name):
            raise SpecError(
                f"model.{name} is {shown(getattr(given, name))} but {folder} holds a model with "
                f"{shown(getattr(kept, name))}: give the same model, or leave it out"
            )


def allowed_changes(text: str | None, resume: Path | None) -> set[str]:
    if text is None:
        return set()
    if resume is None:
        raise SpecError("--allow-changed is about a run that is resumed: add --resume runs/first, or leave it out")
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in CHANGEABLE:
            raise SpecError(f"--allow-changed is {shown(text)}: {nearest(word, CHANGEABLE)}, such as --allow-changed data,seed")
    return set(words)


def _changed(given: Request, source: Checkpoint, allowed: Set[str], first: bool, report: Report | None) -> tuple[str, ...]:
    """Which of seed and data differ from the checkpoint; SpecError if that was not allowed."""
    if not source.step:
        return ()
    changed = []
    if given.training.seed != source.training.seed:
        changed.append("seed")
        if "seed" not in allowed:
            raise SpecError(
                f"train.seed is {given.training.seed} but the run was trained with {source.training.seed} up to step "
                f"{source.step}: leave it out, or read the data in another order from here on with --allow-changed seed"
            )
    if first and not _same_data(given, source, report):
        changed.append("data")
        if "data" not in allowed:
            raise SpecError(
                f"train.data is {shown(given.training.data)} but it is not the data that the run was trained on up to step "
                f"{source.step} (tokens, mixture weights, tokenizer, or document ends under train.document_mask differ): "
                "restore it, or train on the new data from here on with --allow-changed data"
            )
    return tuple(changed)


def _same_data(given: Request, source: Checkpoint, report: Report | None) -> bool:
    vocab, kept = given.job.model.vocab, source.data
    # The seed is compared separately, and the mask is a setting: with those of the run, only the data can differ.
    same = given.training.changed(seed=source.training.seed, document_mask=source.training.document_mask)
    if isinstance(kept, str):
        return kept == data_digest(same, vocab, checkpoint.run_of(source.folder), HASH_THREADS, report)
    return kept is None or kept == corpora.sampled_fingerprint(same, vocab)


def _refuse_unresumable(given: Request, source: Checkpoint) -> None:
    """Refuses changes that a run cannot make when it resumes."""
    before, step = source.job, source.step
    if given.training.steps <= step:
        raise SpecError(
            f"train.steps is {given.training.steps} but {source.folder} has done {step}: try --steps {max(2 * step, 100)}"
        )
    if (loss := source.reached_loss) is not None and source.reaches_goal(given.training):
        goal = given.training.stop_at_loss
        raise SpecError(
            f"train.stop_at_loss is {goal:g} and {source.folder} has reached it with {loss:.4g}: to go on, try "
            f"train.stop_at_loss={0.9 * loss:.2g} or null"
        )
    if given.job.adapter_rank is not None and before.adapter_rank is None:
        raise SpecError(
            f"job.adapter_rank is {given.job.adapter_rank} but {source.folder} was trained without adapters: begin a new run "
            f"with --weights {source.folder}"
        )
    _refuse_other_adapters(given, source)
    if not step:
        return
    for name in ("seq", "optimizer"):
        now, then = getattr(given.job, name), getattr(before, name)
        if now != then:
            raise SpecError(
                f"job.{name} is {now} but the run was trained with {then} up to step {step}: leave it out, or begin a new run "
                f"with --weights {source.folder}"
            )
    _refuse_other_batches(given, source)


def _refuse_other_batches(given: Request, source: Checkpoint) -> None:
    """Steps that are done keep their batches: the data that follows, and the tokens of all logs, are counted by them."""
    now, then = (
        BatchRamp.of(one.training.batch_ramp, one.job.seq, one.job.sequences, one.training.seq_stages)
        for one in (given, source)
    )
    changes = {stage.step for stage in (*now.stages, *then.stages) if stage.step < source.step}
    if any(now.at(step).seq != then.at(step).seq for step in changes):
        raise SpecError(
            f"{LENGTHS} is {given.training.seq_stages or 'null'} but the run was trained with "
            f"{source.training.seq_stages or 'null'} up to step {source.step}: leave it out, change what comes later alone, or "
            f"begin a new run with --weights {source.folder}"
        )
    if all(now.sequences(step) == then.sequences(step) for step in changes):
        return
    name, value, trained = "job.batch_tokens", str(given.job.batch_tokens), str(source.job.batch_tokens)
    if given.training.batch_ramp != source.training.batch_ramp:
        name, value, trained = RAMP, str(given.training.batch_ramp or "null"), str(source.training.batch_ramp or "null")
    larger = ""
    if given.job.sequences > then.sequences(source.step - 1):
        larger = f", add {RAMP}={then.through(source.step)} for the new batch from here on"
    raise SpecError(
        f"{name} is {value} but the run was trained with {trained} up to step {source.step}: leave it out{larger}, or begin a "
        f"new run with --weights {source.folder}"
    )


def _refuse_other_adapters(given: Request, source: Checkpoint) -> None:
    settings = (given.job.adapter_rank, given.job.adapter_targets, given.training.adapter_alpha)
    trained = (source.job.adapter_rank, source.job.adapter_targets, source.training.adapter_alpha)
    names = ("job.adapter_rank", "job.adapter_targets", "train.adapter_alpha")
    for name, now, then in zip(names, settings, trained, strict=True):
        if now != then and source.job.adapter_rank is not None:
            shown = "null" if now is None else now
            raise SpecError(
                f"{name} is {shown} but {source.folder} holds adapters that were trained with {then}: leave it at that, or "
                f"merge them first: ultrascale convert {source.folder} hf FOLDER"
            )


def _data_parallel(layout: Layout, fixed: Mapping[str, Any], world: int) -> int:
    rest = layout.tp * layout.pp * layout.cp
    return layout.dp if "dp" in fixed or world % rest else world // rest


def _batch(ramp: BatchRamp, layout: Layout, fixed: Mapping[str, Any], base_is_a_try: bool) -> dict[str, int]:
    """Micro-batch size and accumulation that give the job's batch; values given by the user stay."""
    sequences, dp = ramp.stages[-1].sequences, layout.dp
    if base_is_a_try and not {"gas", "mbs"} & set(fixed) and layout.pp == 1 and ramp.divisor % dp == 0:
        mbs = ramp.divisor // dp  # only a pipeline needs smaller micro-batches
        return {"mbs": mbs, "gas": sequences // (dp * mbs)}
    if "gas" not in fixed:
        gas, rest = divmod(sequences, dp * layout.mbs)
        if "mbs" in fixed:
            return {} if rest else {"gas": gas}
        return _smaller_microbatch(layout, sequences) if rest or gas < layout.pp else {"gas": gas}
    if "mbs" not in fixed:
        return {"mbs": sequences // (dp * layout.gas)} if sequences % (dp * layout.gas) == 0 else {}
    return {}


def _smaller_microbatch(layout: Layout, sequences: int) -> dict[str, int]:
    """The largest micro-batch size up to the layout's that divides the batch, with enough micro-batches for the pipeline."""
    per_rank, rest = divmod(sequences, layout.dp)
    sizes = [mbs for mbs in range(min(layout.mbs, per_rank), 0, -1) if per_rank % mbs == 0]
    if rest or not sizes:
        return {}
    mbs = next((mbs for mbs in sizes if per_rank // mbs >= layout.pp and per_rank // mbs % layout.pp == 0), sizes[0])
    return {"mbs": mbs, "gas": per_rank // mbs}


def _resized(cluster: Cluster, world: int) -> Cluster:
    per_node = min(cluster.gpus_per_node, world)
    while world % per_node:
        per_node -= 1
    domain = cluster.link_domain
    if domain % per_node and per_node % domain:
        domain = per_node
    return cluster.model_copy(update={"nodes": world // per_node, "gpus_per_node": per_node, "link_domain": domain})


def _world_sentence(job: Job, layout: Layout, training: Training, world: int) -> str:
    found = supported.suggestions(job, layout, training)
    here = "one process" if world == 1 else f"{world} processes"
    hint = f"; with {here} these work: {found}" if found else ""
    return (
        f"layout.dp·tp·pp·cp is {layout.dp}·{layout.tp}·{layout.pp}·{layout.cp} = {layout.gpus} but there "
        f"{'is' if world == 1 else 'are'} {here}: start {layout.gpus} with --nproc {layout.gpus} (or torchrun){hint}"
    )
