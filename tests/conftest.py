"""What all tests share."""

import signal

# Programs under test are to find signals as in a terminal, also when tests run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
