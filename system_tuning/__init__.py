"""Operating-system and CPU settings for training: check, apply, revert.

The folder needs only Python's standard library. It imports nothing else of this project, so it can
be copied alone to a host without packages:

    python3 -m system_tuning check

It does not change GPU clocks or power limits, load kernel modules, or acquire root rights itself.
"""
