"""A draft: guesses of the next tokens of a row, which a step feeds after the newest token and
verifies."""

from collections.abc import Sequence as ReadableList
from typing import Literal, NamedTuple

MAX_DRAFTS = 16
# The source of a draft: the text so far, the client's predicted answer, or the draft model.
Drafter = Literal["suffixes", "prediction", "model"]


class Draft(NamedTuple):
    """The guesses of the tokens that follow the newest token of a row, and their source."""

    tokens: ReadableList[int] = ()
    drafter: Drafter = "suffixes"
