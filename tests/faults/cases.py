"""What clients should not send, as data: bodies, whole requests, and bytes that are none.

A body is what changes in a good chat request, or the bytes themselves. Each case gives the
statuses that are right and words that the error must have.
"""

import json
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {
    "model": "tiny-chat",
    "messages": [{"role": "user", "content": "What is 7 + 5?"}],
    "temperature": 0,
    "max_tokens": 4,
}
HUGE = 10**400
MISSING = Ellipsis


@dataclass(frozen=True)
class Case:
    name: str
    sent: Any
    status: tuple[int, ...] = (400,)
    words: str = ""


def good_body(**changes: Any) -> bytes:
    fields = {**GOOD, **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not MISSING}).encode()


def said(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def _wrong_values(field: str, *values: Any) -> list[Case]:
    return [
        Case(
            f"{field}={json.dumps(value, default=str)[:24]}#{n}",
            good_body(**{field: value}),
            words=field,
        )
        for n, value in enumerate(values)
    ]


NO_NUMBER = ("1", "", [], {}, [1])
VALUES = [
    *_wrong_values("temperature", -1, -1e-9, 2.5, 1e308, HUGE, True, *NO_NUMBER),
    *_wrong_values("top_p", -0.1, 0, 1.1, HUGE, False, *NO_NUMBER),
    *_wrong_values("top_k", -2, 1.5, HUGE, "1"),
    *_wrong_values("min_p", -0.1, 1.1, HUGE, "1"),
    *_wrong_values("max_tokens", 0, -2, 1.5, -HUGE, True, *NO_NUMBER),
    *_wrong_values("max_completion_tokens", 0, -2, "1"),
    *_wrong_values("seed", 1.5, 2**64, -(2**64), HUGE, "1", []),
    *_wrong_values("n", 0, -1, 10**9, 1.5, "1"),
    *_wrong_values("presence_penalty", 3, -3, HUGE, "1"),
    *_wrong_values("frequency_penalty", 3, -3, HUGE, "1"),
    *_wrong_values("repetition_penalty", 0, -1, HUGE, "1"),
    *_wrong_values("logprobs", "yes", 5, []),
    *_wrong_values("top_logprobs", -2, 10**9, "1"),
    *_wrong_values("logit_bias", {"x": 1}, {"999999999": 1}, {"-1": 1}, {"1": "x"}, [1], 5),
    *_wrong_values("min_tokens", -1, HUGE, "1"),
    *_wrong_values("stop", 1, [1], [""], {}, ["x"] * 5000, "x" * 100_000, [["x"]]),
    *_wrong_values("stop_token_ids", [-1], ["x"], [10**12], 5),
    *_wrong_values("allowed_token_ids", [], [-1], ["x"], [10**12], [[1]], 5, {}),
    *_wrong_values("bad_words", 5, [5], [""], "x", {}, ["x"] * 5000, ["x" * 100_000]),
    *_wrong_values("truncate_prompt_tokens", 0, -2, 1.5, HUGE, True, "1"),
    *_wrong_values("stream", "yes", 1, []),
    *_wrong_values("stream_options", 5),
    *_wrong_values("response_format", {"type": "nope"}, 5, "json"),
    *_wrong_values("tools", 5, [5], [{"type": "nope"}]),
    *_wrong_values("tool_choice", "nope", 5),
    *_wrong_values("chat_template_kwargs", 5, [], {"messages": []}, {"tokenize": True}),
    *_wrong_values("model", 5, []),
    *_wrong_values("messages", [], None, {}, "x", [5], [{}], [[]], MISSING),
]

MESSAGES = [
    Case(name, good_body(messages=messages), words=words)
    for name, messages, words in (
        ("no such role", [{"role": "nobody", "content": "x"}], "role"),
        ("no role", [{"content": "x"}], "role"),
        ("no content", [{"role": "user"}], "content"),
        ("content is a number", said(5), "content"),
        ("a part that is none", said([5]), "part 0"),
        ("an image by its address", said([{"type": "image_url", "image_url": {
            "url": "http://127.0.0.1:1/x.png"}}]), "text only"),
        ("an image as data", said([{"type": "image_url", "image_url": {
            "url": "data:image/png;base64,AAAA"}}]), "text only"),
        ("audio", said([{"type": "input_audio", "input_audio": {}}]), "text only"),
        ("parts within parts", said([{"type": "text", "text": [{"type": "text"}]}]), "part 0"),
        ("very many calls", [{"role": "assistant", "tool_calls": [0] * 500_000}], "tool_calls"),
        ("a hundred thousand messages", said("x") * 100_000, "maximum context length is"),
        ("a prompt that is too long", said("word " * 5000), "maximum context length is"),
        ("a very long prompt", said("word " * 1_000_000), "maximum context length is"),
        ("one very long word", said("x" * 5_000_000), "maximum context length is"),
    )
]  # fmt: skip

TEXT = [
    Case("nothing", b""),
    Case("white space", b" \n\t "),
    Case("an array", b"[]", words="object"),
    Case("null", b"null", words="object"),
    Case("cut off", good_body()[:-1]),
    Case("something after it", good_body() + b"x"),
    Case("two objects", good_body() * 2),
    Case("no UTF-8", b'{"model": "\xff\xfe"}'),
    Case("UTF-16", good_body().decode().encode("utf-16")),
    Case("a byte order mark", b"\xef\xbb\xbf" + good_body()),
    Case("a surrogate in UTF-8", b'{"model": "\xed\xa0\x80"}'),
    Case("a lone leading surrogate", good_body(messages=said("\ud800"))),
    Case("a lone trailing surrogate", good_body(messages=said("x\udfffx"))),
    Case("a raw NUL", b'{"model": "\x00"}'),
    Case("deep arrays", b"[" * 100_000),
    Case("deep objects", b'{"a":' * 100_000),
    Case("deep content", good_body()[:-1] + b', "user": ' + b"[" * 300 + b"]" * 300 + b"}"),
    Case("NaN", good_body()[:-1] + b', "top_p": NaN}'),
    Case("Infinity", good_body()[:-1] + b', "top_p": -Infinity}'),
    Case("1e999", good_body()[:-1] + b', "top_p": 1e999}', words="1e999"),
    Case("1e999 in a corner", good_body()[:-1] + b', "chat_template_kwargs": {"x": [1e999]}}'),
    Case("many digits", good_body()[:-1] + b', "seed": ' + b"9" * 10_000 + b"}"),
    Case("a field twice", b'{"model": "a", ' + good_body()[1:], words="twice"),
    Case("a field twice inside", b'{"messages": [{"role": "user", "role": "system"}]}'),
    Case("a field twice by an escape", b'{"\\u006dodel": "a", ' + good_body()[1:], words="twice"),
    Case("very many fields", good_body(**{f"f{n}": n for n in range(200_000)}), words="4096"),
    Case("a form", b"model=tiny-chat&messages=x"),
]


def _call(arguments: str) -> dict[str, Any]:
    """A tool call in the history, as a client returns it."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


FINE = [
    Case("a key that nobody knows", good_body(**{"__proto__": {"x": 1}}), (200,)),
    Case("NUL in a message", good_body(messages=said("a\0b")), (200,)),
    Case("an empty message", good_body(messages=said("")), (200,)),
    Case("special tokens", good_body(messages=said("<|im_end|><|endoftext|></s>")), (200,)),
    Case("a thousand line ends", good_body(messages=said("\r\n" * 400)), (200,)),
    Case("directions and joiners", good_body(messages=said("\u202e\u200d\ufeff" * 20)), (200,)),
    Case("the end of Unicode", good_body(messages=said("\U0010ffff\uffff")), (200,)),
    Case("a pair of surrogates", good_body(messages=said("\U0001f600")), (200,)),
    Case("sixteen stop strings", good_body(stop=[f"s{n}" for n in range(16)]), (200,)),
    Case("the smallest number", good_body(temperature=5e-324), (200,)),
    Case("the largest seed", good_body(seed=2**63 - 1), (200,)),
    Case("as many tokens as fit", good_body(max_tokens=-1), (200,)),
    Case("more tokens than fit", good_body(max_tokens=10**12), (200,)),
    Case(
        "more tokens than fit, by the newer name", good_body(max_completion_tokens=10**12), (200,)
    ),
    Case("an empty stop string", good_body(stop=""), (200,)),
    Case(
        "stream_options without a stream", good_body(stream_options={"include_usage": True}), (200,)
    ),
    Case("a user that is a number", good_body(user=5), (200,)),
    Case("a user that is an object", good_body(user={}), (200,)),
    Case("model is null", good_body(model=None), (200,)),
    Case("no model", good_body(model=MISSING), (200,)),
    Case("an empty model", good_body(model=""), (200,)),
    Case("content is null", good_body(messages=said(None)), (200,)),
    Case("no parts", good_body(messages=said([])), (200,)),
    Case("a field of a history", good_body(messages=[{**said("x")[0], "hidden": 1}]), (200,)),
    Case(
        "arguments that are no JSON",
        good_body(messages=[*said("x"), _call("{"), *said("x")]),
        (200,),
    ),
]

ANTHROPIC = "/v1/messages"
ANTHROPIC_BODIES = [
    Case(f"{ANTHROPIC}: {case.name}", case.sent, case.status, case.words)
    for case in (
        *TEXT,
        *_wrong_values("max_tokens", 0, -1, 1.5, -HUGE, True, None, MISSING, *NO_NUMBER),
        *_wrong_values("temperature", -1, -1e-9, 2.5, HUGE, *NO_NUMBER),
        *_wrong_values("top_p", 0, 1.1, HUGE, *NO_NUMBER),
        *_wrong_values("top_k", -2, 1.5, HUGE, "1"),
        *_wrong_values("stop_sequences", 1, [1], [""], ["x"] * 5000, ["x" * 100_000]),
        *_wrong_values("allowed_token_ids", [], [-1], ["x"], [10**12], [[1]], 5, {}),
        *_wrong_values("bad_words", 5, [5], [""], "x", {}, ["x"] * 5000, ["x" * 100_000]),
        *_wrong_values("truncate_prompt_tokens", 0, -2, 1.5, HUGE, True, "1"),
        *_wrong_values("stream", "yes", 1, []),
        *_wrong_values("system", 5, [5], {}, [{"type": "image"}]),
        *_wrong_values("tools", 5, [5], [{"name": "f"}], [{"name": "f", "input_schema": 5}]),
        *_wrong_values("tool_choice", "any", {"type": "tool"}, {"type": "nope"}),
        *_wrong_values("thinking", {"type": "enabled", "budget_tokens": -1}, True, {}),
        *_wrong_values("output_config", 5, {"effort": "lots"}, {"format": {"type": "xml"}}),
        *_wrong_values("container", "c", 5),
        *_wrong_values("model", 5),
        *_wrong_values(
            "messages",
            *([], None, {}, "x", [5], [{}], [{"role": "tool", "content": "x"}], MISSING),
            *(said(5), said(None), said([5]), said([{"type": "text"}]), said([{"type": "image"}])),
        ),
        *_wrong_values("hidden", 1),
        Case("a huge answer", good_body(max_tokens=10**12), (200,)),
        Case("metadata of any kind", good_body(metadata=5), (200,)),
        Case("no such model", good_body(model="nope"), (404,), "nope"),
        Case("a long prompt", good_body(messages=said("word " * 5000)), words="maximum context"),
        Case("NUL in a message", good_body(messages=said("a\0b")), (200,)),
        Case("an empty turn", good_body(messages=said("")), (200, 400)),
    )
]

MODELS = [
    Case(f"model {name[:20]!r}", good_body(model=name), (404,), "model")
    for name in ("nope", "tiny-chat\0", "TINY-CHAT", "../../etc/passwd", "x" * 100_000, "a\nb")
]

BODIES = [*VALUES, *MESSAGES, *TEXT, *FINE, *MODELS]


# --- whole requests: method, path, headers


JSON = {"Content-Type": "application/json"}
REQUESTS = [
    *(Case(f"{method} {CHAT}", (method, CHAT, JSON), (405,))
      for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")),
    *(Case(f"{method} {path}", (method, path, {}), (405,))
      for method in ("POST", "DELETE") for path in ("/health", "/v1/models", "/metrics")),
    Case("GET /", ("GET", "/", {}), (200,)),
    Case("GET /admin/drain", ("GET", "/admin/drain", {}), (405,)),
    *(Case(f"type {kind!r}", ("POST", CHAT, {"Content-Type": kind}), (415,), "application/json")
      for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                   "application/xml", "application/json-seq")),
    *(Case(f"encoding {name}", ("POST", CHAT, {**JSON, "Content-Encoding": name}), (415,))
      for name in ("gzip", "deflate", "br", "nonsense")),
    *(Case(f"GET {path[:24]}", ("GET", path, {}), (404,))
      for path in ("//", "/v1", "/v1/chat/completions/", "/../../etc/passwd",
                   "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/nope", "/%ff%fe", "/" + "x" * 20_000)),
    *(Case(f"GET {path}", ("GET", path, {}), (400,), "control characters")
      for path in ("/%00", "/%0d%0aSet-Cookie:%20a=b", "/%1b[31mred", "/admin/drain%0A")),
    Case("admin through a proxy", ("GET", "/admin/pipeline", {"X-Forwarded-For": "::1"}), (403,)),
    Case("admin of a rebound name", ("GET", "/admin/pipeline", {"Host": "evil.example"}), (403,)),
    Case("models of a rebound name", ("GET", "/v1/models", {"Host": "evil.example"}), (403,)),
    Case("a page that drains", ("POST", "/admin/drain", {"Origin": "https://a.example"}), (403,)),
    Case("a trace of no time", ("GET", "/admin/trace?seconds=-1", {}), (400,), "seconds"),
    Case("an id with a line end", ("GET", "/nope", {"X-Request-Id": "a\x85b c"}), (404,)),
]  # fmt: skip


# --- bytes on a connection, in pieces with a pause between them; status 0 is a close


def post(*headers: bytes, body: bytes = b"") -> bytes:
    lines = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
    ]
    return b"\r\n".join([*lines, *headers, b"", b""]) + body


def get(
    *headers: bytes, first: bytes = b"GET /health HTTP/1.1", host: bytes = b"Host: localhost"
) -> bytes:
    close = b"Connection: close"
    return b"\r\n".join([first, *filter(None, [host]), close, *headers, b"", b""])


CHUNKED = b"Transfer-Encoding: chunked"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
FULL = post(b"Content-Length: %d" % len(good_body()), body=good_body())


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])


WIRE = [
    Case("TLS", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 32 + b"\r\n\r\n"]),
    Case("HTTP/2's preface", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], (400, 404, 505)),
    Case("ssh", [b"SSH-2.0-OpenSSH_9.9\r\n\r\n"]),
    Case("bytes", [bytes(range(256)) * 8 + b"\r\n\r\n"]),
    Case("bytes without an end", [b"\x80\xff" * 100_000], (400, 431)),
    Case("NULs", [b"\0" * 4096 + b"\r\n\r\n"]),
    Case("no HTTP version", [b"GET /health\r\n\r\n"]),
    Case("HTTP/9.9", [get(first=b"GET /health HTTP/9.9")], (400, 505)),
    Case("no Host", [get(host=b"")]),
    Case("two Hosts", [get(b"Host: y")]),
    Case("HTTP/1.0 without a Host", [b"GET /health HTTP/1.0\r\n\r\n"], (200,)),
    Case("a space in a header's name", [get(b"X : y")]),
    Case("a header without a colon", [get(b"nonsense")]),
    Case("NUL in a header", [get(b"X: a\0b")]),
    Case("a lone CR in a header", [get(b"X: a\rb")]),
    Case("a folded header", [get(b"X: a\r\n b")], (200, 400)),
    Case("a raw space in the path", [get(first=b"GET /a b HTTP/1.1")]),
    Case("raw UTF-8 in the path", [get(first="GET /é HTTP/1.1".encode())]),
    Case("an address as the path", [get(first=b"GET http://localhost/health HTTP/1.1")], (200,)),
    Case("another address", [get(first=b"GET http://a.example/health HTTP/1.1")], (400,)),
    Case("CONNECT", [get(first=b"CONNECT a.example:443 HTTP/1.1")], (400, 404, 405)),
    Case("a flood of headers", [get(*(b"X-%d: y" % n for n in range(20_000)))], (431,)),
    Case("one long header", [get(b"X: " + b"x" * 1_000_000)], (431,)),
    Case("a long path", [get(first=b"GET /" + b"x" * 200_000 + b" HTTP/1.1")], (414, 431)),
    Case("a header that never ends", [b"GET /health HTTP/1.1\r\n"] + [b"X: y\r\n"] * 40, (408,)),
    Case("a header byte by byte", [bytes([b]) for b in get()[:40]], (408,)),
    Case("silence", [b""], (0,)),
    Case("half a first line", [b"GET /hea"], (408,)),
    Case("a body that does not come", [post(b"Content-Length: 100")], (408,)),
    Case("a body byte by byte", [post(b"Content-Length: 100"), *([b" "] * 40)], (408,)),
    Case("chunks that stop", [post(CHUNKED), b"5\r\nab"], (408,)),
    Case("a length that is too short", [post(b"Content-Length: 5", body=good_body())]),
    Case("a length of -1", [post(b"Content-Length: -1")]),
    Case("a length of +5", [post(b"Content-Length: +5")]),
    Case("a length of 0x5", [post(b"Content-Length: 0x5")]),
    Case("a length of 1e3", [post(b"Content-Length: 1e3")]),
    Case("a length of many digits", [post(b"Content-Length: " + b"9" * 5000)], (400, 413)),
    Case("two lengths", [post(b"Content-Length: 5", b"Content-Length: 6", body=b"12345")]),
    Case("two lengths in one", [post(b"Content-Length: 5, 6", body=b"12345")]),
    Case("200 MB announced", [post(b"Content-Length: 200000000")], (413,)),
    Case("a length and chunks", [post(b"Content-Length: 4", CHUNKED,
         body=chunked(good_body()) + SMUGGLED)], words="exclude"),
    Case("chunks and a length", [post(CHUNKED, b"Content-Length: 0",
         body=b"0\r\n\r\n" + SMUGGLED)], words="exclude"),
    Case("chunked twice", [post(CHUNKED, CHUNKED, body=SMUGGLED)], (400, 501)),
    Case("chunked and identity", [post(b"Transfer-Encoding: chunked, identity")], (400, 501)),
    Case("almost chunked", [post(b"Transfer-Encoding: xchunked", body=SMUGGLED)], (400, 501)),
    Case("hidden chunked", [post(b"Transfer-Encoding: \x0bchunked", body=SMUGGLED)], (400, 501)),
    Case("chunked with a space", [post(b"Transfer-Encoding : chunked", body=SMUGGLED)]),
    Case("a chunk of zz bytes", [post(CHUNKED, body=b"zz\r\n")]),
    Case("a chunk of -1 bytes", [post(CHUNKED, body=b"-1\r\n")]),
    Case("a chunk of too many digits", [post(CHUNKED, body=b"f" * 40 + b"\r\n")]),
    Case("a chunk with a long extension", [post(CHUNKED, body=b"1;" + b"x" * 100_000)], (400, 431)),
    Case("a chunk longer than it says", [post(CHUNKED, body=b"1\r\nabc\r\n")]),
    Case("a trailer", [post(CHUNKED, b"Connection: close",
         body=chunked(good_body())[:-2] + b"X: y\r\n\r\n")], (200, 400)),
    Case("one byte a chunk", [post(CHUNKED, b"Connection: close",
         body=chunked(*(bytes([b]) for b in good_body())))], (200,)),
    Case("chunks that are too many", [post(CHUNKED, b"Connection: close",
         body=chunked(*[b" " * 1_000_000] * 12))], (413,)),
    Case("the header Expect: 100-continue", [post(b"Expect: 100-continue", b"Content-Length: 9")],
         (100, 408)),
    Case("a websocket", [get(b"Upgrade: websocket", b"Connection: upgrade")], (200, 400)),
    Case("HTTP/2 by upgrade", [get(b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")], (200,)),
    Case("garbage after a request", [FULL + b"\0garbage\r\n\r\n"], (200,)),
    Case("line ends before a request", [b"\r\n\r\n" + get()], (200, 400)),
]  # fmt: skip
