"""A run while it lasts: what one sees of it, and samples of its GPUs. `pages` and `submission` show it afterwards."""
