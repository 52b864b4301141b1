"""Write docs/settings.md: every setting of a run, from the fields of Training, Layout, Job and Checkpointing.

python tools/settings_page.py [-o docs/settings.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.request import JOB_FIELDS

HEAD = (
    "# Settings of a run\n\n"
    "Every field that `ultrascale train` takes as `section.field=value`, such as `train.lr=1e-3 layout.tp=2`: they change the "
    "plan,\nor the defaults below. From Python they are the fields of `Training`, `Layout`, `Job` and `Checkpointing`; "
    "`python tools/settings_page.py`\nwrites this page from them. A value that the engine cannot run "
    "([training.md](training.md)) is refused before any process starts.\n"
)
COLUMNS = "| field | default | values | sets |\n|---|---|---|---|\n"
SECTIONS: tuple[tuple[str, type[BaseModel], Iterable[str], str], ...] = (
    ("train", Training, Training.model_fields, "Steps, learning rate, data, evaluation, kernels, logs."),
    (
        "layout",
        Layout,
        Layout.model_fields,
        "How the job is cut. By default dp follows from the processes, gas from the batch.",
    ),
    ("job", Job, JOB_FIELDS, "What is trained; the model and the cluster come from the plan or `--model`."),
    ("checkpoint", Checkpointing, Checkpointing.model_fields, "[Checkpoints](checkpoints.md) of the run."),
)
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    parts = [HEAD]
    for name, model, fields, words in SECTIONS:
        parts.append(f"## `{name}.`\n\n{words}\n\n{COLUMNS}{''.join(rows(model, fields))}")
    return "\n".join(parts)


def rows(model: type[BaseModel], fields: Iterable[str]) -> Iterator[str]:
    for name in fields:
        field = model.model_fields[name]
        cells = (f"`{name}`", default(field), values(field), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "of the plan"
    return f"`{written(value)}`"


def written(value: Any) -> str:
    """A value as a command line has it."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def values(field: FieldInfo) -> str:
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is tuple:
        return "any of " + ", ".join(f"`{word}`" for word in get_args(kinds[0]))
    if all(isinstance(kind, str) for kind in kinds):
        return ", ".join(f"`{word}`" for word in kinds)
    if bool in kinds:
        return "`true`, `false`"
    if str in kinds:
        return "text"
    return f"{'a number' if float in kinds else 'a whole number'}{bounds(field)}"


def bounds(field: FieldInfo) -> str:
    found = {name: getattr(one, name) for one in field.metadata for name in SIGNS if hasattr(one, name)}
    return ",".join(f" {sign} {number(found[name])}" for name, sign in SIGNS.items() if name in found)


def number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 2**power and power >= 10 else f"{value:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "settings.md")
    parser.parse_args().out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
