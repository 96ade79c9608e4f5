"""Test the judgment of the kernel log on lines as drivers write them."""

import pytest

from launch.preflight import kernel_log


@pytest.mark.quick
@pytest.mark.parametrize(
    "line, name, verdict",
    [
        ("[5.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off", "Xid 79", "refuse"),
        ("[5.0] NVRM: Xid (PCI:0000:1b:00): 13, pid=1, Graphics Exception", "Xid 13", "warn"),
        ("[5.0] EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "uncorrected", "refuse"),
        ("[5.0] EDAC MC0: 1 CE memory read error on CPU_SrcID#0", "corrected", "warn"),
        ("[5.0] amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "amdgpu GPU reset", "refuse"),
        ("[5.0] amdgpu 0000:c1:00.0: 1 uncorrectable hardware errors", "amdgpu unc", "refuse"),
        ("[5.0] pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error", "PCIe error", "refuse"),
    ],
)
def test_the_kernel_log_names_the_part(line, name, verdict):
    row = kernel_log.judge(["[1.0] Linux version 6", line, line], "")
    assert row.verdict == verdict and name in row.value and "2 x" in row.value


@pytest.mark.quick
def test_a_log_that_nobody_may_read_has_not_passed():
    assert kernel_log.judge([], "Operation not permitted").verdict == "skipped"
    assert kernel_log.judge(["[1.0] eth0: link becomes ready"], "").verdict == "ok"
