"""The reasoning that a request asks for: its effort, and its limit in tokens."""

from dataclasses import dataclass
from typing import Any

from serve.core.errors import RequestError
from serve.core.types import Reasoning
from serve.front.text.dialects import interface
from serve.front.text.tokens import Tokenizer

# The limit of reasoning, in tokens, by OpenAI's effort, for templates without a variable for
# effort. xhigh and max have no limit.
BUDGETS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576}

# The variables that most templates have, for a model whose marks of reasoning are not known.
_UNMARKED = interface.ReasoningFormat(
    start="",
    end="",
    switch="enable_thinking",
    effort="reasoning_effort",
    efforts=interface.EFFORTS,
)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that a request asks for; None leaves it to the model. effort is OpenAI's. The
    engine ends the reasoning after budget tokens (0: no reasoning); budget_param is the field that
    sets budget."""

    effort: str | None = None
    budget: int | None = None
    is_wanted: bool | None = None
    budget_param: str = "thinking_token_budget"

    def variables(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns the template's variables for reasoning. Unknown variables have no effect."""
        marks = tokenizer.dialect.reasoning or _UNMARKED
        return marks.variables(self.effort, self.is_wanted)

    def reasoning(self, tokenizer: Tokenizer, prompt: str) -> Reasoning | None:
        """Returns the marks and the budget; None if the model marks no reasoning. prompt is the
        rendered text. Raises RequestError if the request's budget cannot be kept."""
        marks = tokenizer.dialect.reasoning
        if marks is None:
            return None
        can_keep_budget = all(map(tokenizer.begins_with_a_mark, (marks.start, marks.end)))
        if self.budget is not None and not can_keep_budget:
            raise RequestError(
                f"{self.budget_param}: this model marks its reasoning with ordinary text "
                "and not with special tokens, so a budget cannot be enforced: leave it "
                "out.",
                param=self.budget_param,
                code="unsupported_by_model",
            )
        start = tuple(tokenizer.encode(marks.start))
        end = tuple(tokenizer.encode(marks.end))
        budget: int | None = None
        if can_keep_budget:
            budget = self._budget(knows_effort=marks.effort is not None)
        is_open = prompt.rstrip().endswith(marks.start.rstrip())
        return Reasoning(start, end, is_open, budget)

    def _budget(self, knows_effort: bool) -> int | None:
        """Returns the request's budget, or the one that its effort stands for."""
        if self.budget is not None:
            return self.budget
        if self.is_wanted is False or self.effort == "none":
            return 0
        if self.effort is None or knows_effort:
            return None
        return BUDGETS.get(self.effort)
