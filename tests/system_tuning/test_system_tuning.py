"""System tuning on copies of /proc and /sys: nothing here writes to this machine's own.

Kills, other programs, no root.
"""

import errno
import fcntl
import io
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.paths import ROOT
from system_tuning import __main__ as cli
from system_tuning.settings import CPU, SETTINGS, THP, value_of

pytestmark = pytest.mark.quick

SYSCTLS = {"numa_balancing": "1\n", "nmi_watchdog": "1\n"}
EPYC_STATES = [("POLL", 0), ("C1", 1), ("C2", 100)]  # acpi_idle
XEON_STATES = [("POLL", 0), ("C1", 1), ("C1E", 4), ("C6", 170)]  # intel_idle
BY_NAME = {setting.name: setting for setting in SETTINGS}


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def host(root: Path, states=EPYC_STATES, governor="schedutil", energy=None, cpus=3) -> Path:
    """A host's files, as plain ones, with the links that sysfs has."""
    for name, text in SYSCTLS.items():
        write(root, f"proc/sys/kernel/{name}", text)
    (root / "run").mkdir(parents=True, exist_ok=True)
    write(root, f"{THP}/enabled", "always [madvise] never\n")
    write(root, f"{THP}/defrag", "always defer defer+madvise [madvise] never\n")
    for cpu in range(cpus):
        for index, (name, latency) in enumerate(states):
            for file, text in {"name": name, "latency": latency, "disable": 0}.items():
                write(root, f"{CPU}/cpu{cpu}/cpuidle/state{index}/{file}", f"{text}\n")
        policy = f"{CPU}/cpufreq/policy{cpu}"
        write(root, f"{policy}/scaling_governor", f"{governor}\n")
        if energy:
            write(root, f"{policy}/energy_performance_preference", f"{energy}\n")
        (root / f"{CPU}/cpu{cpu}/cpufreq").symlink_to(f"../cpufreq/policy{cpu}")
    return root


def xeon(root: Path) -> Path:
    return host(root, XEON_STATES, "powersave", "balance_performance")


def contents(root: Path) -> dict:
    """The text of every file of proc and sys."""
    files = [path for path in [*root.glob("proc/**/*"), *root.glob("sys/**/*")] if path.is_file()]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def value(root: Path, path: str) -> str:
    return value_of(root / path)


@pytest.fixture(autouse=True)
def _kernel_moves_brackets(monkeypatch):
    """Update the file as the kernel does: `always` becomes `[always] madvise never`."""
    plain = Path.write_text

    def write_choice(self, text):
        if THP in str(self) and "[" not in text:
            choices = plain_choices(self.read_text())
            text = (
                " ".join(f"[{choice}]" if choice == text.strip() else choice for choice in choices)
                + "\n"
            )
        return plain(self, text)

    monkeypatch.setattr(Path, "write_text", write_choice)


def plain_choices(text: str) -> list[str]:
    return text.replace("[", "").replace("]", "").split()


@pytest.fixture(autouse=True)
def _outside_of_a_container(monkeypatch):
    for variable in ("container", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(params=[host, xeon], ids=["epyc", "xeon"])
def any_host(request, tmp_path):
    return request.param(tmp_path / "host")


@pytest.fixture
def epyc(tmp_path):
    return host(tmp_path / "host")


@pytest.fixture
def call(capsys, monkeypatch):
    """The command line on a copy of a host: exit code and what was printed."""
    # With it, this process, and so each one that a later test starts, would ignore SIGTERM.
    monkeypatch.setattr(cli, "_ignore_signals", lambda: None)

    def run(root: Path, *arguments: str) -> tuple[int, str]:
        try:
            code = cli.main([*arguments], root)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


# --- looking --------------------------------------------------------------------------------------


def test_check_writes_nothing(call, any_host):
    times = {path: path.lstat().st_mtime_ns for path in any_host.glob("**/*")}
    assert call(any_host, "check")[0] == 0
    assert {path: path.lstat().st_mtime_ns for path in any_host.glob("**/*")} == times


def test_check_says_what_could_be_better_and_the_risk(call, epyc):
    code, printed = call(epyc, "check")
    assert code == 0 and "governor: could be better" in printed and "7 files" not in printed
    for name in ("idle_states", "numa_balancing", "thp_defrag"):
        assert BY_NAME[name].risk in printed and BY_NAME[name].what in printed
    assert "cpu*/cpuidle/state2/disable: 0 -> 1 (3 files)  [C2, 100 µs to leave]" in printed
    assert "6 settings could be better" in printed
    call(epyc, "apply")
    assert "0 settings could be better" in call(epyc, "check")[1]


def test_check_for_programs_is_what_it_shows(call, epyc):
    found = json.loads(call(epyc, "check", "--json", "--only", "nmi_watchdog", "governor")[1])
    (watchdog,) = found["nmi_watchdog"]
    assert found.keys() == {"governor", "nmi_watchdog"} and (watchdog["now"], watchdog["want"]) == (
        "1",
        "0",
    )
    call(epyc, "apply")
    assert all(
        file["now"] == file["want"]
        for files in json.loads(call(epyc, "check", "--json")[1]).values()
        for file in files
    )


def test_check_shows_what_apply_writes(call, any_host):
    shown = [line.split() for line in call(any_host, "check")[1].splitlines() if " -> " in line]
    written = [
        line.split()[1:]
        for line in call(any_host, "apply")[1].splitlines()
        if line.startswith("set ")
    ]
    assert shown == written and len(shown) == (
        7 if any_host.joinpath(CPU, "cpufreq/policy0/energy_performance_preference").exists() else 6
    )


@pytest.mark.parametrize(
    ("states", "deep"),
    [
        (EPYC_STATES, [2]),
        (XEON_STATES, [3]),  # index 2 is C1E there
        ([("POLL", 0), ("C1_ACPI", 1), ("C2_ACPI", 41), ("C3_ACPI", 200)], [2, 3]),
        ([("POLL", 0), ("C1", 1), ("C1E", 10), ("C6N", 290), ("C6P", 300)], [3, 4]),
        ([("POLL", 0), ("C1", 1), ("C2", 5)], [2]),  # a BIOS that says C2 is quick: the name counts
        ([("POLL", 0), ("haltpoll", 1)], []),
        ([("WFI", 1), ("cpu-sleep", 433)], [1]),  # Arm: the latency tells
        ([("C2", 100)], []),  # the only state stays
        ([("POLL", 0), ("odd", "x")], []),
    ],
)
def test_deep_idle_states_are_found_by_name_and_latency(tmp_path, states, deep):
    root = host(tmp_path / "host", states, cpus=1)
    found = BY_NAME["idle_states"].files(root)
    assert [file.path for file in found] == [
        root / f"{CPU}/cpu0/cpuidle/state{index}/disable" for index in deep
    ]


def test_a_bare_container_supports_nothing_and_does_not_fail(call, tmp_path):
    (tmp_path / "host" / "run").mkdir(parents=True)
    assert call(tmp_path / "host", "check")[1].count("not supported") == 6
    code, printed = call(tmp_path / "host", "apply")
    assert code == 0 and "nothing to do" in printed


@pytest.mark.parametrize(
    "sign",
    [
        "/.dockerenv",
        "/run/.containerenv",
        "/.singularity.d",
        "variable container",
        "variable KUBERNETES_SERVICE_HOST",
    ],
)
@pytest.mark.parametrize("command", ["apply", "hold"])
def test_a_container_changes_its_host_only_if_this_is_accepted(
    call, epyc, monkeypatch, sign, command
):
    if sign.startswith("/"):
        write(epyc, sign[1:], "")
    else:
        monkeypatch.setenv(sign.split()[1], "oci")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # `hold` ends at once
    before = contents(epyc)
    code, printed = call(epyc, command)
    assert code == 18 and contents(epyc) == before and not (epyc / cli.JOURNAL_PATH).exists()
    for words in (f"{command} is refused", f"  why: {'the ' * (sign[0] != '/')}{sign}", "  do:  "):
        assert words in printed
    assert "on the host" in printed and "--in-container" in printed
    code, printed = call(epyc, command, "--in-container")
    assert code == 0 and " -> " in printed
    assert (contents(epyc) == before) == (command == "hold"), "hold puts the values back"
    assert call(epyc, "revert")[0] == 0 and contents(epyc) == before


def test_a_container_whose_host_has_all_values_is_not_refused(call, epyc):
    assert call(epyc, "apply")[0] == 0
    write(epyc, ".dockerenv", "")
    code, printed = call(epyc, "apply")
    assert code == 0 and "nothing to do" in printed


def test_a_cpu_that_is_offline_has_no_setting(call, epyc, monkeypatch):
    plain = Path.read_text

    def read(self, **options):
        if "policy1" in self.parts:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return plain(self, **options)

    monkeypatch.setattr(Path, "read_text", read)
    code, printed = call(epyc, "apply")
    assert code == 0 and "scaling_governor: schedutil -> performance (2 files)" in printed


# --- apply and revert -----------------------------------------------------------------------------


def test_apply_sets_everything_and_revert_restores_every_value(call, any_host):
    before = contents(any_host)
    assert call(any_host, "apply")[0] == 0
    assert (
        value(any_host, f"{THP}/enabled") == "always"
        and value(any_host, f"{THP}/defrag") == "defer+madvise"
    )
    assert value(any_host, f"{CPU}/cpufreq/policy2/scaling_governor") == "performance"
    assert (
        value(any_host, "proc/sys/kernel/numa_balancing")
        == value(any_host, "proc/sys/kernel/nmi_watchdog")
        == "0"
    )
    assert call(any_host, "revert")[0] == 0 and contents(any_host) == before
    assert "nothing to do" in call(any_host, "revert")[1]


def test_apply_twice_keeps_the_first_old_values(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply")[0] == 0
    write(epyc, f"{THP}/defrag", "always defer defer+madvise madvise [never]\n")
    assert call(epyc, "apply")[0] == 0 and value(epyc, f"{THP}/defrag") == "defer+madvise"
    assert call(epyc, "revert")[0] == 0 and contents(epyc) == before


def test_only_the_named_settings_are_applied(call, epyc):
    assert call(epyc, "apply", "--only", "thp_enabled", "governor")[0] == 0
    assert (
        value(epyc, f"{THP}/enabled") == "always"
        and value(epyc, "proc/sys/kernel/nmi_watchdog") == "1"
    )


@pytest.mark.parametrize("wrong", [["--only", "gpu_clock"], ["--gpu"], ["--json"]])
def test_wrong_usage_is_2(call, epyc, wrong):
    assert call(epyc, "apply", *wrong)[0] == 2


def test_revert_refuses_only_and_restores_nothing(call, epyc):
    call(epyc, "apply")
    applied = contents(epyc)
    code, printed = call(epyc, "revert", "--only", "governor")
    assert code == 2 and "--only" in printed and contents(epyc) == applied


def test_hold_reverts_if_its_caller_ended_before_it_could_print(call, epyc, monkeypatch):
    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    before = contents(epyc)
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    assert call(epyc, "hold")[0] == 0
    assert contents(epyc) == before


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8")])
def test_hold_reverts_if_its_input_is_closed_or_not_text(call, epyc, monkeypatch, stdin):
    before = contents(epyc)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert call(epyc, "hold")[0] == 0
    assert contents(epyc) == before


@pytest.mark.parametrize(("output", "code"), [("/dev/full", 17), ("closed pipe", 141)])
def test_an_output_that_cannot_be_written_is_no_traceback(output, code):
    if output == "closed pipe":
        reader, descriptor = os.pipe()
        os.close(reader)
    else:
        descriptor = os.open(output, os.O_WRONLY)
    command = [sys.executable, "-m", "system_tuning", "check"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=descriptor, stderr=subprocess.PIPE, text=True, timeout=30
    )
    os.close(descriptor)
    assert done.returncode == code and "Traceback" not in done.stderr


def test_what_the_kernel_changes_together_with_the_governor_comes_back_too(
    call, tmp_path, monkeypatch
):
    """intel_pstate in active mode ties the energy preference to the performance governor."""
    root, plain = xeon(tmp_path / "host"), Path.write_text
    before = contents(root)

    def pstate(self, text):
        if (
            self.name == "energy_performance_preference"
            and (self.parent / "scaling_governor").read_text() == "performance\n"
        ):
            raise OSError(errno.EBUSY, "Device or resource busy")
        if self.name == "scaling_governor" and text == "performance\n":
            (self.parent / "energy_performance_preference").write_text("performance\n")
        return plain(self, text)

    monkeypatch.setattr(Path, "write_text", pstate)
    assert call(root, "apply")[0] == 0
    assert value(root, f"{CPU}/cpufreq/policy0/energy_performance_preference") == "performance"
    assert call(root, "revert")[0] == 0 and contents(root) == before


def test_a_value_that_does_not_stick_is_a_failure(call, epyc, monkeypatch):
    plain = Path.write_text
    monkeypatch.setattr(
        Path,
        "write_text",
        lambda self, text: 0 if self.name == "nmi_watchdog" else plain(self, text),
    )
    code, printed = call(epyc, "apply")
    assert (
        code == 18
        and f"failed         {epyc}/proc/sys/kernel/nmi_watchdog: 1 -> 0  [reads back as 1]"
        in printed
    )


# --- kills ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Exception in place of a kill: the process changes nothing after it."""


def die_at(monkeypatch, count: int) -> None:
    """Let `count` changing calls through, then raise Killed before the next."""
    passed = [0]

    def dying(real):
        def call(*arguments, **options):
            passed[0] += 1
            if passed[0] > count:
                raise Killed
            return real(*arguments, **options)

        return call

    for name in ("rename", "write_text"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))


@pytest.mark.parametrize("subcommand", ["apply", "revert"])
def test_killed_between_any_two_changes_revert_restores_every_value(tmp_path, capsys, subcommand):
    root = host(tmp_path / "host", cpus=2)
    before = contents(root)
    for count in range(60):
        if subcommand == "revert":
            assert cli.main(["apply"], root) == 0
        killed = False
        with pytest.MonkeyPatch.context() as monkeypatch:
            die_at(monkeypatch, count)
            try:
                assert cli.main([subcommand], root) == 0
            except Killed:
                killed = True
        assert cli.main(["revert"], root) == 0 and contents(root) == before, f"killed at {count}"
        if not killed:
            break
    assert 8 <= count < 59  # every change of the whole command was killed once


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_of_apply_revert_and_kill_lose_nothing(tmp_path, capsys, seed):
    generator = random.Random(seed)
    root = (host if seed % 2 else xeon)(tmp_path / "host")
    before = contents(root)
    for _ in range(30):
        arguments = [generator.choice(["apply", "apply", "revert"])]
        if arguments == ["apply"] and generator.random() < 0.5:
            arguments += ["--only", *generator.sample(sorted(BY_NAME), 3)]
        with pytest.MonkeyPatch.context() as monkeypatch:
            if generator.random() < 0.7:
                die_at(monkeypatch, generator.randrange(20))
            try:
                assert cli.main(arguments, root) == 0
                assert arguments[0] == "apply" or contents(root) == before
            except Killed:
                pass
    assert cli.main(["revert"], root) == 0 and contents(root) == before


# --- other programs, reboots ----------------------------------------------------------------------


def test_a_value_that_another_program_set_is_left(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply")[0] == 0
    write(epyc, f"{CPU}/cpufreq/policy1/scaling_governor", "powersave\n")
    code, printed = call(epyc, "revert")
    assert (
        code == 18
        and "changed since" in printed
        and "policy*/scaling_governor: powersave -> schedutil" in printed
    )
    assert value(epyc, f"{CPU}/cpufreq/policy1/scaling_governor") == "powersave"
    # All others are back.
    assert len([path for path, now in contents(epyc).items() if now != before[path]]) == 1
    write(epyc, f"{CPU}/cpufreq/policy1/scaling_governor", "schedutil\n")  # by hand
    assert call(epyc, "revert")[0] == 0 and "nothing to do" in call(epyc, "revert")[1]


def test_a_file_that_is_gone_does_not_keep_the_others_from_coming_back(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply")[0] == 0
    shutil.rmtree(epyc / CPU / "cpu1" / "cpuidle")
    code, printed = call(epyc, "revert")
    assert code == 18 and "it is gone" in printed
    assert all(before[path] == now for path, now in contents(epyc).items())


def test_a_second_apply_at_the_same_time_is_refused(call, epyc):
    before = contents(epyc)
    with (epyc / "run/system_tuning.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        code, printed = call(epyc, "apply")
    assert code == 17 and f"process {os.getpid()} (" in printed and "holds the settings" in printed
    assert {**contents(epyc), **before} == contents(epyc)
    assert call(epyc, "apply")[0] == 0


# --- the journal ----------------------------------------------------------------------------------


def test_a_damaged_journal_stops_everything(call, epyc):
    assert call(epyc, "apply", "--only", "numa_balancing")[0] == 0
    for text in (
        '{"/proc',
        "[1]",
        '{"/proc/x": 7}',
        '{"/proc/x": ["1"]}',
        '{"/proc/x": ["1", 2]}',
        "[" * 100_000,
    ):
        (epyc / cli.JOURNAL_PATH).write_text(text)
        before = contents(epyc)
        for subcommand in (["apply"], ["revert"]):
            code, printed = call(epyc, *subcommand)
            assert code == 17 and str(epyc / cli.JOURNAL_PATH) in printed
        assert contents(epyc) == before


def test_a_full_disk_stops_before_the_first_write(call, epyc, monkeypatch):
    before = contents(epyc)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        code, printed = call(epyc, "apply")
    assert code == 17 and "No space left" in printed and contents(epyc) == before


# --- rights ---------------------------------------------------------------------------------------


def test_without_root_it_says_so(call, epyc, monkeypatch):
    before, plain = contents(epyc), Path.open

    def refuse(self, mode="r", *rest, **options):
        if "w" in mode and "run" in self.parts:
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(self, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert call(epyc, "check")[0] == 0
    code, printed = call(epyc, "apply", "--only", "governor", "thp_defrag")
    assert code == 18 and "with sudo" in printed and contents(epyc) == before


def test_one_file_that_may_not_be_written_and_the_others_done(call, epyc, monkeypatch):
    before, plain = contents(epyc), Path.write_text

    def read_only(self, text):
        if self.name == "nmi_watchdog":
            raise OSError(errno.EROFS, "Read-only file system")
        return plain(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", read_only)
        code, printed = call(epyc, "apply")
    assert code == 18 and "[Read-only file system]" in printed and "on the host" in printed
    assert printed.count("failed") == 1 and value(epyc, "proc/sys/kernel/numa_balancing") == "0"
    assert call(epyc, "revert")[0] == 0 and contents(epyc) == before


# --- alone ----------------------------------------------------------------------------------------


def test_it_runs_copied_alone_with_the_standard_library_only(tmp_path):
    shutil.copytree(
        ROOT / "system_tuning",
        tmp_path / "alone" / "system_tuning",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    root = xeon(tmp_path / "host")
    code = "import pathlib, sys; sys.path.insert(0, '.'); from system_tuning.__main__ import main; "
    code += "sys.exit(main(sys.argv[1:-1], pathlib.Path(sys.argv[-1])))"
    for subcommand, watchdog in (("check", "1"), ("apply", "0"), ("revert", "1")):
        command = [sys.executable, "-I", "-S", "-c", code, subcommand, str(root)]
        done = subprocess.run(
            command, cwd=tmp_path / "alone", capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        assert value(root, "proc/sys/kernel/nmi_watchdog") == watchdog
