"""Machines that find and trust each other: the program `brigade node`, and its clients."""
