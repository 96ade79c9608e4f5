"""Stand-ins for the engines of optional packages, which compute on a CPU."""

from dataclasses import replace

from common import engines


def let_run_on_a_cpu(monkeypatch, operation, name, version=""):
    """Let a CPU run an engine in every dtype, with `version` of its package installed."""
    known = engines.ENGINES[operation]
    changed = [
        replace(engine, gpus=(*engine.gpus, "")) if engine.name == name else engine
        for engine in known
    ]
    monkeypatch.setitem(engines.ENGINES, operation, tuple(changed))
    monkeypatch.setattr(engines, "version_of", lambda package: version)
    for module in ("attention", "fp8"):
        monkeypatch.setattr(f"common.kernels.{module}.dtype_name", lambda dtype: "bf16")
    monkeypatch.setenv(engines.VARIABLES[operation], name)
