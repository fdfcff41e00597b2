"""Turns the logits of a step into tokens, and into scores where a request asks for them. Only rank
0 uses it."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from serve.core.errors import RequestError
from serve.core.messages import Result
from serve.core.outputs import Scores
from serve.core.types import (
    CONFLICT_TOKEN,
    FAILED_TOKEN,
    FAILURES,
    REFUSED_TOKEN,
    Row,
    Sampling,
    Score,
    Step,
)
from serve.rank.cache import ForwardPass
from serve.rank.grammar import CONFLICT, GrammarCompiler
from serve.rank.sampling import Sampler, sample, score
from serve.rank.verification import Verification

_ARRAYS_PER_SCORING = 3  # how many arrays `score` returns
_SCORED_AT_ONCE = 64  # the positions of a prompt in one slice
_PEAK_ARRAYS = 3  # how many arrays `score` holds at a time, with 4 bytes for each logit

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """The tokens of a row to score, from a position on; None for the token that the step samples.
    The first token's logits are at index `start` among the row's logits."""

    row: int
    position: int
    tokens: list[int] | None
    num_top: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a step is choosing, besides one token for each row."""

    scorings: list[_Scoring]
    verification: Verification | None = None


_NO_CHOICE = _Choice([])


class Chooser:
    """Keeps a sampler for each sequence that the parent has admitted. Call choose and result from
    one thread; `admit` and `forget` may be called from any. folder contains the tokenizer."""

    def __init__(self, folder: Path | None = None) -> None:
        self._grammars = GrammarCompiler(folder) if folder else None
        self._samplers: dict[int, Sampler] = {}
        self._choices: dict[int, _Choice] = {}  # by the number of each step under way
        self._num_begun: Counter[int] = Counter()
        self._lock = threading.Lock()

    def admit(
        self,
        sequence: int,
        sampling: Sampling,
        num_prompt: int,
        tokens: list[int],
    ) -> None:
        """Begins a sequence. The stages may still hold an earlier try, which samples no more."""
        with self._lock:
            self._samplers[sequence] = Sampler(sampling, num_prompt, tokens, self._grammars)
            self._num_begun[sequence] += 1

    def forget(self, sequence: int) -> bool:
        """Counts one try of a sequence as ended. Returns whether it was the only one."""
        with self._lock:
            self._num_begun[sequence] -= 1
            if self._num_begun[sequence] > 0:
                return False
            del self._num_begun[sequence]
            self._samplers.pop(sequence, None)
            return True

    def clear(self) -> None:
        """Forgets all sequences. Compiled grammars stay."""
        with self._lock:
            self._samplers.clear()
            self._num_begun.clear()
            self._choices.clear()

    def sampler(self, sequence: int) -> Sampler:
        with self._lock:
            return self._samplers[sequence]

    def num_known(self, sequence: int) -> int | None:
        """Returns a sequence's number of known tokens; None if its prompt is embedded."""
        with self._lock:
            sampler = self._samplers.get(sequence)
        return None if sampler is None else len(sampler.tokens)

    def needs_tokens(self, step: Step) -> bool:
        """Whether a row of a step can be continued only when its token is known."""
        with self._lock:
            return any(self._samplers[row.sequence].reads_tokens for row in step.rows)

    def cut_drafts(self, step: Step) -> Step:
        """Returns the step without the drafts that a grammar forbids. Earlier steps may still run,
        except the step that chooses the tokens before the drafts."""
        if not step.num_drafts:
            return step
        rows: list[Row] = []
        tokens: list[int] = []
        for row, own in zip(step.rows, step.tokens_fed, strict=True):
            if len(own) > 1:  # An earlier step may be choosing a token of a row without drafts.
                own = own[: 1 + self.sampler(row.sequence).num_allowed(own[1:])]
            rows.append(msgspec.structs.replace(row, num_tokens=len(own)))
            tokens += own
        return msgspec.structs.replace(step, rows=tuple(rows), tokens=tuple(tokens))

    def choose(
        self,
        step: Step,
        passes: list[ForwardPass],
        logits: list[mx.array],
    ) -> Iterator[list[mx.array]]:
        """Yields lazy arrays, from each pass's logits (B, L, vocabulary): tokens (B,) if the step
        samples, and scores. Without either, the head is never evaluated. Prompts are scored in
        slices, each to be evaluated before the next, because scoring takes several times the memory
        of the logits."""
        if step.num_drafts:
            verification = self._verify(step, passes, logits)
            self._choices[step.number] = _Choice([], verification)
            yield verification.arrays
            return
        if step.sample:
            outputs = [self._sample(step, passes, logits)]
        else:
            outputs = []
        scorings = list(self._wanted_scores(step))
        self._choices[step.number] = _Choice(scorings)
        if scorings:
            rows = _outputs_of_rows(step, passes, logits)
        else:
            rows = {}
        for scoring in scorings:
            own = rows[scoring.row]
            if scoring.tokens is None:
                chosen = outputs[0][scoring.row : scoring.row + 1]
                outputs += score(own[-1:], chosen, scoring.num_top)
            else:
                tokens = mx.array(scoring.tokens)
                own = own[scoring.start : scoring.start + tokens.size]
                yield score(own, tokens, scoring.num_top)
        if outputs:
            yield outputs

    def result(self, step: Step, outputs: list[mx.array]) -> Result:
        """Makes the result of a step from the arrays that choose gave for it, evaluated."""
        choice = self._choices.pop(step.number, _NO_CHOICE)
        if choice.verification:
            return self._result_of_drafts(step, choice.verification)
        tokens: tuple[int, ...] = ()
        if step.sample:
            tokens = tuple(outputs[0].tolist())  # type: ignore[arg-type]
        scores = []
        first = int(step.sample)
        for scoring in choice.scorings:
            end = first + _ARRAYS_PER_SCORING
            chosen = scoring.tokens or [tokens[scoring.row]]
            scored = _scores(chosen, outputs[first:end])
            sequence = step.rows[scoring.row].sequence
            scores.append(Scores(sequence, scoring.position, scored))
            first = end
        for row, token in zip(step.rows, tokens, strict=False):
            if token not in FAILURES:
                self._samplers[row.sequence].note(token)
        return Result(step.number, tokens, outputs=tuple(scores))

    def _verify(
        self,
        step: Step,
        passes: list[ForwardPass],
        logits: list[mx.array],
    ) -> Verification:
        samplers = [self._samplers[row.sequence] for row in step.rows]
        rows = _outputs_of_rows(step, passes, logits)
        in_order = [rows[n] for n in range(len(step.rows))]
        return Verification(step, samplers, in_order, _sample_each)

    def _result_of_drafts(self, step: Step, verification: Verification) -> Result:
        rows = verification.tokens()
        scores = []
        for n, (row, tokens) in enumerate(zip(step.rows, rows, strict=True)):
            num_top = self._samplers[row.sequence].sampling.logprobs
            if tokens and num_top is not None:
                logits = verification.logits[n][: len(tokens)]
                arrays = score(logits, mx.array(tokens), num_top)
                scored = _scores(tokens, arrays)
                scores.append(Scores(row.sequence, row.position + 1, scored))
        tokens_of_all = tuple(token for tokens in rows for token in tokens)
        num_accepted = tuple(len(tokens) - 1 for tokens in rows)
        num_drafts = tuple(row.num_tokens - 1 for row in step.rows)
        return Result(
            step.number,
            tokens_of_all,
            num_accepted,
            num_drafts,
            outputs=tuple(scores),
        )

    def _sample(self, step: Step, passes: list[ForwardPass], logits: list[mx.array]) -> mx.array:
        rows: list[int] = []
        last: list[mx.array] = []
        for each, output in zip(passes, logits, strict=True):
            own_rows = [row for row in each.rows if row is not None]
            rows += own_rows
            last_logits = output[:, -1]
            last.append(each.own_rows(last_logits))
        fed = [step.rows[n] for n in rows]
        samplers = [self._samplers[row.sequence] for row in fed]
        positions = [row.position + row.num_tokens for row in fed]
        tokens = _sample_each(mx.concatenate(last), samplers, positions)
        if rows == sorted(rows):
            return tokens
        order = mx.argsort(mx.array(rows))
        return tokens[order]

    def _wanted_scores(self, step: Step) -> Iterator[_Scoring]:
        for n, row in enumerate(step.rows):
            sampler = self._samplers.get(row.sequence)
            if sampler is None:
                continue  # The row's prompt is embedded.
            asked = sampler.sampling
            if step.sample and asked.logprobs is not None:
                yield _Scoring(n, row.position + row.num_tokens, None, asked.logprobs)
            elif (
                not step.sample
                and asked.prompt_logprobs is not None
                and (tokens := _followers(row, sampler))
            ):
                for start in range(0, len(tokens), _SCORED_AT_ONCE):
                    part = tokens[start : start + _SCORED_AT_ONCE]
                    position = row.position + 1 + start
                    yield _Scoring(n, position, part, asked.prompt_logprobs, start)


def scoring_bytes(logits_shape: tuple[int, ...]) -> int:
    """Returns the most memory that scoring takes beside the logits (..., vocabulary) themselves."""
    bytes_per_position = 4 * logits_shape[-1]
    return _PEAK_ARRAYS * _SCORED_AT_ONCE * bytes_per_position


def _sample_each(
    logits: mx.array,
    samplers: list[Sampler],
    positions: list[int],
) -> mx.array:
    """Samples the next tokens (B,) from logits (B, vocabulary). If sampling a row fails, its
    request is at fault: the row gets one of FAILURES, and other rows get their tokens."""
    try:
        return sample(logits, samplers, positions).astype(mx.int32)
    except Exception as error:
        if len(samplers) > 1:
            each = []
            for n, sampler in enumerate(samplers):
                row = logits[n : n + 1]
                each.append(_sample_each(row, [sampler], [positions[n]]))
            return mx.concatenate(each)
        _logger.error("event=row_failed reason=%s", json.dumps(repr(error)))
        return mx.array([_failure(error)])


def _failure(error: Exception) -> int:
    if not isinstance(error, RequestError):
        return FAILED_TOKEN
    if error.code == CONFLICT:
        return CONFLICT_TOKEN
    return REFUSED_TOKEN


def _outputs_of_rows(
    step: Step,
    passes: list[ForwardPass],
    logits: list[mx.array],
) -> dict[int, mx.array]:
    """Splits the logits into those of each row (num_tokens, vocabulary), without padding."""
    rows: dict[int, mx.array] = {}
    for each, output in zip(passes, logits, strict=True):
        rows |= each.outputs_of_rows(step, output)
    return rows


def _followers(row: Row, sampler: Sampler) -> list[int]:
    """Returns the token after each fed token of the prompt; an answer is not scored again."""
    first = row.position + 1
    end = min(first + row.num_tokens, sampler.num_prompt)
    return sampler.tokens[first:end]


def _scores(tokens: list[int], arrays: list[mx.array]) -> tuple[Score, ...]:
    lists: list[Any] = [array.tolist() for array in arrays]
    scores = []
    for token, logprob, ids, logprobs in zip(tokens, *lists, strict=True):
        top = tuple(zip(ids, logprobs, strict=True))
        scores.append(Score(token, logprob, top))
    return tuple(scores)
