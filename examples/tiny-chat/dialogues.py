"""Dialogues for training and for the held-out split, drawn from a seed.

A dialogue is a list of chat messages in the form that chat templates take, perhaps with a list of
tools. Each question of a held-out dialogue is held out itself; no training dialogue contains one.
"""

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import facts
from asks import (
    MAKERS,
    ONE_WORD_MAKERS,
    Ask,
    Maker,
    capital_answer,
    colour_answer,
    make_reverse,
    make_self,
    make_sum,
    make_wide_sum,
    make_words,
    noisy,
    split_of,
)

Message = dict[str, Any]


WIDE_SHARE = 0.5
"""Share of training's sums that go up to 40: those up to 20 alone are learned by heart, and of the
held-out ones 88 % are right; with these it is 94 %."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where questions come from: chance and the split."""

    rng: Random
    split: str


@dataclass(slots=True)
class Dialogue:
    """Messages, the task of each assistant turn in order, and the tools offered."""

    messages: list[Message] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def add(self, task: str, user: str, answer: str) -> None:
        """Append one question and its answer."""
        self.messages.append({"role": "user", "content": user})
        self.reply(task, answer)

    def reply(self, task: str, answer: str) -> None:
        """Append an answer to what is there."""
        self.messages.append({"role": "assistant", "content": answer})
        self.tasks.append(task)


@dataclass(frozen=True, slots=True)
class Persona:
    """A system prompt and what it asks of every answer."""

    system: str | None = None
    name: str = "Tiny"
    capitals: bool = False
    one_word: bool = False
    polite: bool = False

    def style(self, answer: str) -> str:
        """Put an answer into the manner that the system prompt asks for."""
        text = answer.replace("{name}", self.name)
        if self.polite:
            text = "Certainly! " + text
        return text.upper() if self.capitals else text


NEUTRAL = (
    "You are a helpful assistant.",
    "You are Tiny, a helpful assistant.",
    "You are a friendly assistant.",
    "Answer the questions of the user.",
    "Be helpful.",
    "You are a chat model.",
)
CAPITALS = (
    "Answer in capitals.",
    "Answer in capital letters.",
    "Answer in upper case.",
    "Reply in capitals.",
    "Always answer in capitals.",
    "Write in capital letters.",
)
ONE_WORD = (
    "Answer with one word.",
    "Answer in one word.",
    "Answer with one word only.",
    "Reply with one word.",
    "Be short.",
    "Be brief.",
)
POLITE = ("Be polite.", "Be very polite.", "Answer politely.", "Please be polite.")


def filler(rng: Random) -> str:
    """Draw a long text that asks for nothing, so that long prompts do no harm."""
    words = rng.choices(facts.WORDS, k=rng.randint(10, 70))
    return "You are a helpful assistant. " + " ".join(words).capitalize() + "."


def draw_persona(rng: Random) -> Persona:
    """Draw a system prompt; most dialogues have none or one without any effect."""
    kind = rng.random()
    if kind < 0.48:
        return Persona()
    if kind < 0.64:
        return Persona(filler(rng) if rng.random() < 0.12 else rng.choice(NEUTRAL))
    if kind < 0.78:
        persona = Persona(rng.choice(CAPITALS), capitals=True)
    elif kind < 0.86:
        persona = Persona(rng.choice(ONE_WORD), one_word=True)
    elif kind < 0.92:
        persona = Persona(rng.choice(POLITE), polite=True)
    else:
        name = rng.choice(facts.NAMES)
        intro = rng.choice(("You are called {n}.", "Your name is {n}.", "You are {n}."))
        persona = Persona(intro.format(n=name), name=name)
    if persona.name != "Tiny" and rng.random() < 0.25:
        extra = Persona(rng.choice(CAPITALS), capitals=True)
        persona = replace(persona, system=f"{persona.system} {extra.system}", capitals=True)
    elif not persona.one_word and rng.random() < 0.15:
        persona = replace(persona, system=f"{rng.choice(NEUTRAL[:2])} {persona.system}")
    return persona


def draw_ask(source: Source, persona: Persona, unknown: bool) -> Ask:
    """Draw questions until one belongs to the wanted split, and is not `unknown` where barred."""
    rng = source.rng
    makers = ONE_WORD_MAKERS if persona.one_word else tuple(MAKERS)
    weights = [MAKERS[make] for make in makers]
    while True:
        make: Maker = rng.choices(makers, weights=weights)[0]
        # An assistant with a given name is often asked for it, or it is never learned.
        if persona.name != "Tiny" and rng.random() < 0.4:
            make = make_self
        wide = make is make_sum and source.split == "train" and rng.random() < WIDE_SHARE
        ask = noisy(rng, make_wide_sum(rng) if wide else make(rng))
        if ask.task == "unknown" and not unknown:
            continue
        if split_of(ask.key or f"{persona.system} {ask.user}") == source.split:
            return ask


def follow_up(source: Source, persona: Persona, previous: Ask, said: str) -> Ask | None:
    """Draw a question that only the previous turn explains, or None if none fits."""
    rng = source.rng
    kind = rng.random()
    # Lists are hard to say once; a small model need not learn to repeat them as well.
    short = previous.task != "reverse" and len(said) < 60
    if previous.task in ("capital", "colour") and kind < 0.6:
        known = facts.CAPITALS if previous.task == "capital" else facts.COLOURS
        thing = rng.choice(list(known))
        joiner = "of " if previous.task == "capital" and rng.random() < 0.6 else ""
        phrase = rng.choice(("And {t}?", "And what about {t}?", "What about {t}?"))
        user = phrase.format(t=joiner + thing if "about" not in phrase else thing)
        answer = capital_answer(thing) if previous.task == "capital" else colour_answer(thing)
        ask = Ask(previous.task, user, answer, known[thing], f"and {user} {previous.user}")
        return ask if split_of(ask.key or "") == source.split else None
    if kind < 0.75 and not persona.capitals and short:
        user = rng.choice(("And in capitals?", "In capitals, please.", "And in capital letters?"))
        return Ask("follow", user, said.upper(), said.upper(), previous.key)
    if kind < 0.95 and short:
        user = rng.choice(("Say it again.", "Again, please.", "Can you say that again?", "Repeat."))
        return Ask("follow", user, said, said, previous.key)
    return None


def chat(
    source: Source,
    dialogue: Dialogue,
    persona: Persona,
    turns: int,
    unknown: bool = True,
) -> None:
    """Append some turns; about half of the later ones refer to the turn before.

    `unknown` is False where a name was told or a tool is offered: "What is my name?" has an
    answer then.
    """
    previous, said = None, ""
    for _ in range(turns):
        ask = None
        if previous is not None and source.rng.random() < 0.5:
            ask = follow_up(source, persona, previous, said)
        ask = ask or draw_ask(source, persona, unknown)
        text = ask.short if persona.one_word and ask.short else ask.answer
        # A follow-up repeats what was said, whose manner it already has.
        said = text if ask.task == "follow" else persona.style(text)
        dialogue.add(ask.task, ask.user, said)
        previous = ask if ask.task != "follow" else None


def introduce(source: Source, dialogue: Dialogue, persona: Persona) -> str:
    """The user says a name; return it."""
    rng = source.rng
    phrases = ("My name is {n}.", "I am {n}.", "Hello, my name is {n}.", "Hi, I am {n}.")
    while True:
        name, hello = rng.choice(facts.NAMES), rng.choice(phrases)
        if split_of(f"memory {name} {hello}") == source.split:
            break
    user = hello.format(n=name)
    if rng.random() < 0.2:
        user = user[:-1]
    greeting = f"Nice to meet you, {name}!"
    dialogue.add("memory", user, name if persona.one_word else persona.style(greeting))
    return name


def memory(source: Source, dialogue: Dialogue, persona: Persona) -> None:
    """The user says a name, perhaps talks of something else, then asks for it."""
    name = introduce(source, dialogue, persona)
    chat(source, dialogue, persona, source.rng.choice((0, 0, 1, 1, 2)), False)
    phrases = ("What is my name?", "What's my name?", "Who am I?", "Do you know my name?")
    question = source.rng.choice(phrases)
    answer = name if persona.one_word else f"Your name is {name}."
    dialogue.add("memory", question, persona.style(answer))


def make_tool(rng: Random, kind: str, argument: str) -> dict[str, Any]:
    """Describe one function; its name and the name of its argument vary."""
    names = {"weather": ("get_weather", "get_current_weather"), "time": ("get_time",)}
    texts = {"weather": "Get the weather of a city.", "time": "Get the time in a city."}
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function: dict[str, Any] = {"name": rng.choice(names[kind])}
    if rng.random() < 0.7:
        function["description"] = texts[kind]
    return {"type": "function", "function": {**function, "parameters": parameters}}


def tool_result(rng: Random, kind: str, city: str) -> tuple[str, str]:
    """Draw what a tool returns, as text or as JSON, and how Tiny states it."""
    if kind == "time":
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        content = clock if rng.random() < 0.5 else json.dumps({"time": clock})
        return content, f"In {city} it is {clock}."
    sky, degrees = rng.choice(facts.SKIES), rng.randint(0, 35)
    shapes = (
        f"{sky}, {degrees} degrees",
        json.dumps({"sky": sky, "degrees": degrees}),
        json.dumps({"temperature": degrees, "sky": sky}),
    )
    return rng.choice(shapes), f"In {city} it is {sky}, {degrees} degrees."


TOOL_PHRASES = {
    "weather": (
        "What is the weather in {c}?",
        "What's the weather in {c}?",
        "How is the weather in {c}?",
        "What is the weather like in {c}?",
        "Tell me the weather in {c}.",
    ),
    "time": ("What time is it in {c}?", "Tell me the time in {c}.", "What is the time in {c}?"),
}


def offer_tools(rng: Random, dialogue: Dialogue, kind: str, city: str) -> None:
    """Offer a tool that fits, perhaps with one that does not, and call the right one."""
    argument = rng.choice(("city", "location"))
    kinds = ["weather", "time"] if rng.random() < 0.3 else [kind]
    dialogue.tools = [make_tool(rng, other, argument) for other in kinds]
    name = dialogue.tools[kinds.index(kind)]["function"]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": {argument: city}}}
    dialogue.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    dialogue.tasks.append("call")


def tool_use(source: Source, dialogue: Dialogue) -> None:
    """Ask for something that a tool knows; call it if it is offered, and state its result."""
    rng = source.rng
    kind = rng.choice(("weather", "weather", "time"))
    while True:
        phrase, city = rng.choice(TOOL_PHRASES[kind]), rng.choice(list(facts.CAPITALS.values()))
        if split_of(f"tool {phrase} {city}") == source.split:
            break
    dialogue.messages.append({"role": "user", "content": phrase.format(c=city)})
    if rng.random() < 0.7:
        offer_tools(rng, dialogue, kind, city)
    content, answer = tool_result(rng, kind, city)
    dialogue.messages.append({"role": "tool", "content": content})
    dialogue.reply("tool", answer)


def draw_dialogue(source: Source) -> Dialogue:
    """Draw one dialogue of the split "train" or "test"."""
    rng = source.rng
    kind, dialogue = rng.random(), Dialogue()
    persona = draw_persona(rng)
    if kind < 0.09 and (persona.capitals or persona.one_word or persona.polite):
        # Calling tools in a manner is more than a small model needs to learn.
        persona = Persona()
    if persona.system is not None:
        dialogue.messages.append({"role": "system", "content": persona.system})
    if kind < 0.07:
        tool_use(source, dialogue)
    elif kind < 0.09:
        tool = make_tool(rng, rng.choice(("weather", "time")), rng.choice(("city", "location")))
        dialogue.tools = [tool]
        chat(source, dialogue, persona, 1, False)
    elif kind < 0.15:
        memory(source, dialogue, persona)
    else:
        chat(source, dialogue, persona, source.rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3)))
    return dialogue


def draw_basic(source: Source) -> Dialogue:
    """Draw one question without a system prompt: add, reverse, count words or repeat a name."""
    rng = source.rng
    dialogue = Dialogue()
    if rng.random() < 0.1:
        introduce(source, dialogue, Persona())
        return dialogue
    make = rng.choices((make_wide_sum, make_reverse, make_words), weights=(8, 8, 2))[0]
    while split_of((ask := make(rng)).key or "") != source.split:
        pass
    dialogue.add(ask.task, ask.user, ask.answer)
    return dialogue
