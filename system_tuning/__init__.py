"""Operating-system and CPU settings for training: check, apply, revert.

Standard library only, and nothing else of this project, so that the folder can be copied alone to a bare host:

    python3 -m system_tuning check

It touches no GPU clock or power limit, loads no kernel module, and never becomes root by itself.
"""
