"""Limits of the engine beyond cost/legality.py, checked before any process starts, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from ultrascale.cost import engines, legality
from ultrascale.cost.columns import LayoutColumns
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY, legal
from ultrascale.specs import batch_ramp
from ultrascale.specs.engine import OWN_ENGINE
from ultrascale.specs.errors import SpecError, divisors, near
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import OPTIMIZER_SETTINGS, WHAT, Training

RAMP, LENGTHS = f"{WHAT}.batch_ramp", f"{WHAT}.seq_stages"
# 1 + 2·z_loss·logsumexp, times FACTOR of kernels/float8.py, stays below e5m2's largest number for a log-sum-exp up to 375.
FP8_MAX_Z_LOSS = 1e-3


def check(job: Job, layout: Layout, training: Training) -> None:
    """Raises SpecError with the first problem and, if other layouts work, two of them."""
    if (sentence := job_problem(job)) is not None:
        raise SpecError(sentence)
    if (sentence := layout_problem(job, layout, training)) is not None:
        found = suggestions(job, layout, training)
        raise SpecError(f"{sentence}. Layouts of {job.cluster.gpus} processes that work: {found}" if found else sentence)


def job_problem(job: Job) -> str | None:
    """Why the engine cannot run the job under any layout, with what to try; None if it can."""
    return engines.job_problem(job, OWN_ENGINE)


def layout_problem(job: Job, layout: Layout, training: Training) -> str | None:
    """The first reason why the layout cannot run, with what to try; None if it can."""
    return (
        legality.problem(job, layout)
        or engines.layout_problem(job, layout, OWN_ENGINE)
        or next(_problems(job, layout, training), None)
    )


def that_run(job: Job, layouts: Sequence[Layout], training: Training) -> list[Layout]:
    """Of these layouts those without a problem, all checked at once."""
    rows = LayoutColumns.of(layouts)
    legal = legality.legal_rows(job, rows) & legality.legal_rows(job, rows, engines.rules(OWN_ENGINE))
    found = [layout for layout, runs in zip(layouts, legal.tolist(), strict=True) if runs]
    return [layout for layout in found if next(_problems(job, layout, training), None) is None]


def _problems(job: Job, layout: Layout, training: Training) -> Iterator[str]:
    """Of the training's own settings."""
    compress = training.compress
    if compress != "none" and layout.data_ranks > 1:
        if layout.data_parallel == "ddp":
            yield f"train.compress is {compress} but data_parallel = ddp has no such hook: try data_parallel=bucketed"
        if layout.zero:
            yield f"train.compress is {compress} but ZeRO-{layout.zero} scatters in full: try zero=0 or train.compress=none"
    if layout.cp > 1 and training.document_mask:
        yield (
            f"layout.cp is {layout.cp} but train.document_mask keeps attention within documents only where a rank has whole "
            "sequences: try cp=1 or train.document_mask=false"
        )
    if training.tp_chunks > 1 and layout.tp > 1 and layout.sequence_parallel:
        yield from _chunk_problems(training.tp_chunks, layout.mbs, job.seq // layout.cp // layout.tp)
    if job.precision == "fp8" and training.z_loss > FP8_MAX_Z_LOSS:
        yield (
            f"train.z_loss is {training.z_loss:g} but gradients of logits in fp8 have room for {FP8_MAX_Z_LOSS:g} at most: "
            f"try {FP8_MAX_Z_LOSS:g}, or job.precision=bf16"
        )
    weight, default = training.mtp_weight, Training.model_fields["mtp_weight"].default
    if weight != default and not job.model.mtp_depth:
        yield (
            f"{WHAT}.mtp_weight is {weight:g} but {job.model.name} predicts the next token alone: try {default:g}, or "
            "model.mtp_depth=1"
        )
    yield from _ramp_problems(job, layout, training)
    yield from _length_problems(job, layout, training)
    yield from _expert_problems(job, layout, training)
    yield from _optimizer_problems(job, training)
    if training.fp8_gather == "fp8" and (why := why_not_gathered_in_fp8(job, layout, training)) is not None:
        yield f"train.fp8_gather is fp8 but {why}, or train.fp8_gather=auto"


def _ramp_problems(job: Job, layout: Layout, training: Training) -> Iterator[str]:
    """Every batch of the ramp has the job's layout, with fewer micro-batches."""
    one = layout.mbs * layout.dp * job.seq
    factors = f"mbs·dp·seq = {layout.mbs}·{layout.dp}·{job.seq} = {one}"

    def reason(gas: int) -> str | None:
        return legal(layout.schedule, layout.pp, gas, layout.virtual_stages) if layout.pp > 1 else None

    for batch, until in batch_ramp.parse(training.batch_ramp, RAMP):
        given = f"{RAMP} has a batch of {batch} tokens"
        gas, rest = divmod(batch, one)
        if gas >= layout.gas:
            half = layout.gas // 2 * one or max(1, job.sequences // 2) * job.seq
            yield f"{given} but must have less than job.batch_tokens = {layout.gas * one}: try {RAMP}={half}:{until}"
        elif layout.gas == 1:
            sizes = [mbs for mbs in divisors(layout.mbs)[:-1] if batch % (mbs * layout.dp * job.seq) == 0]
            works = f"layout.mbs={sizes[-1]}" if sizes else f"layout.mbs=1 with job.batch_tokens={2 * one}"
            yield f"{given} but the whole batch is one micro-batch of {factors}: try {works}"
        elif rest:
            works = near(batch, [count * one for count in (gas, gas + 1) if 0 < count < layout.gas])
            yield f"{given} but every batch must be a multiple of {factors}: try {works}"
        elif (why := reason(gas)) is not None:
            larger = (more for more in range(gas + 1, min(layout.gas, gas + 4 * layout.pp)) if reason(more) is None)
            works = next((str(more * one) for more in larger), f"layout.schedule={DEFAULT_SCHEDULE}")
            why = why.removeprefix("microbatches: ").partition(", given")[0]
            yield f"{given}, {gas} micro-batch{'es' * (gas > 1)} of {factors}, but {why}: try {works}"


def _length_problems(job: Job, layout: Layout, training: Training) -> Iterator[str]:
    """The layout must cut shorter sequences too, of which a micro-batch has as many more."""
    for length, until in batch_ramp.parse(training.seq_stages, LENGTHS, "length", batch_ramp.LENGTHS):
        given = f"{LENGTHS} has sequences of {length} tokens"
        if length >= job.seq or job.seq % length:
            shorter = divisors(job.seq)[:-1]
            hint = f": try {LENGTHS}={near(length, shorter)}:{until}" if shorter else ""
            yield f"{given} but they must be an equal part of job.seq = {job.seq}{hint}"
            return
        more = layout.changed(mbs=layout.mbs * job.seq // length)
        problem = layout_problem(job.changed(seq=length), more, training.changed(seq_stages=None, batch_ramp=None))
        if problem is not None:
            yield f"{given}, and with these {problem}, or a longer {LENGTHS}"


def _chunk_problems(chunks: int, sequences: int, length: int) -> Iterator[str]:
    works = sorted({*divisors(sequences), *(sequences * parts for parts in divisors(length))})
    if chunks not in works:
        yield (
            f"train.tp_chunks is {chunks} but a rank's slice of a micro-batch is {sequences} × {length} tokens, and a chunk is "
            f"one or more sequences, or an equal part of one: try {near(chunks, works)}"
        )


def _optimizer_problems(job: Job, training: Training) -> Iterator[str]:
    for field, optimizers in OPTIMIZER_SETTINGS.items():
        value, default = getattr(training, field), Training.model_fields[field].default
        if value != default and job.optimizer not in optimizers:
            known, works = " or ".join(optimizers), "null" if default is None else default
            yield (
                f"{WHAT}.{field} is {value} but job.optimizer is {job.optimizer}, not {known}: try {works}, or "
                f"job.optimizer={optimizers[0]}"
            )

    if training.mup_base_width is not None and (job.model.tied_embeddings or job.adapter_rank is not None):
        why = "head and embedding are one matrix" if job.model.tied_embeddings else "weights beside adapters are frozen"
        yield f"{WHAT}.mup_base_width is {training.mup_base_width} but {why} in {job.model.name}: try null"
    decay, default = training.ema_decay, Training.model_fields["ema_decay"].default
    if decay != default and not job.ema:
        yield f"train.ema_decay is {decay:g} but job.ema is false, so no mean of the weights is kept: try job.ema=true"


def _expert_problems(job: Job, layout: Layout, training: Training) -> Iterator[str]:
    moe, factor = job.model.moe, training.capacity_factor
    if moe is None:
        if training.balance_loss:
            yield f"train.balance_loss is {training.balance_loss:g} but {job.model.name} has no experts: try 0"
        if factor is not None:
            yield f"train.capacity_factor is {factor:g} but {job.model.name} has no experts: try null"
    elif factor is not None and moe.capacity(job.seq, factor) < 1:
        yield (
            f"train.capacity_factor is {factor:g}: an expert would take {factor * job.seq * moe.top_k / moe.experts:.2g} of a "
            f"sequence's {job.seq} tokens: try {max(1.0, moe.experts / (job.seq * moe.top_k)):g} or null"
        )
    elif factor is not None and layout.cp > 1:
        yield (
            f"layout.cp is {layout.cp} but train.capacity_factor counts the tokens of whole sequences: "
            "try cp=1 or train.capacity_factor=null"
        )
    if layout.ep == 1 and training.expert_overlap not in ("auto", "none"):
        yield f"train.expert_overlap is {training.expert_overlap} but no rows travel between ranks (ep = 1): try auto"


def why_not_gathered_in_fp8(job: Job, layout: Layout, training: Training) -> str | None:
    """Why ZeRO-3 gathers the weights of fp8 GEMMs in bf16, with what to try; None if it gathers them in fp8."""
    if job.precision != "fp8":
        return f"matmuls are in {job.precision}: try job.precision=fp8"
    if training.fp8_gather == "bf16":
        return "train.fp8_gather is bf16: try auto"
    if layout.zero < 3 or layout.shards == 1:
        more = "more than one data rank" if layout.zero == 3 else "layout.zero=3"
        return f"only ZeRO-3 gathers weights for each pass (zero = {layout.zero}, shards = {layout.shards}): try {more}"
    if training.fp8_scaling != "tensor":
        return (
            f"train.fp8_scaling is {training.fp8_scaling}, whose scales along rows are no longer those of a weight's columns "
            "in backward: try train.fp8_scaling=tensor"
        )
    if layout.offload == "parameters":
        return "FSDP2 casts what it brings from the host by itself: try layout.offload=optimizer"
    return None


def suggestions(job: Job, layout: Layout, training: Training) -> str:
    """Two layouts for an error message, empty if none works."""
    return "; ".join(str(one) for one in islice(alternatives(job, layout, training), 2))


def alternatives(job: Job, layout: Layout, training: Training) -> Iterator[Layout]:
    """Layouts of the same number of processes that work, the nearest to the given layout first."""
    world, sequences = job.cluster.gpus, job.sequences

    def distance(axes: tuple[int, int, int, int]) -> int:
        target = (layout.dp, layout.tp, layout.pp, layout.cp)
        return sum(abs(a.bit_length() - b.bit_length()) for a, b in zip(axes, target, strict=True))

    one_stage = [(name, 1) for name, spec in REGISTRY.items() if spec.most_stages == 1]
    schedules = dict.fromkeys([(layout.schedule, layout.virtual_stages), (DEFAULT_SCHEDULE, 1), *one_stage])
    tried = set()
    for dp, tp, pp, cp in sorted(factors(world), key=distance):
        for mbs, (schedule, virtual) in product((layout.mbs, 1), schedules):
            fields = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "mbs": mbs, "gas": max(1, sequences // (dp * mbs))}
            fields |= {"schedule": schedule, "virtual_stages": virtual, "zero_shards": None}
            candidate = layout.model_copy(update=fields)
            if candidate not in tried and layout_problem(job, candidate, training) is None:
                tried.add(candidate)
                yield candidate


def factors(world: int) -> list[tuple[int, int, int, int]]:
    """Every (dp, tp, pp, cp) of `world` processes."""
    return [
        (world // (tp * pp * cp), tp, pp, cp)
        for tp in divisors(world)
        for pp in divisors(world // tp)
        for cp in divisors(world // tp // pp)
    ]
