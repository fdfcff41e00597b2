"""The helper process that reads long bodies of requests: their JSON, fields, templates and tokens
take seconds of a core, mostly while holding the GIL, which would block the server's process."""

import logging
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeAlias

from serve.core.errors import NotFoundError, RequestError
from serve.core.helper_messages import BodyNotRead, BodyRead, BodyRefused, ModelNames, ReadBody
from serve.front.api.reading import kinds
from serve.front.api.reading.reader import AnyReading, Reader
from serve.front.http.record import trace_of
from serve.front.text.helpers import answer_questions
from serve.front.text.tokens import Tokenizer

MAX_SECONDS = 30.0  # the CPU time for one body

_logger = logging.getLogger(__name__)

Answer: TypeAlias = BodyRead[AnyReading] | BodyRefused | BodyNotRead


def main(
    folder: str, tool_parser: str, generation_config: str, max_context: str, max_answers: str
) -> None:
    """Answers questions until its standard input ends, or until SIGPROF ends the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    tokenizer = Tokenizer(Path(folder), tool_parser or None, generation_config)
    reader = Reader(tokenizer, int(max_context), int(max_answers), ModelNames((), ""))

    def answer(question: ReadBody, data: bytes) -> Answer:
        return answered(reader, question, data)

    answer_questions(ReadBody, answer, MAX_SECONDS)


def answered(reader: Reader, question: ReadBody, data: bytes) -> Answer:
    """Returns the answer to a question. data consists of the texts to read, the body first."""
    configured = replace(reader, names=question.names, finds_boundaries=question.finds_boundaries)
    ends = accumulate(question.sizes, initial=0)
    given = [data[start:end] for start, end in pairwise(ends)]
    try:
        return BodyRead(kinds.BY_NAME[question.kind].read(configured, *given))
    except RequestError as error:
        is_not_found = isinstance(error, NotFoundError)
        return BodyRefused(str(error), error.param, error.code, is_not_found)
    # A bug ends this request and not the process.
    except Exception as error:
        _logger.error("event=bug trace=%s", trace_of(error))
        return BodyNotRead(type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
