"""Hostile environment variables, command lines, and configurations of other engines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hostile.cases import SHORT, Case, a_plan
from hostile.spec_files import READERS
from test_bad_input import NINES, flags

VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7"}


def of_environment() -> Iterator[Case]:
    for given in (VARIABLES, SLURM):
        for name in given:
            for number, value in enumerate(("²", "٣", "-1", NINES, "\x1b[31m", "1.5", "")):
                words = (["train", "--model=tiny"], ["bench", "collectives"])[number % 2]
                yield Case(f"{name}-{number}", words, environment={**given, name: value})


ARGUMENTS: list[list[str]] = [
    [],
    ["nothing"],
    ["--nothing"],
    ["plan"],
    ["plan", "tiny"],
    ["presets", "nothing"],
    ["presets", "x" * 10_000],
    ["presets", "["],
    ["presets", "[/bold]"],
    flags(cluster="²xh100"),
    flags(cluster="²xhere"),
    flags(cluster=f"{NINES}xhere"),
    flags(cluster="0xhere"),
    flags(cluster="8x" * 3000),
    flags(batch="²"),
    flags(batch="1" + "0" * 4200),
    flags(seq="٣k"),
    flags(model="x" * 5000),
    flags(model="[/]"),
    flags(model="../" * 2000),
    [*flags(), "--fix=tp=" + "9" * 4000],
    [*flags(), "--fix=tp=²"],
    [*flags(), "--fix=" + "tp=1," * 5000],
    [*flags(), "--forbid=" + "zero=1," * 5000],
    [*flags(), "-o", "/dev/full"],
    [*flags(), "-o", "/dev/null/plan.yaml"],
    [*flags(), "-o", "x" * 5000],
    ["accuracy", "nothing.csv", "--worst=-1"],
    ["accuracy", "nothing.csv", "--by=["],
    ["train"],
    ["train", "--model=tiny", "--steps=0"],
    ["train", "--model=tiny", "--steps=" + NINES],
    ["train", "--model=tiny", "--steps=-1"],
    ["train", "--model=tiny", "--nproc=0"],
    ["train", "--model=tiny", "--nproc=99999"],
    ["train", "--model=tiny", "--seed=-1"],
    ["train", "--model=tiny", "--seed=" + "9" * 4000],
    ["train", "--model=tiny", "--seq=nan"],
    ["train", "--model=tiny", "--data=nothing:1,:"],
    ["train", "--model=tiny", "--data=" + "stdlib:1," * 2000],
    ["train", "--model=tiny", "layout.tp=²"],
    ["train", "--model=tiny", "layout.tp"],
    ["train", "--model=tiny", "train.lr=nan"],
    ["train", "--model=tiny", "train.lr=inf"],
    ["train", "--model=tiny", "train.nothing=1"],
    ["train", "--model=tiny", "nothing.lr=1"],
    ["train", "--model=tiny", "=" * 500],
    ["train", "--model=tiny", "train.clip=-1"],
    ["train", "--resume", "nothing"],
    ["train", "--resume", "/dev/null"],
    ["train", "--weights", "nothing", "--model=tiny"],
    ["verify"],
    ["verify", "--world=0"],
    ["verify", "--dump=."],
    ["verify", "--dump=/dev", "--against=/dev/null"],
    ["verify", "--dump=nowhere", "--against=nowhere", "--map=nowhere"],
    ["verify", "--engine=nothing", "nowhere.yaml"],
    ["verify", "--engine=torchtitan", "nowhere.yaml"],
    ["verify", "--world=" + "9" * 4000],
    ["verify", "--world=4", "--only=nothing"],
    ["verify", "--world=4", "--model=nothing"],
    ["data", "info", "/dev/zero"],
    ["data", "info", ""],
    ["data", "info", "x" * 5000],
    ["data", "tokenize", "stdlib", "-o", "/dev/null"],
    ["data", "tokenize", "stdlib", "-o", "out", "--workers=0"],
    ["data", "tokenize", "stdlib", "-o", "out", "--workers=" + "9" * 4000],
    ["data", "tokenize", "/dev/zero", "-o", "out"],
    ["data", "tokenize", "", "-o", "out"],
    ["data", "tokenize", "stdlib", "-o", "out", "--eod=x"],
    ["convert"],
    ["convert", "hf"],
    ["convert", "hf", "nothing", "out"],
    ["convert", "hf", "/dev/null", "out"],
    ["convert", "nothing", "hf", "out"],
    ["convert", "hf", "hf", "hf", "hf"],
    ["convert", "nothing", "hf", "out", "--dtype=int4"],
    ["doctor", "nothing.yaml"],
    ["generate", "nothing"],
    ["generate", "."],
    ["generate", "hf://../.."],
    ["generate", "hf://a/b@../../c"],
    ["data", "tokenize", "hf://a", "-o", "new"],
    ["plan", "hf://", "--cluster", "8xh100", "--batch-tokens", "1M", "--seq", "4096"],
    ["rehearse", "nothing.yaml"],
    ["profile"],
    ["profile", "--steps=0"],
    ["profile", "--trace", ""],
    ["profile", "--trace", "x" * 5000],
    ["bench", "nothing"],
    ["bench", "collectives", "--sizes=nan"],
    ["bench", "collectives", "--sizes=1..9" + "9" * 4000],
    ["bench", "collectives", "--sizes=²"],
    ["bench", "collectives", "--groups=²"],
    ["bench", "collectives", "--groups=0"],
    ["bench", "collectives", "--groups=" + "9" * 4000],
    ["bench", "collectives", "--only=["],
    ["bench", "layouts", "nothing.yaml", "--budget=²m"],
    ["bench", "layouts", "nothing.yaml", "--budget=" + "9" * 4000 + "h"],
    ["bench", "layouts", "nothing.yaml", "--vary=tp", "--timeout=nan"],
    ["compare", "nothing", "nothing"],
    ["compare", "", ""],
    ["calibrate", "nothing"],
    ["calibrate", "/dev/zero"],
    ["report", "nothing"],
    ["report", "/dev/zero"],
    ["studio", "--port=0"],
    ["studio", "--port=" + "9" * 4000],
    ["studio", "--port=-1"],
    ["studio", "--accuracy=/dev/zero"],
    ["studio", "--runs=/dev/null"],
    ["export", "nothing.yaml", "--to=nothing", "-o", "out"],
    ["export", "nothing.yaml", "--to=slurm", "-o", "out"],
    ["import", "nothing"],
    ["import", ""],
    ["import", "/dev/zero"],
    ["import", "x" * 5000],
    ["compare", "x" * 5000, "x" * 5000],
    ["calibrate", "x" * 5000],
    ["report", "x" * 5000],
    ["explain", "x" * 5000],
    ["doctor", "x" * 5000],
    ["generate", "x" * 5000],
    ["train", "--resume", "x" * 5000],
    ["train", "--model=tiny", "--steps=1", "--out", "x" * 5000],
    ["convert", "x" * 5000, "hf", "out"],
    ["studio", "--runs", "x" * 5000, "--port=1"],
    ["\x1b[2J"],
    ["train", "\x9b2J=\x07"],
]
WITH_PLAN: list[list[str]] = [
    ["explain", "p.yaml", "--what-if=tp=" + "9" * 4000],
    ["explain", "p.yaml", "--what-if=" + "=" * 500],
    ["explain", "p.yaml", "--what-if=gpus=٣"],
    ["explain", "p.yaml", "--largest=["],
    ["explain", "p.yaml", "--row=x"],
    ["train", "p.yaml", "layout.tp=" + "9" * 4000],
    ["train", "p.yaml", "--nproc=3"],
    ["verify", "p.yaml", "layout.tp=nan"],
    ["rehearse", "p.yaml", "--rank=-1"],
    ["rehearse", "p.yaml", "--rank=" + "9" * 4000],
    ["rehearse", "p.yaml", "--stage=²"],
    ["rehearse", "p.yaml", "--stage=" + "9" * 4000],
    ["rehearse", "p.yaml", "--device=["],
    ["rehearse", "p.yaml", "--kernels=["],
    ["rehearse", "p.yaml", "--engine=["],
    ["rehearse", "p.yaml", "--world=3"],
    ["rehearse", "p.yaml", "p.yaml"],
    ["rehearse", "--script=p.yaml", "--world=2", "--rank=" + "9" * 4000],
    ["rehearse", "--script=" + "x" * 4000, "--world=2"],
    ["rehearse", "--script=p.yaml", "--engine=torchtitan", "--world=2"],
    ["profile", "p.yaml", "layout.tp=²"],
    ["profile", "p.yaml", "--nproc=3"],
    ["bench", "layouts", "p.yaml", "--vary=mbs=²", "--nproc=2"],
    ["bench", "layouts", "p.yaml", "--vary=mbs=" + "9" * 4000, "--nproc=2"],
    ["bench", "layouts", "p.yaml", "--vary=" + "mbs=1:" * 3000, "--nproc=2"],
    ["bench", "layouts", "p.yaml", "--vary=mbs", "--nproc=2", "--storage=nothing://"],
    ["bench", "layouts", "p.yaml", "--vary=mbs", "--nproc=2", "--storage=sqlite:////dev/null"],
    ["compare", "p.yaml", "nothing"],
    ["compare", "p.yaml", "/dev/zero"],
    ["calibrate", "p.yaml"],
    ["report", "p.yaml", "-o", "/dev/full"],
    ["export", "p.yaml", "--to=kubernetes", "-o", "out", "--image=\n"],
    ["export", "p.yaml", "--to=megatron", "-o", "/dev/null"],
    ["export", "p.yaml", "--to=torchtitan", "-o", "out", "--style=["],
    ["import", "p.yaml"],
    ["accuracy", "p.yaml"],
    ["plan", "p.yaml", *SHORT],
    ["data", "info", "p.yaml"],
    ["profile", "--trace", "p.yaml"],
]


def of_arguments() -> Iterator[Case]:
    for number, words in enumerate(ARGUMENTS):
        yield Case(f"words-{number}-{re.sub('[^a-z0-9=-]+', '-', ' '.join(words))[:40]}", words, codes=(0, 2))
    for number, words in enumerate(WITH_PLAN):
        written = (lambda path: a_plan().save(path / "p.yaml"),)
        name = f"plan-words-{number}-{re.sub('[^a-z0-9=-]+', '-', ' '.join(words))[:40]}"
        yield Case(name, words, written, codes=(0, 1, 2))


FOREIGN: dict[str, str] = {
    "run.sh-unclosed": 'torchrun pretrain_gpt.py --num-layers "4',
    "run.sh-endless": "A=$B\nB=$A\ntorchrun pretrain_gpt.py --num-layers $A",
    "run.sh-grows": "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 60)) + "torchrun pretrain_gpt.py --num-layers $A59",
    "run.sh-digits": f"torchrun pretrain_gpt.py --num-layers {NINES} --hidden-size ² --seq-length -1",
    "run.sh-continued": "torchrun pretrain_gpt.py \\\n" * 2000,
    "config.toml-digits": "[training]\nseq_len = " + "9" * 4000 + "\n[parallelism]\ntensor_parallel_degree = -1\n",
    "config.toml-nan": "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = nan\nlocal_batch_size = inf\n",
    "config.toml-lists": "[model]\nname = []\nflavor = {}\n[training]\nseq_len = [1]\n[parallelism]\ntensor_parallel_degree=[]",
    "config.toml-date": "[training]\nseq_len = 1979-05-27\n[model]\nname='llama3'\nflavor='8B'\n",
    "config.toml-deep": "a = " + "[" * 3000,
    "config.toml-keys": "[" + ".".join("a" * 1 for _ in range(5000)) + "]\nb = 1\n",
    "config.py-command": "import os\nos.system('touch config-was-run')\n",
    "config.py-deep": "x = " + "(" * 500 + "1" + ")" * 500,
    "config.py-digits": "config = Trainer.Config(training=TrainingConfig(seq_len=" + "9" * 5000 + "))",
    "config.py-zeros": "x = '\\0'\n\0",
    "nanotron.yaml-lists": "parallelism: []\nmodel: {model_config: []}\ntokens: 3\noptimizer: x\n",
    "nanotron.yaml-values": "parallelism: {dp: x, tp: -1, pp: .nan}\nmodel: {model_config: {hidden_size: .inf}}\ntokens: {}\n",
    "nanotron.yaml-accelerate": "distributed_type: FSDP\nfsdp_config: []\nnum_processes: .nan\nnum_machines: -1\n",
    "ds_config.json-values": '{"train_batch_size": -1, "zero_optimization": {"stage": "x"}, "fp16": [], "bf16": 3}',
    "ds_config.json-nan": '{"train_micro_batch_size_per_gpu": NaN, "gradient_accumulation_steps": 1e999, "fp16": []}',
    "ds_config.json-vast": '{"train_batch_size": 1' + "0" * 4000 + ', "train_micro_batch_size_per_gpu": 1}',
}


def of_engines() -> Iterator[Case]:
    for name, text in FOREIGN.items():
        file = name.partition("-")[0]
        written = (lambda path, f=file, t=text: (path / f).write_text(t),)
        yield Case(f"import-{name}", READERS[file], written, codes=(0, 2))
        words = ["import", file, "--model=tiny", "--seq=128", "--cluster=8xh100", "-o", "p.yaml"]
        yield Case(f"import-given-{name}", words, written, codes=(0, 2))
