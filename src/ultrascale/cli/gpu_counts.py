"""`ultrascale plan` with --by, --budget or --compare: its kinds of GPUs, their prices, and the answer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ultrascale.cli.common import NO, cluster_named, print_json, progress, terminal
from ultrascale.specs.errors import SpecError

if TYPE_CHECKING:
    from ultrascale.specs.cluster import Cluster
    from ultrascale.specs.job import Job
    from ultrascale.specs.plan import Plan

DEFAULT_KIND = "h100"  # the playbook's


def clusters(named: str | None, compare: str | None, prices: Sequence[str], any_number: bool) -> list[Cluster]:
    """The clusters to plan for, with the prices given: one, or one of each kind. `any_number`: of GPUs, to be searched for."""
    from ultrascale.specs.cluster import Cluster

    kinds = [] if compare is None else _kinds(compare)
    if named is None and not any_number:
        why = "--compare needs" if compare is not None else "--cluster is missing: it says"
        raise SpecError(f"{why} how many GPUs: try --cluster 64xh100, or --tokens 15T --by 30d to find their number")
    if any_number:
        found = [_any_number(named)] if named is not None else [] if kinds else [_any_number(DEFAULT_KIND)]
        found += [_any_number(kind) for kind in kinds]
    else:
        assert named is not None
        found = [cluster_named(named)]
        found += [Cluster.load(f"{found[0].gpus}x{kind}") for kind in kinds]
    first: dict[str, Cluster] = {}
    for cluster in found:
        first.setdefault(cluster.gpu.name, cluster)
    return _priced(list(first.values()), prices)


def _kinds(text: str) -> list[str]:
    from ultrascale.specs.gpu import GPU

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise SpecError("--compare is empty: name GPU kinds, such as --compare h100,h200")
    try:
        return [GPU.load(word).name for word in words]
    except SpecError as error:
        raise SpecError(f"--compare: {error}") from None


def _any_number(named: str) -> Cluster:
    """A node of the kind, or the cluster of a file."""
    from ultrascale.specs.cluster import Cluster
    from ultrascale.specs.gpu import GPU
    from ultrascale.specs.validate import shown

    if Path(named).suffix.lower() in (".yaml", ".yml", ".json"):
        return Cluster.load(named)
    try:
        kind = GPU.load(named)
    except SpecError as error:
        if not named[:1].isdigit() and named != "here":
            raise SpecError(f"--cluster: {error}") from None
        sentence = f"--cluster is {shown(named)} but --by and --budget find the number of GPUs: try --cluster h100"
        raise SpecError(sentence) from None
    return Cluster.load(f"{kind.gpus_per_node}x{kind.name}")


def _priced(found: list[Cluster], texts: Sequence[str]) -> list[Cluster]:
    from ultrascale.specs.cluster import Cluster
    from ultrascale.specs.gpu import GPU
    from ultrascale.specs.units import usd
    from ultrascale.specs.validate import build

    prices: dict[str, float] = {}
    for text in (word for some in texts for word in some.split(",")):
        kind, equals, amount = text.partition("=")
        if not equals:
            kind = found[0].gpu.name
            raise SpecError(f"--price is '{text:.40}' but must be a GPU kind and US dollars: try --price {kind}=2.5")
        known = {one.gpu.name for one in found}
        name = kind.strip() if kind.strip() in known else GPU.load(kind).name
        if name not in known:
            raise SpecError(f"--price is of {name}, which is not planned for: try --compare {name}, or leave the price out")
        prices[name] = usd(amount, f"--price {name}", "2.5")
    given = [{"price_per_gpu_hour_usd": prices[one.gpu.name]} if one.gpu.name in prices else {} for one in found]
    return [build(Cluster, {**dict(one), **price}, "cluster") for one, price in zip(found, given, strict=True)]


def same_job(model: str, options: Mapping[str, tuple[Any, Any]]) -> str:
    """The command that plans the same job, without the cluster; options are values beside their defaults."""
    words = [f"{flag} {shlex.quote(str(value))}" for flag, (value, default) in options.items() if value != default]
    return " ".join(["ultrascale plan", shlex.quote(model), *words])


def cluster_words(plan: Plan) -> str | None:
    """The options that name the plan's cluster, network and price; None where no words do, since it comes from a file."""
    from ultrascale.specs.cluster import Cluster

    cluster = plan.job.cluster
    words, price = f"{cluster.gpus}x{cluster.gpu.name}", cluster.price_per_gpu_hour_usd
    try:
        usual = Cluster.load(words)
    except SpecError:
        return None
    alike = ("gpu", "nodes", "gpus_per_node", "link_domain", "link_bandwidth_gb_s")
    if any(getattr(usual, name) != getattr(cluster, name) for name in alike) or cluster.calibrated is not None:
        return None
    rate = cluster.network_gb_s
    network = f" --network-gb-s {rate:g}" if rate != usual.network_gb_s else ""
    return f"--cluster {words}{network}" + (f" --price {cluster.gpu.name}={price:g}" if price is not None else "")


def compare_kinds(jobs: Sequence[Job], pue: float, limits: dict[str, Any], as_json: bool) -> list[Plan | None]:
    """Print the fastest plan of each kind of GPU."""
    from ultrascale.plan import gpu_counts
    from ultrascale.show import gpu_counts as show

    with progress() as say:
        found = gpu_counts.compare_kinds(jobs, pue=pue, progress=say, **limits)
    print_json(show.comparison_json(found)) if as_json else show.show_comparison(terminal(), found)
    return [one.plan for one in found]


def fewest_gpus(
    jobs: Sequence[Job], by: str | None, budget: str | None, pue: float, limits: dict[str, Any], command: str, as_json: bool
) -> list[Plan | None]:
    """Search for the fewest GPUs of each kind, and print them."""
    from ultrascale.plan import gpu_counts
    from ultrascale.show import gpu_counts as show
    from ultrascale.specs.units import duration_days, usd

    by_days = None if by is None else duration_days(by, "--by")
    budget_usd = None if budget is None else usd(budget, "--budget")
    for job in jobs:
        gpu_counts.check(job, by_days, budget_usd, pue)
    with progress() as say:
        options = {"by_days": by_days, "budget_usd": budget_usd, "pue": pue, "progress": say, **limits}
        found = [gpu_counts.fewest_gpus(job, **options) for job in jobs]
    plans = [None if one.fewest is None else one.fewest.plan for one in found]
    words = [None if plan is None else cluster_words(plan) for plan in plans]
    commands = [None if one is None else f"{command} {one}" for one in words]
    if as_json:
        print_json(show.counts_json(found, commands))
    else:
        show.show_counts(terminal(), found, commands, by, budget)
    return plans


def finish(plans: Sequence[Plan | None], output: Path | None, as_json: bool) -> None:
    """Write the first kind's plan; exits with 1 where no kind has one."""
    first = plans[0]
    if output is not None and first is not None:
        first.save(output)
    if output is not None and not as_json:
        wrote = f"Wrote {output}; next: ultrascale explain {output}"
        terminal().print(wrote if first is not None else f"{output} was not written: the first kind has no plan")
    if not any(plans):
        raise typer.Exit(NO)
