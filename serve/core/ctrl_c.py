"""Handles Ctrl-C while modules are imported, which takes a while: nothing else catches it yet."""

import signal
import threading
from collections.abc import Callable


def ends_silently() -> Callable[[], None]:
    """Lets Ctrl-C end this process without a traceback, until the returned function is called. Does
    nothing if something else handles Ctrl-C already."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return lambda: None
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def restore() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return restore
