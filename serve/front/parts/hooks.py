"""The calls of parts in each step. Methods that a part does not override are left out, because even
a call that does nothing takes time."""

from collections.abc import Callable
from collections.abc import Sequence as ReadableList

from serve.front.parts.interface import SchedulerPart


class Hooks:
    """For each of these methods, the parts' overrides in the parts' order."""

    def __init__(self, parts: ReadableList[SchedulerPart]) -> None:
        base = SchedulerPart
        self.must_wait = [part.must_wait for part in _overriding(parts, base.must_wait)]
        self.drafts = [part.drafts for part in _overriding(parts, base.drafts)]
        self.after = [part.after for part in _overriding(parts, base.after)]
        self.took = [part.took for part in _overriding(parts, base.took)]
        self.ready = [part.ready for part in _overriding(parts, base.ready)]
        self.on_result = [part.on_result for part in _overriding(parts, base.on_result)]


def _overriding(
    parts: ReadableList[SchedulerPart],
    method: Callable[..., object],
) -> list[SchedulerPart]:
    active = [part for part in parts if part.is_on]
    return [part for part in active if getattr(type(part), method.__name__) is not method]
