"""Several machines and one study: a real PostgreSQL server, started here, and exclusive claims of trials."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ultrascale.cost.estimate import estimate
from ultrascale.measure import bench_layouts as layouts
from ultrascale.measure.bench_layouts import CandidateSet, Sweep
from ultrascale.measure.bench_layouts_study import Study
from ultrascale.measure.bench_trial import TrialFailure
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

pytestmark = pytest.mark.slow  # needs psycopg and a PostgreSQL server

WAIT_S = 60


class Server:
    """PostgreSQL in a folder of its own, on a port of its own; as root it runs as nobody, since it refuses to be root."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries = folder, binaries
        nobody = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        self.user = {"user": nobody.pw_uid, "group": nobody.pw_gid} if nobody else {}
        if nobody:
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://bench@127.0.0.1:{self.port}/postgres"
        data = str(folder / "data")
        self._done("initdb", "-D", data, "-U", "bench", "--auth=trust", "--no-sync", "-E", "UTF8")
        words = ("-D", data, "-k", str(folder), "-h", "127.0.0.1", "-p", str(self.port), "-c", "fsync=off")
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [binaries / "postgres", *words], cwd=folder, stdout=self.log, stderr=subprocess.STDOUT, **self.user
        )
        until = time.monotonic() + WAIT_S
        while subprocess.run([binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)

    def _done(self, program: str, *words: str) -> None:
        ended = subprocess.run([self.binaries / program, *words], cwd=self.folder, capture_output=True, text=True, **self.user)
        assert ended.returncode == 0, ended.stderr

    def end(self) -> None:
        self.process.terminate()  # smart shutdown would wait for clients; none is connected
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()


def binaries() -> Path | None:
    """Where Debian puts them, or wherever the path leads."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("initdb"):
        places.append(Path(found).parent)
    return next(
        (place for place in places if all((place / name).exists() for name in ("initdb", "postgres", "pg_isready"))), None
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    place = binaries()
    if place is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:  # short: a socket's path may have 107 characters
        running = Server(Path(folder), place)
        try:
            yield running
        finally:
            running.end()


@pytest.fixture(scope="module")
def candidates() -> CandidateSet:
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=64, batch_tokens=8 * 64, precision="fp32")
    layout = Layout(dp=2, mbs=4, gas=1)
    plan = Plan(job=job, layout=layout, estimate=estimate(job, layout))
    return layouts.varied(plan, layouts.base_request(plan, None, 3, 0), "mbs,recompute", None)


def work(url: str, candidates: CandidateSet, folder: Path, queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """One machine: takes what waits until nothing does. Trials fail at once, which is a result too."""
    study = Study(url, "shared")  # all of them at once, on a server that has no tables yet
    study.offer(candidates.candidates, False)
    mine = []
    while (claimed := study.claim([one.layout for one in candidates.candidates])) is not None:
        mine.append(claimed[1])
        study.finish(claimed[1], TrialFailure("crashed", "made up"), 0.1, folder)
    queue.put(mine)


@pytest.mark.slow
def test_machines_share_a_study_without_duplicate_trials(server: Server, candidates: CandidateSet, tmp_path: Path) -> None:
    assert len(candidates.candidates) == 5
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    machines = [context.Process(target=work, args=(server.url, candidates, tmp_path, queue)) for _ in range(3)]
    for machine in machines:
        machine.start()
    taken = [queue.get(timeout=WAIT_S) for _ in machines]
    for machine in machines:
        machine.join()
    assert sorted(number for one in taken for number in one) == list(range(5))
    records = Study(server.url, "shared").records()
    assert {record.state for record in records.values()} == {"failed"}
    assert set(records) == {one.layout for one in candidates.candidates}


def test_a_real_trial_is_stored_on_the_server(server: Server, candidates: CandidateSet, tmp_path: Path) -> None:
    one = CandidateSet(candidates.base, candidates.candidates[:1])
    (row,) = Sweep(one, Study(server.url, "real"), tmp_path, None, 120).run()
    assert row.record is not None
    assert row.record.state == "measured", row.record
    again = Study(server.url.replace("postgresql", "postgres"), "real")
    assert again.records()[one.candidates[0].layout] == row.record


def test_a_missing_database_is_a_clear_error(server: Server) -> None:
    with pytest.raises(SpecError, match=r"cannot be opened \(.*does not exist"):
        Study(server.url.replace("/postgres", "/none"), "x")


def test_a_lost_server_is_a_clear_error(server: Server, candidates: CandidateSet) -> None:
    """The last of this file: it ends the server."""
    study = Study(server.url, "ends")
    server.end()
    with pytest.raises(RunError, match=r"does not answer any more.*the same command goes on"):
        study.offer(candidates.candidates, False)
