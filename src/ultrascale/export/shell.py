"""Shell scripts as words: assignments, arrays, `$NAME` and `${NAME:-default}`. Read, never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from ultrascale.specs.errors import SpecError

LONGEST_SCRIPT = 2**18  # characters; people's have some thousands
LONGEST = 2**20  # characters that variables may become where they are put in, all together
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^}]*))?\})")
_COMMENT = re.compile(r"(^|[ \t])#.*$", re.MULTILINE)
_SIGNS = "();<>|&\n"
_END = set("\n;&|")


def commands(text: str, where: str) -> list[list[str]]:
    """The words of each command, variables put in; what a script computes at run time stays as `$NAME`."""
    if len(text) > LONGEST_SCRIPT:
        raise SpecError(f"{where} has {len(text):,} characters, too many for a script that starts a training: is it one?")
    script = _Script(where)
    found = []
    for statement in _statements(text, where):
        words = script.assigned(statement)
        if words:
            found.append([word for raw in words for word in script.expanded(raw)])
    return found


class _Script:
    """The variables of a script as far as it was read."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._variables: dict[str, list[str]] = {}
        self._spent = 0

    def assigned(self, statement: list[str]) -> list[str]:
        """Keeps the assignments at the head of a statement; gives back the words of the command after them."""
        at = 0
        while at < len(statement) and statement[at] in ("export", "local", "declare", "readonly"):
            at += 1
        while at < len(statement) and (match := _ASSIGN.fullmatch(statement[at])):
            at += 1
            name, add, value = match[1], match[2], match[3]
            if not value and statement[at : at + 1] == ["("]:
                end = next((place for place in range(at, len(statement)) if statement[place] == ")"), len(statement))
                values = [word for raw in statement[at + 1 : end] for word in self.expanded(raw)]
                at = end + 1
            else:
                values = [self._text(value)]
            self._variables[name] = (self._variables.get(name, []) if add else []) + values
        return statement[at:]

    def expanded(self, raw: str) -> list[str]:
        """A word that is a variable and nothing else becomes the words in it; others have theirs put in."""
        match = _NAME.fullmatch(raw)
        if match is None or (match[1] or match[2]) not in self._variables:
            return [self._text(raw)]
        values = self._variables[match[1] or match[2]]
        self._spend(sum(len(value) + 1 for value in values))
        if len(values) != 1:
            return values
        try:
            return shlex.split(values[0], comments=True)
        except ValueError:
            return values

    def _text(self, raw: str) -> str:
        return _NAME.sub(self._put_in, raw)

    def _put_in(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        if name not in self._variables:
            return match[0] if default is None else default
        value = " ".join(self._variables[name])
        self._spend(len(value))
        return value

    def _spend(self, characters: int) -> None:
        """Variables that double each other would fill the memory."""
        self._spent += characters
        if self._spent > LONGEST:
            raise SpecError(
                f"{self._where}: its variables grow beyond {LONGEST:,} characters: is this the script that starts a training?"
            )


def _statements(text: str, where: str) -> Iterator[list[str]]:
    lines, numbers = _logical(text)
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
            if signs and not inside and set(token) & _END and statement:
                yield statement
                statement = []
    except ValueError as error:
        line = numbers[_opened(lines)]
        raise SpecError(f"{where} is not a shell script: {str(error).lower()} of what begins at line {line}") from None
    if statement:
        yield statement


def _opened(lines: list[str]) -> int:
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


def _logical(text: str) -> tuple[list[str], list[int]]:
    """Lines without comments, those that end in a backslash joined to the next; and where each begins in the text."""
    lines, numbers, open_ended = [""], [1], False
    for number, raw in enumerate(_COMMENT.sub("", text).splitlines(), 1):
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
        elif name:
            before = found[name]
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [str(before), word]
    return found
