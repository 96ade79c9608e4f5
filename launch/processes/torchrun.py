"""torchrun with its messages and findings in files: `python -m launch.processes.torchrun DIR ...`.

Messages go to DIR/torchrun.log and findings to DIR/torchrun.json. The ranks inherit stdout and
stderr, so that their progress line reaches the terminal. After a failure torchrun itself would
print forty lines that often blame a victim and hide the rank's own message.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from common.errors import write_record


def main(folder: Path, arguments: list[str]) -> int:
    """Run torchrun with `arguments`; return 0, 1 if a rank failed, 128 + n if signal n ended it."""
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _log_to(folder / "torchrun.log")
    # A failure of torchrun itself: a port in use, or a process that cannot be started.
    try:
        torch.distributed.run.main(arguments)
    except ChildFailedError as error:
        ended = error.failures.items()
        failures = [
            {"rank": rank, "pid": end.pid, "exit_code": end.exitcode, "time": end.timestamp}
            for rank, end in ended
        ]
        write_record(folder, "torchrun.json", json.dumps(failures))
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except Exception:
        logging.exception("torchrun failed")
        return 1
    return 0


def _log_to(path: Path) -> None:
    """Make every torch logger write to `path` instead of stderr."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    for name in [
        "torch",
        *(name for name in logging.root.manager.loggerDict if name.startswith("torch.")),
    ]:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
