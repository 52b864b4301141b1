"""Training: how long, with which learning rate, data, clipping, reduction and logs. What is trained is the Job's business.

Nothing here depends on how the job is cut: the same Training under another Layout gives the same losses.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ultrascale.specs import batch_ramp
from ultrascale.specs.validate import FrozenSpec, build
from ultrascale.specs.words import NULL, field_from_text

WHAT = "train"  # the fields' first word, in files, overrides and sentences
LONGEST_WARMUP = 2000  # steps; what Llama 2 used for 500,000 (Touvron 2023, section 2.2)

LrSchedule = Literal["cosine", "linear", "wsd", "constant"]
Compress = Literal["none", "bf16", "int8"]
MuonScale = Literal["match_rms_adamw", "original"]
Sink = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Kernels = Literal["fused", "compile", "eager"]
Graphs = Literal["auto", "always", "never"]
ExpertOverlap = Literal["auto", "none", "gradients", "rows"]
Fp8Scaling = Literal["tensor", "row", "block"]
Fp8Keep = Literal["ends", "head", "none"]
Fp8Gather = Literal["auto", "fp8", "bf16"]

# Settings that some optimizers alone read.
OPTIMIZER_SETTINGS = {
    "muon_momentum": ("muon",),
    "muon_scale": ("muon",),
    "mup_base_width": ("adamw", "adamw-bf16", "adamw-8bit", "lion"),
}

FP8_BLOCK = 128  # numbers that share a scale
# What sizes of a weight, and tokens where a matmul sums over them, must be multiples of: the kernels' alignment. A row of
# blocks of a weight must begin at 16 bytes, which four scales are.
FP8_MULTIPLE: dict[Fp8Scaling, int] = {"tensor": 16, "row": 16, "block": 4 * FP8_BLOCK}
FP8_TOKENS: dict[Fp8Scaling, int] = {"tensor": 16, "row": 16, "block": FP8_BLOCK}

_POWER = re.compile(r"[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]{1,3}")


class Training(FrozenSpec):
    """The run around the job: steps, optimizer constants, data, evaluation, gradient reduction, logs."""

    steps: int = Field(100, ge=1, le=2**40, strict=True, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**63, strict=True, description="of initial weights and of the data's order")
    lr: float = Field(3e-4, gt=0, le=100, strict=True, description="highest learning rate")
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, strict=True, description="lowest learning rate after warm-up, over the highest"
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=2**40,
        strict=True,
        examples=[10],
        description=f"steps of linear warm-up; null: a tenth of the steps, at most {LONGEST_WARMUP:,}",
    )
    lr_schedule: LrSchedule = Field("cosine", description="after warm-up; wsd: stay, then decay linearly at the end")
    decay_fraction: float = Field(0.2, ge=0, le=1, strict=True, description="wsd: the last share of the steps, which decays")
    seq_stages: str | None = Field(
        None,
        min_length=1,
        strict=True,
        examples=[batch_ramp.LENGTHS],
        description="shorter sequences at first, LENGTH:UNTIL,…: tokens of a sequence (2k = 2,048), and tokens trained on "
        "until which steps have it; then job.seq; null: all alike",
    )
    batch_ramp: str | None = Field(
        None,
        min_length=1,
        strict=True,
        examples=[batch_ramp.EXAMPLE],
        description="smaller batches at first, BATCH:UNTIL,…: tokens of a batch (4M = 4,194,304), and tokens trained on (252M "
        "= 252,000,000) until which steps have it; then job.batch_tokens; null: no ramp",
    )
    weight_decay: float = Field(0.1, ge=0, le=10, strict=True, description="of matrices alone; decoupled with AdamW")
    decay_embeddings: bool = Field(True, strict=True, description="whether weight_decay applies to embedding and head too")
    beta1: float = Field(0.9, ge=0, lt=1, strict=True, description="decay of the mean gradient (AdamW, Lion); momentum of SGD")
    beta2: float = Field(
        0.95, ge=0, lt=1, strict=True, description="decay of the mean squared gradient (AdamW), of momentum (Lion)"
    )
    eps: float = Field(1e-8, gt=0, le=1, strict=True, description="Adam's term below the fraction")
    ema_decay: float = Field(
        0.999, ge=0, lt=1, strict=True, description="of the moving mean of weights that job.ema keeps, in each step"
    )
    mup_base_width: int | None = Field(
        None,
        ge=1,
        le=2**31,
        strict=True,
        examples=[256],
        description="μP: the hidden size for which lr was found; wider matrices begin smaller and train with less of it; null: "
        "all weights alike",
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, strict=True, description="Muon: Nesterov momentum of matrices")
    muon_scale: MuonScale = Field(
        "match_rms_adamw",
        description="Muon: what an orthogonalised update of a matrix m × n is multiplied by, 0.2·sqrt(max(m, n)), as large as "
        "an update of AdamW so that one lr fits both, or sqrt(max(1, m / n)) (original)",
    )
    clip: float = Field(1.0, ge=0, le=1e6, strict=True, description="highest gradient norm; 0: no clipping")
    clip_value: float = Field(
        0.0, ge=0, le=1e6, strict=True, description="highest absolute value in a gradient, after clip; 0: no clipping"
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        le=1,
        strict=True,
        description="weight of the squared log-sum-exp of each token's logits, which is added to its loss; 0: none",
    )
    mtp_weight: float = Field(
        0.3,
        gt=0,
        le=100,
        strict=True,
        description="weight of the mean cross-entropy of the tokens after the next, where the model predicts them "
        "(model.mtp_depth), in the loss",
    )
    eval_every: int = Field(0, ge=0, le=2**40, strict=True, description="steps between evaluations; 0: none")
    eval_batches: int = Field(4, ge=1, le=2**20, strict=True, description="global batches in one evaluation")
    stop_at_loss: float | None = Field(
        None,
        gt=0,
        le=1e6,
        strict=True,
        examples=[2.5],
        description="the run ends after a step with a loss of at most this: the evaluation's with eval_every, else the step's",
    )
    data: str = Field(
        "stdlib",
        min_length=1,
        strict=True,
        description="stdlib: Python's own library as bytes; synthetic: uniform random tokens; a path to tokens; or several by "
        "weight, PATH:0.7,PATH:0.3",
    )
    eval_data: str | None = Field(
        None,
        min_length=1,
        strict=True,
        examples=["data/held-out"],
        description="what to evaluate on, as in data; null: the last 2 % of each set, which never train",
    )
    document_mask: bool | None = Field(
        None,
        strict=True,
        examples=[True],
        description="attention does not cross the end of a document; null: if some text is a set of conversations",
    )
    bucket_mb: float = Field(25.0, gt=0, le=1e5, strict=True, description="10⁶ bytes of gradients reduced together")
    compress: Compress = Field("none", description="format in which gradients are sent between data ranks")
    reduce_every_microbatch: bool = Field(
        False, strict=True, description="the naive baseline: reduce gradients after each micro-batch, not once a step"
    )
    kernels: Kernels = Field(
        "fused", description="on a GPU: our own kernels and torch.compile, torch.compile alone, or operator by operator"
    )
    tp_chunks: int = Field(
        1,
        ge=1,
        le=2**20,
        strict=True,
        description="fused blocks under tensor and sequence parallelism: into how many chunks a rank's tokens are cut, so that "
        "collectives of one overlap with matmuls of another; whole sequences, or equal parts of one",
    )
    graphs: Graphs = Field(
        "auto",
        description="on GPUs, with one pipeline stage: whether a step's kernels are recorded as a CUDA graph and launched as "
        "one, where they are the same in every step; auto: where the host takes longer to launch a step than it then waits for "
        "it, and there is memory for the graph",
    )
    balance_loss: float = Field(
        0.0,
        ge=0,
        le=100,
        strict=True,
        description="weight of the experts' balance loss, in each sequence of each layer; 0: none",
    )
    router_bias_rate: float = Field(
        1e-3, ge=0, le=100, strict=True, description="how far a router's bias moves in a step, where the model has one"
    )
    adapter_alpha: float = Field(
        32.0, gt=0, le=1e6, strict=True, description="what adapters add is multiplied by this over their rank"
    )
    capacity_factor: float | None = Field(
        None,
        gt=0,
        le=1e6,
        strict=True,
        examples=[1.25],
        description="most tokens of a sequence that an expert takes, over the mean; the rest is dropped; null: it takes all",
    )
    expert_overlap: ExpertOverlap = Field(
        "auto",
        description="what experts compute during the all-to-all: nothing, gradients of their weights, or rows that stay "
        "as well; auto: on a GPU gradients, and rows where the estimate gains by it",
    )
    loss_scale: float = Field(65536.0, ge=1, le=2.0**40, strict=True, description="fp16: first factor of the loss")
    loss_scale_window: int = Field(
        1000, ge=1, le=2**40, strict=True, description="fp16: steps without overflow before the factor doubles"
    )
    fp8_scaling: Fp8Scaling = Field("tensor", description="fp8: what shares a scale, a tensor, a row, or 128 numbers of a row")
    fp8_keep: Fp8Keep = Field(
        "ends", description="fp8: what stays in bf16, the first and last block and the head, the head alone, or nothing"
    )
    fp8_gather: Fp8Gather = Field(
        "auto", description="fp8: in which numbers ZeRO-3 gathers the weights of fp8 matmuls; auto: in fp8 where it can"
    )
    log: tuple[Sink, ...] = Field((), examples=["tensorboard"], description="loggers that get the metrics beside metrics.jsonl")
    log_every: int = Field(1, ge=1, le=2**40, strict=True, description="steps between records of metrics")
    timeout_s: float = Field(
        600.0, gt=0, le=1e6, strict=True, description="seconds without progress until a run names who holds it up and ends"
    )

    @field_validator(
        "lr", "eps", "weight_decay", "clip_value", "z_loss", "mtp_weight", "balance_loss", "router_bias_rate", mode="before"
    )
    @classmethod
    def _power_of_ten(cls, value: Any) -> Any:
        # YAML 1.1 reads 1e-3 as text, since it has no point; people write learning rates that way.
        return float(value) if isinstance(value, str) and _POWER.fullmatch(value) else value

    @field_validator("batch_ramp")
    @classmethod
    def _ramp_in_tokens(cls, value: str | None) -> str | None:
        return None if value is None else batch_ramp.text(batch_ramp.parse(value, f"{WHAT}.batch_ramp"))

    @field_validator("seq_stages")
    @classmethod
    def _lengths_in_tokens(cls, value: str | None) -> str | None:
        if value is None:
            return None
        return batch_ramp.text(batch_ramp.parse(value, f"{WHAT}.seq_stages", "length", batch_ramp.LENGTHS))

    @field_validator("log", mode="before")
    @classmethod
    def _log_from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [word.strip().lower() for word in value.split(",") if word.strip()]
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            return tuple(dict.fromkeys(value))  # a sink named twice is written once
        return value

    @model_validator(mode="after")
    def _the_phases_fit_into_the_steps(self) -> Self:
        if self.warmup_steps and self.warmup_steps >= self.steps:
            raise ValueError(
                f"{WHAT}.warmup_steps is {self.warmup_steps} but must be less than {WHAT}.steps = {self.steps}: "
                f"try {_usual_warmup(self.steps)}"
            )
        if self.lr_schedule == "wsd" and self.warmup + self.decay_steps > self.steps:
            raise ValueError(
                f"{WHAT}.decay_fraction is {self.decay_fraction:g}: {self.decay_steps} steps of decay after {self.warmup} of "
                f"warm-up but {WHAT}.steps is {self.steps}: try {max(0, self.steps - self.warmup) // 2 / self.steps:.2g}"
            )
        return self

    @property
    def warmup(self) -> int:
        """Steps of warm-up, given or usual."""
        return _usual_warmup(self.steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def decay_steps(self) -> int:
        """wsd: the steps at the end over which the rate falls."""
        return round(self.decay_fraction * self.steps)

    def changed(self, **fields: Any) -> Training:
        return build(Training, {**self.model_dump(), **fields}, WHAT)


def _usual_warmup(steps: int) -> int:
    return min(steps // 10, LONGEST_WARMUP)


def training_value(field: str, text: str) -> Any:
    """The value of `field` written as text on a command line (`lr=1e-3`, `log=tensorboard`), or SpecError."""
    if field == "log" and text.strip().lower() in NULL:
        text = ""
    # As many steps as a run may have, so that no field is refused for the default of another; whether it fits beside the
    # others is seen when all are built together.
    beside = {} if field == "steps" else {"steps": 2**40}
    return field_from_text(Training, WHAT, field, text, null=(*NULL, "auto"), beside=beside)
