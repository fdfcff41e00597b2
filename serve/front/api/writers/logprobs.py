"""Writes scores as OpenAI's chat and completions list them, and as vLLM's prompt_logprobs."""

from collections.abc import Sequence

import msgspec

from serve.core.types import Score
from serve.front.http.replies import Json
from serve.front.text.tokens import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no -inf


class ScoreWriter:
    """Writes the scores of tokens. With as_ids a token is `token_id:5` instead of its text."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, scores: Sequence[Score]) -> Json:
        """Returns text, bytes and log-probability of each token and of the likeliest tokens."""
        content = [self._chosen_score(score) for score in scores]
        return {"content": content, "refusal": None}

    def completion(
        self,
        tokens: Sequence[int],
        scores: Sequence[Score | None],
        text_offset: list[int],
    ) -> Json:
        """Returns lists with an entry for each token. A prompt's first token has no score."""
        written: Json = {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": text_offset,
        }
        for score in scores:
            logprob = None if score is None else _finite(score.logprob)
            written["token_logprobs"].append(logprob)
            top = None if score is None else self._by_text(score)
            written["top_logprobs"].append(top)
        return written

    def prompt(self, scores: Sequence[Score]) -> list[Json | None]:
        """Returns vLLM's form: for each position of the prompt, the likeliest tokens and the
        prompt's own one, by token id. The first token of a prompt has no score."""
        ranked = [self._ranked_scores(score) for score in scores]
        return [None, *ranked]

    def _chosen_score(self, score: Score) -> Json:
        chosen = self._token_score(score.token, score.logprob)
        top = [self._token_score(token, logprob) for token, logprob in score.top]
        return {**chosen, "top_logprobs": top}

    def _token_score(self, token: int, logprob: float) -> Json:
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": self._tokenizer.token_bytes(token),
        }

    def _by_text(self, score: Score) -> dict[str, float]:
        """Returns log-probabilities by text; if tokens have equal texts, the likeliest counts."""
        by_text: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            by_text.setdefault(self._text(token), _finite(logprob))
        return by_text

    def _ranked_scores(self, score: Score) -> dict[str, Json]:
        """Returns the likeliest tokens, with ranks, and the token itself, by id."""
        ranked: dict[str, Json] = {}
        for rank, (token, logprob) in enumerate(score.top, 1):
            ranked[str(token)] = self._ranked_score(token, logprob, rank)
        own = self._ranked_score(score.token, score.logprob, None)
        ranked.setdefault(str(score.token), own)
        return ranked

    def _ranked_score(self, token: int, logprob: float, rank: int | None) -> Json:
        return {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": self._text(token),
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)


def with_top(scores: Sequence[Score], num_top: int) -> list[Score]:
    """Returns the scores with no more than num_top of the likeliest tokens each."""
    return [msgspec.structs.replace(score, top=score.top[:num_top]) for score in scores]


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
