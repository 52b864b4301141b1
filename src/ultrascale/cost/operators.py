"""The operators of one layer on one rank, and their time: matmuls by shape, attention, memory-bound passes, launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ultrascale.cost import host, kernels
from ultrascale.cost.columns import Array, LayoutColumns, Passes, rows_of
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import (
    ALTERNATE,
    FP32,
    accumulates_nothing,
    autocast,
    compute_bytes,
    gradient_bytes,
    has_master,
    routes_slices,
    selective_policy,
    trained_fraction,
    uses_fused_blocks,
)
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.weights import AdapterInput, adapted_ffn, adapter_inputs

# Bytes that an element of an expert's output costs where its bias is weighed and added separately (TEGroupedMLP._apply_bias),
# with fp32 weights: forward the weighed bias, the sum, the experts put together, the cast; backward the casts, and two
# multiplications with their sums for the gradients of bias and weight.
SEPARATE_BIAS_FORWARD = 28
SEPARATE_BIAS_BACKWARD = 40
LATENT_MATMULS = ("q up", "kv up")  # the up-projections of latent attention
ROUTED = ("router", "expert up", "expert down")
# Of a layer's matmuls, shapes and numbers. A search has 18 times as many rows that differ in anything else.
MATMULS_DEPEND_ON = ("tp", "cp", "ep", "mbs", "sequence_parallel", "expert_cut")


@dataclass(frozen=True)
class Matmul:
    """`count` matmuls of [m, k] × [k, n]."""

    name: str
    m: Array
    n: Array
    k: Array
    count: Array | float = 1.0
    in_fp8: bool = True

    @property
    def flops(self) -> Array:
        return np.asarray(2.0 * self.count * self.m * self.n * self.k)


@dataclass(frozen=True)
class LayerTime:
    """One layer (or the head, or the embedding) and one micro-batch on one rank, before any communication."""

    matmul: Passes
    attention: Passes
    memory_bound: Passes
    launch: Passes
    matmuls: list[Matmul] = field(default_factory=list)
    never_repeated: Array | float = 0.0
    """of forward's memory-bound time, what selective recomputation leaves alone: moving tokens, biases of experts"""

    @property
    def total(self) -> Passes:
        return self.matmul + self.attention + self.memory_bound + self.launch


def mixer_matmuls(job: Job, columns: LayoutColumns, tokens: Array, kind: LayerKind) -> list[Matmul]:
    """Projections of attention, or of what is in its place."""
    linear, mamba, h = job.model.linear_attention, job.model.mamba, np.asarray(float(job.model.hidden))
    if kind.mixer == "linear" and linear is not None:
        outputs = 2 * (linear.key_dim + linear.value_dim + linear.value_heads) / columns.tp
        return [
            Matmul("linear attention input", tokens, outputs, h),
            Matmul("linear attention output", tokens, h, linear.value_dim / columns.tp),
        ]
    if kind.mixer == "mamba" and mamba is not None:
        outputs = (2 * mamba.inner_dim + 2 * mamba.group_dim + mamba.heads) / columns.tp
        return [
            Matmul("mamba input", tokens, outputs, h),
            Matmul("mamba output", tokens, h, mamba.inner_dim / columns.tp),
        ]
    return attention_matmuls(job, columns, tokens) if kind.mixer == "attention" else []


def attention_matmuls(job: Job, columns: LayoutColumns, tokens: Array) -> list[Matmul]:
    model = job.model
    tp, h = columns.tp, np.asarray(float(model.hidden))
    kv_cut = np.minimum(tp, model.kv_heads)
    if model.mla is None:
        qkv = (1 + model.attention_gate) * model.q_dim / tp + 2 * model.kv_dim / kv_cut
        return [Matmul("qkv", tokens, qkv, h), Matmul("attention output", tokens, h, model.q_dim / tp)]
    mla, query = model.mla, model.heads * model.qk_head_dim / tp
    # Every rank has whole down-projections; in our engine they see its slice of the sequence.
    own = tokens / columns.sequence_cut if job.framework.exact_memory_trace else tokens
    latent = np.asarray(float(mla.kv_lora_rank + mla.qk_rope_head_dim))
    expand = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp
    matmuls = [
        Matmul("kv down", own, latent, h),
        Matmul("kv up", tokens, expand, np.asarray(float(mla.kv_lora_rank))),
    ]
    if mla.q_lora_rank is None:
        matmuls.append(Matmul("q", tokens, query, h))
    else:
        rank = np.asarray(float(mla.q_lora_rank))
        matmuls += [Matmul("q down", own, rank, h), Matmul("q up", tokens, query, rank)]
    return [*matmuls, Matmul("attention output", tokens, h, model.heads * mla.v_head_dim / tp)]


def mlp_matmuls(model: Model, name: str, m: Array, width: Array, count: Array | float = 1.0) -> list[Matmul]:
    h = np.asarray(float(model.hidden))
    up = width * (2 if model.gated else 1)
    return [Matmul(f"{name} up", m, up, h, count), Matmul(f"{name} down", m, h, width, count)]


def layer_matmuls(job: Job, columns: LayoutColumns, kind: LayerKind) -> list[Matmul]:
    model, tokens = job.model, columns.tokens(job.seq)
    matmuls = mixer_matmuls(job, columns, tokens, kind)
    if kind.predicts:  # every tp rank has the whole projection, which sees its slice of the sequence
        h = np.asarray(float(model.hidden))
        matmuls.append(Matmul("projection", tokens / columns.sequence_cut, h, 2 * h))
    if kind.mlp == "none":
        return matmuls
    if kind.mlp == "dense":
        return matmuls + mlp_matmuls(model, "mlp", tokens, model.ffn / columns.tp)
    assert model.moe is not None
    local = model.moe.experts / columns.ep
    whole_experts = columns.tp / columns.expert_cut
    busiest = columns.busiest(job.cluster.efficiency.expert_imbalance)
    rows = tokens * model.moe.top_k * busiest / local / whole_experts + job.framework.expert_padding
    sees = tokens / np.where(routes_slices(job, columns), columns.sequence_cut, 1)
    router = Matmul("router", sees, np.asarray(float(model.moe.experts)), np.asarray(float(model.hidden)), in_fp8=False)
    matmuls += [router, *mlp_matmuls(model, "expert", rows, model.moe.expert_ffn / columns.expert_cut, local)]
    if model.moe.shared_experts:
        matmuls += mlp_matmuls(model, "shared expert", tokens, model.moe.shared_expert_ffn / columns.tp)
    return matmuls


def last_matmul(kind: LayerKind) -> str:
    """The name of a layer's last matmul; of experts' layers none stands alone at the end."""
    if kind.mlp != "none":
        return "mlp down"
    return {"attention": "attention output", "linear": "linear attention output"}.get(kind.mixer, "mamba output")


def selective_matmuls(job: Job, columns: LayoutColumns, kind: LayerKind) -> list[Matmul]:
    """Those that selective recomputation repeats: the up-projections of latent attention (Megatron's), `half` of each, or every
    second in the order of calls with all of the router and of routed experts (`alternate`). Compiled code repeats none whose
    result is kept beyond a collective: attention's output after a reduce-scatter, gathered keys.
    """
    model, policy, matmuls = job.model, selective_policy(job), layer_matmuls(job, columns, kind)
    if policy == "latents":
        return [matmul for matmul in matmuls if matmul.name in LATENT_MATMULS]
    if policy not in ("half", *ALTERNATE):
        return []
    if policy == "half" or model.mla is not None or not model.gated:
        return [replace(matmul, count=matmul.count / 2) for matmul in matmuls]
    of_experts = [matmul for matmul in matmuls if matmul.name in ROUTED]
    calls: list[Matmul] = []
    for matmul in (matmul for matmul in matmuls if matmul.name not in ROUTED):
        parts = _parts(job, columns, matmul) if matmul.name != "qkv" or policy == "alternate-unjoined" else []
        calls += [replace(matmul, n=part) for part in parts] or [matmul]
    kept = {"attention output": columns.sequence_cut > 1, "qkv": (columns.cp > 1) & (job.framework.context == "ring-compiled")}
    if not job.framework.compiles:
        kept = {}
    repeated = [replace(matmul, count=np.where(kept.get(matmul.name, False), 0.0, matmul.count)) for matmul in calls[1::2]]
    return repeated + of_experts


def selective_flops(job: Job, layout: LayoutColumns) -> float:
    """Their FLOPs per token of the model, under one layout."""
    rank = sum(
        count * float(np.sum(matmul.flops))
        for kind, count in job.model.layer_kinds.items()
        for matmul in selective_matmuls(job, layout, kind)
    )
    return rank * float((layout.tp / layout.tokens(job.seq))[0])


def _parts(job: Job, columns: LayoutColumns, matmul: Matmul) -> list[Array]:
    """Widths of the matmuls that are joined in this one, in the order of calls; empty: none."""
    model = job.model
    if matmul.name == "qkv":
        kv = model.kv_dim / np.minimum(columns.tp, model.kv_heads)
        return [*[model.q_dim / columns.tp] * (1 + model.attention_gate), kv, kv]
    return [matmul.n / 2] * 2 if matmul.name in ("mlp up", "shared expert up") and model.gated else []


def engine_matmuls(job: Job, columns: LayoutColumns, matmuls: list[Matmul]) -> list[Matmul]:
    """The matmuls of a layer as the engine makes them: joined in fused blocks, each by itself where it runs or compiles the
    plain model. Other engines are taken to join theirs.
    """
    separate = ~uses_fused_blocks(job, columns)
    if not (job.framework.fused_blocks and separate.any()):
        return matmuls
    found = []
    for matmul in matmuls:
        parts = _parts(job, columns, matmul)
        joined = replace(matmul, count=np.where(separate, 0.0, matmul.count)) if parts else matmul
        found += [joined, *(replace(matmul, n=part, count=np.where(separate, matmul.count, 0.0)) for part in parts)]
    return found


def matmul_passes(machine: ClusterRates, matmuls: list[Matmul]) -> Passes:
    """Forward m×n×k; the input's gradient swaps n and k; the weight's reduces over the tokens."""
    total = Passes()
    for p in matmuls:
        times = (machine.matmul_s(*shape, p.in_fp8) for shape in ((p.m, p.n, p.k), (p.m, p.k, p.n), (p.n, p.k, p.m)))
        total = total + Passes(*times).scaled(p.count)
    return total


def frozen(job: Job, passes: Passes) -> Passes:
    """Without gradients of weights, where adapters alone are trained."""
    return passes if job.adapter_rank is None else replace(passes, weight_grad=0.0 * passes.weight_grad)


def adapter_passes(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> tuple[Passes, Passes]:
    """GEMMs of a layer's adapters (Hu 2021: down to their rank and up again), and the sums with what they stand beside.

    Two tensors are read and one written: the outputs of the linear layers forward, their inputs' gradients backward.
    """
    tokens, b = columns.tokens(job.seq), compute_bytes(job)
    matmuls = adapter_matmuls(job, columns, kind)
    outputs = sum(np.where(matmul.name == "adapter up", matmul.n, 0.0) for matmul in matmuls)
    inputs = sum(np.where(matmul.name == "adapter down", matmul.k, 0.0) for matmul in matmuls)
    sums = (machine.stream_s(3 * b * tokens * each) for each in (outputs, inputs))
    return matmul_passes(machine, matmuls), Passes(*sums)


def adapter_matmuls(job: Job, columns: LayoutColumns, kind: LayerKind) -> list[Matmul]:
    """Those of one input down to the rank together, and up for each linear layer."""
    assert job.adapter_rank is not None
    model, tokens, tp, rank = job.model, columns.tokens(job.seq), columns.tp, np.asarray(float(job.adapter_rank))
    own = tokens / columns.sequence_cut  # matrices that tp does not cut see a rank's slice
    hidden, joint = np.asarray(float(model.hidden)), not job.framework.exact_memory_trace
    cuts: dict[str, Array | int] = {"rows": tp, "kv rows": np.minimum(tp, model.kv_heads), "none": 1}

    def of_input(one: AdapterInput, narrow: Array) -> Iterator[Matmul]:
        width, outputs = np.asarray(float(one.width)), [rows / cuts[cut] for rows, cut in one.outputs]
        if joint:
            yield _adapter_down(tokens, rank, width)
            yield _adapter_up(tokens, np.asarray(sum(outputs)), rank)
            return
        yield _adapter_down(narrow, len(outputs) * rank, width)
        for (_, cut), each in zip(one.outputs, outputs, strict=True):
            yield _adapter_up(narrow if cut == "none" else tokens, np.asarray(each), rank)

    found = [matmul for one in adapter_inputs(model) for matmul in of_input(one, own)]
    if job.adapter_targets == "all":
        found += [_adapter_down(tokens, rank, model.heads * model.v_head_dim / tp), _adapter_up(own, hidden, rank)]
        if ffn := adapted_ffn(model, kind):
            narrow = tokens if kind.has_experts else own  # shared experts see the gathered sequence
            found += of_input(AdapterInput(model.hidden, ((ffn, "rows"),) * (1 + model.gated)), narrow)
            found += [_adapter_down(tokens, rank, ffn / tp), _adapter_up(narrow, hidden, rank)]
    return found


def _adapter_down(tokens: Array, rank: Array, width: Array) -> Matmul:
    return Matmul("adapter down", tokens, rank, width, in_fp8=False)


def _adapter_up(tokens: Array, width: Array, rank: Array) -> Matmul:
    return Matmul("adapter up", tokens, width, rank, in_fp8=False)


def memory_bound_bytes(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Bytes that the operators between the matmuls of one layer read and write in forward, moving tokens left aside.

    Norms with their residual (read 2, write 2 residual-wide tensors each), rotary on q and k (read and write), and the
    activation (gated: read 2, write 1).
    """
    model, tokens, b = job.model, columns.tokens(job.seq), compute_bytes(job)
    residual = np.where(autocast(job, columns), FP32, b) * tokens * model.hidden / columns.sequence_cut
    rotated_heads = model.heads + (model.kv_heads if model.mla is None else model.heads)
    width: float = 0
    if kind.mixer == "attention":
        width = 2 * rotated_heads * model.qk_head_dim + 3 * model.q_dim * model.attention_gate
    # Convolutions read and write queries, keys and values, or x, B and C; a norm and a gate read two and write one.
    elif kind.mixer == "linear" and (linear := model.linear_attention) is not None:
        width = 2 * (2 * linear.key_dim + linear.value_dim) + 3 * linear.value_dim
    elif kind.mixer == "mamba" and (mamba := model.mamba) is not None:
        width = 2 * (mamba.inner_dim + 2 * mamba.group_dim) + 3 * mamba.inner_dim
    mixer = b * tokens * width / columns.tp
    activation = b * tokens * (3 if model.gated else 2) * host.mlp_width(job, columns, kind)
    # Three more norms and the concatenation of two hidden states.
    return np.asarray((4 * kind.sublayers + 10 * kind.predicts) * residual + mixer + activation)


def permuted_bytes(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Routing reads and writes each routed token twice: permute, then weigh and add.

    What a plain all-to-all brings lies by rank: it is sorted by expert, and back again before it goes home. DeepEP, HybridEP
    and an all-gather bring a token once and permute on arrival.
    """
    if not kind.has_experts or job.model.moe is None:
        return np.zeros(len(columns))
    rows = job.model.moe.top_k * columns.busiest(job.cluster.efficiency.expert_imbalance)
    tokens = columns.tokens(job.seq) / columns.sequence_cut
    sorts = columns.is_("dispatcher", "alltoall") & (columns.ep > 1) & (columns.ep < job.model.moe.experts)
    return np.asarray(np.where(sorts, 8, 4) * rows * compute_bytes(job) * tokens * job.model.hidden)


def separate_biases(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> Passes:
    """Biases of experts' outputs, in engines that add them outside the matmuls."""
    moe = job.model.moe if kind.has_experts else None
    if not (moe is not None and job.model.mlp_bias and job.framework.transformer_engine):
        return Passes()
    rows = moe.top_k * columns.busiest(job.cluster.efficiency.expert_imbalance)
    elements = columns.tokens(job.seq) * rows * job.model.hidden / columns.routed_cut(routes_slices(job, columns))
    return Passes(machine.stream_s(SEPARATE_BIAS_FORWARD * elements), machine.stream_s(SEPARATE_BIAS_BACKWARD * elements))


def accumulate_s(job: Job, columns: LayoutColumns, machine: ClusterRates, elements: Array) -> Array:
    """A micro-batch's weight gradients are read as autograd made them and added to the accumulated ones (read and write).

    Small next to the matmuls when a rank sees many tokens per parameter; a quarter of them for 2,048 tokens and no tp.
    """
    b, g = compute_bytes(job), gradient_bytes(job)
    # Fused into the matmul, its own write of the gradient (counted with the matmul) becomes the read and write in fp32.
    moved = 2 * g - b if job.framework.accumulation == "fused" else b + 2 * g
    each = machine.stream_s(trained_fraction(job) * elements * moved)
    return np.where(accumulates_nothing(job, columns), 0.0, each) if job.framework.fused_blocks else each


def autocast_s(job: Job, columns: LayoutColumns, machine: ClusterRates, elements: Array) -> Array:
    """Weights are cast where a micro-batch uses them."""
    return np.where(autocast(job, columns), machine.stream_s((FP32 + compute_bytes(job)) * elements), 0.0)


def fp8_casts(job: Job, machine: ClusterRates, matmuls: list[Matmul]) -> Passes:
    """Operands of fp8 matmuls are read in bf16 and written in fp8 twice, as they are and transposed for weight gradients,
    which frozen weights do not have.
    """
    if job.precision != "fp8":
        return Passes()
    cast = [p for p in matmuls if p.in_fp8]
    each = 4.0 if job.adapter_rank is None else 3.0
    inputs = machine.stream_s(np.asarray(sum(each * p.count * p.m * p.k for p in cast)))
    gradients = machine.stream_s(np.asarray(sum(each * p.count * p.m * p.n for p in cast)))
    return Passes(inputs, gradients)


def stepped_gradient_bytes(job: Job, columns: LayoutColumns) -> Array:
    """Of one weight's gradient as the optimizer finds it."""
    g = np.full(len(columns), gradient_bytes(job))
    return np.where(accumulates_nothing(job, columns), compute_bytes(job), g) if job.framework.fused_blocks else g


def optimizer_bytes(job: Job, columns: LayoutColumns) -> Array:
    """That a step of the optimizer reads and writes for one weight, the gradient once more for its norm."""
    state, g = job.state_bytes, stepped_gradient_bytes(job, columns)
    mixed: Array | int = compute_bytes(job) if has_master(job) else 0
    if job.framework.fused_blocks and job.optimizer == "adamw":
        mixed = np.where(columns.shards == 1, 0, mixed)  # the copy that computes is the master's upper half
    averaged = 4 if job.ema else 0  # the master once more: the mean follows after the step
    return np.asarray(2 * g + 2 * 4 + 2 * state + mixed + averaged)


def clock(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Array:
    """Of a step, over that of matmuls in a row. One for all of it: a card's power is limited over more than a layer."""
    if machine.efficiency.boost <= 1 or machine.efficiency.synchronous or job.attention != "flash":
        return np.ones(len(columns))
    ends = _head(job, columns, machine)
    work = 3 * sum(matmul.flops for matmul in ends.matmuls)
    weights = job.model.parameters / columns.tp / np.where(columns.zero >= 1, columns.shards, 1)
    seconds = ends.total.total + machine.stream_s(weights * optimizer_bytes(job, columns)) / columns.gas
    chosen = columns.recompute_layers * columns.pp * columns.virtual_stages
    fraction = np.where(chosen > 0, np.minimum(1.0, chosen / job.model.all_layers), 1.0)
    again = np.where(columns.is_("recompute", "full"), fraction, 0.0)
    for kind, layers in job.model.layer_kinds.items():
        busy = _busy(job, columns, machine, kind)
        work = work + layers * (3 + again) * sum(matmul.flops for matmul in busy.matmuls)
        work = work + layers * (1 + again / (1 + kernels.BACKWARD_FLOPS)) * kernels.attention_flops(job, columns, kind)
        seconds = seconds + layers * (busy.total.total + again * busy.total.forward)
    return machine.clock(np.asarray(work), np.asarray(seconds))


def layer(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind, at: Array | float = 1.0) -> LayerTime:
    """At a clock as `clock` gives it."""
    busy = _busy(job, columns, machine, kind)
    if machine.efficiency.synchronous:
        return replace(busy, launch=host.cpu_layer(columns, machine, kind))
    busy = replace(busy, matmul=busy.matmul.scaled(1 / at), attention=busy.attention.scaled(1 / at))
    if host.one_queue(job, columns, machine):
        return busy  # the queue's idle time is the step's, not a layer's
    busy = replace(busy, memory_bound=busy.memory_bound + host.layer_starts_s(job, columns).scaled(kind.sublayers / 2))
    launch_s = host.layer_launch_s(job, columns, machine, kind)
    return replace(busy, launch=host.exposed_launches(busy.total, launch_s))


def _busy(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> LayerTime:
    """A layer that nothing waits for, at the clock of matmuls in a row."""
    matmuls, (shapes, of_shapes) = layer_matmuls(job, columns, kind), columns.distinct(MATMULS_DEPEND_ON)
    passes = matmul_passes(machine, engine_matmuls(job, shapes, layer_matmuls(job, shapes, kind)))
    matmul = frozen(job, rows_of(passes, of_shapes))
    scores = kernels.mixer_passes(job, columns, machine, kind)
    elementwise = host.relative_to_compiled(job, columns, "elementwise")
    moved = machine.stream_s(permuted_bytes(job, columns, kind)) * elementwise
    forward = machine.stream_s(memory_bound_bytes(job, columns, kind)) * elementwise + moved
    biases = separate_biases(job, columns, machine, kind)
    # Backward reads the gradient and the saved tensor and writes the gradient: twice the forward's bytes.
    memory_bound = Passes(forward, 2 * forward) + fp8_casts(job, machine, matmuls) + biases
    if machine.efficiency.synchronous:
        memory_bound = host.cpu_elementwise(job, columns, machine, kind) + Passes(moved, 2 * moved) + biases
    if job.adapter_rank is not None:
        added, added_bound = adapter_passes(job, columns, machine, kind)
        matmul, memory_bound = matmul + added, memory_bound + added_bound
    return LayerTime(matmul, scores, memory_bound, Passes(), matmuls, moved + biases.forward)


def head(job: Job, columns: LayoutColumns, machine: ClusterRates, at: Array | float = 1.0) -> LayerTime:
    """Final norm, output matrix (kept out of fp8) and vocabulary-parallel cross-entropy."""
    busy = _head(job, columns, machine)
    return replace(
        busy, matmul=busy.matmul.scaled(1 / at), launch=host.cpu_end(columns, machine, host.constants().cpu_operators.head)
    )


def _head(job: Job, columns: LayoutColumns, machine: ClusterRates) -> LayerTime:
    model, tokens = job.model, columns.tokens(job.seq) * (1 + job.model.mtp_depth)
    matmuls = [Matmul("head", tokens, model.vocab / columns.tp, np.asarray(float(model.hidden)), in_fp8=False)]
    logits = tokens * model.vocab / columns.tp
    b = compute_bytes(job)
    # Forward reads the logits twice (maximum and sum, then the label's); backward reads them and writes their gradient.
    fp32 = job.framework.loss in ("fp32", "fp32-softmax", "log-softmax")
    # Written out in fp32: cast, softmax and its logarithm forward; the gradient and its cast backward.
    forward = machine.stream_s((b + 5 * 4 if fp32 else 2 * b) * logits)
    backward = machine.stream_s((b + 4 * 4 if fp32 else 2 * b) * logits)
    cpu = host.cpu_loss(job, columns, machine).scaled(1 + model.mtp_depth)
    passes = cpu if machine.efficiency.synchronous else Passes(forward, backward)
    # Embeddings of the further tokens are looked up together with the others', or by the last stage.
    passes = passes + _lookup(job, columns, machine).scaled(model.mtp_depth)
    return LayerTime(frozen(job, matmul_passes(machine, matmuls)), Passes(), passes, Passes(), matmuls)


def embedding(job: Job, columns: LayoutColumns, machine: ClusterRates) -> LayerTime:
    """A look-up forward, a scatter-add of fp32-accumulated rows backward: bandwidth, no FLOPs."""
    launch = host.cpu_end(columns, machine, host.constants().cpu_operators.embedding)
    return LayerTime(Passes(), Passes(), _lookup(job, columns, machine), launch)


def _lookup(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Passes:
    bytes_ = compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden
    forward, backward = machine.stream_s(2 * bytes_), machine.stream_s(3 * bytes_)
    return frozen(job, Passes(forward, weight_grad=backward))
