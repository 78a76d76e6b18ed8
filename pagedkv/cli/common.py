"""What all commands share: exit codes, complaints of one line, numbers."""

import argparse
import sys

FAILED, MISUSED = 1, 2  # exit codes: the work could not be finished; the request makes no sense


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are one line."""

    def error(self, message: str):
        self.exit(MISUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")


def complain(command: str, message: object, code: int) -> int:
    sys.stdout.flush()
    print(f"pagedkv {command}: {message}", file=sys.stderr)
    return code


def number(minimum: int):
    """An argparse type: whole numbers of at least `minimum`."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"a whole number of at least {minimum} is needed, not {text!r}")
        return value

    return whole
