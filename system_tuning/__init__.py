"""Settings of the operating system and the CPUs for training: check, plan, apply, revert, status.

Standard library only and nothing else of this project, so that the folder can be copied alone to a bare host:

    python3 -m system_tuning check

It never touches GPU clocks or power, loads no module, and never becomes root by itself.

    files.py     the only place that opens a file under /proc or /sys: allow-list, no links
    knobs.py     the table: what each setting does, what it is worth, its risk, and what to write where
    journal.py   old values on disk before anything is written; the lock
    actions.py   apply and revert
    report.py    what is printed
"""
