"""Kill saving and loading at random moments: a complete checkpoint remains, or none."""

import contextlib
import os
import random
import signal
import time
from functools import partial

import pytest
import torch
from ranks import free_port, rank_environment, rank_server
from test_checkpoint import SIZES, checkpoints_of
from tiny import run_config

from common.errors import ConfigError
from common.sharding.processes import start_processes
from common.training.continuation import CHECKPOINTS_FOLDER, newest

KILLS = 60


def made(rank, ranks, port, folder, **args):
    os.environ.update(rank_environment(rank, ranks, port))
    return checkpoints_of(
        start_processes("cpu", 60.0), folder, run_config(gpus_per_node=ranks, **SIZES), **args
    )


def save_on_and_on(rank, ranks, port, folder, ready, saves=0):
    """Step after step, each weight being the number of the step.

    `saves`: number of saves that have ended when this process is ready.
    """
    checkpoints = made(rank, ranks, port, folder, checkpoint="1")
    first = step = newest_step(folder) + 1
    while True:
        for weight in checkpoints.assembly.optimizer.weights:
            weight.fill_(step)
        checkpoints.assembly.optimizer.rule.state()["steps"].fill_(step)
        checkpoints.offer(step, evaluated=True)
        if step == first + saves:
            ready.touch()  # the save of this step is under way
        step += 1


def load_on_and_on(rank, ranks, port, folder, ready):
    """Load again and again, which only a run that also saves can do."""
    checkpoints = made(rank, ranks, port, folder, checkpoint="1", continues=folder)
    ready.touch()
    while checkpoints.load():
        pass


def newest_step(folder):
    with contextlib.suppress(ConfigError):
        return newest(folder)[1]["step"]
    return 0


def verify(folder):
    """On one rank, whoever saved."""
    checkpoints = made(0, 1, free_port(), folder, checkpoint=None, continues=folder)
    step = checkpoints.load()
    assert all(
        torch.equal(weight, torch.full_like(weight, step))
        for weight in checkpoints.assembly.optimizer.weights
    )
    os._exit(0)  # gloo's threads now and then end an interpreter that is shutting down


def killed(body, ranks, folder, pause_s):
    """Fork ranks of `body`, and kill them in any order `pause_s` after they have begun."""
    port, ready = free_port(), [folder / f"ready_{rank}" for rank in range(ranks)]
    children = [
        rank_server().Process(target=body, args=(rank, ranks, port, folder, ready[rank]))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in ready) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(pause_s)
    random.shuffle(children)
    for child in children:
        child.kill()
    for child in children:
        child.join()
    assert children[0].exitcode == -signal.SIGKILL, (
        "the others may have seen that the first is gone"
    )
    for path in ready:
        path.unlink(missing_ok=True)


@pytest.mark.slow
def test_kills_at_random_moments_leave_a_whole_checkpoint_or_none(tmp_path):
    seed = time.time_ns()
    print(f"random seed {seed}")
    random.seed(seed)
    seen, unfinished = [0], 0
    for number in range(KILLS):
        # Some are killed in their first save. On a busy machine, all would be.
        body = partial(save_on_and_on, saves=int(number > 10))
        if number % 3 == 2 and seen[-1]:
            body = load_on_and_on
        killed(body, 1 + number % 2, tmp_path, random.uniform(0.0, 0.3))
        seen.append(newest_step(tmp_path))
        unfinished += any(
            path.suffix == ".partial" for path in (tmp_path / CHECKPOINTS_FOLDER).glob("*")
        )
        assert seen == sorted(seen), "a checkpoint that was whole was lost"
        if seen[-1]:
            reader = rank_server().Process(target=verify, args=(tmp_path,))
            reader.start()
            reader.join()
            assert reader.exitcode == 0, f"after kill {number}"
    assert seen[-1] > KILLS // 3, "saves came to an end between the kills"
    assert unfinished > 5, "kills hit saves in the middle"
