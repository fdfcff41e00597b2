"""Python runs this first where PYTHONPATH has its folder (scripts/check --as-darwin): it takes away
what Linux has and macOS does not, from each process that the tests start.

sys.platform stays what it is, because psutil and asyncio choose their system calls by it.
"""

import asyncio  # noqa: F401 - Chooses how it waits before the names are gone.
import errno
import os
import resource
import select
import signal
import socket
import subprocess  # noqa: F401 - As asyncio.
import sys

# Names of modules of Python for Linux that Python for macOS lacks.
_LINUX_ONLY = {
    os: (
        *("eventfd", "eventfd_read", "eventfd_write", "getrandom", "getresuid", "getresgid"),
        *("memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "pipe2", "splice"),
        *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler"),
        *("setns", "unshare", "getxattr", "setxattr", "listxattr", "removexattr"),
        *("O_TMPFILE", "O_PATH", "O_DIRECT", "O_LARGEFILE", "O_NOATIME", "P_PIDFD"),
    ),
    socket: (
        *("TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_CORK", "TCP_DEFER_ACCEPT"),
        *("TCP_INFO", "TCP_LINGER2", "TCP_SYNCNT", "TCP_WINDOW_CLAMP", "TCP_CONGESTION"),
        *("SO_BINDTODEVICE", "SO_DOMAIN", "SO_MARK", "SO_PASSCRED", "SO_PEERCRED", "SO_PROTOCOL"),
        *("SO_INCOMING_CPU", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_NOSIGNAL", "AF_NETLINK"),
    ),
    resource: (
        *("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_OFILE", "RLIMIT_RTPRIO"),
        *("RLIMIT_RTTIME", "RLIMIT_SIGPENDING", "RUSAGE_THREAD"),
    ),
    select: ("epoll",),
    signal: ("sigtimedwait", "sigwaitinfo"),
}
_FILE_EVENTS = {"open", "os.listdir", "os.scandir"}


def _refuse_proc(event: str, arguments: tuple[object, ...]) -> None:
    """Hides /proc, except from psutil, which asks macOS in other ways."""
    if event in _FILE_EVENTS and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _refuse(os.fsdecode(arguments[0]))


def _refuse(path: str) -> None:
    if not path.startswith("/proc/"):
        return
    frame = sys._getframe()
    while frame:
        if "psutil" in frame.f_code.co_filename:
            return
        frame = frame.f_back
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


_stat = os.stat


def _stat_without_proc(path: object, **options: object) -> os.stat_result:
    """os.stat, which no audit event precedes."""
    if isinstance(path, (str, bytes, os.PathLike)):
        _refuse(os.fsdecode(path))
    return _stat(path, **options)  # type: ignore[arg-type]


os.stat = _stat_without_proc
for module, names in _LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.addaudithook(_refuse_proc)
