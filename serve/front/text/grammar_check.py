"""Whether a grammar can be followed at all: in a process of its own, because llguidance's limits
do not bound how long it takes to find out, and nothing but a process can be stopped.

JSON texts, one a line: grammars come in; what is wrong with them goes out, "" for nothing.
"""

import json
import signal
import sys

from llguidance import LLMatcher, LLTokenizer

# Less than the engine allows, which prepares the same grammar once more.
MOST_SECONDS = 1.0


def main(tokenizer_file: str) -> None:
    """Ends with its stdin, or by SIGPROF."""
    tokenizer = LLTokenizer(tokenizer_file)
    for line in sys.stdin:
        # The system ends this process then, wherever it is. Of a core, so that it does not
        # depend on what else runs.
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        answer = _objection(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _objection(tokenizer: LLTokenizer, grammar: str) -> str:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    can_begin = not matcher.is_error() and any(matcher.compute_logit_bias())
    if matcher.is_error():
        return matcher.get_error().partition("<state>")[0][:500]
    return "" if can_begin else "no answer can follow it"


if __name__ == "__main__":
    main(sys.argv[1])
