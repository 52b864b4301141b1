"""Expansions of a shell script: `$NAME`, `${NAME:-default}`, `${ARRAY[@]}` and `$((arithmetic))`; commands stay as they are."""

from __future__ import annotations

import ast
import operator
import re
import shlex
import warnings
from collections.abc import Callable
from typing import Any

from ultrascale.specs.errors import SpecError

MAX_EXPANDED_CHARACTERS = 2**20  # characters that variables may become where they are put in, all together
MAX_DEFAULT_DEPTH = 8  # defaults in defaults
MAX_EXPANSIONS = 5_000  # expansions of a script that are told apart
MAX_UNCLOSED = 10  # brackets that never close: each is searched for to the end of the text
LONGEST_ARITHMETIC = 200  # characters of an arithmetic expression
MAX_INTEGER = 2**62
_MARK = "\x00"
_PLACE = re.compile(rf"{_MARK}(\d+){_MARK}|\$([A-Za-z_]\w*|\d|[@*])")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(?:\[([@*]|\d{1,4})\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_BRACKETS = {"$((": ("(", ")", "))"), "$(": ("(", ")", ")"), "${": ("{", "}", "}"), "`": ("", "`", "`")}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Expansions:
    """The expansions of a text, each under the number of its marker."""

    def __init__(self) -> None:
        self._whole: list[str] = []

    def marked(self, text: str) -> str:
        """The text with a marker for each expansion in brackets, whatever blanks and signs are in it."""
        parts: list[str] = []
        at, quote, start, unclosed = 0, "", 0, 0
        text = text.replace(_MARK, "")
        while at < len(text):
            sign = text[at]
            if sign == "\\" and quote != "'":
                at += 2
                continue
            if sign in "'\"" and quote in ("", sign):
                quote = "" if quote else sign
            skips = quote == "'" or sign not in "$`" or unclosed > MAX_UNCLOSED or len(self._whole) > MAX_EXPANSIONS
            end = 0 if skips else _end(text, at)
            unclosed += end < 0
            if end > 0:
                parts += [text[start:at], f"{_MARK}{len(self._whole)}{_MARK}"]
                self._whole.append(text[at:end])
                start = end
            at = max(end, at + 1)
        return "".join([*parts, text[start:]])

    def __getitem__(self, number: int) -> str:
        return self._whole[number]


def _end(text: str, at: int) -> int:
    """Where the expansion that begins at `at` ends; 0 where none begins, -1 where it never ends."""
    opening = next((one for one in _BRACKETS if text.startswith(one, at)), None)
    if opening is None:
        return 0
    more, less, closing = _BRACKETS[opening]
    depth, place = len(closing), at + len(opening)
    while place < len(text):
        depth += (text[place] == more) - (text[place] == less)
        place += 1
        if not depth:
            return place
    return -1


class Variables:
    """The values of a script's variables, each a list of words."""

    def __init__(self, where: str, expansions: Expansions) -> None:
        self._where, self._expansions = where, expansions
        self._values: dict[str, list[str]] = {}
        self._expanded_characters = 0

    def assign(self, name: str, words: list[str], add: bool = False) -> None:
        before = self._values.get(name, []) if add else []
        joined = add and len(before) == len(words) == 1  # A+=text of a variable that is no array
        self._values[name] = [before[0] + words[0]] if joined else before + words

    def words(self, raw: str) -> list[str]:
        """A word that is one variable and nothing else becomes the words in it; others have theirs put in."""
        match = _PLACE.fullmatch(raw)
        if match is None:
            return [self.text(raw)]
        parameter = _PARAMETER.fullmatch(self._inside(match))
        name = parameter[1] if parameter else ""
        if parameter is None or (name not in self._values and parameter[3] is None):
            return [] if name in ("@", "*") else [self.text(raw)]
        if name not in self._values or parameter[2] not in (None, "@", "*") or parameter[3] is not None:
            return _split(self.text(raw))
        values = self._values[name]
        self._count_characters(sum(len(value) + 1 for value in values))
        if len(values) == 1:
            return _split(values[0])
        # Of `"--name value"` in an array, quoted as one word, the shell makes two where the array is put in without quotes.
        return [word for value in values for word in (_split(value) if value.startswith("-") else [value])]

    def text(self, raw: str, unset: str | None = None, depth: int = 0) -> str:
        """The text with variables put in; one without a value becomes `unset`, or stays as it is."""
        return _PLACE.sub(lambda match: self._substitute(match, unset, depth), raw)

    def _inside(self, match: re.Match[str]) -> str:
        """`NAME:-default` of a parameter; nothing of arithmetic and commands."""
        if match[1] is None:
            return match[2]
        whole = self._expansions[int(match[1])]
        return whole[2:-1] if whole.startswith("${") else ""

    def _substitute(self, match: re.Match[str], unset: str | None, depth: int) -> str:
        whole = match[0] if match[1] is None else self._expansions[int(match[1])]
        if whole.startswith("$(("):
            found = self._arithmetic(whole[3:-2])
            return whole if found is None else str(found)
        parameter = _PARAMETER.fullmatch(self._inside(match))
        if parameter is None:
            return whole
        name, index, sign, default = parameter.groups()
        values = self._values.get(name)
        if values is not None and not (sign and sign[0] == ":" and not "".join(values)):
            if sign and sign[-1] == "+":
                values = [self._default(default, unset, depth)]
            elif index and index.isdigit():
                values = values[int(index) : int(index) + 1]
            value = " ".join(values)
            self._count_characters(len(value))
            return value
        if sign and sign[-1] in "-=":
            return self._default(default, unset, depth)
        if sign and sign[-1] == "+":
            return ""
        return whole if unset is None else unset

    def _default(self, default: str, unset: str | None, depth: int) -> str:
        self._count_characters(len(default))
        if depth > MAX_DEFAULT_DEPTH:
            return default
        return self.text(self._expansions.marked(default.replace('"', "").replace("'", "")), unset, depth + 1)

    def _arithmetic(self, text: str) -> int | None:
        """The value of a sum of variables and numbers; None where it cannot be known."""
        known = re.sub(r"\$\{(\w+)\}|\$(\w+)", r"\1\2", text)
        known = re.sub(r"\b[A-Za-z_]\w*\b", lambda word: "".join(self._values.get(word[0], [word[0]]))[:20] or "0", known)
        if len(known) > LONGEST_ARITHMETIC:
            return None
        if (choice := re.fullmatch(r"([^?]*)\?([^?:]*):([^?:]*)", known)) is not None:
            known = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python, on digits that run into letters
                return _value(ast.parse(known.strip(), mode="eval").body)
        except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
            return None

    def _count_characters(self, characters: int) -> None:
        """Variables that double each other would fill the memory."""
        self._expanded_characters += characters
        if self._expanded_characters > MAX_EXPANDED_CHARACTERS:
            raise SpecError(
                f"{self._where}: its variables grow beyond {MAX_EXPANDED_CHARACTERS:,} characters: is this the script that "
                "starts a training?"
            )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return [text]


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            found = int(value)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            found = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            found = int(_OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
            found = int(_OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.IfExp(test=test, body=body, orelse=other):
            found = _value(body) if _value(test) else _value(other)
        case _:
            raise ValueError("not a sum")
    if abs(found) > MAX_INTEGER:
        raise ValueError("too large")
    return found
