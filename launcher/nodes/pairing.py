"""Pairing: two machines that share a six-digit code learn each other's public keys.

Both keys take part in SPAKE2, a key exchange that is authenticated by a password. So the proofs
match only if both sides know the code and see the same two keys: a machine in between, with keys of
its own, can only guess. SPAKE2 lets it try one code for each exchange, and `Codes` allows few.
"""

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable

from spake2 import SPAKE2_A, SPAKE2_B

from launcher.nodes.messages import (
    Conversation,
    NodeError,
    PairingProof,
    PairingReply,
    PairingStart,
    Refusal,
)

EXCHANGE_SECONDS = 5.0
NUM_TRIES = 3  # wrong codes before a new code replaces this one
MAX_PAUSE_SECONDS = 300.0
_WRONG_CODE = "the code is wrong, or another machine is in between: look at the code, and try again"


class Codes:
    """The code of this node. After a wrong code no pairing is possible for a while: 1 s, then twice
    as long each time, up to five minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_wrong = 0
        self._open_at = 0.0
        self.is_busy = False
        self._renew()

    def _renew(self) -> None:
        self.code = f"{secrets.randbelow(1_000_000):06d}"

    def pause_seconds(self) -> float:
        """Returns how long no pairing is possible."""
        return max(0.0, self._open_at - self._clock())

    def refusal(self) -> str:
        """Returns why no pairing is possible at this moment, or ""."""
        pause = self.pause_seconds()
        if self.is_busy or pause:
            return f"no pairing now: try again in {max(1, math.ceil(pause))} s"
        return ""

    def was_wrong(self) -> None:
        pause = min(2.0**self._num_wrong, MAX_PAUSE_SECONDS)
        self._open_at = self._clock() + pause
        self._num_wrong += 1
        if self._num_wrong % NUM_TRIES == 0:
            self._renew()

    def was_right(self) -> None:
        self._num_wrong = 0
        self._renew()


async def pair(
    conversation: Conversation,
    code: str,
    start: Callable[[bytes], PairingStart],
    own_key: str,
    their_key: str,
) -> str:
    """Pairs as the machine that connects. Returns the node's name. Raises NodeError."""
    exchange = SPAKE2_A(code.encode(), idA=own_key.encode(), idB=their_key.encode())
    reply = await conversation.ask(start(exchange.start()), PairingReply, EXCHANGE_SECONDS)
    shared = _finish(exchange, reply.element)
    own_proof = PairingProof(_proof(shared, b"the machine that connects"))
    answer = await conversation.ask(own_proof, PairingProof, EXCHANGE_SECONDS)
    if not hmac.compare_digest(answer.proof, _proof(shared, b"the node")):
        raise NodeError(_WRONG_CODE)
    return reply.name


async def answer_pairing(
    conversation: Conversation,
    codes: Codes,
    start: PairingStart,
    name: str,
    own_key: str,
    their_key: str,
) -> bool:
    """Pairs as the node, after its peer has begun. Returns whether the peer knows the code. Only
    one pairing runs at a time: parallel ones would each get a try before the pause."""
    if refusal := codes.refusal():
        conversation.say(Refusal(refusal))
        return False
    codes.is_busy = True
    is_right = False
    try:
        code = codes.code
        exchange = SPAKE2_B(code.encode(), idA=their_key.encode(), idB=own_key.encode())
        conversation.say(PairingReply(name, exchange.start()))
        shared = _finish(exchange, start.element)
        proof = (await conversation.hear(PairingProof, EXCHANGE_SECONDS)).proof
        is_right = hmac.compare_digest(proof, _proof(shared, b"the machine that connects"))
    finally:
        # A peer that hangs up has used its try, too: it may have asked as a machine in between.
        codes.is_busy = False
        if is_right:
            codes.was_right()
        else:
            codes.was_wrong()
    if is_right:
        conversation.say(PairingProof(_proof(shared, b"the node")))
    else:
        conversation.say(Refusal(_WRONG_CODE))
    return is_right


def _finish(exchange: SPAKE2_A | SPAKE2_B, element: bytes) -> bytes:
    try:
        shared: bytes = exchange.finish(element)
    except Exception as error:  # The library has many types of errors for wrong elements.
        raise NodeError("it does not pair as Brigade does") from error
    return shared


def _proof(shared: bytes, side: bytes) -> bytes:
    return hmac.new(shared, side, hashlib.sha256).digest()
