"""The trials of `bench layouts` in a database: an Optuna study, in one SQLite file or on a server that machines share.

Configurations are offered as waiting trials and claimed one by one. A claimed trial has an owner and a heartbeat; when its
owner is gone, whoever looks next sets it failed. Connections are closed after each use, since trials are forked.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from ultrascale.cost.columns import CHOICES
from ultrascale.measure.bench_layouts import Configuration
from ultrascale.measure.bench_trial import TrialFailure, TrialResult, TrialStep, tensors_gib
from ultrascale.parallel.exit_reason import state
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.folders import alone
from ultrascale.specs.layout import Layout
from ultrascale.specs.validate import shown
from ultrascale.train.request import Request

EXAMPLES = "sqlite:///study.db or postgresql://user@host/database"
LOCK_WAIT_S = 30.0
BEAT_S, SILENT_S = 5, 60  # a machine that has not beaten for so long is gone
TURN = 0x756C7472  # the key of our lock on a server: any number that is ours
FILE, SERVERS = "sqlite:///", ("postgresql://", "postgres://")


@contextmanager
def ours(url: str) -> Iterator[None]:
    """A file is for one process at a time: SQLite cannot keep two from claiming the same trial. A server can."""
    if not url.startswith(FILE):
        yield
        return
    file = Path(url.removeprefix(FILE))
    lock = file.with_name(f"{file.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise SpecError(f"--storage is {url} but cannot be written ({error.strerror}): try {EXAMPLES}") from None
    with alone(lock, f"{file} is in use by another bench: wait for it, or share a server, --storage {EXAMPLES.split()[-1]}"):
        yield


@contextmanager
def database(where: str, opening: bool = False) -> Iterator[None]:
    """What a database says when it cannot, as a sentence."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise _sentence(error, where, opening) from error


@contextmanager
def in_turn(url: str) -> Iterator[None]:
    """On a server, one machine at a time: two that make the tables, or offer the same trials, would do it twice."""
    if url.startswith(FILE):
        yield
        return
    address, connect = _address(url)
    try:
        engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool, connect_args=connect)
    except ImportError:
        raise SpecError("--storage is on PostgreSQL, and psycopg is not installed: try pip install 'psycopg[binary]'") from None
    with engine.connect() as connection:  # the server gives the lock back with the connection, however that ends
        connection.execute(sqlalchemy.text(f"select pg_advisory_lock({TURN})"))
        yield


def opened(url: str) -> optuna.storages.RDBStorage:
    address, connect = _address(url)
    template = address.replace("{", "{{").replace("}", "}}")  # Optuna fills templates
    engine = {"poolclass": sqlalchemy.pool.NullPool, "connect_args": connect}
    try:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            return optuna.storages.RDBStorage(template, engine, heartbeat_interval=BEAT_S, grace_period=SILENT_S)
    except RuntimeError as error:  # Optuna's tables are of another version
        raise SpecError(f"--storage is {without_password(url)}: {error}") from None


def _address(url: str) -> tuple[str, dict[str, Any]]:
    """As SQLAlchemy wants it, and what its driver is told."""
    if url.startswith(FILE):
        return url, {"timeout": LOCK_WAIT_S}
    if url.startswith(SERVERS):
        return f"postgresql+psycopg://{url.partition('://')[2]}", {"connect_timeout": 10}
    raise SpecError(f"--storage is {shown(without_password(url))} but must be a database's address, such as {EXAMPLES}")


def _sentence(error: Exception, where: str, opening: bool) -> Exception:
    cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
    text = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
    again = "What is finished is kept: the same command goes on from there"
    if "locked" in text:
        return RunError(f"{where} is locked by another process for more than {LOCK_WAIT_S:g} s: end that. {again}")
    if "full" in text or "No space" in text:
        return RunError(f"the disk of {where} is full: make room. {again}")
    if opening:
        return SpecError(f"--storage is {where} but it cannot be opened ({text}): try {EXAMPLES}")
    return RunError(f"{where} does not answer any more ({text}). {again}")


def without_password(url: str) -> str:
    try:
        return sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url


def this_process() -> dict[str, Any]:
    return {"host": _host(), "pid": os.getpid()}


def _host() -> str:
    """Of this boot: a container has another name, a machine that was started anew has other processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def orphaned(trial: FrozenTrial) -> bool:
    owner = trial.user_attrs.get("owner")
    if owner is None:  # it died between its claim and its first word
        return trial.datetime_start is None or datetime.now() - trial.datetime_start > timedelta(seconds=SILENT_S)
    return owner["host"] == _host() and not _lives(owner["pid"])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return state(pid) != "Z"


CLEARLY = 0.8  # of the best trial's tokens/s: what is slower after its first steps will not win
ENOUGH = 2  # settled steps before that is judged
State = Literal["waiting", "running", "measured", "stopped early", "failed"]
_STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "measured",
    TrialState.PRUNED: "stopped early",
    TrialState.FAIL: "failed",
}
_WORTH = ("failed", "waiting", "running", "stopped early", "measured")  # of two trials of one layout, which is shown


class Slower(optuna.pruners.BasePruner):
    """Stops what is clearly slower than the best trial that was measured to its end."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        seen = list(trial.intermediate_values.values())
        others = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        best = max((one.value for one in others if one.value is not None), default=0.0)
        return len(seen) >= ENOUGH and statistics.median(seen) < CLEARLY * best


@dataclass(frozen=True)
class Record:
    """What the database holds of one configuration."""

    number: int
    state: State
    tokens_per_s: float | None = None
    """measured; of one that was stopped early, the median of its steps"""
    tensors_gib: float | None = None
    """at the peak of the fullest rank"""
    kind: str = ""
    reason: str = ""
    """why it failed, or was stopped"""
    seconds: float | None = None
    folder: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ("measured", "stopped early", "failed")

    @property
    def finished(self) -> bool:
        """Not to be run again: it ended by itself."""
        return self.ended and self.kind != "interrupted"


class Study:
    """The trials of one job on one kind of machine."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.shown = without_password(url)
        with database(self.shown, opening=True), in_turn(url):
            self.storage = opened(url)
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=name,
                direction="maximize",
                load_if_exists=True,
                pruner=Slower(),
                sampler=optuna.samplers.RandomSampler(),
            )
            self._id = self.storage.get_study_id_from_name(name)

    def offer(self, configurations: Iterable[Configuration], stopped_count: bool) -> None:
        """What nobody has measured or tried waits from now on. `stopped_count`: one that was stopped early is done."""
        self.bury()
        with database(self.shown), in_turn(self.url):
            records = self.records()
            for one in configurations:
                seen = records.get(one.layout)
                if seen is None or (seen.ended and not _enough(seen, stopped_count)):
                    self.study.add_trial(_waiting(one.layout))

    def bury(self) -> None:
        """Trials whose owner is gone become failed ones."""
        with database(self.shown):
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if orphaned(trial):
                    self._fail(trial.number, TrialFailure("interrupted", "the process that ran it is gone"))
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                optuna.storages.fail_stale_trials(self.study)

    def claim(self, layouts: Iterable[Layout]) -> tuple[Layout, Claimed] | None:
        """The first of them that waits; nobody else has it from now on."""
        with database(self.shown):
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            by_layout = {_layout(trial): trial.number for trial in reversed(waiting)}
            for layout in layouts:
                if layout in by_layout and self._turn(by_layout[layout], TrialState.RUNNING):
                    return layout, Claimed(self, by_layout[layout])
        return None

    def records(self) -> dict[Layout, Record]:
        """Of each layout the trial that tells most."""
        with database(self.shown):
            trials = self.study.get_trials(deepcopy=False)
        found: dict[Layout, Record] = {}
        for trial in trials:
            layout, record = _layout(trial), _record(trial)
            before = found.get(layout)
            if before is None or _WORTH.index(record.state) >= _WORTH.index(before.state):
                found[layout] = record
        return found

    def _turn(self, number: int, new: TrialState) -> bool:
        """Into a new state; False where somebody else was quicker."""
        try:
            return self.storage.set_trial_state_values(self._trial_id(number), new)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _fail(self, number: int, failed: TrialFailure) -> None:
        identity = self._trial_id(number)
        try:
            self.storage.set_trial_user_attr(identity, "kind", failed.kind)
            self.storage.set_trial_user_attr(identity, "reason", failed.reason)
        except optuna.exceptions.UpdateFinishedTrialError:
            return  # another machine has said so
        self._turn(number, TrialState.FAIL)


class Claimed:
    """A trial that is ours to run."""

    def __init__(self, study: Study, number: int) -> None:
        self.study, self.number = study, number
        self._id = study._trial_id(number)
        study.storage.record_heartbeat(self._id)
        study.storage.set_trial_user_attr(self._id, "owner", this_process())

    def beat(self) -> None:
        with database(self.study.shown):
            self.study.storage.record_heartbeat(self._id)

    def slower(self, steps: list[TrialStep]) -> bool:
        """Tells the database these steps; whether the trial is clearly slower than the best."""
        with database(self.study.shown), self._unless_lost():
            trial = optuna.Trial(self.study.study, self._id)
            for step in steps:
                trial.report(step.tokens_per_s, step.number)
            return bool(steps) and trial.should_prune()
        return False

    def tell(self, ended: TrialResult | TrialFailure, seconds: float, folder: Path) -> None:
        study, storage = self.study, self.study.storage
        with database(study.shown), self._unless_lost():
            storage.set_trial_user_attr(self._id, "seconds", seconds)
            storage.set_trial_user_attr(self._id, "folder", str(folder))
            if isinstance(ended, TrialResult):
                storage.set_trial_user_attr(self._id, "measured", ended.measured.model_dump(mode="json"))
                storage.set_trial_user_attr(self._id, "tensors_gib", tensors_gib(ended.measured))
                storage.set_trial_state_values(self._id, TrialState.COMPLETE, [ended.measured.tokens_per_s])
            elif ended.kind == "stopped":
                storage.set_trial_user_attr(self._id, "reason", ended.reason)
                storage.set_trial_state_values(self._id, TrialState.PRUNED)
            else:
                study._fail(self.number, ended)

    @staticmethod
    def _unless_lost() -> suppress:
        """Another machine took us for dead and has set the trial failed: it will be run again, and what we say is late."""
        return suppress(optuna.exceptions.UpdateFinishedTrialError)


def study_name(base: Request, device: str) -> str:
    """The same for every call that measures the same thing on the same kind of machine."""
    job, training = base.job, base.training
    said = f"{job.model.name}, {job.sequences} × {job.seq} tokens, {job.precision}, {base.layout.gpus} × {device}"
    told = {"model": job.model.model_dump(mode="json"), "gradients": job.gradients, "optimizer": job.optimizer}
    code = hashlib.sha256(json.dumps([told, training.model_dump(mode="json")], sort_keys=True).encode()).hexdigest()[:8]
    return f"{said}, {training.steps} steps ({code})"


def _distribution(name: str) -> BaseDistribution:
    if name in CHOICES:
        return CategoricalDistribution(CHOICES[name])
    if Layout.model_fields[name].annotation is bool:
        return CategoricalDistribution((False, True))
    return IntDistribution(0, 2**30)  # zero_shards 0 means all


def _waiting(layout: Layout) -> FrozenTrial:
    params = {name: value or 0 if name == "zero_shards" else value for name, value in layout.model_dump().items()}
    distributions = {name: _distribution(name) for name in params}
    return optuna.create_trial(state=TrialState.WAITING, params=params, distributions=distributions)


def _layout(trial: FrozenTrial) -> Layout:
    return Layout(**{**trial.params, "zero_shards": trial.params["zero_shards"] or None})


def _record(trial: FrozenTrial) -> Record:
    told = trial.user_attrs
    seen = list(trial.intermediate_values.values())
    silent = trial.state == TrialState.FAIL and "kind" not in told
    return Record(
        trial.number,
        _STATES[trial.state],
        trial.value if trial.state == TrialState.COMPLETE else statistics.median(seen) if seen else None,
        told.get("tensors_gib"),
        "interrupted" if silent else told.get("kind", ""),
        "the machine that ran it fell silent" if silent else told.get("reason", ""),
        told.get("seconds"),
        told.get("folder", ""),
    )


def _enough(record: Record, stopped_count: bool) -> bool:
    return record.finished and (stopped_count or record.state != "stopped early")
