"""`convert`: converts a Hugging Face folder to a run that can be trained further, and a run's weights to such a folder.

In both directions one tensor is in memory at a time, and the output is written completely or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ultrascale.cost.estimate import estimate
from ultrascale.data.corpora import BYTES, STDLIB, SYNTHETIC
from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import PLAN, free_bytes, new_folder, refuse_used
from ultrascale.specs.hub import model_folder
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB
from ultrascale.specs.validate import shown
from ultrascale.train import checkpoint, import_torch
from ultrascale.train.request import TRY_SEQ, Overrides, from_model

Progress = Callable[[int, int], None]
"""called with bytes done and total bytes"""

HF = "hf"
PEFT = "peft"
FORMS = "`ultrascale convert hf ./llama-dir runs/x` or `ultrascale convert runs/x hf ./out`"


@dataclass(frozen=True)
class ConversionResult:
    """The model that was converted and the folder that was written."""

    model: Model
    folder: Path
    is_run: bool


def convert(
    words: Sequence[str],
    dtype: str = "bf16",
    tokenizer: Path | None = None,
    progress: Progress | None = None,
    gpu: bool = False,
    ema: bool = False,
) -> ConversionResult:
    """`hf FOLDER RUN` reads Hugging Face weights, `RUN hf FOLDER` writes them, as `dtype` and with the tokenizer given, with
    adapters merged into them; `RUN peft FOLDER` writes adapters alone.

    `gpu`: whether the run is made for a machine with a GPU. `ema`: write the moving mean of the weights.
    """
    given = list(words)
    if len(given) == 3 and given[1] == PEFT and all(word.strip() for word in given):
        return to_peft(Path(given[0]), Path(given[2]), ema)
    if len(given) != 3 or given.count(HF) != 1 or given[2] == HF or not all(word.strip() for word in given):
        text = shown(" ".join(given)) if given else "nothing"
        also = " (a folder named hf is ./hf)" if given.count(HF) > 1 else ""
        raise SpecError(f"convert was given {text}{also}: try {FORMS}")
    if given[0] == HF:
        if ema:
            raise SpecError(f"--ema is about weights that are written out, not those of {shown(given[1])}: leave it out")
        if tokenizer is not None:
            raise SpecError(f"--tokenizer goes with weights that are written out, not into {given[2]}: leave it out")
        return from_hf(given[1], Path(given[2]), progress, gpu)
    return to_hf(Path(given[0]), Path(given[2]), dtype, tokenizer, progress, ema)


def from_hf(source: str | Path, run: Path, progress: Progress | None = None, gpu: bool = False) -> ConversionResult:
    """Writes a run at step 0 with these weights and a short job for one process, for `train --resume`.

    `source`: a folder, or `hf://ORG/NAME`.
    """
    refuse_used(run)
    _need_safetensors()
    import torch

    from ultrascale.model.hf_folder import HFFolder

    folder = HFFolder.open(*model_folder(source))
    model, shapes = folder.model, folder.shapes
    total = 4 * model.parameters
    if (free := free_bytes(run)) < total:
        raise SpecError(f"{run} needs {total / GIB:,.2f} GiB but its disk has {free / GIB:,.2f} GiB free: name another disk")
    seq = min(TRY_SEQ, model.max_positions or TRY_SEQ)
    data = STDLIB if model.vocab >= BYTES else SYNTHETIC  # a default until a run sets train.data
    changes = Overrides(job={"seq": seq}, train={"data": data})
    request = from_model(model, changes, world=1, precision="bf16" if gpu else "fp32")
    done = 0

    def weight(name: str) -> torch.Tensor:
        """One weight in fp32; reports progress."""
        nonlocal done
        # A contiguous copy: the tensor that was read is a view of the mapped file, transposed or part of another tensor.
        tensor = folder.tensor(name).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
        return tensor

    with new_folder(run) as new_run:
        Plan(job=request.job, layout=request.layout, estimate=estimate(request.job, request.layout)).save(new_run / PLAN)
        checkpoint.write_weights(new_run, request.job, request.layout, request.training, shapes, weight)
    return ConversionResult(model, run, is_run=True)


def to_hf(
    run: Path,
    out: Path,
    dtype: str = "bf16",
    tokenizer: Path | None = None,
    progress: Progress | None = None,
    ema: bool = False,
) -> ConversionResult:
    """Writes the newest checkpoint of a run, or the checkpoint given, as a folder that `transformers` loads."""
    refuse_used(out)
    if not os.path.isdir(run):
        raise SpecError(f"run {run} is no folder: name one with checkpoints in it, such as runs/first")
    _need_safetensors()
    from ultrascale.model.hf import whole_shapes
    from ultrascale.model.hf_folder import write

    source = checkpoint.resolve(run)
    whole, tensor = checkpoint.merged(source, ema)
    model = source.job.model
    if whole.shapes() != whole_shapes(model):
        raise SpecError(f"checkpoint {whole.folder} does not hold the weights that its own model has: try another")
    write(out, model, tensor, dtype, tokenizer=tokenizer, progress=progress)
    return ConversionResult(model, out, is_run=False)


def to_peft(run: Path, out: Path, ema: bool = False) -> ConversionResult:
    """Writes a run's adapters as a folder that `peft` loads beside the model's own weights."""
    refuse_used(out)
    if not os.path.isdir(run):
        raise SpecError(f"run {run} is no folder: name one with checkpoints in it, such as runs/first")
    _need_safetensors()
    from ultrascale.model.hf_adapters import write

    source = checkpoint.resolve(run)
    rank, model = source.job.adapter_rank, source.job.model
    if rank is None:
        raise SpecError(f"{source.folder} has no adapters: try ultrascale convert {run} hf {out}")
    write(out, model, source.shapes(), checkpoint.trained(source, ema), rank, source.training.adapter_alpha)
    return ConversionResult(model, out, is_run=False)


def _need_safetensors() -> None:
    import_torch()
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError:
        raise SpecError("convert needs safetensors, which is not installed: try pip install 'ultrascale[train]'") from None
