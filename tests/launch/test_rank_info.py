"""Which process this is, from what torchrun and Slurm say."""

from __future__ import annotations

import pytest

from ultrascale.launch.rank_info import RankInfo, rank_info_from_env
from ultrascale.specs.errors import SpecError


def test_a_process_without_a_launcher_has_no_rank_info():
    assert rank_info_from_env({}) is None
    assert rank_info_from_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_torchrun():
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert rank_info_from_env(given) == RankInfo(5, 8, 1, 4, "env://")


def test_slurm():
    given = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "3",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_NODELIST": "gpu[07-08,11]",
        "SLURM_JOB_ID": "41234",
    }
    assert rank_info_from_env(given) == RankInfo(3, 16, 3, 8, "tcp://gpu07:21234", launch="slurm 41234.0")
    again = rank_info_from_env({**given, "SLURM_RESTART_COUNT": "1"})
    assert again == RankInfo(3, 16, 3, 8, "tcp://gpu07:21234", launch="slurm 41234.0", restarted=True)
    with pytest.raises(SpecError, match="SLURM_NTASKS is 'many' but must be a whole number"):
        rank_info_from_env({**given, "SLURM_NTASKS": "many"})
    with pytest.raises(SpecError, match="SLURM_JOB_ID is 'x' but"):
        rank_info_from_env({**given, "SLURM_JOB_ID": "x"})
    assert rank_info_from_env({**given, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).address == "tcp://10.0.0.1:29500"
    assert rank_info_from_env({**given, "SLURM_NODELIST": "one,two"}).address.startswith("tcp://one:")


@pytest.mark.parametrize("given", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_nonsense_is_refused(given):
    with pytest.raises(SpecError, match="environment"):
        rank_info_from_env(given)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize("value", ["²", "٣", "-1", "+1", "1.0", "1_0", " 1", "9" * 5000, "0x1", "\x1b[31m", "1\n", "nan"])
@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_a_non_integer_variable_is_a_clear_error(launcher, value):
    assert rank_info_from_env(launcher) is not None
    for name in launcher:
        with pytest.raises(SpecError, match=rf"the environment's {name} is .* but must be a whole number from") as caught:
            rank_info_from_env({**launcher, name: value})
        assert str(caught.value).isprintable()


def test_impossible_numbers_are_refused():
    for name, value in (("WORLD_SIZE", "0"), ("WORLD_SIZE", "9" * 11), ("LOCAL_WORLD_SIZE", "0"), ("MASTER_PORT", "65536")):
        with pytest.raises(SpecError, match=f"{name} is '{value}' but must be a whole number from"):
            rank_info_from_env({**TORCHRUN, name: value})
    with pytest.raises(SpecError, match="MASTER_PORT is '0x'"):
        rank_info_from_env({**SLURM, "MASTER_PORT": "0x"})
