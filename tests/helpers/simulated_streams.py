"""Simulate a compute stream and a side stream that run their work in any order events allow."""

import random


class SimulatedStreams:
    """SideStream and compute stream, as two lists of (event to wait for, work).

    See common/sharding/side_stream.py.
    """

    def __init__(self):
        self.work = {"compute": [], "side": []}

    def run(self, work, after):
        self.work["side"].append((after, work))
        return "side", len(self.work["side"])

    def record_event(self):
        return "compute", len(self.work["compute"])

    def wait_event(self, event):
        self.work["compute"].append((event, lambda: None))

    def compute(self, work):
        self.work["compute"].append((None, work))

    def execute(self, choose):
        """Run all work; `choose` picks the stream wherever both could go on."""
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


ORDERS = {
    "side stream first": lambda ready: ready[-1],
    "compute stream first": lambda ready: ready[0],
    **{f"random {seed}": random.Random(seed).choice for seed in range(3)},
}
