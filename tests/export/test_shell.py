"""Shell scripts are read as words: variables, arrays, quotes, comments; nothing is run."""

from __future__ import annotations

import time

import pytest

from ultrascale.export.shell import commands, options
from ultrascale.specs.errors import SpecError

CASES = [
    ("run a b", [["run", "a", "b"]]),
    ("run a \\\n  b", [["run", "a", "b"]]),
    ("A=1\nrun $A ${A} x$A", [["run", "1", "1", "x1"]]),
    ("run ${B:-2} ${B-3} $B", [["run", "2", "3", "$B"]]),
    ("A=(1 2)\nA+=(3)\nrun ${A[@]} end", [["run", "1", "2", "3", "end"]]),
    ('A=(\n --x 1  # one\n --y 2\n)\nrun "${A[@]}"', [["run", "--x", "1", "--y", "2"]]),
    ('A="--x 1 --y 2"\nrun $A', [["run", "--x", "1", "--y", "2"]]),
    ("run 'a b' \"c; d\"", [["run", "a b", "c; d"]]),
    ("one; two && three | four", [["one"], ["two"], ["three"], ["four"]]),
    ("# don't\nrun a # it's\nrun b", [["run", "a"], ["run", "b"]]),
    ("export A=1 B=2\nC=$A$B run $B", [["run", "2"]]),
    ("A=(1\nrun $A", []),
    ("run $(rm -rf x) `date`", [["run", "$(rm -rf x)", "`date`"]]),
    ("A=8\nB=$(($A*4))\nrun $B $((B/A)) $(( ($A > 1) ? 1 : 0 )) $((C+1))", [["run", "32", "4", "1", "$((C+1))"]]),
    ('A=${1:-"x y"}\nB=${C:-${D:-3}}\nrun "$A" $B $@', [["run", "x", "y", "3"]]),
    ("A=${PATH_OF:-<a path>/x}\nrun --to $A", [["run", "--to", "<a", "path>/x"]]),
    ('A=("--x 1" "--y")\nrun ${A[@]} ${A[0]}', [["run", "--x", "1", "--y", "--x", "1"]]),
    ("A=a\nA+=b\nrun ${A} ${A:+c} ${Z:+c}", [["run", "ab", "c"]]),
    ("run --fp16 2>&1 | tee log", [["run", "--fp16"], ["tee", "log"]]),
    ('A="run --x 1 | tee log"\necho $A\neval $A', [["run", "--x", "1"], ["tee", "log"]]),
    ("A=fp8\nif [[ $A == fp8 ]]; then\nrun a\nelse\nrun b\nfi", [["run", "a"]]),
    ("A=2\nif [ $A = 1 ]; then\nrun a\nelif [ $A -gt 1 ]\nthen run b; else run c; fi\nrun d", [["run", "b"], ["run", "d"]]),
    ('if [ -z ${A} ] && [ ! -n "$B" ]; then run a; else run b; fi', [["run", "a"]]),
    ("if [ -f x ] || [[ $A == y ]]; then run a; else run b; fi", [["run", "a"], ["run", "b"]]),
    ("if false; then if true; then run a; fi; run b; fi; run c", [["run", "c"]]),
    ("", []),
]


@pytest.mark.parametrize(("text", "words"), CASES, ids=[text[:20] for text, _ in CASES])
def test_arguments_of_a_script(text: str, words: list[list[str]]) -> None:
    assert commands(text, "run.sh") == words


def test_options_take_one_value_several_or_none() -> None:
    words = ["--a", "1", "--b=2", "--flag", "--n_x", "1", "2", "3", "--neg", "-1", "--a", "9"]
    assert options(words) == {"--a": "9", "--b": "2", "--flag": True, "--n-x": ["1", "2", "3"], "--neg": "-1"}


def test_an_unclosed_quote_is_reported_with_its_line() -> None:
    with pytest.raises(SpecError, match=r"run\.sh is not a shell script: no closing quotation of what begins at line 4"):
        commands("a \\\n b\n\nrun 'b\nc\nd\n", "run.sh")


def test_exponentially_growing_variables_are_bounded() -> None:
    bomb = "A=xxxxxxxx\n" + "\n".join("A=$A$A" for _ in range(60)) + "\nrun $A"
    with pytest.raises(SpecError, match="grow beyond"):
        commands(bomb, "run.sh")
    wide = "A=" + "x" * 60000 + "\nrun " + "$A" * 100000
    with pytest.raises(SpecError, match="grow beyond"):
        commands(wide, "run.sh")
    arrays = "A=(x x)\n" + "\n".join("A=(${A[@]} ${A[@]})" for _ in range(60)) + "\nrun ${A[@]}"
    with pytest.raises(SpecError, match="grow beyond"):
        commands(arrays, "run.sh")


@pytest.mark.parametrize("text", ["run $(" * 20000, "run ${a:-" * 12000, "run " + "$((A*" * 20000, "`" * 100000])
def test_brackets_that_never_close_take_no_time(text: str) -> None:
    before = time.process_time()
    commands(text, "run.sh")
    assert time.process_time() - before < 5
