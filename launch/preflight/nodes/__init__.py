"""Checks of several nodes and of the network between them: `preflight --nodes`."""
