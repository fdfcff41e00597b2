"""What `brigade doctor` finds on each machine, as lines of a self-test."""

from collections.abc import Iterator

from msgspec.structs import replace

from launcher.checks import HOST_CHECKS, Finding, check_clock, check_same_versions
from launcher.doctor import query_host
from launcher.remote import connected, on_each
from serve.core.agent_messages import HostFacts
from serve.selftest.report import Line, Verdict
from serve.selftest.section import Context


def doctor(context: Context) -> Iterator[Line]:
    hosts = context.hosts if context.has_hosts else context.hosts[:1]
    with connected(hosts, context.access, lambda _: None) as connections:
        answers = on_each(connections, query_host)
    for rank, (facts, ahead_seconds) in enumerate(answers):
        for line in _of_host(facts):
            yield replace(line, where=f"rank {rank}")
        if rank:
            clock = check_clock(facts.host, ahead_seconds)
            yield by_doctor("machine.clock", clock, f"rank {rank}")
    if len(answers) > 1:
        same = check_same_versions([facts for facts, _ in answers])
        yield by_doctor("machine.same_versions", same)


def _of_host(facts: HostFacts) -> Iterator[Line]:
    system = facts.system
    if facts.mac:
        system = f"macOS {facts.mac.version} {facts.mac.machine}"
    yield Line("machine.os", system)
    yield Line("machine.python", facts.python)
    yield Line("machine.mlx", facts.versions["mlx"])
    yield Line("machine.ram", facts.memory_bytes / 1e9)
    yield Line("machine.free_ram", facts.free_memory_bytes / 1e9)
    for check in HOST_CHECKS:
        finding = check(facts)
        if finding:
            yield by_doctor(f"machine.{check.__name__.removeprefix('check_')}", finding)


def by_doctor(id: str, finding: Finding, where: str = "") -> Line:
    """Returns a finding of doctor as a line. The finding's words stay on this machine."""
    verdict = Verdict.EXPECTED if finding.status == "ok" else Verdict.WORSE
    line = Line(id, finding.status, where=where, verdict=verdict)
    return replace(line, detail=finding.what, advice=finding.fix)


MEASUREMENTS = [doctor]
