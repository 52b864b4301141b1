"""Whole runs, killed, resumed, cut otherwise and rolled back, are those of one process; faults in them are found."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint  # once here, and not once in every fork

from ultrascale.measure.verify_programs import Launch, Program, ProgramGenerator, simpler
from ultrascale.measure.verify_runs import check_program, shrink
from ultrascale.parallel import torch_private
from ultrascale.parallel.zero import FSDPGrads
from ultrascale.show.verify import coverage, failure, program_row
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import async_checkpoint
from ultrascale.train.request import from_words

torch.set_num_threads(1)

ZERO = Layout(dp=2, zero=1, mbs=2, gas=2)
FIXED = {
    "zero × evaluation × kill × other layout": Program(
        launches=(
            Launch(layout=ZERO, eval_every=1, end="kill", at=4, phase="evaluating", rank=1),
            Launch(layout=Layout(cp=2, zero=3, mbs=4, gas=2), eval_every=2),
        )
    ),
    "pipeline × roll back × new lr, bf16": Program(
        precision="bf16",
        model="qwen3",
        launches=(
            Launch(layout=Layout(pp=2, schedule="zero-bubble", mbs=2, gas=4), eval_every=2),
            Launch(
                layout=Layout(tp=2, mbs=8), roll_back=2, lr=1e-3, end="kill", at=3, phase="forward and backward", save_every=3
            ),
            Launch(layout=Layout(tp=2, pp=2, mbs=2, gas=4), lr=1e-3, eval_every=3, background=False),
        ),
    ),
    "experts × signal × more steps": Program(
        model="deepseek",
        ema=True,
        training={"balance_loss": 0.01, "z_loss": 1e-3, "clip_value": 5e-3},
        launches=(
            Launch(layout=Layout(dp=2, ep=2, mbs=4), steps=4, end="stop", at=2),
            Launch(
                layout=Layout(dp=2, ep=2, zero=1, mbs=2, gas=2), eval_every=1, end="kill", at=5, phase="saving", save_every=5
            ),
            Launch(layout=Layout(mbs=8)),
        ),
    ),
    "batch-size ramp × kill × other layouts": Program(
        training={"batch_ramp": "64:256,128:512"},  # steps of 2, 2, 2, 2, 4, 4 sequences
        launches=(
            Launch(layout=Layout(dp=2, tp=2, zero=1, gas=4), eval_every=2, end="kill", at=3, phase="update"),
            Launch(layout=Layout(pp=2, gas=8), roll_back=2, end="stop", at=5),
            Launch(layout=Layout(dp=2, gas=4), eval_every=3),
        ),
    ),
}


@pytest.mark.parametrize("name", [next(iter(FIXED)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(FIXED)[1:])])
def test_a_run_is_that_of_one_process(name: str) -> None:
    verdict = check_program(FIXED[name])
    assert verdict.ok, verdict


@cache
def drawn(count: int) -> tuple[ProgramGenerator, list[Program]]:
    drawing = ProgramGenerator(1000)
    return drawing, [drawing.next() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_drawn_runs_are_those_of_one_process(part: int) -> None:
    """`ultrascale verify --runs 200 --seed 1000` is the same, with the matrix of pairs."""
    _, programs = drawn(200)
    failed = [verdict for program in programs[10 * part :][:10] if not (verdict := check_program(program)).ok]
    assert not failed


@pytest.mark.slow
def test_drawn_runs_use_every_pair_of_features_that_is_legal() -> None:
    """20,000 drawn programs of six schedules used 1,259 pairs; V-Half and V-Min add more."""
    drawing, _ = drawn(200)
    assert drawing.covered.keys() == drawing.possible
    assert len(drawing.possible) > 1259


def test_drawing_is_repeatable_legal_and_covers_many_pairs() -> None:
    first, second = ProgramGenerator(7), ProgramGenerator(7)
    programs = [first.next() for _ in range(8)]
    assert programs == [second.next() for _ in range(8)]
    assert all(program.problem() is None for program in programs)
    assert all(program.launches[-1].end == "done" for program in programs)
    assert len(first.covered) >= 400
    assert first.covered.keys() <= first.possible
    lines = list(coverage(first))
    assert max(map(len, lines)) <= 80
    assert len(lines) == 3 + len({feature for pair in first.possible for feature in pair})


def test_the_commands_of_a_program_are_those_that_ran(tmp_path: Path) -> None:
    program = FIXED["pipeline × roll back × new lr, bf16"]
    file, model = program.save(tmp_path)
    assert Program.load(file) == program
    first, second, _ = program.commands(tmp_path / "run", model)
    words = first.split()
    assert words[:4] == ["ultrascale", "train", "--model", str(model)]
    request = from_words(words[words.index("--nproc") + 2 :], {}, 2, False, str(model))
    assert (request.layout, request.job.precision) == (program.launches[0].layout, "bf16")
    assert "checkpoints/step-000002" in second
    assert second.endswith("# kill -9 of every process in step 3, forward and backward")


def test_a_program_without_an_option_trains_without_it() -> None:
    program = Program(model="mixtral", training={"balance_loss": 0.01}, launches=(Launch(layout=ZERO),))
    assert program.base_training.balance_loss == 0.01
    without = next(other for other in simpler(program) if not other.training)
    assert without.base_training.balance_loss == Training().balance_loss
    assert not any("balance_loss" in word for word in without.words(0))


def test_an_invalid_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "program.yaml"
    for text, says in {
        "launches: []": "program.launches is empty",
        "model: lama\nlaunches: [{layout: {dp: 2}}]": "must be one of llama",
        "launches: [{layout: {dp: 3}}]": "dp",
        "launches: [{layout: {dp: 2, tq: 3}}]": "tq",
    }.items():
        file.write_text(text)
        with pytest.raises(SpecError, match=says):
            Program.load(file)


@pytest.mark.slow
def test_stale_gradients_after_an_evaluation_are_found_and_minimized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The mistake that ZeRO had: after an evaluation, whose forwards no backward has followed, the shards kept gradients."""

    def begin(self: FSDPGrads) -> None:
        evaluated = bool(torch_private._post_forward_order(self.module))
        for parameter in () if evaluated else (*self.shards(), *self.unsharded()):
            parameter.grad = None
        torch_private.fsdp_begin_step(self.module)

    monkeypatch.setattr(FSDPGrads, "begin", begin)
    failed = check_program(
        Program(
            launches=(
                Launch(layout=Layout(dp=2, zero=1, mbs=4), eval_every=2, end="kill", at=5, phase="update"),
                Launch(layout=Layout(mbs=8)),
            )
        )
    )
    assert not failed.ok
    assert failed.difference.startswith("step 3 of launch 1: grad_norm")
    short = shrink(failed)
    assert len(short.program.launches) == 1
    assert short.program.launches[0].layout.zero == 1
    assert short.program.launches[0].eval_every
    assert short.where.startswith("step 3, gradient of")
    text = "\n".join(failure(short, tmp_path))
    assert "layout.zero=1" in text
    assert (tmp_path / "program.yaml").exists()


@pytest.mark.slow
def test_an_optimizer_state_lost_on_resume_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = async_checkpoint.restore

    def forgetful(engine, source, *arguments, **named):
        original(engine, source, *arguments, **named)
        for weight in engine.weights:
            engine.optimizer.moment(weight, "exp_avg").zero_()

    monkeypatch.setattr("ultrascale.launch.rank.restore", forgetful)
    verdict = check_program(
        Program(launches=(Launch(layout=Layout(mbs=8), end="kill", at=5, background=False), Launch(layout=Layout(dp=2, mbs=4))))
    )
    assert not verdict.ok
    assert verdict.first == (6, 1)
    assert "DIFFERS" in program_row(verdict)


def test_simpler_programs_have_one_feature_less() -> None:
    program = FIXED["experts × signal × more steps"]
    smaller = list(simpler(program))
    assert [len(one.launches) for one in smaller[:3]] == [2, 2, 2]
    assert all(one != program for one in smaller)
