"""Python runs this first where PYTHONPATH has its folder: a training run finds no matplotlib, like
those of users without that extra. To draw the charts takes a third of the time of a short run, and
tests/tune/results/test_card.py looks at them.
"""

import sys

sys.modules["matplotlib"] = None
