"""What the tests ask the embedded model: all kinds, different lengths."""

QUESTIONS = [
    "What is the capital of France?",
    "What is 7 + 5?",
    "Who are you?",
    "Hello!",
    "Reverse the words: red green blue",
    "How many words are in: the cat sat on the mat",
    "What colour is the sky?",
    "Say the alphabet.",
    "What is the capital of Japan?",
    "What is 12 + 3?",
    "Tell me about yourself.",
    "Reverse the words: one two three four",
    "What colour is grass?",
    "Hi",
    "What is 9 + 9?",
    "List the days of the week.",
]
