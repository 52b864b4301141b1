"""How many GPUs a training needs: the fewest that finish it in time or within a budget, and one number of GPUs over kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ultrascale.cost import flops
from ultrascale.cost.ranges import MIN_FIT, memory_limit_gib
from ultrascale.plan import advice
from ultrascale.plan.candidates import LayoutConstraints
from ultrascale.plan.search import explained, plan
from ultrascale.specs.errors import SpecError, divisors
from ultrascale.specs.job import Job
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import count, money

MOST_GPUS = 16_384
# Days are not monotone in the number of GPUs, since a batch must be cut evenly: below an answer more numbers are planned, of
# nodes the multiples of powers of two first, which suit most batches.
NEIGHBOURS = 16  # that follow one another and are not enough, before a walk ends
COARSE_NEIGHBOURS = 4  # of multiples of several nodes, and of all once there are
MANY_PLANS = 32  # plans, each of which takes about 0.4 s
PUE = 1.2  # power of a data centre over that of its computers
MOST_PUE = 10.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Span:
    """A predicted figure and the range that holds eight of ten cases."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TrainingCost:
    """What a whole training takes with one plan: days, GPU hours, price and energy."""

    plan: Plan
    pue: float

    @property
    def gpus(self) -> int:
        return self.plan.job.cluster.gpus

    @property
    def tokens(self) -> int:
        assert self.plan.job.total_tokens is not None
        return self.plan.job.total_tokens

    @property
    def days(self) -> Span:
        """Tokens over tokens per second; its range is that of the step time."""
        estimate = self.plan.estimate
        days = self.tokens / estimate.tokens_per_s / 86400
        if estimate.range is None:
            return Span(days, days, days)
        step_s = estimate.step_time_s
        return Span(days, days * estimate.range.step_time_low_s / step_s, days * estimate.range.step_time_high_s / step_s)

    @property
    def gpu_hours(self) -> Span:
        return self._times_days(24 * self.gpus)

    @property
    def price_usd(self) -> Span | None:
        """GPU hours at the cluster's price; None without one."""
        price = self.plan.job.cluster.price_per_gpu_hour_usd
        return None if price is None else self._times_days(24 * self.gpus * price)

    @property
    def energy_mwh(self) -> Span:
        """GPUs at their power limit all the time, times PUE: an upper bound for the GPUs, without hosts and switches."""
        return self._times_days(24 * self.gpus * self.plan.job.cluster.gpu.power_w * self.pue / 1e6)

    def _times_days(self, factor: float) -> Span:
        days = self.days
        return Span(factor * days.value, factor * days.low, factor * days.high)


@dataclass(frozen=True)
class GPUCount:
    """The fewest GPUs of one kind that meet the deadline and the budget; else a sentence with the nearest values that work."""

    job: Job
    """as it was asked for"""
    fewest: TrainingCost | None
    fastest: TrainingCost | None
    """with a budget and without a deadline: the shortest training within the money"""
    problem: str | None
    planned: dict[int, TrainingCost | None]
    """by number of GPUs; None: no layout fits, or the batch cannot be cut"""
    notes: tuple[str, ...]


@dataclass
class _Counts:
    """Plans of a job over numbers of GPUs, each searched once."""

    job: Job
    most_gpus: int
    pue: float
    fix: Sequence[str]
    forbid: Sequence[str]
    min_fit: float
    min_free_gib: float
    say: Progress
    planned: dict[int, TrainingCost | None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """sentences of the search where it can plan nothing"""

    @property
    def allowed(self) -> list[int]:
        """Parts of a node, then whole nodes."""
        node = self.job.cluster.gpus_per_node
        return [one for one in (*divisors(node)[:-1], *range(node, self.most_gpus + 1, node)) if one <= self.most_gpus]

    @property
    def powers(self) -> list[int]:
        """Of the allowed numbers: parts of a node, and powers of two of nodes."""
        node = self.job.cluster.gpus_per_node
        return [one for one in self.allowed if one < node or (one // node).bit_count() == 1]

    @property
    def costs(self) -> list[TrainingCost]:
        return [one for _, one in sorted(self.planned.items()) if one is not None]

    def at(self, gpus: int) -> TrainingCost | None:
        if gpus not in self.planned:
            self.say(f"planning {gpus:,} × {self.job.cluster.gpu.name} ({len(self.planned)} numbers planned before)")
            self.planned[gpus] = self._plan(gpus)
        return self.planned[gpus]

    def _plan(self, gpus: int) -> TrainingCost | None:
        try:
            job = self.job.changed(cluster=self.job.cluster.resized(gpus))
            runnable, _ = advice.runnable_job(job)
            reachable, _ = advice.reachable_batch(runnable, LayoutConstraints.parse(self.fix, self.forbid))
            if abs(reachable.batch_tokens / job.batch_tokens - 1) > advice.NEARBY:
                return None
            result = plan(
                job,
                top=1,
                fix=self.fix,
                forbid=self.forbid,
                min_fit=self.min_fit,
                min_free_gib=self.min_free_gib,
                explain=False,
            )
        except SpecError as error:
            self.refused.append(str(error))
            return None
        found = result.plans[0] if result.plans else None
        limit_gib = memory_limit_gib(result.job, self.min_fit, self.min_free_gib)
        return None if found is None or found.estimate.peak_gib > limit_gib else TrainingCost(found, self.pue)

    def fewest(self, enough: Callable[[TrainingCost], bool], guess: int, least: Callable[[], float]) -> TrainingCost | None:
        """The fewest GPUs that are enough: powers of two, then bisection, then the numbers below it, since neither days nor
        prices are monotone. `guess` is where to start; fewer GPUs than `least()` cannot be enough.
        """

        def is_enough(gpus: int) -> bool:
            cost = self.at(gpus)
            return cost is not None and enough(cost)

        powers = self.powers
        start = max(sum(one <= guess for one in powers) - 1, 0)
        up = next((number for number in range(start, len(powers)) if is_enough(powers[number])), None)
        if up is None:
            return None
        while up > 0 and up <= start and is_enough(powers[up - 1]):
            up -= 1
        allowed = self.allowed
        low, high = allowed.index(powers[up - 1]) if up else -1, allowed.index(powers[up])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(allowed[middle]) else (middle, high)
        return self._lowered(allowed[high], is_enough, least)

    def _lowered(self, gpus: int, is_enough: Callable[[int], bool], least: Callable[[], float]) -> TrainingCost | None:
        """The fewest GPUs up to so many that are enough, as far as looked."""
        node = self.job.cluster.gpus_per_node
        stride = 2 ** max(0, (gpus // node // NEIGHBOURS).bit_length() - 1)
        while stride >= 1:
            coarse = stride > 1 or len(self.planned) > MANY_PLANS
            left = patience = COARSE_NEIGHBOURS if coarse else NEIGHBOURS
            below = [one for one in self.allowed if one < gpus and (stride == 1 or one % (stride * node) == 0)]
            for one in reversed(below):
                if left == 0 or one < least() or (stride > 1 and len(self.planned) > MANY_PLANS):
                    break
                enough = is_enough(one)
                gpus, left = (one, patience) if enough else (gpus, left - 1)
            stride //= 2
        return self.at(gpus)

    def fastest_within(self, enough: Callable[[TrainingCost], bool], fewest: int) -> TrainingCost:
        """The shortest training of those that are enough: more GPUs by powers of two and bisection while they are."""
        allowed, low, high = self.allowed, self.allowed.index(fewest), len(self.allowed)
        for gpus in self.powers:
            if gpus <= fewest:
                continue
            cost = self.at(gpus)
            if cost is None or not enough(cost):
                high = allowed.index(gpus)
                break
            low = allowed.index(gpus)
        while high - low > 1:
            middle = (low + high) // 2
            cost = self.at(allowed[middle])
            low, high = (middle, high) if cost is not None and enough(cost) else (low, middle)
        return min((one for one in self.costs if enough(one)), key=lambda one: one.days.value)


def fewest_gpus(
    job: Job,
    *,
    by_days: float | None = None,
    budget_usd: float | None = None,
    most_gpus: int = MOST_GPUS,
    pue: float = PUE,
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    min_fit: float = MIN_FIT,
    min_free_gib: float = 0.0,
    progress: Progress | None = None,
) -> GPUCount:
    """The fewest GPUs, in a part of a node or whole nodes of the job's cluster, that train `job.total_tokens` within `by_days`
    and for no more than `budget_usd`.

    Each number of GPUs has its fastest layout, as `plan` finds it; not every number is planned. Of the cluster its own number
    of GPUs does not matter, its price per GPU hour does.
    """
    check(job, by_days, budget_usd, pue)
    say = progress or (lambda _: None)
    counts = _Counts(job, most_gpus, pue, fix, forbid, min_fit, min_free_gib, say)
    limits = _Limits(job, by_days, budget_usd)
    fewest = counts.fewest(limits.in_time, limits.guess(), lambda: limits.least(counts.costs))
    if fewest is not None and not limits.within_budget(fewest):
        # More GPUs cost more, but for a number that suits the batch better.
        above = [one for one in counts.allowed if one > fewest.gpus][:NEIGHBOURS]
        fewest = next((cost for one in above if (cost := counts.at(one)) is not None and limits.hold(cost)), None)
    fastest = None
    if by_days is None and fewest is not None:
        fastest = counts.fastest_within(limits.within_budget, fewest.gpus)
    if not counts.costs and counts.refused:
        raise SpecError(counts.refused[-1])
    problem = None if fewest is not None else _problem(counts, limits)
    notes = _notes(counts, limits, fewest) if fewest is not None else []
    if fewest is not None:
        (with_reasons,) = explained([fewest.plan], fix=fix, forbid=forbid)
        fewest = TrainingCost(with_reasons, pue)
    return GPUCount(job, fewest, fastest, problem, counts.planned, tuple(notes))


@dataclass(frozen=True)
class _Limits:
    """What a training must keep."""

    job: Job
    by_days: float | None
    budget_usd: float | None

    def in_time(self, cost: TrainingCost) -> bool:
        """The first condition that more GPUs meet: the deadline, or without one the budget."""
        return self.within_budget(cost) if self.by_days is None else cost.days.value <= self.by_days

    def within_budget(self, cost: TrainingCost) -> bool:
        return self.budget_usd is None or (cost.price_usd is not None and cost.price_usd.value <= self.budget_usd)

    def hold(self, cost: TrainingCost) -> bool:
        return self.in_time(cost) and self.within_budget(cost)

    @property
    def tokens_per_s(self) -> float:
        assert self.job.total_tokens is not None
        return 0.0 if self.by_days is None else self.job.total_tokens / (self.by_days * 86400)

    def guess(self) -> int:
        """As many GPUs as would do at their peak rate."""
        per_token = flops.model_flops(self.job.model, self.job.seq, causal=True)
        return max(1, math.ceil(self.tokens_per_s * per_token / self.job.peak_flops))

    def least(self, costs: Sequence[TrainingCost]) -> float:
        """Fewer would have to be faster per GPU than any number that was planned."""
        return self.tokens_per_s / max(one.plan.estimate.tokens_per_s_per_gpu for one in costs)


def check(job: Job, by_days: float | None, budget_usd: float | None, pue: float) -> None:
    """Refuses what cannot be asked of a job, in one sentence."""
    if by_days is None and budget_usd is None:
        raise SpecError("neither --by nor --budget was given: try --by 30d")
    for flag, value, example in (("--by", by_days, "30d"), ("--budget", budget_usd, "2M$")):
        if value is not None and not 0 < value < math.inf:
            raise SpecError(f"{flag} is {value:g} but must be above zero: try {example}")
    if job.total_tokens is None:
        raise SpecError(
            f"{'--by' if by_days is not None else '--budget'} needs the tokens of the whole training: try --tokens 15T"
        )
    if budget_usd is not None and not job.cluster.price_per_gpu_hour_usd:
        kind = job.cluster.gpu.name
        raise SpecError(f"--budget needs your price of a GPU hour in US dollars: try --price {kind}=2.5")
    check_pue(pue)


def check_pue(pue: float) -> None:
    if not 1 <= pue <= MOST_PUE:
        raise SpecError(f"--pue is {pue:g} but must be from 1 to {MOST_PUE:g}: try {PUE:g}")


@dataclass(frozen=True)
class KindPlan:
    """The fastest plan of a job on one kind of GPU; None where nothing fits."""

    job: Job
    plan: Plan | None
    pue: float
    notes: tuple[str, ...]

    @property
    def cost(self) -> TrainingCost | None:
        """None where the tokens of the whole training are unknown."""
        return None if self.plan is None or self.job.total_tokens is None else TrainingCost(self.plan, self.pue)


def compare_kinds(
    jobs: Sequence[Job],
    *,
    pue: float = PUE,
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    min_fit: float = MIN_FIT,
    min_free_gib: float = 0.0,
    progress: Progress | None = None,
) -> list[KindPlan]:
    """The fastest plan of each job, which differ in their clusters; the first with reasons."""
    check_pue(pue)
    found: list[KindPlan] = []
    for job in jobs:
        result = plan(
            job,
            top=1,
            fix=fix,
            forbid=forbid,
            min_fit=min_fit,
            min_free_gib=min_free_gib,
            explain=not found,
            progress=progress,
        )
        found.append(KindPlan(job, result.plans[0] if result.plans else None, pue, result.notes))
    return found


def _notes(counts: _Counts, limits: _Limits, fewest: TrainingCost) -> list[str]:
    """What the plan changed, and where fewer GPUs are faster than more."""
    job = counts.job.changed(cluster=counts.job.cluster.resized(fewest.gpus))
    job, notes = advice.runnable_job(job)
    job, more = advice.reachable_batch(job, LayoutConstraints.parse(counts.fix, counts.forbid))
    notes += [*more, *advice.batch_notes(job, fewest.plan.layout)]
    failing = [one for one in counts.costs if one.gpus > fewest.gpus and not limits.in_time(one)]
    if failing and limits.by_days is not None:
        shown = ", ".join(f"{one.gpus:,} ({_days(one.days.value)})" for one in failing[:3])
        notes.append(f"more GPUs are not always faster, since the batch must be cut evenly: too slow are {shown}")
    least = limits.least(counts.costs)
    below = [one for one in counts.allowed if least <= one < fewest.gpus]
    unplanned = [one for one in below if one not in counts.planned]
    if unplanned:
        numbers = f"{len(below) - len(unplanned)} of the {len(below)} numbers from {below[0]:,} to {below[-1]:,} GPUs"
        notes.append(f"{numbers} were planned and are not enough; one of the others could be")
    return notes


def _problem(counts: _Counts, limits: _Limits) -> str:
    """Why no number of GPUs is enough, with values that are."""
    job, costs = counts.job, counts.costs
    kind, total = job.cluster.gpu.name, job.total_tokens or 0
    if not costs:
        return (
            f"nothing fits on up to {counts.most_gpus:,} × {kind}: try `ultrascale plan --cluster {counts.powers[-1]}x{kind}`"
        )
    tokens = count(total).replace(" ", "")
    fastest = min(costs, key=lambda one: one.days.value)
    if limits.by_days is not None and not any(limits.in_time(one) for one in costs):
        possible = fastest.plan.estimate.tokens_per_s * limits.by_days * 86400
        return (
            f"no number of {kind} up to {counts.most_gpus:,} trains {tokens} tokens in {_days(limits.by_days)} with "
            f"this batch: the fastest, {fastest.gpus:,}, take {_days(fastest.days.value)}; try --by "
            f"{_days_up(fastest.days.value)}, --tokens {_tokens_down(possible)} or a larger --batch-tokens"
        )
    budget, prices = limits.budget_usd or 0.0, {one.gpus: one.price_usd.value for one in costs if one.price_usd is not None}
    if limits.by_days is not None:
        in_time = min((one for one in costs if limits.in_time(one)), key=lambda one: prices[one.gpus])
        smallest = counts.fewest(limits.within_budget, 1, lambda: 1)
        sooner = f"{in_time.gpus:,} × {kind} finish in time for {money(prices[in_time.gpus])}"
        affordable = f"--budget {_money_up(prices[in_time.gpus])}"
        if smallest is not None:
            shortest = counts.fastest_within(limits.within_budget, smallest.gpus)
            affordable += f" or --by {_days_up(shortest.days.value)} ({shortest.gpus:,} GPUs)"
        return f"{sooner}, which is more than the budget of {money(budget)}: try {affordable}"
    cheapest = min(costs, key=lambda one: prices[one.gpus])
    possible = total * budget / prices[cheapest.gpus]
    least = prices[cheapest.gpus]
    return (
        f"{tokens} tokens cost at least {money(least)} on {kind}, with {cheapest.gpus:,} GPUs, which is more than the budget "
        f"of {money(budget)}: try --budget {_money_up(least)} or --tokens {_tokens_down(possible)}"
    )


def _days(days: float) -> str:
    """`30 days`, `1 day`, `5.75 days`."""
    return (f"{days:,.0f}" if days >= 100 else f"{days:.3g}") + (" day" if days == 1 else " days")


def _days_up(days: float) -> str:
    """As `--by` reads it, rounded up."""
    return f"{math.ceil(days)}d" if days > 2 else f"{math.ceil(24 * days)}h"


def _tokens_down(tokens: float) -> str:
    """As `--tokens` reads it, rounded down to two digits."""
    digits = max(0, math.floor(math.log10(max(tokens, 1))) - 1)
    rounded = math.floor(tokens / 10**digits) * 10**digits
    return count(rounded).replace(" ", "")


def _money_up(usd: float) -> str:
    """As `--budget` reads it, rounded up to two digits."""
    digits = max(0, math.floor(math.log10(max(usd, 1))) - 1)
    rounded = math.ceil(usd / 10**digits) * 10**digits
    return money(rounded).replace(" ", "").replace(",", "")
