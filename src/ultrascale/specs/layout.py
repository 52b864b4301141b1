"""Layout: how a job is cut over its GPUs. Field names are the playbook's and are a contract for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ultrascale.schedules import DEFAULT_SCHEDULE, SCHEDULES
from ultrascale.specs.validate import FrozenSpec, build
from ultrascale.specs.words import field_from_text

DEGREES = ("dp", "tp", "pp", "cp", "ep")  # of parallelism
DataParallel = Literal["naive", "hooks", "bucketed", "ddp"]
ContextParallel = Literal["allgather", "ring", "zigzag", "ulysses"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters", "activations"]
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]


if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[SCHEDULES]


class Layout(FrozenSpec):
    """dp × tp × pp × cp GPUs; ep lives inside dp × cp. Which layouts are legal for a job is decided by cost/legality.py."""

    dp: int = Field(1, ge=1, le=2**20, strict=True, description="data parallelism: replicas of the model")
    tp: int = Field(1, ge=1, le=2**20, strict=True, description="tensor parallelism: every matrix cut in this many parts")
    pp: int = Field(1, ge=1, le=2**20, strict=True, description="pipeline parallelism: layers in this many stages")
    cp: int = Field(1, ge=1, le=2**20, strict=True, description="context parallelism: the sequence in this many parts")
    ep: int = Field(1, ge=1, le=2**20, strict=True, description="expert parallelism: experts over this many data ranks")
    etp: int | None = Field(
        None,
        ge=1,
        le=2**20,
        strict=True,
        examples=[1],
        description="expert tensor parallelism: each expert cut in this many parts, 1 or tp; null: tp, or 1 where ep is spread "
        "over the tp ranks too",
    )
    zero: int = Field(0, ge=0, le=3, strict=True, description="1: optimizer states sharded, 2: + gradients, 3: + parameters")
    zero_shards: int | None = Field(
        None,
        ge=1,
        le=2**20,
        strict=True,
        examples=[8],
        description="data ranks that ZeRO shards over; fewer than dp·cp is HSDP; null: all",
    )
    keep_gathered: bool = Field(
        False, strict=True, description="ZeRO-3: keep parameters gathered from forward to backward, not gather twice"
    )
    sequence_parallel: bool = Field(True, strict=True, description="norms and residuals cut over tp along the sequence")
    data_parallel: DataParallel = Field("bucketed", description="when gradients are reduced, and in which pieces")
    context_parallel: ContextParallel = Field("zigzag", description="how cp ranks get the keys and values of the others")
    schedule: ScheduleName = Field(DEFAULT_SCHEDULE, description="order of forwards and backwards in the pipeline")
    virtual_stages: int = Field(1, ge=1, le=1024, strict=True, description="model chunks per pipeline rank")
    mbs: int = Field(1, ge=1, le=2**20, strict=True, description="micro-batch: sequences in one forward pass")
    gas: int = Field(1, ge=1, le=2**30, strict=True, description="micro-batches accumulated (or pipelined) in one step")
    recompute: Recompute = Field("none", description="activations computed again in backward")
    recompute_layers: int | None = Field(
        None,
        ge=1,
        le=2**20,
        strict=True,
        examples=[8],
        description="of each pipeline stage, its first layers that recompute; null: all",
    )
    offload: Offload = Field(
        "none", description="optimizer: its states and step on the host; parameters: those too; activations: what layers save"
    )
    dispatcher: Dispatcher = Field(
        "alltoall",
        description="how tokens reach experts on other ranks: NCCL's all-to-all; gathered by all; or by DeepEP's or HybridEP's "
        "kernels, which send a token to each node once",
    )

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights and see other tokens: gradients are reduced over them."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        return min(self.zero_shards or self.data_ranks, self.data_ranks)

    @property
    def expert_cut(self) -> int:
        """Parts of an expert on as many tp ranks."""
        return self.etp or (self.tp if self.data_ranks % self.ep == 0 else 1)

    def batch_tokens(self, seq: int) -> int:
        """Playbook: global batch = mbs × dp × gas × sequence."""
        return self.mbs * self.dp * self.gas * seq

    def changed(self, **fields: Any) -> Layout:
        return build(Layout, {**self.model_dump(), **fields}, "layout")

    def __str__(self) -> str:
        """The short form used in tables and sentences: only what differs from the defaults that matter."""
        words = [f"{axis}{getattr(self, axis)}" for axis in DEGREES if getattr(self, axis) > 1]
        words = words or ["dp1"]
        if self.etp is not None:
            words.append(f"etp{self.etp}")
        words.append(f"zero{self.zero}" + (f"/{self.zero_shards}" if self.zero_shards else ""))
        if self.pp > 1:
            words.append(self.schedule + (f"·v{self.virtual_stages}" if self.virtual_stages > 1 else ""))
        if self.cp > 1:
            words.append(self.context_parallel)
        if self.tp > 1 and not self.sequence_parallel:
            words.append("no sp")
        if self.data_parallel != "bucketed" and self.data_ranks > 1 and not self.zero:
            words.append(self.data_parallel)
        words.append(f"mbs{self.mbs}·gas{self.gas}")
        if self.recompute != "none":
            words.append(f"{self.recompute} recompute" + (f"·{self.recompute_layers}" if self.recompute_layers else ""))
        if self.offload != "none":
            words.append(f"{self.offload} offload")
        if self.keep_gathered:
            words.append("keep gathered")
        if self.ep > 1 and self.dispatcher != "alltoall":
            words.append(self.dispatcher)
        return " ".join(words)


def field_value(field: str, text: str, what: str = "layout") -> Any:
    """The value of `field` written as text on a command line (`tp=8`, `sequence_parallel=false`), or SpecError."""
    return field_from_text(Layout, what, field, text, null=("none", "null", "all"), example="2")
