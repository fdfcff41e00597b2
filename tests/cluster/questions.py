"""What the tests ask the embedded model: all kinds, different lengths."""

QUESTIONS = [
    "What is the capital of France?",
    "What is 7 + 5?",
    "Who are you?",
    "Hello!",
    "Reverse the words: red green blue",
    "How many words are in: the cat sat on the mat",
    "What colour is the sky?",
    "Count from 1 to 20.",
    "What is the capital of Japan?",
    "What is 12 + 3?",
    "Tell me about yourself.",
    "Reverse the words: one two three four five",
    "What colour is grass?",
    "Hi",
    "What is 9 + 9?",
    "Count from 3 to 12.",
]
