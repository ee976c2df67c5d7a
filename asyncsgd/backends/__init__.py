"""Backends: what computes the gradients for `asyncsgd.core.loop.Loop`, and tells it the time.

The backends are `single` (one process), `virtual` (simulated time), `processes` (worker processes), `ranks` (ranks that
step together) and `log` (a replay of an event log). A worker process begins in `worker_main`, a rank in `rank_main`.
`link` has the messages between server and worker, `segment` shares vectors on one host, and `pair` carries both between
hosts. `hosts` and `member` are the two sides of a run on several hosts."""
