"""Ctrl-C inside code that turns every exception into an answer ends the command."""

import os
import re
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from common.command_line import exit_code_of
from common.errors import Interrupted
from llama2_70b_lora import packed_npy
from open_llama import chat
from submission import rcp
from submission.official_tools import silent
from throughput import tiles

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")


def interrupt(*_, **__):
    raise Interrupted(signal.SIGINT)


def time_kernels(monkeypatch, folder):
    monkeypatch.setattr(tiles, "against_reference", interrupt)
    tiles.timed(interrupt, None, CPU)


def time_attention(monkeypatch, folder):
    monkeypatch.setattr(tiles, "mock", SimpleNamespace(patch=SimpleNamespace(object=interrupt)))
    sizes = SimpleNamespace(
        shape=SimpleNamespace(num_heads=4, num_kv_heads=2), micro_batch_size=1, sequence_length=8
    )
    list(tiles.attention_lines(sizes, CPU))


def read_packed(monkeypatch, folder):
    monkeypatch.setattr(packed_npy, "_require_loadable", interrupt)
    path = folder / "train.npy"
    path.write_bytes(b"")
    packed_npy.read_packed(path)


def render(monkeypatch, folder):
    monkeypatch.setattr(chat, "_compiled", interrupt)
    chat.ChatTemplate({"default": ""}, {}, re.compile("x")).render([])


@pytest.mark.parametrize("work", [time_kernels, time_attention, read_packed, render])
def test_an_interruption_is_no_answer(work, monkeypatch, tmp_path):
    with pytest.raises(Interrupted):
        work(monkeypatch, tmp_path)


def catch_ctrl_c():
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interruption_that_other_code_caught_ends_the_command():
    def work():
        catch_ctrl_c()
        return 20

    assert exit_code_of(work) == 130
    assert exit_code_of(lambda: 20) == 20, "the next command begins without it"


def check_log(monkeypatch):
    with silent():
        catch_ctrl_c()


def judge(monkeypatch):
    checker = SimpleNamespace(check_directory=lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(rcp, "_rcp_checker", lambda: checker)
    rcp.judge([None] * 3, "6.1.0")


@pytest.mark.parametrize("tool", [check_log, judge])
def test_nothing_follows_an_official_tool_during_ctrl_c(tool, monkeypatch):
    reached = []

    def work():
        tool(monkeypatch)
        reached.append("verdict")

    assert exit_code_of(work) == 130 and not reached
