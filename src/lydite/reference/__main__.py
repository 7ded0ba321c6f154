"""`python -m lydite.reference`: a job as JSON on stdin, a line on stdout for each step."""

import os
import sys

import msgspec

from lydite.core.errors import LyditeError
from lydite.reference.jobs import Job, ReferenceMissing, Reply
from lydite.reference.recording import record


def main() -> int:
    """Run the job; whatever goes wrong is one line for the other side."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)  # what libraries print is not for the other side

        def reply(line: Reply) -> None:
            replies.write(msgspec.json.encode(line) + b"\n")

        try:
            job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
            for output in job.outputs:
                record(job, output, lambda: reply(Reply()))
        except KeyboardInterrupt:
            return 130
        except LyditeError as error:
            reply(Reply(str(error), isinstance(error, ReferenceMissing)))
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - of torch and diffusers, which raise anything
            reason = (str(error).strip().splitlines() or [""])[0]
            reply(Reply(f"the reference failed: {type(error).__name__}: {reason:.300}"))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
