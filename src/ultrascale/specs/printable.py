"""Texts of users for a terminal: no control character in them is obeyed. Imports nothing, since every command needs it."""

from __future__ import annotations

# Control characters (ECMA-48's C0, DEL and C1), which a terminal obeys, and Unicode's marks that turn the direction of text.
# C0 and DEL have pictures in Unicode; line feed and tab stay.
CONTROL_CODES = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_PICTURES = {code: 0x2400 + code if code < 0x20 else 0xFFFD for code in CONTROL_CODES if chr(code) not in "\n\t"}
_PICTURES[0x7F] = 0x2421


def printable(text: str) -> str:
    """A text for a terminal: what the terminal would obey is shown as a picture, such as ␛."""
    return text.translate(_PICTURES)
