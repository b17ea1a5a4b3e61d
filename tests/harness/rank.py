"""One rank of a job that ``run_ranks`` starts: ``rank.py FOLDER COMMAND...``.

Runs the command with its output in FOLDER/<rank>.out and .err, leaves its exit status in
<rank>.status, and ends as it ended.
"""

import contextlib
import os
import signal
import sys

from job import rank_and_size


def main() -> None:
    folder, command = sys.argv[1], sys.argv[2:]
    base = os.path.join(folder, str(rank_and_size()[0]))
    child = os.fork()
    if child == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            file = os.open(f"{base}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
        os.execvp(command[0], command)

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with open(f"{base}.status", "w") as file:
        file.write(str(code))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
