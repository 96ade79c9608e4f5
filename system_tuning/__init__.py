"""Operating-system and CPU settings for training: check, apply, revert.

It uses the standard library only, and nothing else of this project, so that the folder can be
copied alone to a bare host:

    python3 -m system_tuning check

It does not change GPU clocks or power limits, load kernel modules, or become root by itself.
"""
