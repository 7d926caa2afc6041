"""Generation servers on other GPUs: --engine server. Seam: the verbs of `rollout.Engine`."""
