"""Fit the presets of other engines to rehearsals of their own code.

python tools/fit_frameworks.py torchtitan [--rehearse] [--write]

Each engine has a grid of small jobs (GRIDS). `--rehearse` runs the grid without a GPU (docs/rehearse.md; minutes on two cores)
and stores memory, FLOPs and collectives in data/rehearsals/ENGINE.json; without it the stored ones are read. Then the fields of
the preset on which memory, FLOPs and bytes sent depend (CANDIDATES) are chosen, one after the other, as the values whose
Estimate is nearest to the rehearsals. `--write` puts them into specs/presets/frameworks.yaml with the versions rehearsed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.traffic import of_stage
from ultrascale.export import targets, write
from ultrascale.measure.foreign.request import ENGINES, ForeignRehearsal, ForeignRequest, arguments_of
from ultrascale.measure.foreign.run import rehearse_foreign
from ultrascale.measure.rehearse import predicted_flops, without_imbalance
from ultrascale.parallel.mesh import RankCoordinates
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "data" / "rehearsals"
PRESETS = ROOT / "src" / "ultrascale" / "specs" / "presets" / "frameworks.yaml"
SEQ = 4096
ENOUGH = 1e-4
"""by how much a value must be better than the one in use, as a share of what was rehearsed"""


@dataclass(frozen=True)
class Case:
    """A rank of a small job: `model` is a preset, of which `layers` are left."""

    model: str
    layers: int
    layout: Layout
    rank: int = 0

    def job(self, framework: Framework, whole: bool = False) -> Job:
        """`whole`: with all layers of the preset."""
        model = Model.load(self.model)
        return Job(
            model=model if whole else model.model_copy(update={"layers": self.layers}),
            cluster=Cluster.load(f"{self.layout.gpus}xh100"),
            seq=SEQ,
            batch_tokens=self.layout.batch_tokens(SEQ),
            framework=framework,
        )

    def __str__(self) -> str:
        return f"{self.model}/{self.layers} {self.layout}" + (f" rank {self.rank}" if self.rank else "")


def case(model: str, layers: int, rank: int = 0, **layout: Any) -> Case:
    return Case(model, layers, Layout(**layout), rank)


ONE, EIGHT, QWEN, SEVEN = "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "llama-2-7b"
"""with vocabularies of 128k, 128k, 152k and 32k"""
THIRTY, MIXTRAL = "qwen3-30b-a3b", "mixtral-8x7b"
"""with 128 and 8 experts"""
_TORCHTITAN = (
    case(ONE, 4, dp=8, zero=3),
    case(ONE, 4, dp=8, zero=3, mbs=4, recompute="selective"),
    case(ONE, 4, dp=8, zero=3, mbs=4, recompute="full"),
    case(EIGHT, 4, dp=8, zero=3, gas=3),
    case(EIGHT, 4, dp=8, zero=3, mbs=8, gas=3, recompute="full"),
    case(EIGHT, 4, dp=4, tp=2, zero=3, mbs=2),
    case(EIGHT, 4, dp=2, tp=4, zero=3, mbs=2, recompute="selective"),
    case(ONE, 4, dp=8, zero=3, mbs=2, gas=3, keep_gathered=True),
    case(QWEN, 4, dp=8, zero=3, mbs=4, recompute="selective"),
    case(QWEN, 4, dp=4, tp=2, zero=3, mbs=2, recompute="selective"),
    case(EIGHT, 4, dp=2, cp=4, zero=3, mbs=2, recompute="selective"),
    case(EIGHT, 4, dp=2, cp=4, zero=3, mbs=2, recompute="full"),
)
_PIPELINES = tuple(
    case(EIGHT, 8, rank, **{"zero": 3, "keep_gathered": True, **more})
    for rank, more in (
        (0, {"dp": 4, "pp": 2, "gas": 4, "schedule": "1f1b"}),
        (7, {"dp": 4, "pp": 2, "gas": 4, "schedule": "1f1b"}),
        (0, {"dp": 4, "pp": 2, "gas": 4, "schedule": "afab"}),
        (0, {"dp": 4, "pp": 2, "gas": 4, "schedule": "interleaved", "virtual_stages": 2}),
        (0, {"dp": 2, "pp": 4, "gas": 8, "schedule": "1f1b", "recompute": "selective"}),
        (4, {"dp": 2, "pp": 4, "gas": 8, "schedule": "1f1b", "recompute": "selective"}),
        (7, {"dp": 4, "pp": 2, "gas": 4, "schedule": "afab"}),
        (7, {"dp": 4, "pp": 2, "gas": 4, "schedule": "interleaved", "virtual_stages": 2}),
        (0, {"dp": 4, "pp": 2, "gas": 4, "schedule": "1f1b", "keep_gathered": False}),
        (7, {"dp": 4, "pp": 2, "gas": 4, "schedule": "1f1b", "keep_gathered": False}),
    )
)
_EXPERTS = (
    case(THIRTY, 4, dp=8, zero=3),
    case(THIRTY, 4, dp=8, zero=3, mbs=2, recompute="selective"),
    case(THIRTY, 4, dp=8, zero=3, mbs=2, gas=2, recompute="full"),
    case(THIRTY, 4, dp=4, tp=2, zero=3, mbs=2),
    case(THIRTY, 4, dp=2, tp=4, zero=3, mbs=4, recompute="selective"),
    case(THIRTY, 4, dp=4, tp=2, zero=3, mbs=4, recompute="full"),
)
_EXPERTS_OF_RANKS = (
    case(THIRTY, 4, dp=8, ep=2, zero=3, mbs=2, gas=3),
    case(THIRTY, 4, dp=8, ep=4, zero=3, mbs=2, recompute="selective"),
    case(THIRTY, 4, dp=8, ep=8, zero=3, mbs=2),
    case(THIRTY, 4, dp=8, ep=8, zero=3, mbs=4, recompute="full"),
    case(THIRTY, 4, dp=4, tp=2, ep=8, zero=3, mbs=2),
    case(THIRTY, 4, dp=4, tp=2, ep=4, etp=1, zero=3, mbs=2, recompute="selective"),
    case(THIRTY, 4, dp=2, tp=4, ep=8, zero=3, mbs=4, recompute="full"),
    case(THIRTY, 4, dp=8, ep=8, zero=3, mbs=2, gas=3, keep_gathered=True),
)
# 0.2 has no flavors of 1B.
_TORCHTITAN_2 = (
    case(EIGHT, 4, dp=8, zero=3),
    case(EIGHT, 4, dp=8, zero=3, mbs=4, recompute="selective"),
    case(EIGHT, 4, dp=8, zero=3, mbs=4, recompute="full"),
    case(EIGHT, 4, dp=8, zero=3, gas=3),
    case(EIGHT, 8, dp=2, zero=3, recompute="full"),
    case(EIGHT, 4, dp=4, tp=2, zero=3, mbs=2),
    case(EIGHT, 4, dp=2, tp=4, zero=3, mbs=2, recompute="selective"),
    case(EIGHT, 4, dp=2, cp=4, zero=3, mbs=2, recompute="selective"),
    case(EIGHT, 4, dp=2, cp=4, zero=3, mbs=2, recompute="full"),
    case(EIGHT, 4, dp=2, tp=2, cp=2, zero=3, gas=2, recompute="selective"),
    case(EIGHT, 4, dp=1, mbs=2),
    case(EIGHT, 4, dp=1, mbs=4, recompute="full"),
    case(THIRTY, 4, dp=8, zero=3, mbs=2),
    case(THIRTY, 4, dp=8, zero=3, mbs=2, recompute="full"),
)
_LIBRARY = (
    case(ONE, 4, dp=8, zero=3),
    case(ONE, 4, dp=8, zero=3, mbs=4, recompute="full"),
    case(EIGHT, 4, dp=8, zero=3, gas=3),
    case(EIGHT, 4, dp=8, zero=3, mbs=2, recompute="full"),
    case(QWEN, 4, dp=8, zero=3, mbs=4, gas=3),
    case(SEVEN, 4, dp=8, zero=3, mbs=4, recompute="full"),
    case(SEVEN, 4, dp=8, zero=3, mbs=4),
)
GRIDS: dict[str, tuple[Case, ...]] = {
    "torchtitan": (*_TORCHTITAN, *_EXPERTS),
    "torchtitan-eager": (*_TORCHTITAN, *_PIPELINES, *_EXPERTS, *_EXPERTS_OF_RANKS),
    "torchtitan-0.2": _TORCHTITAN_2,
    "torchtitan-0.2-eager": _TORCHTITAN_2,
    "accelerate": (*_LIBRARY, case(EIGHT, 2, dp=1, mbs=2), case(ONE, 4, dp=8, mbs=2, gas=3), case(EIGHT, 32, dp=8, zero=3)),
    "deepspeed": (
        *_LIBRARY,
        *(
            case(model, layers, dp=8, zero=zero, **more)
            for zero in (1, 2)
            for model, layers, more in (
                (ONE, 4, {"mbs": 2}),
                (ONE, 4, {"mbs": 4, "recompute": "full"}),
                (SEVEN, 4, {"mbs": 2, "gas": 3}),
            )
        ),
        case(EIGHT, 32, dp=4, zero=3),
    ),
    "megatron-local": (
        case(ONE, 4, dp=8, zero=1, mbs=2),
        case(ONE, 4, dp=8, zero=1, mbs=4, recompute="full"),
        case(ONE, 4, dp=8, zero=0, gas=3),
        case(EIGHT, 4, dp=4, tp=2, zero=1, mbs=2),
        case(EIGHT, 4, dp=2, tp=4, zero=1, mbs=2, gas=3, recompute="selective"),
        case(EIGHT, 4, dp=2, tp=8, zero=1, mbs=4, recompute="full"),
        case(SEVEN, 4, dp=4, tp=2, zero=1, mbs=4, recompute="full"),
        case(SEVEN, 4, dp=4, tp=2, zero=1, mbs=4, gas=3),
        case(EIGHT, 8, dp=2, tp=2, pp=2, zero=1, gas=4, schedule="1f1b"),
        case(EIGHT, 8, dp=2, tp=2, pp=2, zero=1, gas=4, schedule="1f1b", rank=7),
        *(
            case(EIGHT, layers, rank, tp=2, zero=1, schedule="interleaved", **more)
            for layers, ranks, more in (
                (8, (0, 7), {"dp": 2, "pp": 2, "virtual_stages": 2, "gas": 4}),
                (8, (0, 7), {"dp": 1, "pp": 4, "virtual_stages": 2, "gas": 8, "mbs": 2}),
                (16, (0,), {"dp": 2, "pp": 2, "virtual_stages": 4, "gas": 4, "mbs": 2, "recompute": "full"}),
            )
            for rank in ranks
        ),
        case(THIRTY, 4, dp=8, ep=8, zero=1),
        case(THIRTY, 4, dp=8, ep=4, zero=1, dispatcher="allgather"),
        case(THIRTY, 4, dp=4, tp=2, ep=8, zero=1, mbs=2, recompute="full"),
        case(MIXTRAL, 2, dp=8, ep=8, zero=1, gas=2),
        case(MIXTRAL, 2, dp=4, tp=2, ep=4, zero=1, mbs=2),
        case(MIXTRAL, 2, dp=4, tp=2, ep=4, etp=1, zero=1, mbs=2),
        case(MIXTRAL, 2, dp=4, tp=2, ep=2, etp=1, zero=1, gas=2),
        case(MIXTRAL, 4, dp=4, ep=4, pp=2, zero=1, gas=4, schedule="1f1b"),
        case(MIXTRAL, 4, 7, dp=4, ep=4, pp=2, zero=1, gas=4, schedule="1f1b"),
    ),
}


def request_of(preset: str, case: Case, folder: Path) -> ForeignRequest:
    """The rank, with its engine's configuration in the folder."""
    engine = ENGINES[Framework.load(preset).engine]
    planned = Framework.load(engine.framework if engine.library else preset)
    job = case.job(planned, whole=not engine.library)
    plan = Plan(job=job, layout=case.layout, estimate=estimate(job, case.layout))
    style = None if engine.library else "toml" if is_old(preset) else "current"
    exported = targets.engine_files(plan, engine.name, style, str(folder))
    write.into(folder, exported.files, force=True)
    config = folder / exported.checks[0].engine.config
    arguments = arguments_of(plan)
    if not engine.library:
        config, arguments = (_fewer_layers_toml if is_old(preset) else _fewer_layers)(config, case.layers), ()
    asked = ForeignRequest(str(config), case.layout.gpus, case.rank, engine.name, arguments)
    return replace(asked, gpus_per_node=job.cluster.gpus_per_node)


def rehearse(preset: str, case: Case) -> ForeignRehearsal:
    with TemporaryDirectory(prefix="ultrascale-") as folder:
        return rehearse_foreign(request_of(preset, case, Path(folder)))


def _fewer_layers(config: Path, layers: int) -> Path:
    """torchtitan builds flavors: a configuration that keeps the first layers of one."""
    text = f"from {config.stem} import plan as whole\n\n\ndef plan():\n    found = whole()\n"
    short = config.with_name("short.py")
    short.write_text(text + f"    del found.model_spec.model.layers[{layers}:]\n    return found\n", encoding="utf-8")
    return short


def is_old(preset: str) -> bool:
    """A preset of torchtitan 0.2, which must then be the one that is found first."""
    return preset.startswith("torchtitan-0.2")


def _fewer_layers_toml(config: Path, layers: int) -> Path:
    name, flavor = (re.search(rf'^{key} = "(.+)"', config.read_text(encoding="utf-8"), re.M) for key in ("name", "flavor"))
    assert name is not None
    assert flavor is not None
    module = f"from torchtitan.models.{name[1]} import {name[1]}_args as known\n\nknown['{flavor[1]}'].n_layers = {layers}\n"
    config.with_name(f"short_{layers}.py").write_text(module, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(config.parent), os.environ.get("PYTHONPATH", "")])
    text = config.read_text(encoding="utf-8")
    config.write_text(text + '\n[experimental]\ncustom_import = "short_' + f'{layers}"\n', encoding="utf-8")
    return config


def stored(preset: str) -> list[tuple[Case, ForeignRehearsal]]:
    file = STORED / f"{preset}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [(_read_case(one["case"]), ForeignRehearsal.of_json(one["found"])) for one in found]


def _read_case(data: dict[str, Any]) -> Case:
    return Case(**{**data, "layout": Layout(**data["layout"])})


def _written_case(case: Case) -> dict[str, Any]:
    return {**vars(case), "layout": case.layout.model_dump(exclude_defaults=True)}


def rehearse_grid(preset: str, processes: int) -> None:
    """Those that are not stored yet, each stored when it is done: an interrupted grid goes on."""
    known = {str(case): (case, found) for case, found in stored(preset)}
    known = {name: known[name] for name in map(str, GRIDS[preset]) if name in known}

    def one(case: Case) -> None:
        try:
            found = rehearse(preset, case)
        except (RunError, SpecError) as error:
            print(f"{preset}: {case}: {error}", flush=True)
            return
        print(f"{preset}: {case}: {found.peak / GIB:.2f} GiB at {found.moment}, {found.seconds:.0f} s", flush=True)
        known[str(case)] = case, found
        _store(preset, [known[name] for name in map(str, GRIDS[preset]) if name in known])

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, [case for case in GRIDS[preset] if str(case) not in known]))


def _store(preset: str, rows: Sequence[tuple[Case, ForeignRehearsal]]) -> None:
    STORED.mkdir(exist_ok=True)
    lines = [
        json.dumps({"case": _written_case(case), "found": {**asdict(found), "seconds": round(found.seconds)}})
        for case, found in rows
    ]
    (STORED / f"{preset}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------------ the fit


_WORDS = (
    "buffers", "loss", "states", "norm", "accumulation", "selective", "head_gathers", "context", "stage_split",
    "routing_format", "keeps_gradients", "sliced_routing",
)  # fmt: skip
_FLAGS = (
    "eager_activation", "gathered_inputs", "autocast", "unrotated_heads",
    "early_stop", "ddp_buckets", "sums_in_backward", "foreach_optimizer",
)  # fmt: skip
CANDIDATES: dict[str, tuple[Any, ...]] = {
    **{name: get_args(Framework.model_fields[name].annotation) for name in _WORDS},
    **dict.fromkeys(_FLAGS, (False, True)),
    "reduce_bucket": (0, 5e8),
    "live_parameters": (0, 1e9),
    "expert_padding": (0, 8, 16, 32),
}
"""values of the fields that are fitted; buckets and live parameters are settings of DeepSpeed, here with its defaults"""


@dataclass(frozen=True)
class Difference:
    """Of the estimate from a rehearsal, as shares of what was rehearsed."""

    peak: float
    flops: float
    sent: float
    """bytes by kind of collective"""
    sent_bytes: float
    """the same, not as a share"""

    @property
    def cost(self) -> float:
        return abs(self.peak) + abs(self.flops) + self.sent


def difference(framework: Framework, case: Case, found: ForeignRehearsal) -> Difference:
    job, layout = without_imbalance(case.job(framework)), case.layout
    place = RankCoordinates.of(layout, case.rank)
    stage = estimate(job, layout).memory[place.pp]
    peak = stage.memory.total - stage.memory.runtime
    flops = predicted_flops(job, layout, place)
    sent: defaultdict[str, float] = defaultdict(float)
    for one in of_stage(job, layout, ClusterRates(job), place.pp):
        sent[one.collective] += one.bytes
    seen: defaultdict[str, float] = defaultdict(float)
    for each in found.collectives:
        seen[each.kind] += each.bytes
    apart = sum(abs(sent[kind] - seen[kind]) for kind in sent.keys() | seen.keys())
    flops_share = flops / sum(found.flops.values()) - 1
    return Difference(peak / found.peak - 1, flops_share, apart / max(1, sum(seen.values())), apart)


def cost(framework: Framework, rows: Sequence[tuple[Case, ForeignRehearsal]]) -> float:
    return sum(difference(framework, case, found).cost for case, found in rows) / len(rows)


def fit(
    start: Framework, rows: Sequence[tuple[Case, ForeignRehearsal]], values: Mapping[str, Sequence[Any]], rounds: int = 3
) -> Framework:
    """One field after the other, and again until nothing changes; a field that makes no difference stays as it is."""
    best, least = start, cost(start, rows)
    for _ in range(rounds):
        before = best
        for field, choices in values.items():
            for value in (one for one in choices if one != getattr(best, field)):
                tried = best.model_copy(update={field: value})
                try:
                    found = cost(tried, rows)
                except SpecError:  # a layout that this value refuses
                    continue
                if found < least - ENOUGH:
                    best, least = tried, found
        if best == before:
            break
    return best


def written(text: str, framework: Framework, fields: Iterable[str]) -> str:
    """The presets' file with these fields of one preset; a field that has its default is left out."""
    lines = text.splitlines()
    start = lines.index(f"{framework.name}:")
    end = next((number for number in range(start + 1, len(lines)) if not lines[number].startswith(" ")), len(lines))
    known = {line.strip().partition(":")[0]: line for line in lines[start + 1 : end]}
    for field in fields:
        value = getattr(framework, field)
        known.pop(field, None)
        if value != Framework.model_fields[field].default:
            known[field] = f"  {field}: {json.dumps(value) if not isinstance(value, str) else value}"
    known["source"] = known.pop("source")
    known.pop("seen", None)
    known["seen"] = f"  seen: {framework.seen}"
    return "\n".join([*lines[: start + 1], *known.values(), *lines[end:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=list(GRIDS))
    parser.add_argument("--rehearse", action="store_true", help="rehearse the cases of the grid that are not stored")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--start", help="the preset from which the fit starts; default: the same")
    parser.add_argument("--write", action="store_true", help="write the fields into frameworks.yaml")
    given = parser.parse_args()
    if given.rehearse:
        rehearse_grid(given.preset, given.processes)
    rows = stored(given.preset)
    if not rows:
        parser.error(f"no rehearsals of {given.preset} are stored: try --rehearse")
    now = Framework.load(given.preset)
    start, values = Framework.load(given.start or given.preset), CANDIDATES
    print(f"{len(rows)} rehearsals, {start.name} as it is: cost {cost(start, rows):.4f}")
    fitted = fit(start, rows, values)
    for field in values:
        if getattr(fitted, field) != getattr(now, field):
            print(f"  {field}: {getattr(now, field)} -> {getattr(fitted, field)}")
    print(f"{'GiB':>6} {'peak':>7} {'FLOPs':>7} {'sent':>7}")
    differences = [difference(fitted, case, found) for case, found in rows]
    for one, (case, found) in zip(differences, rows, strict=True):
        print(f"{found.peak / GIB:6.2f} {one.peak:+7.1%} {one.flops:+7.1%} {one.sent:7.1%}  {case}")
    peaks = [abs(one.peak) for one in differences]
    print(f"peak: {sum(peaks) / len(peaks):.1%} mean, {max(peaks):.1%} worst")
    if given.write:
        engines = sorted({f"{found.engine} with torch {found.torch}" for _, found in rows})
        seen = f"{', '.join(engines)}, {date.today()}"
        chosen = now.model_copy(update={**{field: getattr(fitted, field) for field in values}, "seen": seen})
        PRESETS.write_text(written(PRESETS.read_text(encoding="utf-8"), chosen, values), encoding="utf-8")


if __name__ == "__main__":
    main()
