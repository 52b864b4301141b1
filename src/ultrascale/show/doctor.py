"""Output of `ultrascale doctor`: findings in a table, then advice."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ultrascale.measure.doctor import Finding
from ultrascale.show.lines import count_of, labelled, table

STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def show_findings(console: Console, findings: Sequence[Finding], plan: str | None = None) -> None:
    columns = ("", "what", "found")
    grid = table(f"this machine, and {plan} on it" if plan else "this machine", *columns, left=columns)
    for finding in findings:
        grid.add_row(Text(finding.level, style=STYLES[finding.level]), Text(finding.name), Text(finding.text))
    console.print(grid)
    for finding in findings:
        if finding.level != "ok" and finding.advice:
            labelled(console, f"{finding.name}:", STYLES[finding.level], finding.advice)
    console.print(verdict(findings, plan))


def verdict(findings: Sequence[Finding], plan: str | None = None) -> str:
    bad = [finding.name for finding in findings if finding.level == "bad"]
    warned = sum(finding.level == "warn" for finding in findings)
    what = plan or "a run"
    if bad:
        return f"{what} would not run here: {', '.join(bad)}"
    return f"nothing stops {what} here" + (f" ({count_of(warned, 'warning')})" if warned else "")


def stopped(findings: Sequence[Finding]) -> bool:
    """Whether something would stop the plan or run: exit code 1."""
    return any(finding.level == "bad" for finding in findings)
