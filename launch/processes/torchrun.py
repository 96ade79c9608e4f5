"""torchrun with its log in a file: `python -m launch.processes.torchrun DIR ...`.

The log goes to DIR/torchrun.log, and the exit codes of failed ranks to DIR/torchrun.json. After a
failure, torchrun itself would print some forty lines, which often blame a victim and hide the
failed rank's own message. The ranks inherit stdout and stderr, so that their output reaches the
terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from common.errors import PreflightError, StorageError, write_record


def main(folder: Path, arguments: list[str]) -> int:
    """Run torchrun with `arguments`.

    Return 0, 1 after a failure, 128 + n after signal n, the code of PreflightError if torch cannot
    be imported, or that of StorageError if torchrun.log cannot be opened. No rank is then started.
    """
    try:
        import torch.distributed.run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except (ImportError, OSError) as error:  # OSError: a library of CUDA or ROCm is missing
        print(f"torch cannot be imported: {error}", file=sys.stderr, flush=True)
        return PreflightError.exit_code

    try:
        _log_to(folder / "torchrun.log")
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        return StorageError.exit_code
    try:
        torch.distributed.run.main(arguments)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "pid": end.pid, "exit_code": end.exitcode, "time": end.timestamp}
            for rank, end in error.failures.items()
        ]
        write_record(folder, "torchrun.json", json.dumps(failures))
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except Exception:  # of torchrun itself: a port in use, or a process that cannot be started
        logging.exception("torchrun failed")
        return 1
    return 0


def _log_to(path: Path) -> None:
    """Make every torch logger write to `path` instead of stderr."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    children = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    for name in ["torch", *children]:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
