"""Start a module as a program: `python -m launch.start MODULE ARGUMENTS`.

run_and_time.sh and launch block SIGINT before they start this module. Otherwise Python would print
a traceback, or fail to start, at a Ctrl-C that arrives before the program has its handlers. Here
Ctrl-C ends the process at once and silently, until the program handles it.
"""

import runpy
import signal
import sys


def main() -> None:
    """Unblock SIGINT, and run the module."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup's ignoring remains
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
