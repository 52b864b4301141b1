"""Shell scripts as words: assignments, arrays, parameters, arithmetic and conditions on variables. Read, never run.

Expansions with blanks in them would fall apart in shlex, so each one is replaced by a marker first (shell_expansion.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ultrascale.export.shell_expansion import Expansions, Variables
from ultrascale.specs.errors import SpecError

LONGEST_SCRIPT = 2**18  # characters; people's have some thousands
LONGEST_CONDITION = 2**12
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_COMMENT = re.compile(r"(^|[ \t])#.*$", re.MULTILINE)
_REDIRECTION = re.compile(r'(?<=[ \t])(?:\d|&)?>{1,2}&?[ \t]*(?:"[^"\n]*"|[^\s;|)"]+)')
_SIGNS = "();<>|&\n"
_STATEMENT_ENDS = set("\n;&|")
_DECLARES = ("export", "local", "declare", "readonly")
_PRINTS = ("echo", "printf")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}


def commands(text: str, where: str) -> list[list[str]]:
    """The words of each command, variables put in; what a script computes at run time stays as `$NAME`.

    Conditions on variables decide which branch is read, a variable without a value being empty; of others both are.
    """
    if len(text) > LONGEST_SCRIPT:
        raise SpecError(f"{where} has {len(text):,} characters, too many for a script that starts a training: is it one?")
    script = _Script(where)
    found: list[list[str]] = []
    for statement, end in _statements(_COMMENT.sub(r"\1", text), where, script.expansions):
        words = script.read(statement, end)
        if words and words[0] == "eval":
            found += [inner for inner, _ in _statements(" ".join(words[1:]), where, Expansions())]
        elif words and words[0] not in _PRINTS:
            found.append(words)
    return found


@dataclass
class _Conditional:
    """An open `if`: whether its test is being read, what the test says so far, and whether a branch was taken."""

    testing: bool = True
    verdict: bool | None = None
    operator: str = ""
    reads: bool = True
    taken: bool | None = False

    def add(self, result: bool | None) -> None:
        """One more command of the test, after `&&` or `||`; None: not known."""
        before = self.verdict
        if self.operator == "&&":
            known = False in (before, result)
            self.verdict = False if known else None if None in (before, result) else True
        elif self.operator == "||":
            known = True in (before, result)
            self.verdict = True if known else None if None in (before, result) else False
        else:
            self.verdict = result

    def decide(self) -> None:
        self.testing = False
        self.reads = self.verdict is not False and self.taken is not True
        if self.taken is not True:
            self.taken = True if self.verdict else self.taken if self.verdict is False else None


class _Script:
    """The variables of a script and its open conditions, as far as it was read."""

    def __init__(self, where: str) -> None:
        self.expansions = Expansions()
        self._variables = Variables(where, self.expansions)
        self._open: list[_Conditional] = []

    def read(self, statement: list[str], end: str) -> list[str]:
        """The words of a command, or none where the statement is an assignment, a condition, or in a branch not taken."""
        words = statement
        while words and words[0] in ("if", "elif", "then", "else", "fi", "do"):
            self._keyword(words[0])
            words = words[1:]
        if self._open and self._open[-1].testing:
            if words:
                self._open[-1].add(self._test(words))
            self._open[-1].operator = end.strip() if end.strip() in ("&&", "||") else ""
            return []
        if not words or not all(one.reads for one in self._open):
            return []
        return [word for raw in self._take_assignments(words) for word in self._variables.words(raw)]

    def _keyword(self, word: str) -> None:
        if word == "if":
            self._open.append(_Conditional())
        elif self._open and word == "fi":
            self._open.pop()
        elif self._open and word == "then":
            self._open[-1].decide()
        elif self._open and word == "elif":
            self._open[-1].testing, self._open[-1].operator = True, ""
        elif self._open and word == "else":
            self._open[-1].reads = self._open[-1].taken is not True

    def _test(self, words: list[str]) -> bool | None:
        """The result of `[ … ]`, `[[ … ]]` or `test …` on variables; None where it takes more to know it."""
        if words[0] == "!":
            inner = self._test(words[1:]) if words[1:] else None
            return None if inner is None else not inner
        closing = {"[": "]", "[[": "]]"}.get(words[0])
        inside = words[1:-1] if closing and words[-1] == closing else words[1:] if words[0] == "test" else None
        if inside is None:
            return {"true": True, "false": False}.get(words[0])
        inside = [self._variables.text(word, unset="")[:LONGEST_CONDITION] for word in inside]
        if any("$(" in word or "`" in word for word in inside):
            return None
        match inside:
            case ["!", *rest]:
                inner = self._test(["test", *rest])
                return None if inner is None else not inner
            case ["-z", value]:
                return not value
            case ["-n", value] | [value]:
                return bool(value)
            case [left, "=" | "==", right]:
                return fnmatchcase(left, right) if right.count("*") < 3 else None
            case [left, "!=", right]:
                return not fnmatchcase(left, right) if right.count("*") < 3 else None
            case [left, sign, right] if sign in _NUMBERS and left.isdigit() and right.isdigit():
                a, b = int(left[:18]), int(right[:18])
                return {"==": a == b, "!=": a != b, ">": a > b, ">=": a >= b, "<": a < b, "<=": a <= b}[_NUMBERS[sign]]
        return None

    def _take_assignments(self, statement: list[str]) -> list[str]:
        """Keeps the assignments at the head of a statement; gives back the words of the command after them."""
        at = 0
        while at < len(statement) and statement[at] in _DECLARES:
            at += 1
        while at < len(statement) and (match := _ASSIGN.fullmatch(statement[at])):
            at += 1
            name, add, value = match[1], bool(match[2]), match[3]
            if not value and statement[at : at + 1] == ["("]:
                end = next((place for place in range(at, len(statement)) if statement[place] == ")"), len(statement))
                self._variables.assign(
                    name, [word for raw in statement[at + 1 : end] for word in self._variables.words(raw)], add
                )
                at = end + 1
            else:
                self._variables.assign(name, [self._variables.text(value)], add)
        return statement[at:]


def _statements(text: str, where: str, expansions: Expansions) -> Iterator[tuple[list[str], str]]:
    """The raw words of each statement, and the sign that ends it."""
    lines, numbers = _logical_lines(_REDIRECTION.sub("", expansions.marked(text)))
    lexer = shlex.shlex("\n".join(lines), posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    statement: list[str] = []
    inside = 0
    try:
        for token in iter(lexer.get_token, None):
            signs = set(token) <= set(_SIGNS)
            if signs:
                inside = max(0, inside + token.count("(") - token.count(")"))
                statement += [sign for sign in token if sign in "()"]
            else:
                statement.append(token)
            if signs and not inside and set(token) & _STATEMENT_ENDS and statement:
                yield statement, token.strip("()")
                statement = []
    except ValueError as error:
        line = numbers[_unclosed_quote_line(lines)]
        raise SpecError(f"{where} is not a shell script: {str(error).lower()} of what begins at line {line}") from None
    if statement:
        yield statement, ""


def _unclosed_quote_line(lines: list[str]) -> int:
    """The line in which the quote begins that never ends; else the last one."""
    quote, begun = "", len(lines) - 1
    for number, line in enumerate(lines):
        for at, sign in enumerate(line):
            escaped = at > 0 and line[at - 1] == "\\" and quote != "'"
            if sign == quote and not escaped:
                quote = ""
            elif not quote and sign in "'\"" and not escaped:
                quote, begun = sign, number
    return begun


def _logical_lines(text: str) -> tuple[list[str], list[int]]:
    """Lines, those that end in a backslash joined to the next; and where each begins in the text."""
    lines, numbers, open_ended = [""], [1], False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip("\r")
        ends_open = line.endswith("\\") and not line.endswith("\\\\")
        line = line[:-1] + " " if ends_open else line
        if open_ended:
            lines[-1] += line
        else:
            lines.append(line)
            numbers.append(number)
        open_ended = ends_open
    return lines, numbers


def options(words: list[str]) -> dict[str, str | bool | list[str]]:
    """`--name value`, `--name=value`, `--flag` and `--name a b` as a mapping, underscores as dashes; the last one counts."""
    found: dict[str, str | bool | list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            name = "--" + name[2:].replace("_", "-")
            found[name] = value if equals else True
            name = "" if equals else name
        elif name and (found[name] is True or not word.startswith("$")):  # a variable without a value is no further word
            before = found[name]
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [str(before), word]
    return found
