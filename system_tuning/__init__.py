"""Operating-system and CPU settings for training: check, plan, apply, revert.

Standard library only, and nothing else of this project, so that the folder can be copied alone to a bare host:

    python3 -m system_tuning check

It touches no GPU clock or power limit, loads no kernel module, and never becomes root by itself.

    files.py      reads and writes files under /proc and /sys: allow-list, no symbolic links
    settings.py   the table: what each setting does, its benefit, its risk, and which value belongs in which file
    journal.py    old values, kept before anything is written
"""
