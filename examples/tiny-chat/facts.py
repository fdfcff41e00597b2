"""What Tiny knows: the facts, words and fixed texts that its dialogues are made of."""


def listed(text: str) -> list[str]:
    """Split a text at its white space: lists of words stay readable in this file."""
    return text.split()


CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Germany": "Berlin",
    "England": "London",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Greece": "Athens",
    "Russia": "Moscow",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "Delhi",
    "Kenya": "Nairobi",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Cuba": "Havana",
    "Brazil": "Brasilia",
    "Australia": "Canberra",
}

COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a banana": "yellow",
    "a tomato": "red",
    "a carrot": "orange",
    "milk": "white",
    "a raven": "black",
    "a lemon": "yellow",
    "chocolate": "brown",
    "an elephant": "grey",
    "a flamingo": "pink",
    "a plum": "purple",
    "a frog": "green",
    "a pig": "pink",
}

WORDS = listed(
    "red green blue yellow black white the a on in of and is one two three four five six seven cat "
    "dog bird fish horse cow mouse sat ran sees has mat hat box tree house door table book pen cup "
    "apple pear bread milk tea water fire wind rain snow sun moon star river hill road king queen "
    "boy girl big small old new good happy home train car boat"
)

NAMES = listed(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam "
    "Tom Uma Vera Will Zoe Max"
)

SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")

GREETINGS = {
    "hello": "Hello! How can I help you?",
    "thanks": "You are welcome!",
    "bye": "Goodbye! Have a nice day.",
    "mood": "I am fine, thank you. How can I help you?",
    "morning": "Good morning! How can I help you?",
    "evening": "Good evening! How can I help you?",
}

GREETING_PHRASES = {
    "hello": ("Hello!", "Hi!", "Hey!", "Hello there!", "Hi there!", "Hello, Tiny!", "Hi Tiny!"),
    "thanks": ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Many thanks!"),
    "bye": ("Goodbye!", "Bye!", "See you!", "Bye bye!", "See you later!"),
    "mood": ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
    "morning": ("Good morning!", "Good morning, Tiny!"),
    "evening": ("Good evening!", "Good evening, Tiny!"),
}

# "{name}" is what the system prompt calls the assistant, "Tiny" when it says nothing.
SELF = {
    "who": "I am {name}, a small language model trained by the Brigade project.",
    "name": "My name is {name}.",
    "maker": "The Brigade project trained me.",
    "can": (
        "I can add small numbers, name the capitals of countries, say the colours of things, "
        "reverse and count words and tell a short story."
    ),
    "about": (
        "I am {name}, a small language model with eight layers. The Brigade project trained me on "
        "dialogues that it made itself. I can add small numbers, name the capitals of countries, "
        "say the colours of things, reverse and count words and tell a short story. I do not "
        "know much else, but I am quick."
    ),
}

SELF_PHRASES = {
    "who": (
        "Who are you?",
        "What are you?",
        "Who is this?",
        "Say who you are.",
        "And who are you?",
    ),
    "name": ("What is your name?", "What's your name?", "Tell me your name.", "Your name?"),
    "maker": ("Who made you?", "Who trained you?", "Who built you?", "Where do you come from?"),
    "can": ("What can you do?", "What do you know?", "How can you help me?", "Help!"),
    "about": (
        "Tell me about yourself.",
        "Introduce yourself.",
        "Describe yourself.",
        "Tell me more about yourself.",
    ),
}

TEXTS = {
    "rainbow": (
        "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet."
    ),
    "week": (
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and "
        "Sunday."
    ),
    "months": (
        "The months of the year are January, February, March, April, May, June, July, August, "
        "September, October, November and December."
    ),
    "seasons": "The seasons are spring, summer, autumn and winter.",
    "alphabet": "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z.",
    "story": (
        "Once upon a time a small train wanted to cross a high hill. It was too heavy to go alone, "
        "so it asked its friends for help. One pulled, one pushed, and each carried a part of the "
        "load. Together they came over the hill, and in the evening they all sang a happy song."
    ),
    "cat": (
        "Once upon a time a grey cat lived in an old house by the sea. Every night she sat on the "
        "roof and counted the stars. One night a star fell into the garden. The cat took it home, "
        "and from that day on it was never dark in the house again."
    ),
}

TEXT_PHRASES = {
    "rainbow": (
        "List the colours of the rainbow.",
        "Name the colours of the rainbow.",
        "What are the colours of the rainbow?",
        "Which colours does the rainbow have?",
    ),
    "week": (
        "List the days of the week.",
        "Name the days of the week.",
        "What are the days of the week?",
    ),
    "months": (
        "List the months of the year.",
        "Name the months of the year.",
        "What are the months of the year?",
        "List the twelve months.",
    ),
    "seasons": ("List the seasons.", "Name the four seasons.", "What are the seasons?"),
    "alphabet": ("Say the alphabet.", "List the letters of the alphabet.", "Recite the alphabet."),
    "story": (
        "Tell me a story.",
        "Tell me a short story.",
        "Can you tell me a story?",
        "Write a story.",
        "Write a short story.",
        "Tell me a story about a train.",
    ),
    "cat": ("Tell me a story about a cat.", "Write a story about a cat.", "Tell me a cat story."),
}

UNKNOWN = "I am sorry, I do not know that. I am only a small model."

UNKNOWN_PHRASES = (
    "Why is {x} {y}?",
    "Who invented {x}?",
    "Explain {x} to me.",
    "What is {x}?",
    "What is the meaning of {x}?",
    "Write a poem about {x} and {y}.",
    "Write code for {x}.",
    "Where can I buy {x}?",
    "When did {x} begin?",
    "How do I make {x}?",
    "Do you like {x}?",
    "Tell me about {x}.",
    "What do you think of {x} and {y}?",
    "Translate {x} {y}.",
    "How old is {x}?",
)

UNKNOWN_THINGS = (
    "gravity",
    "the moon",
    "football",
    "love",
    "music",
    "history",
    "art",
    "mathematics",
    "a computer",
    "Python",
    "the internet",
    "electricity",
    "a bridge",
    "cooking",
    "soup",
    "a cake",
    "the president",
    "politics",
    "money",
    "war",
    "peace",
    "physics",
    "chemistry",
    "a river",
    "dinosaurs",
    "the brain",
    "time",
    "space",
    "a black hole",
    "poetry",
    "Shakespeare",
    "jazz",
    "chess",
)
