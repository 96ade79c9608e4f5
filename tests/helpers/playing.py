"""Streams played on a CPU: the same work in any order that its events allow."""

import random


class TwoStreams:
    """Compute and side stream as lists of work, played later in any order that their events allow."""

    def __init__(self):
        self.work = {"compute": [], "side": []}

    def run(self, work, after):
        self.work["side"].append((after, work))
        return "side", len(self.work["side"])

    def mark(self):
        return "compute", len(self.work["compute"])

    def wait(self, event):
        self.work["compute"].append((event, lambda: None))

    def compute(self, work):
        self.work["compute"].append((None, work))

    def play(self, choose):
        done = {"compute": 0, "side": 0}
        while any(done[name] < len(work) for name, work in self.work.items()):
            ready = []
            for name, work in self.work.items():
                if done[name] < len(work):
                    after = work[done[name]][0]
                    if after is None or done[after[0]] >= after[1]:
                        ready.append(name)
            name = choose(ready)
            self.work[name][done[name]][1]()
            done[name] += 1


HURRIES = {
    "side": lambda ready: ready[-1],  # what moves data as early as its events let it
    "compute": lambda ready: ready[0],  # as late
    **{f"random {seed}": random.Random(seed).choice for seed in range(3)},
}
