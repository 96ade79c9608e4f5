"""Live display of a run, samples of its GPUs, and tracking by other packages.

For runs that have ended, see `submission`.
"""
