"""Links of the documents that lead out of docs/ (to benchmarks/, to the README) work in the repository; the site has no such
page and shows the file's name instead. mkdocs calls `on_page_markdown` (mkdocs.yml, hooks).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = len(PurePosixPath(page.file.src_uri).parent.parts)

    def named(link: re.Match[str]) -> str:
        words, target = link.groups()
        if target.count("../") <= depth:
            return link.group()
        return f"{words} (`{target.replace('../', '')}`)"

    return LINK.sub(named, markdown)
