"""System tuning on copies of /proc and /sys: nothing here touches this machine's own. Kills, attacks, foreign hands, no root."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from system_tuning import __main__ as door
from system_tuning import actions, report
from system_tuning.files import CPU, THP, Refused, Rehearsal, Tree, open_tree
from system_tuning.journal import Journal, JournalError
from system_tuning.knobs import KNOBS, NAMES, Options, look

ROOT = Path(__file__).parents[2]
SYSCTLS = {"numa_balancing": "1\n", "nmi_watchdog": "1\n", "randomize_va_space": "2\n", "random/boot_id": "boot-one\n"}
EPYC_STATES = [("POLL", 0), ("C1", 1), ("C2", 100)]  # acpi_idle
XEON_STATES = [("POLL", 0), ("C1", 1), ("C1E", 4), ("C6", 170)]  # intel_idle
EPYC_GOVERNORS = "conservative ondemand userspace powersave performance schedutil"
BEFORE = {"numa_balancing": "1", "nmi_watchdog": "1", "randomize_va_space": "2"}


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
            write(root, f"{policy}/energy_performance_available_preferences", "default performance balance_performance power\n")
        (root / f"{CPU.lstrip('/')}/cpu{cpu}/cpufreq").symlink_to(f"../cpufreq/policy{cpu}")
    return root


def xeon(root: Path) -> Path:
    return host(root, XEON_STATES, "performance powersave", "powersave", "balance_performance")


def contents(root: Path) -> dict:
    """Every file of proc and sys: bytes, mode and link target."""
    found = {}
    for path in sorted([*root.glob("proc/**/*"), *root.glob("sys/**/*")]):
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (what, path.lstat().st_mode)
    return found


def marked(printed: str, mark: str) -> int:
    """How many files are listed with this mark; the last lines, which count and explain, are not files."""
    return sum(line.startswith(mark) for line in printed.splitlines())


def text(root: Path, path: str) -> str:
    return (root / path.lstrip("/")).read_text()


@pytest.fixture(params=[host, xeon], ids=["epyc", "xeon"])
def any_host(request, tmp_path):
    return request.param(tmp_path / "host")


@pytest.fixture
def epyc(tmp_path):
    return host(tmp_path / "host")


@pytest.fixture
def call(tmp_path, capsys):
    """The door, on the tree given: exit code and what was printed."""

    def run(root: Path, *arguments: str) -> tuple[int, str]:
        try:
            code = door.main([*arguments, "--root", str(root), "--journal", str(tmp_path / "journal")])
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def journal_of(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "journal.jsonl"


# --- looking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["check"], ["check", "--json"], ["plan"], ["status"], ["apply"], ["revert"]], ids=" ".join)
def test_looking_changes_nothing_and_leaves_no_journal(call, any_host, tmp_path, verb):
    before = contents(any_host)
    times = {path: path.lstat().st_mtime_ns for path in any_host.glob("**/*")}
    assert call(any_host, *verb)[0] == 0
    assert contents(any_host) == before and {path: path.lstat().st_mtime_ns for path in any_host.glob("**/*")} == times
    assert not (tmp_path / "journal").exists()


def test_check_says_what_it_is_worth_and_the_risk(call, epyc):
    code, printed = call(epyc, "check")
    assert code == 0 and "rccl#1562" in printed and "SECURITY" in printed
    for knob in KNOBS:
        assert f"{knob.name}: " in printed and knob.risk in printed and knob.worth in printed
    assert "cpu*/cpuidle/state2/disable: 0 -> 1 (3 files)  [C2, 100 us to leave]" in printed
    assert call(epyc, "check", "--strict")[0] == 18
    states = {found["knob"]: found["state"] for found in json.loads(call(epyc, "check", "--json")[1])}
    assert states["governor"] == "better" and states["aslr"] == "left" and states["page_cache"] == "once"


def test_plan_is_what_apply_does(call, any_host):
    planned = [line.split()[2:] for line in call(any_host, "plan")[1].splitlines() if line.startswith("would set")]
    written = [line.split()[1:] for line in call(any_host, "apply", "--yes")[1].splitlines() if line.startswith("set ")]
    assert planned == written and len(planned) == 1 + 3 + 3 + 2 + 2


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
    tree = open_tree(str(host(tmp_path / "host", states, cpus=1)))
    found = look(KNOBS[NAMES.index("idle_states")], tree, Options())
    assert [setting.path for setting in found.settings] == [f"{CPU}/cpu0/cpuidle/state{index}/disable" for index in deep]
    assert bool(found.missing) == (not deep)


def test_a_bare_container_has_nothing_and_does_not_fail(call, tmp_path):
    (tmp_path / "host" / "proc").mkdir(parents=True)
    code, printed = call(tmp_path / "host", "apply", "--yes", "--strict")
    assert code == 0 and marked(printed, "not here") == 7 and not (tmp_path / "journal").exists()


def test_a_missing_performance_governor_is_not_supported_here(call, tmp_path):
    root = host(tmp_path / "host", governors="ondemand powersave", governor="ondemand")
    code, printed = call(root, "apply", "--yes", "--only", "governor")
    assert code == 0 and "performance is not offered, only ondemand powersave" in printed
    assert text(root, f"{CPU}/cpufreq/policy0/scaling_governor") == "ondemand\n"


def test_an_old_kernel_without_the_choice_for_defrag(call, epyc):
    write(epyc, f"{THP}/defrag", "always [madvise] never\n")
    assert "does not offer defer+madvise" in call(epyc, "apply", "--yes", "--only", "thp_defrag")[1]
    assert call(epyc, "apply", "--yes", "--only", "thp_defrag", "--thp-defrag", "always")[0] == 0
    assert text(epyc, f"{THP}/defrag") == "[always] madvise never\n"


# --- apply and revert -------------------------------------------------------------------------------------------------


def test_apply_sets_everything_and_revert_restores_every_byte(call, any_host, tmp_path):
    before = contents(any_host)
    assert call(any_host, "apply", "--yes")[0] == 0
    assert text(any_host, f"{THP}/enabled") == "[always] madvise never\n"
    assert text(any_host, f"{THP}/defrag") == "always defer [defer+madvise] madvise never\n"
    assert text(any_host, f"{CPU}/cpufreq/policy2/scaling_governor") == "performance\n"
    assert text(any_host, "/proc/sys/kernel/numa_balancing") == text(any_host, "/proc/sys/kernel/nmi_watchdog") == "0\n"
    assert text(any_host, "/proc/sys/kernel/randomize_va_space") == "2\n"  # only when asked for
    assert call(any_host, "check", "--strict")[0] == 0
    assert "files can be reverted" in call(any_host, "status")[1]
    assert call(any_host, "revert", "--yes")[0] == 0
    assert contents(any_host) == before
    lines = len(journal_of(tmp_path).read_text().splitlines())
    assert call(any_host, "revert", "--yes") == (0, "nothing to do\n") and "nothing to revert" in call(any_host, "status")[1]
    assert len(journal_of(tmp_path).read_text().splitlines()) == lines and contents(any_host) == before


def test_apply_twice_keeps_the_first_old_values(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    assert call(epyc, "apply", "--yes", "--thp-defrag", "always")[0] == 0
    assert text(epyc, f"{THP}/defrag").startswith("[always]")
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before


def test_aslr_goes_off_only_when_asked_for(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes", "--only", "aslr")[0] == 2 and contents(epyc) == before
    assert call(epyc, "apply", "--yes", "--only", "aslr", "--aslr-off")[0] == 0
    assert text(epyc, "/proc/sys/kernel/randomize_va_space") == "0\n"
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before


@pytest.mark.parametrize("wrong", [["--only", "gpu_clock"], ["--skip", "x"], ["--thp-defrag", "never"], ["--gpu"], ["--root", "/nowhere"]])
def test_wrong_usage_is_2(call, epyc, wrong):
    assert door.main(["check", *wrong]) == 2 if wrong[0] == "--root" else call(epyc, "apply", "--yes", *wrong)[0] == 2


def test_the_page_cache_is_synced_and_dropped_once_and_never_reverted(epyc, tmp_path):
    calls = []

    class Watched(Rehearsal):
        def sync(self):
            calls.append("sync")

        def write(self, path, value):
            calls.append((path, value))
            super().write(path, value)

    journal = Journal(str(tmp_path / "journal"), str(epyc), "b")
    tree = Watched(str(epyc))
    with journal.locked("apply"):
        assert [o.status for o in actions.apply([KNOBS[0]], tree, journal, Options())] == ["written"]
    assert calls == ["sync", ("/proc/sys/vm/drop_caches", "3")]
    assert journal.entries == {} and json.loads(journal_of(tmp_path).read_text().splitlines()[-1]) == {"op": "done", "knob": "page_cache"}


class Pstate(Rehearsal):
    """intel_pstate in active mode: performance takes the energy preference along, and holds it."""

    def write(self, path, value):
        energy = Path(self.root, path.lstrip("/")).with_name("energy_performance_preference")
        if path.endswith("energy_performance_preference") and energy.with_name("scaling_governor").read_text() == "performance\n":
            raise OSError(16, "Device or resource busy", path)
        super().write(path, value)
        if path.endswith("scaling_governor") and value == "performance":
            energy.write_text("performance\n")


def test_what_the_kernel_changes_along_with_the_governor_comes_back_too(tmp_path):
    root = xeon(tmp_path / "host")
    before, tree, journal = contents(root), Pstate(str(root)), Journal(str(tmp_path / "journal"), str(root), "b")
    with journal.locked("apply"):
        assert not any(o.is_failure for o in actions.apply(list(KNOBS), tree, journal, Options()))
    assert text(root, f"{CPU}/cpufreq/policy0/energy_performance_preference") == "performance\n"
    with journal.locked("revert"):
        assert {o.status for o in actions.revert(tree, journal)} == {"reverted"}
    assert contents(root) == before


def test_a_value_that_does_not_stick_is_a_failure(epyc, tmp_path):
    class Deaf(Rehearsal):
        def _put(self, descriptor, path, value):
            if not path.endswith("nmi_watchdog"):
                super()._put(descriptor, path, value)

    journal = Journal(str(tmp_path / "journal"), str(epyc), "b")
    with journal.locked("apply"):
        outcomes = actions.apply(list(KNOBS[:-1]), Deaf(str(epyc)), journal, Options())
    assert [(o.knob, o.status, o.why) for o in outcomes if o.is_failure] == [("nmi_watchdog", "failed", "reads back as 1")]


# --- kills ------------------------------------------------------------------------------------------------------------

CHANGES = ("write", "pwrite", "ftruncate", "fsync", "rename", "mkdir")


class Killed(BaseException):
    """In place of a kill: from here on the process changes nothing more."""


def die_at(monkeypatch, count: int, die, torn: bool = False) -> None:
    """Let `count` changing system calls through, then `die()` before the next; a torn one still writes half of its bytes."""
    passed = [0]

    def dying(name, real):
        def call(*arguments, **options):
            passed[0] += 1
            if passed[0] <= count:
                return real(*arguments, **options)
            if torn and passed[0] == count + 1 and name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            die()

        return call

    for name in CHANGES:
        monkeypatch.setattr(os, name, dying(name, getattr(os, name)))


def forked(work) -> int:
    """Exit status of a child process that runs `work`."""
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                code = work()
        except BaseException:
            code = 99
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_between_any_two_changes_revert_restores_every_byte(tmp_path, capsys, torn, verb):
    root = host(tmp_path / "host", cpus=2)
    before = contents(root)
    for count in range(200):
        arguments = ["--root", str(root), "--journal", str(tmp_path / f"journal{count}"), "--yes"]
        if verb == "revert":
            assert door.main(["apply", *arguments]) == 0

        def killed(arguments=arguments, count=count):
            with pytest.MonkeyPatch.context() as monkeypatch:
                die_at(monkeypatch, count, lambda: os._exit(137), torn)
                return door.main([verb, *arguments])

        code = forked(killed)
        assert code in (0, 137)
        assert door.main(["revert", *arguments]) == 0 and contents(root) == before, f"killed at {count}"
        if code == 0:
            break
    assert 20 <= count < 199  # every change of the whole verb was killed once


def test_old_values_are_on_disk_before_anything_is_written(call, any_host, monkeypatch):
    calls = []
    for name in ("write", "pwrite", "fsync"):

        def noted(*arguments, real=getattr(os, name), name=name):  # noqa: B008 (the function as it is now)
            calls.append((name, arguments[1] if name != "fsync" else b""))
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)
    assert call(any_host, "apply", "--yes", "--aslr-off")[0] == 0
    unsynced = num_writes = 0
    for name, data in calls:
        if name == "pwrite":
            num_writes += 1
            assert not unsynced
        elif data.startswith(b"{"):
            unsynced += 1
        elif name == "fsync":
            unsynced = 0
    assert num_writes == 11


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_of_apply_revert_and_kill_lose_nothing(tmp_path, monkeypatch, capsys, seed):
    generator = random.Random(seed)
    root = (host if seed % 2 else xeon)(tmp_path / "host")
    before = contents(root)
    base = ["--root", str(root), "--journal", str(tmp_path / "journal")]
    for _ in range(40):
        verb = generator.choice(["apply", "apply", "revert"])
        options = ["--yes", "--thp-defrag", generator.choice(["always", "defer+madvise"])]
        if verb == "apply" and generator.random() < 0.5:
            options += ["--aslr-off"]
        if generator.random() < 0.3:
            options += ["--only", ",".join(generator.sample(NAMES[:-1], 3))]

        def die():
            raise Killed

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            if generator.random() < 0.7:
                die_at(patch, generator.randrange(50), die, torn=generator.random() < 0.5)
            assert door.main([verb, *options, *base]) == 0
            assert verb == "apply" or contents(root) == before
    assert door.main(["revert", "--yes", *base]) == 0 and contents(root) == before


# --- attacks ----------------------------------------------------------------------------------------------------------


def outside(tmp_path) -> Path:
    file = tmp_path / "outside" / "scaling_governor"
    file.parent.mkdir()
    file.write_text("schedutil\n")
    (file.parent / "scaling_available_governors").write_text("performance schedutil\n")
    return file


@pytest.mark.parametrize("component", ["scaling_governor", "policy0", "cpufreq", "cpu", "sys"])
def test_a_link_in_place_of_any_component_is_refused(call, epyc, tmp_path, component):
    target = outside(tmp_path)
    path = epyc / CPU.lstrip("/") / "cpufreq" / "policy0" / "scaling_governor"
    while path.name != component:
        path = path.parent
    aside = tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(target if component == "scaling_governor" else target.parent if component == "policy0" else aside)
    moved = {file: file.read_bytes() for file in [*aside.glob("**/scaling_governor"), target]}
    code, printed = call(epyc, "apply", "--yes", "--only", "governor")
    assert code == 18 and "is a symbolic link" in printed
    assert all(file.read_bytes() == data for file, data in moved.items())


def test_a_link_put_there_after_apply_is_not_followed_by_revert(call, epyc, tmp_path):
    assert call(epyc, "apply", "--yes")[0] == 0
    victim = tmp_path / "victim"
    victim.write_text("0\n")
    knob = epyc / "proc/sys/kernel/nmi_watchdog"
    knob.unlink()
    knob.symlink_to(victim)
    code, printed = call(epyc, "revert", "--yes", "--force")
    assert code == 18 and "symbolic link" in printed and victim.read_text() == "0\n"


def test_what_is_no_regular_file_is_refused(call, epyc, tmp_path):
    watchdog, balancing = epyc / "proc/sys/kernel/nmi_watchdog", epyc / "proc/sys/kernel/numa_balancing"
    watchdog.unlink()
    os.mkfifo(watchdog)  # must not hang
    balancing.unlink()
    os.link(outside(tmp_path), balancing)
    (epyc / THP.lstrip("/") / "enabled").unlink()
    (epyc / THP.lstrip("/") / "enabled").mkdir()
    for path in ("/proc/sys/kernel/nmi_watchdog", "/proc/sys/kernel/numa_balancing", f"{THP}/enabled"):
        with pytest.raises(Refused):
            open_tree(str(epyc)).read(path)
    code, printed = call(epyc, "apply", "--yes", "--only", "nmi_watchdog,numa_balancing,thp_enabled")
    assert code == 18 and marked(printed, "REFUSED") == 3 and "hard links" in printed


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
def test_a_path_that_is_not_on_the_list_is_refused(epyc, path):
    before = contents(epyc)
    with pytest.raises(Refused):
        open_tree(str(epyc)).write(path, "0")
    assert contents(epyc) == before


@pytest.mark.parametrize("path", ["/proc/../etc/passwd", "/../etc/passwd", "//etc/passwd", "/proc//sys", "/./proc", "relative"])
def test_reading_does_not_climb_out(epyc, path):
    write(epyc.parent, "etc/passwd", "secret")
    with pytest.raises(Refused):
        open_tree(str(epyc)).read(path)


@pytest.mark.parametrize("value", ["0\n1", "0 1", "", "performance\n", "a" * 41, "0;reboot", "é", "\0"])
def test_a_value_that_is_not_one_plain_word_is_refused(epyc, value):
    with pytest.raises(Refused):
        open_tree(str(epyc)).write("/proc/sys/kernel/nmi_watchdog", value)


@pytest.mark.parametrize(("name", "old"), [("scaling_governor", "evil"), ("scaling_governor", "a\nb"), ("scaling_governor", "")])
def test_a_journal_with_an_old_value_that_the_kernel_does_not_offer_is_not_obeyed(call, epyc, tmp_path, name, old):
    assert call(epyc, "apply", "--yes", "--only", "governor")[0] == 0
    journal = journal_of(tmp_path)
    journal.write_text(journal.read_text().replace(json.dumps("schedutil\n"), json.dumps(old)))
    code, printed = call(epyc, "revert", "--yes")
    assert code == 18 and marked(printed, "REFUSED") == 3 and text(epyc, f"{CPU}/cpufreq/policy0/scaling_governor") == "performance\n"


def test_a_journal_with_another_path_is_refused_whole(call, epyc, tmp_path):
    assert call(epyc, "apply", "--yes")[0] == 0
    journal = journal_of(tmp_path)
    journal.write_text(journal.read_text().replace("/proc/sys/kernel/nmi_watchdog", "/proc/sys/kernel/core_pattern"))
    assert call(epyc, "revert", "--yes")[0] == 17


def test_a_real_proc_under_the_root_of_a_rehearsal_is_refused(epyc, monkeypatch):
    real = os.stat
    elsewhere = str(epyc / "sys")
    other = os.stat_result((*real(elsewhere)[:2], 4242, *real(elsewhere)[3:10]))
    monkeypatch.setattr(os, "stat", lambda path, **options: other if path == elsewhere else real(path, **options))
    with pytest.raises(Refused, match="is mounted there"):
        open_tree(str(epyc))
    assert type(open_tree("/")) is Tree


# --- other hands ------------------------------------------------------------------------------------------------------


def test_a_foreign_change_is_told_and_left_unless_forced(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    write(epyc, f"{CPU}/cpufreq/policy1/scaling_governor", "powersave\n")
    code, printed = call(epyc, "apply", "--yes")
    assert code == 18 and marked(printed, "NOT OURS") == 1
    code, printed = call(epyc, "revert", "--yes")
    assert code == 18 and "NOT OURS" in printed and "policy1" in printed
    assert text(epyc, f"{CPU}/cpufreq/policy1/scaling_governor") == "powersave\n"
    assert len([path for path in contents(epyc) if contents(epyc)[path] != before[path]]) == 1  # all others are back
    assert call(epyc, "revert", "--yes", "--force")[0] == 0 and contents(epyc) == before


def test_a_change_between_reading_and_writing_is_not_written_over(epyc, tmp_path):
    class Busy(Rehearsal):
        reads = 0

        def read(self, path):
            if path.endswith("numa_balancing"):
                self.reads += 1
                if self.reads == 2:
                    write(epyc, path, "2\n")
            return super().read(path)

    journal = Journal(str(tmp_path / "journal"), str(epyc), "b")
    with journal.locked("apply"):
        outcomes = actions.apply([KNOBS[NAMES.index("numa_balancing")]], Busy(str(epyc)), journal, Options())
    assert outcomes[0].status == "foreign" and text(epyc, "/proc/sys/kernel/numa_balancing") == "2\n"


def test_a_file_that_is_gone_does_not_keep_the_others_from_coming_back(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    shutil.rmtree(epyc / CPU.lstrip("/") / "cpu1" / "cpuidle")  # a CPU taken offline
    code, printed = call(epyc, "revert", "--yes")
    assert code == 18 and marked(printed, "FAILED") == 1
    assert all(before[path] == found for path, found in contents(epyc).items())


def test_a_reboot_has_put_everything_back(call, epyc):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes")[0] == 0
    write(epyc, "/proc/sys/kernel/random/boot_id", "boot-two\n")
    write(epyc, f"{CPU}/cpufreq/policy0/scaling_governor", "performance\n")  # by the administrator's choice this time
    for name, now in BEFORE.items():
        write(epyc, f"/proc/sys/kernel/{name}", f"{now}\n")
    write(epyc, f"{THP}/enabled", "[always] madvise never\n")
    changed = contents(epyc)
    code, printed = call(epyc, "revert", "--yes")
    assert code == 0 and "from before the last boot" in printed and contents(epyc) == changed != before
    assert "nothing to revert" in call(epyc, "status")[1]


def test_a_second_apply_at_the_same_time_is_refused(call, epyc, tmp_path):
    before = contents(epyc)
    with Journal(str(tmp_path / "journal"), str(epyc), "b").locked("apply"):
        code, printed = call(epyc, "apply", "--yes")
    assert code == 17 and "another apply or revert" in printed and contents(epyc) == before
    assert call(epyc, "apply", "--yes")[0] == 0


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_journal_cut_anywhere_in_its_last_line_is_read_and_goes_on(call, epyc, tmp_path):
    before = contents(epyc)
    assert call(epyc, "apply", "--yes", "--only", "numa_balancing")[0] == 0
    whole = journal_of(tmp_path).read_bytes()
    write(epyc, "/proc/sys/kernel/numa_balancing", "1\n")  # as it is when a process dies while saving
    for length in range(whole.rindex(b"\n", 0, -1) + 2, len(whole)):
        journal_of(tmp_path).write_bytes(whole[:length])
        code, printed = call(epyc, "status")
        assert code == 0 and ("is cut" in printed) == (length < len(whole) - 1)
        assert call(epyc, "apply", "--yes", "--only", "nmi_watchdog")[0] == 0
        assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before
        assert all(json.loads(line) for line in journal_of(tmp_path).read_text().splitlines())


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"{}\n", b'{"op": "save", "path": 1}\n', b"[]\n", b'{"op": "x"}\n', b"\n"])
def test_damage_in_the_middle_stops_everything_and_names_the_line(call, epyc, tmp_path, damage):
    assert call(epyc, "apply", "--yes", "--only", "numa_balancing")[0] == 0
    lines = journal_of(tmp_path).read_bytes().splitlines(keepends=True)
    journal_of(tmp_path).write_bytes(lines[0] + damage + lines[1])
    before = contents(epyc)
    for verb in (["apply", "--yes"], ["revert", "--yes", "--force"], ["status"], ["plan"]):
        code, printed = call(epyc, *verb)
        assert code == 17 and "line 2 is damaged" in printed
    assert contents(epyc) == before


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_full_disk_stops_before_the_write(call, epyc, tmp_path, monkeypatch, name):
    before = contents(epyc)

    def full(descriptor, *data):
        raise OSError(28, "No space left on device")

    (tmp_path / "journal").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        code, printed = call(epyc, "apply", "--yes", "--skip", "page_cache")
    assert code == 17 and "No space left" in printed and contents(epyc) == before


def test_a_journal_that_others_can_write_to_or_of_another_tree_is_refused(call, epyc, tmp_path):
    assert call(epyc, "apply", "--yes")[0] == 0
    (tmp_path / "second").mkdir()
    code, printed = call(host(tmp_path / "second" / "host"), "revert", "--yes")
    assert code == 17 and "belongs to the tree" in printed
    journal_of(tmp_path).chmod(0o666)
    assert call(epyc, "revert", "--yes")[0] == 17
    journal_of(tmp_path).chmod(0o644)
    (tmp_path / "journal").chmod(0o777)
    assert call(epyc, "revert", "--yes")[0] == 17
    (tmp_path / "journal").chmod(0o755)
    assert call(epyc, "revert", "--yes")[0] == 0


def test_a_journal_that_is_a_link_or_cannot_be_made(call, epyc, tmp_path):
    (tmp_path / "journal").mkdir()
    journal_of(tmp_path).symlink_to(tmp_path / "elsewhere")
    assert call(epyc, "apply", "--yes")[0] == 17 and not (tmp_path / "elsewhere").exists()
    with pytest.raises(JournalError), Journal(str(tmp_path / "host" / "proc/sys/kernel/nmi_watchdog" / "x"), "/", "b").locked("apply"):
        pass


def test_a_long_journal_with_nothing_open_is_begun_anew(call, epyc, tmp_path, monkeypatch):
    monkeypatch.setattr("system_tuning.journal.MAX_BYTES", 3000)
    before = contents(epyc)
    for _ in range(5):
        assert call(epyc, "apply", "--yes")[0] == 0 and call(epyc, "revert", "--yes")[0] == 0
    assert contents(epyc) == before and journal_of(tmp_path).stat().st_size < 6000
    assert journal_of(tmp_path).with_name("journal.previous.jsonl").exists()


# --- rights -----------------------------------------------------------------------------------------------------------


def read_only(root: Path) -> dict:
    for file in root.glob("**/*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o444)
    return contents(root)


def test_without_root_it_says_what_could_not_be_done_and_the_command(call, epyc, tmp_path, monkeypatch):
    before = read_only(epyc)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid())
    monkeypatch.setattr(report.os, "geteuid", lambda: 1000)
    assert call(epyc, "check")[0] == 0
    monkeypatch.setattr(subprocess, "Popen", None)  # nor does it start anything
    code, printed = call(epyc, "apply", "--yes", "--skip", "page_cache", "--thp-defrag", "always")
    assert code == 18 and marked(printed, "NOT SET") == 10 and contents(epyc) == before
    command = next(line for line in printed.splitlines() if line.startswith("  do:"))
    assert f"cd {ROOT} && sudo {sys.executable} -B -m system_tuning apply --yes --skip page_cache --thp-defrag always" in command
    assert f"--root {epyc} --journal {tmp_path / 'journal'}" in command and not (tmp_path / "journal").exists()


def test_a_container_with_read_only_files_points_to_the_host(call, epyc, monkeypatch):
    read_only(epyc)
    monkeypatch.setattr(report.os, "geteuid", lambda: 0)
    code, printed = call(epyc, "plan")
    assert code == 0 and "run it on the host, not in a container" in printed and "sudo" not in printed
    assert call(epyc, "plan", "--strict")[0] == 18


def test_some_files_read_only_and_the_others_done(call, epyc):
    (epyc / "proc/sys/kernel/nmi_watchdog").chmod(0o444)
    before = contents(epyc)
    code, printed = call(epyc, "apply", "--yes")
    assert code == 18 and marked(printed, "NOT SET") == 1 and text(epyc, "/proc/sys/kernel/numa_balancing") == "0\n"
    assert call(epyc, "revert", "--yes")[0] == 0 and contents(epyc) == before


# --- alone ------------------------------------------------------------------------------------------------------------


def test_it_runs_copied_alone_with_the_standard_library_only(tmp_path):
    shutil.copytree(ROOT / "system_tuning", tmp_path / "alone" / "system_tuning", ignore=shutil.ignore_patterns("__pycache__"))
    root = xeon(tmp_path / "host")
    before = contents(root)
    for verb in ("check", "apply", "revert"):
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            "import sys, runpy; sys.path.insert(0, '.'); runpy.run_module('system_tuning', run_name='__main__')",
        ]
        result = subprocess.run(
            [*command, verb, "--yes", "--root", str(root)], cwd=tmp_path / "alone", capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 0, result.stderr
    assert contents(root) == before and (root / "var/lib/system_tuning/journal.jsonl").exists()


def test_it_writes_nothing_about_gpus_and_loads_nothing():
    source = "".join(path.read_text() for path in sorted((ROOT / "system_tuning").glob("*.py")))
    for word in ("subprocess", "os.system", "rocm-smi", "nvidia-smi", "drm", "modprobe"):
        assert word not in source, word
