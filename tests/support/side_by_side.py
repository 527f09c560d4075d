"""Run two shell commands at the same time: `python side_by_side.py FIRST SECOND`.

What the first says is shown while it says it, what the second says when it has ended. The exit code
is 0 if both ended well. Tests of real federations mostly wait; what else there is to test fills the
time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from typing import IO


def run(first: str, second: str) -> int:
    with tempfile.TemporaryFile() as said:
        other = subprocess.Popen(
            second, shell=True, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        showing = threading.Thread(target=show_when_ended, args=(other, said))
        showing.start()
        code = wait_for(subprocess.Popen(first, shell=True))
        showing.join()
        return 1 if code or other.returncode else 0


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches both commands, and they end by themselves."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def show_when_ended(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    process.wait()
    said.seek(0)
    print(flush=True)
    sys.stdout.buffer.write(said.read())
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
