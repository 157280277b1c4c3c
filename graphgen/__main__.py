"""The program `graphgen`, also as `python -m graphgen`."""

import sys


def start() -> None:
    """Run the command line and exit. Ctrl-C ends it in one line from the first import on."""
    try:
        import signal

        from graphgen.commands import main

        code = main()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: libraries need not tell
    except KeyboardInterrupt:  # before `main` can say so, or behind it
        print("graphgen: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    start()
