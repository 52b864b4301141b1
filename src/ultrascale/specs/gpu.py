"""GPU: what one accelerator is on paper and what usually surrounds it, every number with its source.

Peaks are dense (no structured sparsity); bandwidths are per GPU and per direction. What a training step gets of them is
the business of `Efficiency` and of the measured kernel surfaces.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import package_data
from ultrascale.specs.validate import FrozenSpec, build

# Strict, as in Model: "3.35e3" between quotes or `true` is a mistake in the file. A whole number is a fine float.
Amount = Annotated[float, Field(strict=True, ge=1e-3, le=1e9, allow_inf_nan=False)]
AmountOrZero = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, gt=0, le=2**20)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Numbers = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


class GPU(FrozenSpec):
    """One kind of accelerator."""

    name: Text = Field(examples=["h100"])
    vendor: Text = Field(examples=["nvidia"])
    architecture: Text = Field(examples=["hopper"])
    memory_gib: Amount = Field(examples=[79.1], description="What the driver offers a process as total.")
    memory_bandwidth_gb_s: Amount = Field(examples=[3352])
    peak_tflops: dict[Numbers, Amount] = Field(
        min_length=1, description="Dense, by precision; one the chip lacks is absent.", examples=[{"bf16": 989.4}]
    )
    multiprocessors: Count | None = Field(default=None, examples=[132])
    link_bandwidth_gb_s: Amount = Field(
        examples=[450], description="NVLink or xGMI per GPU and direction; the host link where there is none."
    )
    link_domain: Count = Field(examples=[8], description="GPUs that reach each other over that link in the usual box; 1: none.")
    pcie_bandwidth_gb_s: Amount = Field(
        examples=[63], description="Between GPU and host, per direction; NVLink-C2C with Grace."
    )
    network_gb_s: Amount = Field(examples=[50], description="The usual NIC per GPU and direction: 400 Gb/s is 50.")
    gpus_per_node: Count = Field(examples=[8])
    power_w: Amount = Field(examples=[700])
    price_per_gpu_hour_usd: AmountOrZero | None = Field(
        default=None, examples=[2.5], description="None in every preset: prices age within weeks, and no guess is silent."
    )
    surface: Literal["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200"] | None = Field(
        default=None, description="The measured kernel table that this chip uses."
    )
    surface_note: str = Field(default="", description="Why, when that table was measured on another chip.")
    sources: dict[str, str] = Field(default_factory=dict, description="Field -> where its number comes from.")

    def __hash__(self) -> int:
        return hash(self.name)  # Equal GPUs have equal names; the dicts above cannot be hashed.

    @classmethod
    def load(cls, name: str) -> GPU:
        """The preset of that name or alias, upper or lower case."""
        found = _index().get(str(name).strip().lower())
        if found is None:
            raise SpecError(f"gpu '{name}' is not a known kind: {nearest(str(name).lower(), _index())}")
        return _presets()[found]

    @classmethod
    def presets(cls) -> dict[str, GPU]:
        """Every shipped kind by its own name, aliases left out. A fresh dict: callers may change theirs."""
        return dict(_presets())

    @classmethod
    def preset_names(cls) -> list[str]:
        """Every name that `load` knows, aliases included."""
        return sorted(_index())


def _data() -> Any:
    return package_data("ultrascale.specs", "presets/gpus.yaml")


@cache
def _presets() -> dict[str, GPU]:
    return {name: build(GPU, {"name": name, **fields}, f"preset {name}") for name, fields in _data()["gpus"].items()}


@cache
def _index() -> dict[str, str]:
    """Every accepted lower-case name -> the preset's own name."""
    return {**{name: name for name in _presets()}, **_data()["aliases"]}
