"""Backends: what computes the gradients for `asyncsgd.core.loop.Loop`, and tells it the time.

The backends are `single` (one process), `virtual` (simulated time), `processes` (worker processes), `ranks` (ranks that
step together) and `log` (a replay of an event log; `rounding` judges one that was made on another processor).

Processes: `launch` starts those of a run, or recognises those that torchrun has started, and `process_setup` has what
each of them does first. A worker process begins in `worker_main`, a rank in `rank_main`. `link` has the messages
between server and worker, `segment` shares vectors on one host, and `pair` carries both between hosts. `pool` calls a
function in several processes, for preparations.

Several hosts: `host` says which of them this one is. `hosts` has the other hosts, as rank 0 sees them. `member` is one
of those others, as it sees rank 0. `addresses` finds the address on which a host is reached. `token` and `seal` keep
strangers out. `copies` sends prepared folders, and `mirror` sends copies of checkpoints. `election` chooses the host
that leads, where hosts come and go."""
