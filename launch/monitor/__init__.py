"""Display of a running run, and samples of its GPUs.

common/html and `submission` show a run after it has ended.
"""
