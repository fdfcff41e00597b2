"""Prefixes on disk as a part: a step says which file to write and which sequence begins with a file
that was read, and the parent says which files to read and delete.
"""

from collections.abc import Callable, Sequence
from typing import Self

import mlx.core as mx

from serve.core.errors import EngineError
from serve.core.messages import ForgetPrefixFiles, FromEngine, Message, Order, ReadPrefix
from serve.core.ops import AnyOp, Load, Write
from serve.core.types import Step
from serve.rank.cache import GroupCaches
from serve.rank.parts.disk import contents
from serve.rank.parts.disk.contents import FileContent
from serve.rank.parts.disk.store import PrefixStore, open_store
from serve.rank.parts.interface import RankPart, Surroundings


class DiskPart(RankPart):
    """Moves prefixes between the caches of a stage and its store, which is None if its folder
    cannot be used: then rank 0 knows of no files here, and asks for none."""

    ops = (Load, Write)
    messages = (ReadPrefix, ForgetPrefixFiles)

    def __init__(
        self,
        store: PrefixStore | None,
        caches: GroupCaches,
        send: Callable[[FromEngine], None],
    ) -> None:
        self.store = store
        self._caches = caches
        self._send = send

    @classmethod
    def build(cls, surroundings: Surroundings) -> Self | None:
        order = surroundings.order
        if order.prefix_dir is None:
            return None
        caches = surroundings.caches
        store = open_store(order, surroundings.send, caches.make_caches)
        return cls(store, caches, surroundings.send)

    def perform(self, op: AnyOp, step: Step) -> None:
        if self.store is None:
            raise EngineError("A step uses the prefix cache on disk, and this stage has none.")
        if isinstance(op, Load):
            caches = self.store.take(op.sequence)
            self._caches.begin(op.sequence, caches, op.num_tokens)
        elif isinstance(op, Write):
            self._write(op, self.store)

    def obey(self, message: Message) -> None:
        assert isinstance(message, ReadPrefix | ForgetPrefixFiles)
        if self.store:
            self.store.obey(message)

    def announce(self) -> None:
        if self.store:
            self._send(self.store.files())

    def rejoin(self, order: Order) -> Sequence[mx.array]:
        if self.store:
            self.store.forget_loaded()
        return ()

    def wait(self) -> None:
        if self.store:
            self.store.wait()

    def leftovers(self) -> Sequence[object]:
        if self.store:
            self.store.close()
        return ()

    def _write(self, write: Write, store: PrefixStore) -> None:
        """Hands a file to the store. A file that cannot be made costs only speed."""
        try:
            content = self._content(write)
        except EngineError as error:
            store.refuse(write, error)
            return
        store.write(write, content)

    def _content(self, write: Write) -> FileContent:
        """Returns the content of a file, lazily. Raises EngineError if its tokens or its checkpoint
        are not held here."""
        if write.is_state:
            states = self._caches.states_at(write.sequence, write.end, write.checkpoint)
            return contents.state(states, write.end)
        caches = self._caches.extracted(write.sequence, write.end)
        return contents.segment(caches, write.start, write.end)
