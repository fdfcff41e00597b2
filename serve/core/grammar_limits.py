"""Limits on a client's grammar, for the process that checks it and the engine that follows it.

llguidance recurses with the depth of a grammar, and a stack overflow ends the process. So the check
has a much smaller stack than the engine: a grammar that passes it cannot overflow the engine's.
"""

from typing import Any

MAX_GRAMMAR_CHARACTERS = 256 << 10
# A chain of MAX_RULES rules takes 9 to 12 MB of stack in llguidance 1.7 on x86-64. A longer one is
# refused at once: it would crash the check, and some systems report each crash to the user.
MAX_RULES = 4000
MAX_REFERENCES = 1000
CHECK_STACK_BYTES = 16 << 20
FOLLOW_STACK_BYTES = 128 << 20

CHECK_SECONDS = 1.0  # the CPU time that one check may take
CHECK_MEMORY_BYTES = 96 << 20

# Arguments of llguidance.LLParserLimits, for both the check and the engine. A lexer's state takes
# up to 2 kB, and each sequence that is being answered has its own lexer.
PARSER_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000}
