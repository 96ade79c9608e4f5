"""System tuning on copies of /proc and /sys: nothing here writes to this machine's own. Kills, links, other programs, no root."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from system_tuning import __main__ as cli
from system_tuning.files import CPU, THP, Host, Refused, choices_of, value_of
from system_tuning.journal import Journal
from system_tuning.settings import SETTINGS

ROOT = Path(__file__).parents[2]
SYSCTLS = {"numa_balancing": "1\n", "nmi_watchdog": "1\n", "randomize_va_space": "2\n", "random/boot_id": "boot-one\n"}
EPYC_STATES = [("POLL", 0), ("C1", 1), ("C2", 100)]  # acpi_idle
XEON_STATES = [("POLL", 0), ("C1", 1), ("C1E", 4), ("C6", 170)]  # intel_idle
EPYC_GOVERNORS = "conservative ondemand userspace powersave performance schedutil"
BY_NAME = {setting.name: setting for setting in SETTINGS}


def write(root: Path, path: str, text: str) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def host(root: Path, states=EPYC_STATES, governors=EPYC_GOVERNORS, governor="schedutil", energy=None, cpus=3) -> Path:
    """A host's files, as plain ones, with the links that sysfs has."""
    for name, text in SYSCTLS.items():
        write(root, f"/proc/sys/kernel/{name}", text)
    write(root, "/proc/sys/vm/drop_caches", "0\n")
    write(root, f"{THP}/enabled", "always [madvise] never\n")
    write(root, f"{THP}/defrag", "always defer defer+madvise [madvise] never\n")
    for cpu in range(cpus):
        for index, (name, latency) in enumerate(states):
            for file, text in {"name": name, "latency": latency, "disable": 0}.items():
                write(root, f"{CPU}/cpu{cpu}/cpuidle/state{index}/{file}", f"{text}\n")
        policy = f"{CPU}/cpufreq/policy{cpu}"
        write(root, f"{policy}/scaling_governor", f"{governor}\n")
        write(root, f"{policy}/scaling_available_governors", f"{governors} \n")
        if energy:
            write(root, f"{policy}/energy_performance_preference", f"{energy}\n")
        (root / f"{CPU.lstrip('/')}/cpu{cpu}/cpufreq").symlink_to(f"../cpufreq/policy{cpu}")
    return root


def xeon(root: Path) -> Path:
    return host(root, XEON_STATES, "performance powersave", "powersave", "balance_performance")


def contents(root: Path) -> dict:
    """The text of every file of proc and sys but drop_caches, which is write-only: there is nothing to put back."""
    files = [path for path in [*root.glob("proc/**/*"), *root.glob("sys/**/*")] if path.is_file() and path.name != "drop_caches"]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def value(root: Path, path: str) -> str:
    return value_of((root / path.lstrip("/")).read_text())


def journal_of(root: Path) -> Path:
    return root / "var/lib/system_tuning/journal.json"


@pytest.fixture(autouse=True)
def _kernel_moves_brackets(monkeypatch):
    """As the kernel does: after `always` is written, the file reads `[always] madvise never`."""
    plain = Host.write

    def write_choice(self, path, word):
        choices = choices_of(self.read(path)) if path.startswith(THP) else []
        plain(self, path, word)
        if choices:
            write(Path(self.root), path, " ".join(f"[{choice}]" if choice == word else choice for choice in choices) + "\n")

    monkeypatch.setattr(Host, "write", write_choice)


@pytest.fixture(params=[host, xeon], ids=["epyc", "xeon"])
def any_host(request, tmp_path):
    return request.param(tmp_path / "host")


@pytest.fixture
def epyc(tmp_path):
    return host(tmp_path / "host")


@pytest.fixture
def call(capsys):
    """The command line on a copy of a host: exit code and what was printed."""

    def run(root: Path, *arguments: str) -> tuple[int, str]:
        try:
            code = cli.main([*arguments], str(root))
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


# --- looking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["check", "plan", "apply", "revert"])
def test_nothing_is_written_without_yes(call, any_host, verb):
    times = {path: path.lstat().st_mtime_ns for path in any_host.glob("**/*")}
    assert call(any_host, verb)[0] == 0
    assert {path: path.lstat().st_mtime_ns for path in any_host.glob("**/*")} == times


def test_check_says_what_could_be_better_and_the_risk(call, epyc):
    code, printed = call(epyc, "check")
    assert code == 0 and "governor: could be better" in printed and "7 files" not in printed
    for name in ("idle_states", "numa_balancing", "thp_defrag"):
        assert BY_NAME[name].risk in printed and BY_NAME[name].benefit in printed
    assert "cpu*/cpuidle/state2/disable: 0 -> 1 (3 files)  [C2, 100 us to leave]" in printed
    assert "6 settings could be better" in printed
    call(epyc, "apply", "--yes")
    assert "0 settings could be better" in call(epyc, "check")[1]


def test_plan_is_what_apply_does(call, any_host):
    planned = [line.split()[2:] for line in call(any_host, "plan")[1].splitlines() if line.startswith("would set")]
    written = [line.split()[1:] for line in call(any_host, "apply", "--yes")[1].splitlines() if line.startswith("set ")]
    assert planned == written and len(planned) == 7


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
    found = BY_NAME["idle_states"].look(Host(str(host(tmp_path / "host", states, cpus=1))))
    assert [file.path for file in found.files] == [f"{CPU}/cpu0/cpuidle/state{index}/disable" for index in deep]
    assert bool(found.unsupported) == (not deep)


def test_a_bare_container_supports_nothing_and_does_not_fail(call, tmp_path):
    (tmp_path / "host" / "proc").mkdir(parents=True)
    code, printed = call(tmp_path / "host", "apply", "--yes")
    assert code == 0 and printed.count("not supported") == 7 and not (tmp_path / "host/var").exists()


def test_a_missing_performance_governor_is_not_supported(call, tmp_path):
    root = host(tmp_path / "host", governors="ondemand powersave", governor="ondemand")
    code, printed = call(root, "apply", "--yes", "--only", "governor")
    assert code == 0 and "does not offer performance, only ondemand powersave" in printed
    assert value(root, f"{CPU}/cpufreq/policy0/scaling_governor") == "ondemand"


def test_an_old_kernel_without_the_choice_for_defrag(call, epyc):
    write(epyc, f"{THP}/defrag", "always [madvise] never\n")
    assert "does not offer defer+madvise" in call(epyc, "apply", "--yes", "--only", "thp_defrag")[1]
    assert call(epyc, "apply", "--yes", "--only", "thp_defrag", "--thp-defrag", "always")[0] == 0
    assert value(epyc, f"{THP}/defrag") == "always"


# --- apply and revert -------------------------------------------------------------------------------------------------


def test_apply_sets_everything_and_revert_restores_every_value(call, any_host):
    before = contents(any_host)
    assert call(any_host, "apply", "--yes")[0] == 0
    assert value(any_host, f"{THP}/enabled") == "always" and value(any_host, f"{THP}/defrag") == "defer+madvise"
    assert value(any_host, f"{CPU}/cpufreq/policy2/scaling_governor") == "performance"
    assert value(any_host, "/proc/sys/kernel/numa_balancing") == value(any_host, "/proc/sys/kernel/nmi_watchdog") == "0"
    assert value(any_host, "/proc/sys/vm/drop_caches") == "3" and "drop_caches" not in journal_of(any_host).read_text()
    assert value(any_host, "/proc/sys/kernel/randomize_va_space") == "2"  # only when asked for
    assert call(any_host, "revert", "--yes")[0] == 0 and contents(any_host) == before
    assert "nothing to do" in call(any_host, "revert", "--yes")[1]


def test_apply_twice_keeps_the_first_old_values(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    assert call(epyc, "apply", "--yes", "--thp-defrag", "always")[0] == 0
    assert value(epyc, f"{THP}/defrag") == "always"
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before


def test_aslr_goes_off_only_when_asked_for(call, epyc):
    before = contents(epyc)
    assert "SECURITY" in call(epyc, "check", "--only", "aslr")[1]
    assert call(epyc, "apply", "--yes", "--only", "aslr")[0] == 0 and value(epyc, "/proc/sys/kernel/randomize_va_space") == "0"
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before


@pytest.mark.parametrize("wrong", [["--only", "gpu_clock"], ["--thp-defrag", "never"], ["--gpu"]])
def test_wrong_usage_is_2(call, epyc, wrong):
    assert call(epyc, "apply", "--yes", *wrong)[0] == 2


def test_dirty_pages_are_written_back_before_the_page_cache_is_dropped(call, epyc, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    monkeypatch.setattr(Host, "write", lambda self, path, value: calls.append((path, value)))
    assert call(epyc, "apply", "--yes", "--only", "page_cache")[0] == 0
    assert calls == ["sync", ("/proc/sys/vm/drop_caches", "3")]


def test_what_the_kernel_changes_together_with_the_governor_comes_back_too(call, tmp_path, monkeypatch):
    """intel_pstate in active mode: performance takes the energy preference with it, and holds it."""
    root, plain = xeon(tmp_path / "host"), Host.write
    before = contents(root)

    def pstate(self, path, word):
        folder = (root / path.lstrip("/")).parent
        if path.endswith("energy_performance_preference") and (folder / "scaling_governor").read_text() == "performance\n":
            raise OSError(16, "Device or resource busy", path)
        plain(self, path, word)
        if path.endswith("scaling_governor") and word == "performance":
            (folder / "energy_performance_preference").write_text("performance\n")

    monkeypatch.setattr(Host, "write", pstate)
    assert call(root, "apply", "--yes")[0] == 0
    assert value(root, f"{CPU}/cpufreq/policy0/energy_performance_preference") == "performance"
    assert call(root, "revert", "--yes")[0] == 0 and contents(root) == before


def test_a_value_that_does_not_stick_is_a_failure(call, epyc, monkeypatch):
    plain = Host.write
    monkeypatch.setattr(Host, "write", lambda self, path, word: None if path.endswith("nmi_watchdog") else plain(self, path, word))
    code, printed = call(epyc, "apply", "--yes")
    assert code == 18 and "failed         /proc/sys/kernel/nmi_watchdog: 1 -> 0  [reads back as 1]" in printed


# --- kills ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a kill: from here on the process changes nothing more."""


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

    for owner, name in ((os, "rename"), (os, "makedirs"), (json, "dump"), (Host, "write")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_between_any_two_changes_revert_restores_every_value(tmp_path, capsys, verb):
    root = host(tmp_path / "host", cpus=2)
    before = contents(root)
    for count in range(60):
        if verb == "revert":
            assert cli.main(["apply", "--yes"], str(root)) == 0
        killed = False
        with pytest.MonkeyPatch.context() as monkeypatch:
            die_at(monkeypatch, count)
            try:
                assert cli.main([verb, "--yes"], str(root)) == 0
            except Killed:
                killed = True
        assert cli.main(["revert", "--yes"], str(root)) == 0 and contents(root) == before, f"killed at {count}"
        if not killed:
            break
    assert 8 <= count < 59  # every change of the whole verb was killed once


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_of_apply_revert_and_kill_lose_nothing(tmp_path, capsys, seed):
    generator = random.Random(seed)
    root = (host if seed % 2 else xeon)(tmp_path / "host")
    before = contents(root)
    for _ in range(30):
        arguments = [generator.choice(["apply", "apply", "revert"]), "--yes", "--thp-defrag", generator.choice(["always", "defer+madvise"])]
        if generator.random() < 0.3:
            arguments += ["--only", ",".join(generator.sample(sorted(BY_NAME), 3))]
        with pytest.MonkeyPatch.context() as monkeypatch:
            if generator.random() < 0.7:
                die_at(monkeypatch, generator.randrange(20))
            try:
                assert cli.main(arguments, str(root)) == 0
                assert arguments[0] == "apply" or contents(root) == before
            except Killed:
                pass
    assert cli.main(["revert", "--yes"], str(root)) == 0 and contents(root) == before


# --- links, foreign paths and values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("component", ["scaling_governor", "policy0", "cpufreq", "cpu", "sys"])
def test_a_link_in_place_of_any_component_is_refused(call, epyc, tmp_path, component):
    path = epyc / CPU.lstrip("/") / "cpufreq" / "policy0" / "scaling_governor"
    while path.name != component:
        path = path.parent
    aside = tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(aside)
    governors = [aside, *aside.glob("**/scaling_governor")]
    moved = {file: file.read_bytes() for file in governors if file.is_file()}
    code, printed = call(epyc, "apply", "--yes", "--only", "governor")
    assert code == 18 and "symbolic link" in printed and moved
    assert all(file.read_bytes() == data for file, data in moved.items())


def test_a_link_put_there_after_apply_is_not_followed_by_revert(call, epyc, tmp_path):
    assert call(epyc, "apply", "--yes")[0] == 0
    victim = tmp_path / "victim"
    victim.write_text("0\n")
    watchdog = epyc / "proc/sys/kernel/nmi_watchdog"
    watchdog.unlink()
    watchdog.symlink_to(victim)
    code, printed = call(epyc, "revert", "--yes", "--force")
    assert code == 18 and "symbolic link" in printed and victim.read_text() == "0\n"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/nmi_watchdog\n",
        "/proc/sys/kernel/../kernel/nmi_watchdog",
        f"{CPU}/cpufreq/policy0/../policy0/scaling_governor",
        f"{CPU}/cpufreq/policy٣/scaling_governor",
        "proc/sys/kernel/nmi_watchdog",
        "",
    ],
)
def test_a_path_that_is_not_on_the_list_is_not_written(epyc, path):
    before = contents(epyc)
    with pytest.raises(Refused):
        Host(str(epyc)).write(path, "0")
    assert contents(epyc) == before


@pytest.mark.parametrize("path", ["/proc/../../etc/passwd", "/../etc/passwd"])
def test_reading_does_not_climb_out(epyc, path):
    write(epyc.parent, "etc/passwd", "secret")
    with pytest.raises(Refused):
        Host(str(epyc)).read(path)


@pytest.mark.parametrize("word", ["0\n1", "0 1", "", "performance\n", "a" * 41, "0;reboot", "é", "\0"])
def test_a_value_that_is_not_one_plain_word_is_refused(epyc, word):
    with pytest.raises(Refused):
        Host(str(epyc)).write("/proc/sys/kernel/nmi_watchdog", word)


# --- other programs, reboots ------------------------------------------------------------------------------------------


def test_a_value_that_another_program_set_is_left_unless_forced(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    write(epyc, f"{CPU}/cpufreq/policy1/scaling_governor", "powersave\n")
    code, printed = call(epyc, "revert", "--yes")
    assert code == 18 and "changed since" in printed and "policy*" in printed
    assert value(epyc, f"{CPU}/cpufreq/policy1/scaling_governor") == "powersave"
    assert len([path for path, now in contents(epyc).items() if now != before[path]]) == 1  # all others are back
    assert call(epyc, "revert", "--yes", "--force")[0] == 0 and contents(epyc) == before


def test_a_file_that_is_gone_does_not_keep_the_others_from_coming_back(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    shutil.rmtree(epyc / CPU.lstrip("/") / "cpu1" / "cpuidle")  # a CPU taken offline
    code, printed = call(epyc, "revert", "--yes")
    assert code == 18 and printed.count("failed") == 1
    assert all(before[path] == now for path, now in contents(epyc).items())


def test_after_a_reboot_there_is_nothing_to_revert(call, epyc):
    assert call(epyc, "apply", "--yes")[0] == 0
    write(epyc, "/proc/sys/kernel/random/boot_id", "boot-two\n")
    write(epyc, f"{THP}/enabled", "always madvise [never]\n")
    before = contents(epyc)
    code, printed = call(epyc, "revert", "--yes")
    assert code == 0 and "before the last boot" in printed and contents(epyc) == before
    assert call(epyc, "apply", "--yes", "--only", "thp_enabled")[0] == 0
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before, "old values are those of this boot"


def test_a_second_apply_at_the_same_time_is_refused(call, epyc):
    before = contents(epyc)
    with Journal(Host(str(epyc))).locked():
        code, printed = call(epyc, "apply", "--yes")
    assert code == 17 and "another apply or revert" in printed and contents(epyc) == before
    assert call(epyc, "apply", "--yes")[0] == 0


# --- the journal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{}",
        '{"boot": "boot-one", "files": {"/proc/sys/kernel/core_pattern": {"old": "x", "ours": []}}}',
        '{"boot": "boot-one", "files": {"/proc/sys/kernel/nmi_watchdog": {"old": "a\\nb", "ours": []}}}',
    ],
)
def test_a_damaged_or_foreign_journal_stops_everything(call, epyc, damage):
    assert call(epyc, "apply", "--yes", "--only", "numa_balancing")[0] == 0
    journal_of(epyc).write_text(damage)
    before = contents(epyc)
    for verb in (["apply", "--yes"], ["revert", "--yes", "--force"], ["plan"]):
        code, printed = call(epyc, *verb)
        assert code == 17 and str(journal_of(epyc)) in printed
    assert contents(epyc) == before


def test_a_full_disk_stops_before_the_first_write(call, epyc, monkeypatch):
    before = contents(epyc)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", full)
        code, printed = call(epyc, "apply", "--yes")
    assert code == 17 and "No space left" in printed and contents(epyc) == before


def test_a_journal_that_cannot_be_made_stops_before_the_first_write(call, epyc):
    before = contents(epyc)
    write(epyc, "/var/lib", "a file, not a folder")
    assert call(epyc, "apply", "--yes")[0] == 17 and contents(epyc) == before


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(monkeypatch):
    """The kernel says that no file may be written; `as_user` is the effective user."""

    def install(as_user: int) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        monkeypatch.setattr(os, "geteuid", lambda: as_user)
        monkeypatch.setattr(subprocess, "Popen", None)  # nor does it start anything

    return install


def test_without_root_it_says_what_cannot_be_done_and_the_command(call, epyc, read_only):
    before = contents(epyc)
    read_only(as_user=1000)
    assert call(epyc, "check")[0] == 0 and call(epyc, "plan")[0] == 0
    code, printed = call(epyc, "apply", "--yes", "--only", "governor,thp_defrag", "--thp-defrag", "always")
    assert code == 18 and printed.count("not permitted") == 2 and contents(epyc) == before and not (epyc / "var").exists()
    command = f"cd {ROOT} && sudo {sys.executable} -B -m system_tuning apply --yes --only governor,thp_defrag --thp-defrag always"
    assert command in printed


def test_read_only_files_in_a_container_point_to_the_host(call, epyc, read_only):
    read_only(as_user=0)
    printed = call(epyc, "plan")[1]
    assert "on the host, not in a container" in printed and "sudo" not in printed


def test_one_file_that_may_not_be_written_and_the_others_done(call, epyc, monkeypatch):
    before, real = contents(epyc), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("nmi_watchdog") and real(path, mode))
    code, printed = call(epyc, "apply", "--yes")
    assert code == 18 and printed.count("not permitted") == 1 and value(epyc, "/proc/sys/kernel/numa_balancing") == "0"
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before


# --- alone ------------------------------------------------------------------------------------------------------------


def test_it_runs_copied_alone_with_the_standard_library_only(tmp_path):
    shutil.copytree(ROOT / "system_tuning", tmp_path / "alone" / "system_tuning", ignore=shutil.ignore_patterns("__pycache__"))
    root = xeon(tmp_path / "host")
    code = "import sys; sys.path.insert(0, '.'); from system_tuning.__main__ import main; sys.exit(main(sys.argv[1:-1], sys.argv[-1]))"
    for verb, watchdog in (("check", "1"), ("apply", "0"), ("revert", "1")):
        command = [sys.executable, "-I", "-S", "-c", code, verb, "--yes", str(root)]
        done = subprocess.run(command, cwd=tmp_path / "alone", capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert value(root, "/proc/sys/kernel/nmi_watchdog") == watchdog
