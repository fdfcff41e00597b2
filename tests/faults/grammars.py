"""Random grammars and schemas that are deep, wide or recursive, as requests; up to 1 MB.

The same seed gives the same request. Sizes are drawn by their logarithm, so that most are small.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from tests.faults.cases import ANTHROPIC, CHAT

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
MAX_CHARACTERS = 1 << 20

Json = dict[str, Any]
Request = tuple[str, Json]


def size(chance: random.Random, max_size: int) -> int:
    return int(2 ** chance.uniform(0, max_size.bit_length() - 1))


# --- Lark


def _rule_chain(chance: random.Random) -> str:
    length = size(chance, 40_000)
    shape = chance.choice(['"a" {0}', '{0} "a"', '"a" {0}?', "({0})*", '{0} | "c"', '"a" {0} {0}'])
    rules = [f"r{n}: {shape.format(f'r{n + 1}')}" for n in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "b"'])


def _terminal_chain(chance: random.Random) -> str:
    length = size(chance, 20_000)
    shape = chance.choice(['"a" {0}', '{0} "a"', "{0}?", "({0})+", '{0} | "c"', "{0} {0}", "~{0}"])
    terminals = [f"T{n}: {shape.format(f'T{n + 1}')}" for n in range(length)]
    return "\n".join(["start: T0", *terminals, f'T{length}: "b"'])


def _rule_cycle(chance: random.Random) -> str:
    length = size(chance, 2000)
    rules = []
    for n in range(length):
        first, second = chance.randrange(length), chance.randrange(length)
        rules.append(f'r{n}: r{first} r{second} | "w{n}" | r{(n + 1) % length} "x"')
    return "\n".join(["start: r0", *rules])


def _alternation(chance: random.Random) -> str:
    words = [f'"w{n}" /[a-z]{{1,{n % 9 + 1}}}/' for n in range(size(chance, 30_000))]
    return "start: " + " | ".join(words)


def _nested_groups(chance: random.Random) -> str:
    depth = size(chance, 100_000)
    after = chance.choice([")", ")?", ")*", ")+", "){2,3}", ' "b")', ' | "c")'])
    return "start: " + "(" * depth + '"a"' + after * depth


def _ambiguous(chance: random.Random) -> str:
    count = chance.randint(1, 40)
    rules = [
        f"s{n}: s{n} s{(n + 1) % count} | s{(n + 2) % count} s{n} | WORD" for n in range(count)
    ]
    return "\n".join(["start: s0", *rules, "WORD: /[a-z]+ ?/"])


def _embedded(chance: random.Random) -> str:
    schemas = [json.dumps(_schema(chance)) for _ in range(chance.randint(1, 4))]
    return "start: " + " ".join(f"(%json {schema})?" for schema in schemas) + ' "end"'


def _guidance(chance: random.Random) -> str:
    """llguidance's own format, in which grammars name each other."""
    length = size(chance, 3000)
    grammars = [
        {"name": f"g{n}", "lark_grammar": f'start: "a" @g{chance.randint(n, length - 1)} | "b"'}
        for n in range(length)
    ]
    return json.dumps({"grammars": grammars})


LARK = [
    _rule_chain,
    _terminal_chain,
    _rule_cycle,
    _alternation,
    _nested_groups,
    _ambiguous,
    _embedded,
    _guidance,
]


# --- regular expressions


def _nested_regex(chance: random.Random) -> str:
    depth = size(chance, 200_000)
    after = chance.choice([")", ")?", ")*", ")+", "){2}", "|b)", "x)", "){0,2}"])
    return "(" * depth + "a" + after * depth


def _counted(chance: random.Random) -> str:
    inner = chance.choice(["a", "[a-z]", ".", r"\d\w", "(ab|c)", r"\p{L}"])
    for _ in range(chance.randint(1, 4)):
        inner = f"({inner}){{{size(chance, 300)},{300 + size(chance, 100_000)}}}"
    return inner


def _lookaround(chance: random.Random) -> str:
    around = chance.choice(["(?={})", "(?!{})", "(?<={})", "(?<!{})"])
    return "".join(around.format("a" * (n % 7 + 1)) + "[a-z]" for n in range(size(chance, 2000)))


def _classes(chance: random.Random) -> str:
    names = [r"\p{L}", r"\p{Han}", r"[^\p{Lu}\d]", r"\P{Greek}", "[\U00010000-\U0010ffff]", r"\w\W"]
    return "".join(chance.choice(names) for _ in range(size(chance, 3000))) + "*"


def _literal(chance: random.Random) -> str:
    return chance.choice(["a", "é", "\U0001f600", "ab"]) * size(chance, 400_000)


def _late_choice(chance: random.Random) -> str:
    return f".*a.{{{size(chance, 5000)}}}b(c|.*d)" * chance.randint(1, 5)


def _alternatives(chance: random.Random) -> str:
    return "|".join(f"w{n}[a-f]{{{n % 5 + 1}}}" for n in range(size(chance, 60_000)))


REGEX = [
    _nested_regex,
    _counted,
    _lookaround,
    _classes,
    _literal,
    _late_choice,
    _alternatives,
]


# --- schemas


def _definition_chain(chance: random.Random) -> Json:
    length = size(chance, 8000)
    kind = chance.choice(["required", "optional", "items", "anyOf", "allOf", "plain"])
    definitions = {f"d{n}": _linked(kind, {"$ref": f"#/$defs/d{n + 1}"}, n) for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def _linked(kind: str, next_one: Json, number: int) -> Json:
    links: dict[str, Json] = {
        "required": {"type": "object", "properties": {"a": next_one}, "required": ["a"]},
        "optional": {"type": "object", "properties": {f"p{number}": next_one}},
        "items": {"type": "array", "items": next_one, "minItems": 1},
        "anyOf": {"anyOf": [next_one, {"type": "null"}]},
        "allOf": {"allOf": [next_one, {"description": "x"}]},
        "plain": next_one,
    }
    return links[kind]


def _definition_cycle(chance: random.Random) -> Json:
    length = size(chance, 600)
    kinds = ["required", "optional", "items", "anyOf", "allOf", "plain"]
    definitions = {
        f"d{n}": _linked(chance.choice(kinds), {"$ref": f"#/$defs/d{chance.randrange(length)}"}, n)
        for n in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _nested_combination(chance: random.Random) -> Json:
    inner: Json = {"type": "string", "maxLength": 5}
    for number in range(chance.randint(1, 70)):
        word = chance.choice(["anyOf", "allOf", "oneOf"])
        other: Json = {"type": chance.choice(["null", "string", "integer"]), "minLength": number}
        inner = {word: [inner, other] if chance.random() < 0.8 else [inner, inner]}
        if len(json.dumps(inner)) > 100_000:
            break
    return inner


def _nested_containers(chance: random.Random) -> Json:
    inner: Json = {"type": "integer"}
    for _ in range(chance.randint(1, 90)):
        if chance.random() < 0.5:
            inner = {"type": "array", "items": inner, "maxItems": chance.choice([1, 3, 10_000])}
        else:
            required = ["a"] if chance.random() < 0.7 else []
            inner = {"type": "object", "properties": {"a": inner}, "required": required}
    return inner


def _wide_object(chance: random.Random) -> Json:
    names = [f"p{n}" for n in range(size(chance, 12_000))]
    leaves: list[Json] = [{"type": "string"}, {"type": "number"}, {"enum": ["a", "b"]}]
    required = chance.sample(names, len(names) // chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: chance.choice(leaves) for name in names},
        "required": required,
        "additionalProperties": chance.random() < 0.3,
    }


def _enumeration(chance: random.Random) -> Json:
    count = size(chance, 80_000)
    length = size(chance, 30) if count > 1000 else size(chance, 300)
    return {"enum": [f"{chance.getrandbits(64):016x}" * (length // 16 + 1) for _ in range(count)]}


def _patterns(chance: random.Random) -> Json:
    properties = {
        f"^{chr(97 + n % 26)}{n}[a-z]{{0,{n % 50}}}$": {"type": "string", "pattern": "^(ab?){3,9}$"}
        for n in range(size(chance, 2000))
    }
    return {"type": "object", "patternProperties": properties, "minProperties": 1}


def _numbers(chance: random.Random) -> Json:
    factors = [chance.choice([2, 3, 7, 101, 0.01]), size(chance, 10_000_000)]
    bounds = {"minimum": -(10 ** size(chance, 30)), "maximum": 10 ** size(chance, 30)}
    parts: list[Json] = [{"multipleOf": factor} for factor in factors[: chance.randint(1, 2)]]
    return {"type": chance.choice(["integer", "number"]), "allOf": parts, **bounds}


def _strings(chance: random.Random) -> Json:
    bounds = {"minLength": size(chance, 5000), "maxLength": 5000 + size(chance, 10_000_000)}
    formats = ["date-time", "uri", "email", "uuid", "ipv6", "hostname"]
    plain: Json = {"type": "string", **(bounds if chance.random() < 0.6 else {})}
    return {**plain, **({"format": chance.choice(formats)} if chance.random() < 0.4 else {})}


SCHEMAS = [
    _definition_chain,
    _definition_cycle,
    _nested_combination,
    _nested_containers,
    _wide_object,
    _enumeration,
    _patterns,
    _numbers,
    _strings,
]


def _schema(chance: random.Random) -> Json:
    return chance.choice(SCHEMAS)(chance)


# --- requests


def _choices(chance: random.Random) -> list[str]:
    length = size(chance, 200)
    return [f"{n} {'word(' * (length // 5)}" for n in range(size(chance, 200_000) // length + 1)]


def request(seed: int) -> Request:
    """A path and a body. What is longer than MAX_CHARACTERS is drawn again."""
    chance = random.Random(seed)
    while True:
        path, body = chance.choices(_KINDS, _WEIGHTS)[0](chance)
        if len(json.dumps(body)) <= MAX_CHARACTERS:
            return path, {"model": "tiny-chat", "temperature": 1, **body}


def _completion(outputs: Json, chance: random.Random) -> Request:
    num_tokens = chance.choice([1, 3, 3, 3, 20])
    body = {"prompt": "hi", "max_tokens": num_tokens, "seed": 1, "structured_outputs": outputs}
    return COMPLETIONS, body


def _of_lark(chance: random.Random) -> Request:
    return _completion({"grammar": chance.choice(LARK)(chance)}, chance)


def _of_regex(chance: random.Random) -> Request:
    return _completion({"regex": chance.choice(REGEX)(chance)}, chance)


def _of_choices(chance: random.Random) -> Request:
    return _completion({"choice": _choices(chance)}, chance)


def _of_schema(chance: random.Random) -> Request:
    return _completion({"json": _schema(chance)}, chance)


def _of_schema_text(chance: random.Random) -> Request:
    """Deeper than a body may be."""
    depth = size(chance, 100_000)
    before, after = chance.choice([('{"items":', "}"), ('{"anyOf":[', "]}"), ("[", "]")])
    return _completion({"json": before * depth + "{}" + after * depth}, chance)


def _said(chance: random.Random) -> Json:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": chance.choice([2, 12])}


def _of_format(chance: random.Random) -> Request:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(chance)}}
    return CHAT, {**_said(chance), "response_format": format}


def _of_tool(chance: random.Random) -> Request:
    schemas = [_schema(chance) for _ in range(chance.randint(1, 3))]
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}}
        for n, schema in enumerate(schemas)
    ]
    return CHAT, {**_said(chance), "tools": tools, "tool_choice": "required"}


def _of_response(chance: random.Random) -> Request:
    format = {"type": "json_schema", "name": "x", "schema": _schema(chance)}
    return RESPONSES, {"input": "hi", "max_output_tokens": 16, "text": {"format": format}}


def _of_message(chance: random.Random) -> Request:
    tool = {"name": "f", "input_schema": {**_schema(chance), "type": "object"}}
    return ANTHROPIC, {**_said(chance), "tools": [tool], "tool_choice": {"type": "any"}}


_KINDS: list[Callable[[random.Random], Request]] = [
    _of_lark,
    _of_regex,
    _of_choices,
    _of_schema,
    _of_schema_text,
    _of_format,
    _of_tool,
    _of_response,
    _of_message,
]
_WEIGHTS = [30, 20, 3, 20, 2, 8, 7, 5, 5]
