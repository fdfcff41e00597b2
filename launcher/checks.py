"""Finds problems of a cluster in the facts of its hosts. All functions are pure.

Checks of macOS were written from other people's reports and have not run there yet: wired memory
(mlx-lm#883, omlx#2184), MLX_METAL_FAST_SYNCH (mlx#3142), Local Network privacy (mlx#3755),
addresses of Thunderbolt links that go at a reboot (mlx#1902), kinds of ports.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from launcher.hostfile import Host
from launcher.routes import BRIDGE, WIFI, Pair, Routes, is_link_local
from serve.core.agent_messages import HopSpeed, HostFacts
from serve.core.amounts import format_bytes
from serve.core.facts import BRIGADE, MISSING, VERSIONS, compare

MLX_FLOOR = (0, 32, 1)
_MACOS_FLOOR = (14,)
_FIREWALL_TOOL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
GB = 10**9
_CLOCK_SECONDS = 2.0
_SLOW_BYTES_PER_SECOND = 30e6
_SLOW_ROUND_TRIP_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. status is ok, warn or fail; `fix` says how to mend a problem."""

    status: str
    where: str
    what: str
    fix: str = ""


def named(facts: HostFacts, name: str) -> HostFacts:
    """Returns the facts under the name that findings use for the host."""
    return msgspec.structs.replace(facts, host=name)


def with_variables(facts: HostFacts, environment: Mapping[str, str]) -> HostFacts:
    """Returns the facts of a host whose ranks get these environment variables in addition."""
    return msgspec.structs.replace(facts, variables={**facts.variables, **environment})


def check_port(facts: HostFacts) -> Finding | None:
    if not facts.port:
        return None
    if facts.port_holder:
        fix = f"end it, or choose another port: serve --port {facts.port + 1}"
        what = f"port {facts.port} is taken by {facts.port_holder}"
        return Finding("fail", facts.host, what, fix)
    return Finding("ok", facts.host, f"port {facts.port} is free")


def check_versions(facts: HostFacts) -> Finding:
    versions = facts.versions
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = f"Python {facts.python}, {text}"
    if MISSING in versions.values():
        fix = f"install Brigade for {facts.executable} (docs/install.md)"
        return Finding("fail", facts.host, f"a package is missing: {text}", fix)
    if _numbers(versions["mlx"]) < MLX_FLOOR:
        fix = f"{facts.executable} -m pip install 'mlx>={'.'.join(map(str, MLX_FLOOR))}'"
        return Finding("fail", facts.host, f"mlx waits for lost peers forever: {text}", fix)
    return Finding("ok", facts.host, text)


def check_blas(facts: HostFacts) -> Finding | None:
    if facts.system != "Linux":
        return None
    if facts.blas:
        return Finding("ok", facts.host, f"OpenBLAS at {facts.blas}")
    what = "no OpenBLAS: float32 products on the CPU take about 30 times as long"
    return Finding("warn", facts.host, what, "sudo apt install libopenblas0-pthread")


def check_memory(facts: HostFacts) -> Finding:
    total = facts.memory_bytes
    free = facts.free_memory_bytes
    what = f"{format_bytes(free)} of {format_bytes(total)} memory are free"
    wired = 0
    if facts.mac and facts.mac.wired_limit.isdecimal():
        wired = int(facts.mac.wired_limit) << 20
    most = int(total - max(8 * GB, 0.1 * total))
    if wired > most:
        what += f", but {format_bytes(wired)} may be wired, which leaves too little for the system"
        return Finding("warn", facts.host, what, f"sudo sysctl iogpu.wired_limit_mb={most >> 20}")
    if free < 0.1 * total:
        return Finding("warn", facts.host, what, "end other programs, or give --memory")
    return Finding("ok", facts.host, what)


def check_wired(facts: HostFacts) -> Finding | None:
    """Warns of wired memory that no rank holds. macOS wires less for itself: a few GB, and tables
    that grow with the memory."""
    if facts.mac is None or facts.mac.has_ranks:
        return None
    wired = facts.mac.wired_bytes
    if wired <= 4 * GB + facts.memory_bytes // 8:
        return None
    what = (
        f"{format_bytes(wired)} are wired although no rank runs: memory that a killed process had "
        "wired may be lost until a restart"
    )
    fix = "end other programs that use the GPU; if that does not help, restart the Mac"
    return Finding("warn", facts.host, what, fix)


def check_disk(facts: HostFacts) -> Finding:
    free = facts.free_disk_bytes
    what = f"{format_bytes(free)} of disk space are free for models"
    if free < 10 * GB:  # Not a failure: the model may be here already, or --cache-dir elsewhere.
        fix = "free disk space, or choose another folder with HF_HOME or serve --cache-dir"
        return Finding("warn", facts.host, what, fix)
    return Finding("ok", facts.host, what)


def check_prefix_folder(facts: HostFacts) -> Finding | None:
    folder = facts.prefix_folder
    if folder is None:
        return None
    if folder.problem:
        fix = "give --prefix-cache-dir a folder that the user of the ranks can write"
        return Finding("fail", facts.host, f"prefixes in {folder.path}: {folder.problem}", fix)
    what = (
        f"{format_bytes(folder.num_bytes)} of prefixes are in {folder.path}, "
        f"{format_bytes(folder.free_bytes)} are free there"
    )
    if folder.free_bytes < GB:
        return Finding("warn", facts.host, what, "free disk space, or lower --prefix-cache-disk")
    return Finding("ok", facts.host, what)


def check_files(facts: HostFacts) -> Finding:
    max_files = facts.max_files
    if 0 <= max_files < 4096:
        fix = "raise nofile in /etc/security/limits.conf to 65536 and log in again"
        if facts.system == "Darwin":
            fix = "sudo launchctl limit maxfiles 65536 200000"
        return Finding("warn", facts.host, f"a process may open {max_files} files", fix)
    if max_files < 0:
        text = "any number of"
    else:
        text = f"{max_files:,}"
    return Finding("ok", facts.host, f"a process may open {text} files")


def check_variables(facts: HostFacts) -> Finding:
    if facts.variables.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"):
        what = "MLX_METAL_FAST_SYNCH is set, which can hang a GPU until the next reboot"
        fix = "unset MLX_METAL_FAST_SYNCH, and take it out of the hostfile's envs"
        return Finding("fail", facts.host, what, fix)
    return Finding("ok", facts.host, "no harmful environment variables")


def check_strays(facts: HostFacts) -> Finding:
    if not facts.strays:
        return Finding("ok", facts.host, "no ranks are left over from other launches")
    pids = " ".join(map(str, facts.strays))
    what = f"ranks whose launcher is gone still run: {pids}"
    return Finding("warn", facts.host, what, f"kill -9 {pids}")


def check_addresses(facts: HostFacts) -> Finding | None:
    for ip, reason in facts.unusable.items():
        if is_link_local(ip):
            what = f"{ip} is not an address of this host any more, so another one is used"
            fix = "leave out addresses that begin with 169.254: they change at each boot"
            return Finding("warn", facts.host, what, fix)
        fix = "write one of its addresses into the hostfile (`ip addr`, `ifconfig`)"
        if facts.system == "Darwin":
            fix += (
                "; Thunderbolt links lose their addresses at a reboot: run "
                "mlx.distributed_config again"
            )
        return Finding("fail", facts.host, f"{ip} is not an address of this host: {reason}", fix)
    places = [f"{ip} on {name}" for ip, name in facts.interfaces.items() if name]
    if places:
        return Finding("ok", facts.host, ", ".join(places))
    return None


def check_sleep(facts: HostFacts) -> Finding | None:
    if facts.mac is None:
        return None
    if facts.mac.sleep not in ("", "0"):
        what = f"it goes to sleep after {facts.mac.sleep} minutes in which no launched rank runs"
        return Finding("warn", facts.host, what, "sudo pmset -a sleep 0")
    return Finding("ok", facts.host, "it does not go to sleep")


def check_system(facts: HostFacts) -> Finding | None:
    """Checks whether MLX's wheels run on this macOS, and whether Python was built for the chip."""
    if facts.mac is None:
        return None
    mac = facts.mac
    if mac.machine == "x86_64":
        what = f"{facts.executable} was built for Intel, and MLX needs one for Apple's chips"
        return Finding("fail", facts.host, what, "PYTHON=/opt/homebrew/bin/python3 scripts/install")
    version = _numbers(mac.version)
    if version and version < _MACOS_FLOOR:
        what = f"macOS {mac.version} is older than MLX supports"
        return Finding("fail", facts.host, what, f"update macOS to {_MACOS_FLOOR[0]} or newer")
    if (26,) <= version < (26, 2):
        what = f"MLX's files for macOS 26 were built for 26.2, and this is {mac.version}"
        return Finding("fail", facts.host, what, "update macOS to 26.2 or newer")
    return Finding("ok", facts.host, f"macOS {mac.version}")


def check_power(facts: HostFacts) -> Finding | None:
    if facts.mac is None:
        return None
    if facts.mac.power_mode == "1":
        what = "low power mode is on, which slows the GPU down"
        return Finding("warn", facts.host, what, "sudo pmset -a powermode 0 lowpowermode 0")
    return Finding("ok", facts.host, "low power mode is off")


def check_firewall(facts: HostFacts) -> Finding | None:
    """Warns of a firewall that asks on a Mac's screen before it lets another host connect."""
    if facts.mac is None or not facts.mac.has_firewall:
        return None
    tool = f"sudo {_FIREWALL_TOOL}"
    fix = f"{tool} --add {facts.executable} && {tool} --unblockapp {facts.executable}"
    what = "the firewall is on, and may ask on the screen whether others may connect to Python"
    return Finding("warn", facts.host, what, fix)


def check_kinds(hosts: Sequence[Host], routes: Routes, needed: Sequence[Pair]) -> Iterator[Finding]:
    """Warns of needed routes over Wi-Fi, and of a Thunderbolt Bridge that several cables share."""
    for pair in needed:
        one, other = (hosts[rank] for rank in pair)
        kind = routes[pair].kind
        if one.rank > other.rank:  # The pair was reported in the other direction.
            continue
        where = f"{one} and {other}"
        if kind == WIFI:
            fix = "connect them with a cable, and leave the addresses of Wi-Fi out of the hostfile"
            yield Finding(
                "warn", where, f"they are connected over Wi-Fi ({routes[pair].ips[0]})", fix
            )
        if kind == BRIDGE and len(hosts) > 2:
            fix = (
                "give each cable its own subnet: mlx.distributed_config --over thunderbolt "
                "--backend ring --auto-setup"
            )
            yield Finding(
                "warn", where, "they use the Thunderbolt Bridge, which all links share", fix
            )


def check_model(facts: HostFacts) -> Finding | None:
    if facts.hub_model:
        what = f"{facts.hub_model} is on the hub and was not checked"
        fix = (
            f"to read its headers, and the stages it makes: brigade plan --model {facts.hub_model}"
        )
        return Finding("warn", facts.host, what, fix)
    if facts.model_error:
        fix = "copy the model to the same path on all hosts"
        return Finding("fail", facts.host, facts.model_error.rstrip("."), fix)
    if not facts.model:
        return None
    return Finding("ok", facts.host, "the model's files are complete")


HOST_CHECKS: Sequence[Callable[[HostFacts], Finding | None]] = (
    check_port,
    check_versions,
    check_addresses,
    check_blas,
    check_memory,
    check_wired,
    check_disk,
    check_prefix_folder,
    check_files,
    check_variables,
    check_strays,
    check_sleep,
    check_system,
    check_power,
    check_firewall,
    check_model,
)


def check_hosts(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Checks each host alone, then all hosts together."""
    for each in facts:
        yield from filter(None, (check(each) for check in HOST_CHECKS))
    if len(facts) > 1:
        yield check_same_versions(facts)
        copy = "copy the model from one host to the others"
        hosts = [each.host for each in facts]
        if any(each.model or each.model_error for each in facts):
            models = [_model(each) for each in facts]
            yield check_same(hosts, models, copy)


def check_same_versions(facts: Sequence[HostFacts]) -> Finding:
    """Compares the versions of all hosts. A different patch level of Python is only a warning."""
    hosts = [each.host for each in facts]
    install = _same_install(facts)
    exact = [{"Python": each.python, **each.versions} for each in facts]
    needed = [each | {"Python": each["Python"].rpartition(".")[0]} for each in exact]
    found = check_same(hosts, exact, install)
    if found.status == "fail" and check_same(hosts, needed, install).status == "ok":
        return replace(found, status="warn")
    return found


def _same_install(facts: Sequence[HostFacts]) -> str:
    """Returns how all hosts get the same versions: with the Python that most of them have, and the
    newest version of each package."""
    minors = [each.python.rpartition(".")[0] for each in facts]
    common = Counter(minors).most_common(1)[0][0]
    others = [each.host for each, minor in zip(facts, minors, strict=True) if minor != common]
    if others:
        return f"PYTHON=python{common} scripts/install on {', '.join(others)}"
    newest = {name: max((each.versions[name] for each in facts), key=_numbers) for name in VERSIONS}
    return "; ".join(filter(None, (_upgrade(each, newest) for each in facts)))


def _upgrade(facts: HostFacts, newest: Mapping[str, str]) -> str:
    """Returns the command that gives a host these versions, or nothing if it has them."""
    old = [name for name, version in newest.items() if facts.versions[name] != version]
    if not old:
        return ""
    if BRIGADE in old:
        # It is in no registry. Its own installation also brings the other packages.
        return f"on {facts.host}: git pull && scripts/install, in the folder of Brigade"
    extras = {"mlx": f"[{facts.backend}]" if facts.backend else ""}
    words = " ".join(f"'{name}{extras.get(name, '')}=={newest[name]}'" for name in old)
    return f"on {facts.host}: {facts.executable} -m pip install {words}"


def _model(facts: HostFacts) -> dict[str, str]:
    if facts.model_error:
        return {"error": facts.model_error}
    return facts.model or {}


def check_same(
    hosts: Sequence[str],
    values: Sequence[Mapping[str, str]],
    fix: str,
) -> Finding:
    if error := compare(dict(enumerate(values))):
        rows = error.rows.items()
        who = [f"{name} of {hosts[n]} is {row[n]}" for name, row in rows for n in row]
        return Finding("fail", "all hosts", "they differ: " + ", ".join(who), fix)
    # Not every model contains every file. A file that no host has gets no line.
    names = [name for name, value in values[0].items() if value != MISSING]
    return Finding("ok", "all hosts", "the same " + ", ".join(names))


def check_shell(host: str, noise: Sequence[str], reached: str) -> Finding:
    """Checks what a host printed before its agent answered. `reached` says that all is well."""
    if noise:
        fix = "print in interactive shells only: [[ $- == *i* ]] && …"
        return Finding("warn", host, f"its shell profile prints {noise[0][:60]!r}", fix)
    return Finding("ok", host, reached)


def check_clock(host: str, ahead_seconds: float) -> Finding:
    """Checks a host's clock, which is ahead_seconds ahead of this machine's clock."""
    what = f"its clock is {abs(ahead_seconds):.1f} s {'ahead' if ahead_seconds > 0 else 'behind'}"
    if abs(ahead_seconds) > _CLOCK_SECONDS:
        fix = "sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com)"
        return Finding("warn", host, what + ", so logs and traces of the hosts do not match", fix)
    return Finding("ok", host, what)


def check_hop(where: str, speed: HopSpeed) -> Finding:
    rate = speed.bytes_per_second
    round_trip = speed.round_trip_seconds
    what = f"round trip {round_trip * 1000:.2f} ms, {rate / 1e6:,.0f} MB/s"
    if rate < _SLOW_BYTES_PER_SECOND or round_trip > _SLOW_ROUND_TRIP_SECONDS:
        return Finding("warn", where, what, "use a cable: this is as slow as Wi-Fi")
    return Finding("ok", where, what)


def broken_hop(where: str, reason: str) -> Finding:
    """Returns the finding about a hop that could not be measured for this reason."""
    fix = "open the firewall between them for ports above 1023, or correct the addresses"
    if "No route to host" in reason:  # The error's number differs between systems.
        fix = "macOS: allow the terminal under Privacy & Security, Local Network"
    return Finding("fail", where, f"no connection: {reason}", fix)


def exit_code(findings: Sequence[Finding]) -> int:
    return max(("ok", "warn", "fail").index(finding.status) for finding in findings)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
