"""`brigade selftest`: runs all sections, shows a page, and writes the file to send back."""

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.prompt import Confirm

from launcher.doctor import run_on_all
from launcher.hostfile import Host
from launcher.remote import AgentConnection, connected, on_each
from serve.core.errors import BrigadeError, UsageError
from serve.core.facts import versions
from serve.selftest.page import show
from serve.selftest.report import (
    FORMAT,
    Line,
    Scrubber,
    SectionReport,
    SelftestReport,
    failed,
    not_tried,
    write,
)
from serve.selftest.runner import OVER, run_section
from serve.selftest.section import SECTIONS, Context, SectionRun

_RUNNER = "serve.selftest.runner"
_EXTRA_SECONDS = 30.0  # the time to start and end a runner on another host
_ABOUT = (
    "It measures for at most {minutes:g} minutes. Other programs make the figures worse. The file "
    "at the end holds figures, versions, the chip and error messages. It holds no names, keys, "
    "addresses, paths or texts. Look at it before you send it."
)
_FAULTS = (
    "--faults kills and stops processes of servers that it starts itself. With other machines, it "
    "also takes the link between ranks 0 and 1 away for 30 s. Go on?"
)


def selftest(context: Context, *, faults: bool, asks: bool) -> int:
    """Returns 0 if nothing is worse than expected, otherwise 1."""
    if not os.access(Path(), os.W_OK):
        raise UsageError(f"{Path.cwd()} cannot be written: run the self-test in another folder.")
    console = Console(highlight=False)
    console.print(_ABOUT.format(minutes=context.minutes))
    if faults and asks:
        faults = Confirm.ask(_FAULTS, console=console, default=False)
    deadline = time.monotonic() + 60 * context.minutes
    sections = []
    with console.status("") as status:
        for name, section in SECTIONS.items():
            status.update(section.title)
            started = time.monotonic()
            lines = [line.judged() for line in _lines_of(name, context, deadline, faults)]
            sections.append(SectionReport(name, time.monotonic() - started, lines))
    report = SelftestReport(
        format=FORMAT,
        date=time.strftime("%Y-%m-%d-%H%M%S"),
        system=f"{platform.system()} {platform.machine()}",
        versions=versions(),
        num_hosts=len({host.ssh for host in context.hosts}),
        has_own_model=context.model is not None,
        sections=sections,
    )
    show(console, report)
    path = write(report, Path(), Scrubber(_names(context)))
    console.print(f"Wrote {path}: please add it to an issue of the form “Results on Macs”.")
    return report.exit_code


def _lines_of(name: str, context: Context, deadline: float, faults: bool) -> Iterator[Line]:
    section = SECTIONS[name]
    if name == "faults" and not faults:
        yield not_tried("faults.all", "--faults was not given")
    elif time.monotonic() > deadline:
        yield not_tried(f"{name}.all", OVER)
    elif section.on_each_host and context.has_hosts:
        try:
            yield from _on_each_host(name, context, deadline)
        except BrigadeError as error:
            yield failed(f"{name}.start", str(error))
    else:
        yield from run_section(name, context, deadline)


def _on_each_host(name: str, context: Context, deadline: float) -> Iterator[Line]:
    """Runs a section on all hosts at the same time, by an agent on each."""
    first_ranks = {host.ssh: host for host in reversed(context.hosts)}
    hosts = sorted(first_ranks.values(), key=lambda host: host.rank)
    alone = [Host(0, host.ssh, host.ips) for host in hosts]
    seconds = max(1.0, deadline - time.monotonic())
    job = msgspec.json.encode(SectionRun(name, Context(minutes=context.minutes))).decode()
    words = ["-m", _RUNNER, job, f"{seconds:g}"]

    def run(connection: AgentConnection) -> tuple[int, list[str]]:
        return run_on_all([connection], {}, words, seconds + _EXTRA_SECONDS)

    with connected(alone, context.access, lambda _: None) as connections:
        outcomes = on_each(connections, run)
    for host, (code, output) in zip(hosts, outcomes, strict=True):
        lines = list(_parsed(output))
        if code or not lines:
            last = output[-1] if output else "no output"
            lines.append(failed(f"{name}.runner", f"ended with code {code}: {last}"))
        for line in lines:
            where = ", ".join(filter(None, [f"rank {host.rank}", line.where]))
            yield msgspec.structs.replace(line, where=where)


def _parsed(output: list[str]) -> Iterator[Line]:
    """Yields the lines of a runner, without the name of the rank that is in front of each."""
    for text in output:
        _, _, message = text.partition("] ")
        if message.startswith("{"):
            yield msgspec.json.decode(message, type=Line)


def _names(context: Context) -> set[str]:
    """Returns the names of the hosts, and the users that log in there."""
    words = {host.ssh for host in context.hosts}
    return {part for word in words for part in (word, *word.split("@"))}
