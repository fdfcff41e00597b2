"""A rank that says nothing and does not end."""

import time

if __name__ == "__main__":
    time.sleep(60)
