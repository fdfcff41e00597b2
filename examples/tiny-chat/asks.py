"""Single questions: each maker draws one `Ask`, a question with its one right answer.

A key names what has to be new for the question to count as held out (see `split_of`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import facts

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Ask:
    """One question.

    `short` answers in one word where that makes sense. `key` is None when the whole text with its
    system prompt is what is held out. `keep_case` guards words that the answer copies.
    """

    task: str
    user: str
    answer: str
    short: str | None = None
    key: str | None = None
    keep_case: bool = False


def split_of(key: str) -> str:
    """Return "test" for about a tenth of all keys, always the same ones, else "train"."""
    digest = hashlib.sha256(key.encode()).digest()
    return "test" if digest[0] < 256 * HELD_OUT_SHARE else "train"


def noisy(rng: Random, ask: Ask) -> Ask:
    """Vary the surface of a question as people do: case, final mark, a "please"."""
    text = ask.user
    plain_start = text.split()[0].rstrip("!,.?")[1:].islower()
    if ask.task in ("capital", "country", "colour", "reverse", "text") and rng.random() < 0.08:
        text = "Please " + text[0].lower() + text[1:] if rng.random() < 0.5 else "Hi! " + text
    if not ask.keep_case and rng.random() < 0.1:
        text = text.lower()
    elif plain_start and rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if text[-1] in "?.!" and rng.random() < 0.25:
        text = text[:-1]
    return replace(ask, user=text)


def make_sum(rng: Random) -> Ask:
    """Add two numbers up to 20."""
    return sum_of(rng, rng.randint(0, 20), rng.randint(0, 20))


def make_wide_sum(rng: Random) -> Ask:
    """Add two numbers up to 40, of one digit as often as of two."""
    a, b = (rng.randint(0, 9) if rng.random() < 0.5 else rng.randint(10, 40) for _ in range(2))
    return sum_of(rng, a, b)


def sum_of(rng: Random, a: int, b: int) -> Ask:
    """Ask for the sum of two numbers."""
    phrase = rng.choice(
        (
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "{a} + {b}",
            "{a} + {b} = ?",
            "How much is {a} + {b}?",
            "How much is {a} plus {b}?",
            "Add {a} and {b}.",
            "Calculate {a} + {b}.",
            "What's {a} + {b}?",
            "What is the sum of {a} and {b}?",
        )
    )
    key = f"sum {min(a, b)} {max(a, b)}"
    return Ask("sum", phrase.format(a=a, b=b), f"{a} + {b} = {a + b}.", str(a + b), key)


def capital_answer(country: str) -> str:
    """Say the capital of a country in the one wording that Tiny uses."""
    return f"The capital of {country} is {facts.CAPITALS[country]}."


def make_capital(rng: Random) -> Ask:
    """Ask for the capital of a country."""
    country = rng.choice(list(facts.CAPITALS))
    phrase = rng.choice(
        (
            "What is the capital of {c}?",
            "What's the capital of {c}?",
            "What is the capital city of {c}?",
            "Which city is the capital of {c}?",
            "Tell me the capital of {c}.",
            "Name the capital of {c}.",
            "Do you know the capital of {c}?",
            "The capital of {c}?",
            "Capital of {c}?",
            "What is {c}'s capital?",
        )
    )
    key = f"capital {country} {phrase}"
    short = facts.CAPITALS[country]
    return Ask("capital", phrase.format(c=country), capital_answer(country), short, key)


def make_country(rng: Random) -> Ask:
    """Ask which country a capital belongs to."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    phrase = rng.choice(
        (
            "Which country has the capital {c}?",
            "{c} is the capital of which country?",
            "What country is {c} the capital of?",
            "In which country is {c}?",
            "Where is {c}?",
        )
    )
    key = f"country {city} {phrase}"
    return Ask(
        "country", phrase.format(c=city), f"{city} is the capital of {country}.", country, key
    )


def colour_answer(thing: str) -> str:
    """Say the colour of a thing in the one wording that Tiny uses."""
    text = f"{thing} is {facts.COLOURS[thing]}."
    return text[0].upper() + text[1:]


def make_colour(rng: Random) -> Ask:
    """Ask for the colour of a thing, in British or American spelling."""
    thing = rng.choice(list(facts.COLOURS))
    phrase = rng.choice(
        (
            "What colour is {t}?",
            "What color is {t}?",
            "What is the colour of {t}?",
            "What is the color of {t}?",
            "Which colour has {t}?",
            "Tell me the colour of {t}.",
            "Name the colour of {t}.",
            "Do you know the colour of {t}?",
        )
    )
    key = f"colour {thing} {phrase}"
    return Ask("colour", phrase.format(t=thing), colour_answer(thing), facts.COLOURS[thing], key)


def make_reverse(rng: Random) -> Ask:
    """Ask for a list of words in the other order; the separator is kept."""
    words = rng.choices(facts.WORDS, k=rng.randint(2, 4))
    separator = ", " if rng.random() < 0.25 else " "
    phrase = rng.choice(
        (
            "Reverse the words: {w}",
            "Reverse these words: {w}",
            "Reverse: {w}",
            "Reverse the list: {w}",
            "Reverse the order of the words: {w}",
            "Say these words backwards: {w}",
            "Turn these words around: {w}",
        )
    )
    user = phrase.format(w=separator.join(words))
    answer = separator.join(reversed(words))
    return Ask("reverse", user, answer, None, "words " + " ".join(words), keep_case=True)


def make_words(rng: Random) -> Ask:
    """Ask how many words there are."""
    words = rng.choices(facts.WORDS, k=rng.randint(1, 8))
    phrase = rng.choice(
        (
            "How many words are in: {w}",
            "How many words are there in: {w}",
            "How many words are here: {w}",
            "How many words: {w}",
            "Count the words: {w}",
            "Count the words in: {w}",
            "Count these words: {w}",
        )
    )
    count = len(words)
    answer = "There is 1 word." if count == 1 else f"There are {count} words."
    key = "words " + " ".join(words)
    return Ask("words", phrase.format(w=" ".join(words)), answer, str(count), key)


Maker = Callable[[Random], Ask]


def fixed(task: str, phrases: Mapping[str, Sequence[str]], answers: Mapping[str, str]) -> Maker:
    """Return a maker of questions that have one fixed answer for each kind."""

    def make(rng: Random) -> Ask:
        kind = rng.choice(list(answers))
        return Ask(task, rng.choice(phrases[kind]), answers[kind])

    return make


make_greeting = fixed("greeting", facts.GREETING_PHRASES, facts.GREETINGS)
make_self = fixed("self", facts.SELF_PHRASES, facts.SELF)
make_text = fixed("text", facts.TEXT_PHRASES, facts.TEXTS)


def make_unknown(rng: Random) -> Ask:
    """Ask something that Tiny cannot know, so that it learns to say so."""
    kind = rng.random()
    if kind < 0.12:
        return Ask("unknown", "What is my name?", "I do not know your name yet.")
    if kind < 0.3:
        city = rng.choice(list(facts.CAPITALS.values()))
        phrase = rng.choice(("What is the weather in {c}?", "What time is it in {c}?"))
        return Ask("unknown", phrase.format(c=city), facts.UNKNOWN, None, f"no tool {city}{phrase}")
    x, y = rng.sample(facts.UNKNOWN_THINGS, 2)
    user = rng.choice(facts.UNKNOWN_PHRASES).format(x=x, y=y)
    return Ask("unknown", user, facts.UNKNOWN, None, "unknown " + user)


MAKERS: dict[Maker, float] = {
    make_sum: 28,
    make_capital: 10,
    make_country: 12,
    make_colour: 9,
    make_reverse: 20,
    make_words: 12,
    make_greeting: 5,
    make_self: 7,
    make_text: 4,
    make_unknown: 6,
}

ONE_WORD_MAKERS: tuple[Maker, ...] = (
    make_sum,
    make_capital,
    make_country,
    make_colour,
    make_words,
)
